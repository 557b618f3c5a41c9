#include "store/server/input_ledger.h"

namespace resilient::store {

void InputLedger::Note(ConnectionId connection, std::size_t bytes) {
  if (bytes == 0 && !entries_.contains(connection)) return;
  const auto [found, is_new] = entries_.try_emplace(connection);
  Entry& entry = found->second;
  if (is_new) {
    entry.order = ++last_order_;
    by_order_.emplace(entry.order, connection);
  }
  total_ += bytes;
  total_ -= entry.bytes;
  entry.bytes = bytes;
  if (bytes > 0) return;
  by_order_.erase(entry.order);
  entries_.erase(found);
}

std::size_t InputLedger::Of(ConnectionId connection) const {
  const auto entry = entries_.find(connection);
  return entry == entries_.end() ? 0 : entry->second.bytes;
}

std::optional<ConnectionId> InputLedger::Oldest() const {
  if (by_order_.empty()) return std::nullopt;
  return by_order_.begin()->second;
}

}  // namespace resilient::store
