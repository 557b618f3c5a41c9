#include "store/server/notify.h"

#include <cstdint>

#include "runtime/base/log.h"
#include "runtime/base/numbers.h"

namespace resilient::store {
namespace {

constexpr Duration kStartingInterval = std::chrono::seconds(1);
constexpr char kStartExtensionMicros[] = "30000000";

std::string Find(const std::vector<std::pair<std::string, std::string>>& environment,
                 std::string_view name) {
  for (const auto& [key, value] : environment) {
    if (key == name) return value;
  }
  return {};
}

std::int64_t Number(const std::string& text) { return ParseNumber<std::int64_t>(text).value_or(0); }

std::optional<UnixAddress> AddressOf(std::string_view name) {
  if (name.size() < 2) return std::nullopt;
  if (name.front() == '@') return UnixAddress::Abstract(name.substr(1));
  return name.front() == '/' ? UnixAddress::Path(name) : std::nullopt;
}

}  // namespace

ServiceNotifier::ServiceNotifier(
    const std::vector<std::pair<std::string, std::string>>& environment, std::int64_t pid)
    : address_(AddressOf(Find(environment, "NOTIFY_SOCKET"))) {
  if (!address_) return;
  socket_ = FileDescriptor(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const std::string watched = Find(environment, "WATCHDOG_PID");
  if (!watched.empty() && Number(watched) != pid) return;
  // Twice in each interval, as sd_watchdog_enabled(3) advises.
  alive_interval_ = std::chrono::microseconds(Number(Find(environment, "WATCHDOG_USEC")) / 2);
}

void ServiceNotifier::Starting(Instant now, std::string_view status) {
  if (last_starting_ && now - *last_starting_ < kStartingInterval) return;
  last_starting_ = now;
  Send(StrCat("EXTEND_TIMEOUT_USEC=", kStartExtensionMicros, "\nSTATUS=", status));
}

void ServiceNotifier::Ready(std::string_view status) { Send(StrCat("READY=1\nSTATUS=", status)); }

void ServiceNotifier::Stopping(std::string_view status) {
  Send(StrCat("STOPPING=1\nSTATUS=", status));
}

void ServiceNotifier::Alive(Instant now) {
  if (alive_interval_ == Duration::zero()) return;
  if (last_alive_ && now - *last_alive_ < alive_interval_) return;
  last_alive_ = now;
  Send("WATCHDOG=1");
}

void ServiceNotifier::Send(const std::string& lines) {
  if (!socket_.valid()) return;
  // Best effort: see the class.
  static_cast<void>(::sendto(socket_.get(), lines.data(), lines.size(), MSG_NOSIGNAL,
                             address_->get(), address_->size()));
}

}  // namespace resilient::store
