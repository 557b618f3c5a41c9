#include "store/core/change_log.h"

#include <algorithm>
#include <utility>

namespace resilient::store {

std::size_t ChangeLog::BytesOf(const Entry& entry) {
  return sizeof(Entry) + entry.key.size() + (entry.value ? entry.value->size() : 0);
}

void ChangeLog::Begin(std::uint64_t revision) {
  if (std::exchange(begun_, true)) return;
  oldest_ = revision + 1;
}

void ChangeLog::Note(std::uint64_t revision, std::uint64_t scope, std::string key,
                     std::optional<std::string> value) {
  Add({revision, scope, false, std::move(key), std::move(value)});
}

void ChangeLog::NoteDrop(std::uint64_t revision, std::uint64_t scope) {
  Add({revision, scope, true, {}, {}});
}

void ChangeLog::Add(Entry entry) {
  if (!begun_) return;
  bytes_ += BytesOf(entry);
  entries_.push_back(std::move(entry));
  while (entries_.size() > entries_max_ || !bytes_.Fits(0)) {
    bytes_ -= BytesOf(entries_.front());
    oldest_ = entries_.front().revision + 1;
    entries_.pop_front();
  }
}

ChangeLog::Changes ChangeLog::Since(std::uint64_t from, std::uint64_t scope,
                                    std::string_view prefix, std::uint64_t present) const {
  Changes changes;
  changes.seen = present;
  if (from < oldest_) {
    changes.compacted = oldest_;
    return changes;
  }
  std::size_t bytes = 0;
  auto entry = std::lower_bound(
      entries_.begin(), entries_.end(), from,
      [](const Entry& known, std::uint64_t revision) { return known.revision < revision; });
  for (; entry != entries_.end(); ++entry) {
    if (entry->scope != scope) continue;
    if (entry->drop) {
      changes.events.clear();
      changes.compacted = entry->revision + 1;
      return changes;
    }
    if (!std::string_view(entry->key).starts_with(prefix)) continue;
    if (changes.events.size() >= kWatchBatchEventsMax || bytes >= kWatchBatchBytesMax) {
      changes.seen = entry->revision - 1;
      break;
    }
    bytes += BytesOf(*entry);
    changes.events.push_back({entry->revision, entry->key, entry->value});
  }
  return changes;
}

}  // namespace resilient::store
