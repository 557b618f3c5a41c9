#include "store/core/shared_results.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/check.h"
#include "store/core/codec.h"
#include "store/core/row_codec.h"

namespace resilient::store {

std::uint64_t SharedResults::Hold(const std::shared_ptr<const SharedValues>& values) {
  const auto [known, is_new] = ids_.try_emplace(values.get(), last_id_ + 1);
  const std::uint64_t id = known->second;
  if (is_new) {
    last_id_ = id;
    entries_[id].values = values;
    if (journal_) journal_->Put(SharedRow(id), EncodeRow(values->values));
  }
  ++entries_.at(id).holders;
  return id;
}

void SharedResults::Release(std::uint64_t id) {
  const auto entry = entries_.find(id);
  RESILIENT_CHECK(entry != entries_.end() && entry->second.holders > 0);
  if (--entry->second.holders == 0) Remove(entry);
}

void SharedResults::Remove(std::map<std::uint64_t, Entry>::iterator entry) {
  if (journal_) journal_->Remove(SharedRow(entry->first));
  ids_.erase(entry->second.values.get());
  entries_.erase(entry);
}

bool SharedResults::Restore(std::uint64_t id, std::string_view value) {
  std::vector<std::string> values;
  if (id == 0 || entries_.contains(id) || !DecodeRow(value, values)) return false;
  Entry& entry = entries_[id];
  entry.values = Share(std::move(values));
  ids_.emplace(entry.values.get(), id);
  last_id_ = std::max(last_id_, id);
  return true;
}

std::shared_ptr<const SharedValues> SharedResults::Take(std::uint64_t id) {
  const auto entry = entries_.find(id);
  if (entry == entries_.end()) return nullptr;
  ++entry->second.holders;
  return entry->second.values;
}

void SharedResults::FinishRestore() {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (entry->second.holders == 0) Remove(entry);
    entry = next;
  }
}

void SharedResults::AppendRows(Rows& rows) const {
  for (const auto& [id, entry] : entries_) {
    rows.emplace(SharedRow(id), EncodeRow(entry.values->values));
  }
}

}  // namespace resilient::store
