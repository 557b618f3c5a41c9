#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <resilient/clock.h>

#include "runtime/net/socket.h"
#include "runtime/net/unix_address.h"

namespace resilient::store {

// Tells the service manager how the server is, by the protocol of sd_notify(3): datagrams of
// NAME=VALUE lines to the socket that NOTIFY_SOCKET names. Best effort: a manager that does not
// listen is no reason to end. Owner: the serve command. Thread: the loop's. Lifetime: outlives the
// server.
class ServiceNotifier {
 public:
  // From NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID; says nothing when there is no socket.
  ServiceNotifier(const std::vector<std::pair<std::string, std::string>>& environment,
                  std::int64_t pid);

  void Starting(Instant now, std::string_view status);  // At most once a second; asks for time.
  void Ready(std::string_view status);
  void Stopping(std::string_view status);
  // While the server turns: keeps the watchdog quiet.
  void Alive(Instant now);

 private:
  void Send(const std::string& lines);

  const std::optional<UnixAddress> address_;  // Null: there is no manager.
  FileDescriptor socket_;
  Duration alive_interval_ = Duration::zero();  // Zero: nobody watches.
  std::optional<Instant> last_starting_;
  std::optional<Instant> last_alive_;
};

}  // namespace resilient::store
