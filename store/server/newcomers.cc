#include "store/server/newcomers.h"

#include "runtime/net/socket.h"

namespace resilient::store {

void Newcomers::Add(ConnectionId id, const std::string& peer, Instant now) {
  const Result<HostPort> address = ParseHostPort(peer);
  all_.Add(id, address.ok() ? ChargedAddress(address->host) : peer, now);
}

std::optional<ConnectionId> Newcomers::WhoGoes(
    Instant now, const std::function<bool(ConnectionId)>& has_spoken) const {
  for (const ConnectionId id : all_.OfHeaviest()) {
    const Duration age = now - *all_.AcceptedAt(id);
    if (age < kSilentWhenFull) break;  // The others are younger.
    if (age >= kHelloWhenFull || !has_spoken(id)) return id;
  }
  return std::nullopt;
}

}  // namespace resilient::store
