#include "store/server/listeners.h"

#include <utility>

#include "runtime/base/log.h"
#include "runtime/net/local_socket.h"

namespace resilient::store {

Listeners::Listeners(UvLoop& loop, std::function<void()> on_waiting)
    : loop_(loop), on_waiting_(std::move(on_waiting)) {}

Status Listeners::Listen(const FileDescriptor& bound, const HostPort& address, bool tcp_only) {
  RESILIENT_RETURN_IF_ERROR(Open(tcp_, bound));
  if (tcp_only) return {};
  const FileDescriptor local = ListenLocally(address, kBacklog);
  if (local.valid() && Open(local_, local).ok()) return {};
  RESILIENT_LOG_RECORD(kInfo, "tcp_only", {{"address", FormatHostPort(address)}},
                       StrCat("clients of this host come by TCP too: the name of the unix socket ",
                              "beside ", FormatHostPort(address), " is taken by another program"));
  return {};
}

Status Listeners::Open(Door& door, const FileDescriptor& bound) {
  door.listener = std::make_unique<UvStream>(loop_, UvStreamEvents{.on_connection =
                                                                       [this, &door] {
                                                                         door.waiting = true;
                                                                         on_waiting_();
                                                                       },
                                                                   .on_read = {},
                                                                   .on_end = {},
                                                                   .on_written = {}});
  Status listens = door.listener->Listen(bound, kBacklog);
  if (!listens.ok()) door = {};
  return listens;
}

void Listeners::Close() {
  tcp_ = {};
  local_ = {};
}

Arrival Listeners::AcceptInto(Connection& connection) {
  if (!waiting()) return Arrival::kNone;
  local_last_ = local_.waiting && !(tcp_.waiting && local_last_);
  if (local_last_) return Accept(local_, connection) ? Arrival::kLocal : Arrival::kNone;
  return Accept(tcp_, connection) ? Arrival::kTcp : Arrival::kNone;
}

bool Listeners::Accept(Door& door, Connection& connection) {
  door.waiting = false;
  return connection.AcceptFrom(*door.listener);
}

}  // namespace resilient::store
