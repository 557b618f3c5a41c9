#pragma once

#include <sys/types.h>

#include <optional>

namespace resilient::store {

// Whose process holds the other end of a connection, by what the kernel knows of that socket
// (SO_PEERCRED of a unix socket, sock_diag(7) of TCP): nobody can say it is another user. Thread:
// value type.
struct PeerUser {
  // Its socket is in this network namespace.
  bool is_here = false;
  // Empty: it is not here, or it was closed meanwhile.
  std::optional<uid_t> user;
};

// `socket`: connected. One question to the kernel, which answers at once: never blocks.
PeerUser FindPeerUser(int socket);

// Whether the kernel answers such questions here; tried with a connection to itself. For a start.
bool KernelTellsPeerUsers();

}  // namespace resilient::store
