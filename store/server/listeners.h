#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <resilient/status.h>

#include "runtime/net/socket.h"
#include "store/server/connection.h"
#include "store/server/uv_handle.h"

namespace resilient::store {

// By which way a connection has come. kNone: there is none.
enum class Arrival : std::uint8_t { kNone, kTcp, kLocal };

// Where clients arrive: at the TCP address and, those of this host, at the unix socket beside it
// (runtime/net/local_socket.h). Connections that nobody takes yet wait in the kernel's queues.
// Owner: Server. Thread: the loop's.
class Listeners {
 public:
  static constexpr int kBacklog = 4096;  // Of each of the two.

  // `on_waiting`: a connection has arrived. It is called again only after that one was taken.
  Listeners(UvLoop& loop, std::function<void()> on_waiting);
  Listeners(const Listeners&) = delete;
  Listeners& operator=(const Listeners&) = delete;

  // `bound`: listens on `address`, which is numeric. `tcp_only`: no unix socket. Where that cannot
  // be made it goes without one and says so in the log.
  Status Listen(const FileDescriptor& bound, const HostPort& address, bool tcp_only);
  // What waits is refused.
  void Close();
  bool listening() const { return tcp_.listener != nullptr; }

  bool waiting() const { return tcp_.waiting || local_.waiting; }
  // Hands one that waits to `connection`. kNone: none waits, or its peer has gone meanwhile.
  Arrival AcceptInto(Connection& connection);

 private:
  struct Door {
    std::unique_ptr<UvStream> listener;  // Null: closed.
    bool waiting = false;
  };

  Status Open(Door& door, const FileDescriptor& bound);
  static bool Accept(Door& door, Connection& connection);

  UvLoop& loop_;
  const std::function<void()> on_waiting_;
  Door tcp_;
  Door local_;
  bool local_last_ = false;  // They take turns: neither keeps the other out.
};

}  // namespace resilient::store
