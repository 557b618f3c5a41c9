#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "runtime/net/socket.h"

// A unix socket beside a TCP listener, for peers on the listener's own host: a round trip takes
// about two thirds of one over the loopback interface. Its name is abstract (unix(7)), so it is in
// reach exactly where the loopback interface is: in one network namespace. The name says the user
// and the TCP address, so who knows the address finds it. Anybody may bind any name, so a peer asks
// the kernel who listens, and takes only a listener of its own user or of root. In all other cases
// both sides are left with TCP.
namespace resilient {

// `listener`: numeric, with its port.
std::string LocalSocketName(uid_t user, const HostPort& listener);

// A non-blocking socket that listens beside `listener`, whose owner is this process. Invalid: the
// name is taken, or it cannot be made.
FileDescriptor ListenLocally(const HostPort& listener, int backlog);

// A non-blocking connection to what listens beside the TCP address. Never blocks. Invalid: the
// address is not one of this host, nothing listens beside it, it is of another user, or its queue
// is full.
FileDescriptor ConnectLocally(const HostPort& numeric_address);

// So much of what is sent may wait in the kernel that a large message needs few turns of its
// receiver; the kernel gives what it allows (net.core.wmem_max). For both ends, accepted ones too.
void WidenLocalSocket(int socket);

// The user of the process at the other end of a unix stream socket, as the kernel noted it: of a
// listener, when it began to listen. Empty: it is no such socket, or is not connected.
std::optional<uid_t> UserOfPeer(int socket);

}  // namespace resilient
