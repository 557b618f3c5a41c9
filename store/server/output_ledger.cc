#include "store/server/output_ledger.h"

#include <algorithm>

namespace resilient::store {

void OutputLedger::Note(ConnectionId connection, std::size_t queued, std::uint64_t written,
                        Instant now) {
  const auto found = entries_.find(connection);
  if (found != entries_.end()) total_ -= found->second.queued;
  if (queued == 0) {
    if (found != entries_.end()) entries_.erase(found);
    return;
  }
  total_ += queued;
  if (found == entries_.end()) {
    entries_.emplace(connection, Entry{queued, written, now});
    return;
  }
  Entry& entry = found->second;
  entry.queued = queued;
  if (written == entry.written) return;
  entry.written = written;
  entry.since = now;
}

std::optional<ConnectionId> OutputLedger::Largest() const {
  const auto largest = std::max_element(
      entries_.begin(), entries_.end(),
      [](const auto& a, const auto& b) { return a.second.queued < b.second.queued; });
  if (largest == entries_.end()) return std::nullopt;
  return largest->first;
}

std::vector<ConnectionId> OutputLedger::All() const {
  std::vector<ConnectionId> all;
  for (const auto& [id, entry] : entries_) all.push_back(id);
  return all;
}

std::vector<ConnectionId> OutputLedger::Stuck(std::size_t queued, Instant before) const {
  std::vector<ConnectionId> stuck;
  for (const auto& [id, entry] : entries_) {
    if (entry.queued > queued && entry.since <= before) stuck.push_back(id);
  }
  return stuck;
}

}  // namespace resilient::store
