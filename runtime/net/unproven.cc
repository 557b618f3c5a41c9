#include "runtime/net/unproven.h"

#include <arpa/inet.h>

#include <array>
#include <cstring>

namespace resilient {

template <typename Edit>
void UnprovenConnections::Change(const std::string& address, Edit edit) {
  std::set<Id>& ids = by_address_[address];
  if (!ids.empty()) by_weight_.erase({ids.size(), *ids.begin()});
  edit(ids);
  if (ids.empty()) {
    by_address_.erase(address);
  } else {
    by_weight_.emplace(Weight{ids.size(), *ids.begin()}, &ids);
  }
}

void UnprovenConnections::Add(Id id, const std::string& address, Instant accepted) {
  by_id_.insert_or_assign(id, Entry{address, accepted});
  Change(address, [id](std::set<Id>& ids) { ids.insert(id); });
}

void UnprovenConnections::Remove(Id id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return;
  Change(found->second.address, [id](std::set<Id>& ids) { ids.erase(id); });
  by_id_.erase(found);
}

void UnprovenConnections::Clear() {
  by_id_.clear();
  by_weight_.clear();
  by_address_.clear();
}

std::size_t UnprovenConnections::CountOf(const std::string& address) const {
  const auto found = by_address_.find(address);
  return found == by_address_.end() ? 0 : found->second.size();
}

std::string UnprovenConnections::AddressOf(Id id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? std::string() : found->second.address;
}

const std::set<UnprovenConnections::Id>& UnprovenConnections::OfHeaviest() const {
  return by_weight_.empty() ? none_ : *by_weight_.begin()->second;
}

std::vector<UnprovenConnections::Id> UnprovenConnections::AcceptedBy(Instant before) const {
  std::vector<Id> ids;
  for (const auto& [id, entry] : by_id_) {
    if (entry.accepted > before) break;  // Ids ascend with time.
    ids.push_back(id);
  }
  return ids;
}

std::optional<Instant> UnprovenConnections::AcceptedAt(Id id) const {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return std::nullopt;
  return found->second.accepted;
}

std::optional<Instant> UnprovenConnections::OldestAccepted() const {
  if (by_id_.empty()) return std::nullopt;
  return by_id_.begin()->second.accepted;
}

std::string ChargedAddress(const std::string& numeric) {
  constexpr std::size_t kNetworkBytes = 8;
  in6_addr v6;
  const std::string plain = numeric.substr(0, numeric.find('%'));  // Without the zone.
  if (inet_pton(AF_INET6, plain.c_str(), &v6) != 1) return numeric;
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (IN6_IS_ADDR_V4MAPPED(&v6)) {
    inet_ntop(AF_INET, &v6.s6_addr[12], text.data(), text.size());
    return text.data();
  }
  std::memset(&v6.s6_addr[kNetworkBytes], 0, sizeof(v6.s6_addr) - kNetworkBytes);
  inet_ntop(AF_INET6, &v6, text.data(), text.size());
  return std::string(text.data()) + "/64";
}

}  // namespace resilient
