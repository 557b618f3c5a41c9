#include "store/server/output_ledger.h"

#include <algorithm>

namespace resilient::store {

void OutputLedger::Note(ConnectionId connection, Unread unread, Instant now) {
  const auto found = entries_.find(connection);
  if (found != entries_.end()) total_ -= found->second.unread.memory;
  if (unread.queued == 0) {
    if (found != entries_.end()) entries_.erase(found);
    return;
  }
  total_ += unread.memory;
  if (found == entries_.end()) {
    entries_.emplace(connection, Entry{unread, now});
    return;
  }
  Entry& entry = found->second;
  if (unread.written != entry.unread.written) entry.since = now;
  entry.unread = unread;
}

std::optional<ConnectionId> OutputLedger::Largest() const {
  const auto largest = std::max_element(
      entries_.begin(), entries_.end(),
      [](const auto& a, const auto& b) { return a.second.unread.memory < b.second.unread.memory; });
  if (largest == entries_.end()) return std::nullopt;
  return largest->first;
}

std::vector<ConnectionId> OutputLedger::All() const {
  std::vector<ConnectionId> all;
  all.reserve(entries_.size());
  for (const auto& [id, entry] : entries_) all.push_back(id);
  return all;
}

std::vector<ConnectionId> OutputLedger::Stuck(std::size_t queued, Instant before) const {
  std::vector<ConnectionId> stuck;
  for (const auto& [id, entry] : entries_) {
    if (entry.unread.queued > queued && entry.since <= before) stuck.push_back(id);
  }
  return stuck;
}

}  // namespace resilient::store
