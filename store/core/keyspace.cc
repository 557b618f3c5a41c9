#include "store/core/keyspace.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/numbers.h"
#include "store/core/sizes.h"
#include "store/core/storage.h"

// The values and the queues; the waits are in keyspace_waits.cc.
namespace resilient::store {
namespace {

Status CheckSizes(const std::string& key, std::size_t value_bytes) {
  RESILIENT_RETURN_IF_ERROR(CheckKeySize(key));
  return CheckValueSize(value_bytes);
}

// In place, as a value may be large. It takes an eighth more memory than it has bytes at most: the
// string would take as much again.
void AppendTo(std::string& text, const std::string& more) {
  const std::size_t size = text.size() + more.size();
  if (size > text.capacity()) {
    std::string longer;
    longer.reserve(size + size / 8);
    longer = text;
    text.swap(longer);
  }
  text += more;
}

// Indices of the keys in ascending order; of one that is there twice the last.
std::vector<std::size_t> LastOfEach(const std::vector<std::string>& keys) {
  std::vector<std::size_t> order(keys.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&keys](std::size_t a, std::size_t b) {
    const int compared = keys[a].compare(keys[b]);
    return compared != 0 ? compared < 0 : a > b;
  });
  const auto same = [&keys](std::size_t a, std::size_t b) { return keys[a] == keys[b]; };
  order.erase(std::unique(order.begin(), order.end(), same), order.end());
  return order;
}

}  // namespace

// ---- Values ----

Status Keyspace::CheckRoom(std::size_t new_keys, std::size_t bytes_freed,
                           std::size_t bytes_needed) const {
  if (new_keys > 0 && keys_ + new_keys > limits_.keys) {
    return Status(StatusCode::kResourceExhausted,
                  "the job holds " + std::to_string(keys_) + " keys, and the store keeps " +
                      std::to_string(limits_.keys) +
                      " at most for a job; delete keys no longer used");
  }
  return bytes_needed > bytes_freed ? CheckBytes(bytes_needed - bytes_freed) : Status();
}

Status Keyspace::CheckBytes(std::size_t more) const {
  const Quota::Room room = bytes_.RoomFor(more);
  if (room == Quota::Room::kThere) return {};
  const bool of_job = room == Quota::Room::kNoneForJob;
  return Status(StatusCode::kResourceExhausted,
                std::string("keys, values and waits of ") + (of_job ? "the job" : "all jobs") +
                    " take " + std::to_string(of_job ? bytes_.taken() : bytes_.pool()->taken) +
                    " of " + std::to_string(of_job ? bytes_.most() : bytes_.pool()->most) +
                    " bytes, and this would go beyond; delete keys no longer used");
}

Keyspace::Place Keyspace::Locate(std::uint64_t scope, const std::string& key) {
  const auto found = scopes_.find(scope);
  if (found == scopes_.end()) return {};
  auto& values = found->second.values;
  const auto at = values.lower_bound(key);
  const bool present = at != values.end() && at->first == key;
  return {&found->second, at, present ? &at->second : nullptr};
}

void Keyspace::Store(const Place& place, std::uint64_t scope, const std::string& key,
                     std::string value) {
  auto entry = place.at;
  if (place.value == nullptr) {
    auto& values = (place.scope == nullptr ? scopes_[scope] : *place.scope).values;
    entry = values.emplace_hint(place.scope == nullptr ? values.end() : place.at, key, "");
    bytes_ += key.size() + kKeyOverhead;
    ++keys_;
  }
  bytes_ += value.size();
  bytes_ -= entry->second.size();
  entry->second.swap(value);  // An assignment of a short one keeps the memory of the long one.
  NoteValue(scope, key, entry->second);
}

void Keyspace::NoteValue(std::uint64_t scope, const std::string& key, const std::string& value) {
  if (Noting()) journal_->Put(KeyRow(job_, scope, key), value);
  NoteChange(scope, key, &value);
}

Status Keyspace::SetAt(const Place& place, std::uint64_t scope, const std::string& key,
                       std::string value, std::vector<EndedWait>& ended) {
  RESILIENT_RETURN_IF_ERROR(CheckSizes(key, value.size()));
  const bool is_new = place.value == nullptr;
  RESILIENT_RETURN_IF_ERROR(CheckRoom(is_new ? 1 : 0, is_new ? 0 : place.value->size(),
                                      value.size() + (is_new ? key.size() + kKeyOverhead : 0)));
  Store(place, scope, key, std::move(value));
  Wake(scope, key, false, ended);
  return {};
}

Status Keyspace::Set(std::uint64_t scope, const std::string& key, std::string value,
                     std::vector<EndedWait>& ended) {
  return SetAt(Locate(scope, key), scope, key, std::move(value), ended);
}

Status Keyspace::MultiSet(std::uint64_t scope, const std::vector<std::string>& keys,
                          std::vector<std::string> values, std::vector<EndedWait>& ended) {
  if (keys.size() != values.size()) {
    return Status(StatusCode::kInvalidArgument,
                  "a multi_set of " + std::to_string(keys.size()) + " keys came with " +
                      std::to_string(values.size()) + " values; each key needs one");
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    RESILIENT_RETURN_IF_ERROR(CheckSizes(keys[i], values[i].size()));
  }
  // Ascending, so that each place stays where it is when those before it are filled.
  std::vector<std::pair<std::size_t, Place>> wanted;  // By index, the last of each key.
  std::size_t new_keys = 0;
  std::size_t freed = 0;
  std::size_t needed = 0;
  for (const std::size_t i : LastOfEach(keys)) {
    const Place& place = wanted.emplace_back(i, Locate(scope, keys[i])).second;
    const bool is_new = place.value == nullptr;
    new_keys += is_new ? 1 : 0;
    freed += is_new ? 0 : place.value->size();
    needed += values[i].size() + (is_new ? keys[i].size() + kKeyOverhead : 0);
  }
  RESILIENT_RETURN_IF_ERROR(CheckRoom(new_keys, freed, needed));
  // Nobody may wake up to the old value of another key.
  for (const auto& [i, place] : wanted) Store(place, scope, keys[i], std::move(values[i]));
  for (const auto& [i, place] : wanted) Wake(scope, keys[i], false, ended);
  return {};
}

Result<std::int64_t> Keyspace::Add(std::uint64_t scope, const std::string& key, std::int64_t amount,
                                   std::vector<EndedWait>& ended) {
  RESILIENT_RETURN_IF_ERROR(CheckSizes(key, 0));
  std::int64_t number = 0;
  const Place place = Locate(scope, key);
  if (place.value && !ReadNumbers(*place.value, &number)) {
    return Status(StatusCode::kWrongType, "add() needs a decimal number at key '" + key +
                                              "', which holds " +
                                              std::to_string(place.value->size()) + " other bytes");
  }
  if (__builtin_add_overflow(number, amount, &number)) {
    return Status(StatusCode::kInvalidArgument,
                  "add() to key '" + key + "' leaves the range of 64-bit integers");
  }
  RESILIENT_RETURN_IF_ERROR(SetAt(place, scope, key, std::to_string(number), ended));
  return number;
}

Result<std::size_t> Keyspace::Append(std::uint64_t scope, const std::string& key,
                                     const std::string& value, std::vector<EndedWait>& ended) {
  const Place place = Locate(scope, key);
  const std::size_t size = (place.value ? place.value->size() : 0) + value.size();
  RESILIENT_RETURN_IF_ERROR(CheckSizes(key, size));
  if (place.value == nullptr) {
    RESILIENT_RETURN_IF_ERROR(SetAt(place, scope, key, value, ended));
    return size;
  }
  RESILIENT_RETURN_IF_ERROR(CheckBytes(value.size()));
  AppendTo(place.at->second, value);
  bytes_ += value.size();
  NoteValue(scope, key, place.at->second);
  Wake(scope, key, false, ended);
  return size;
}

Result<Keyspace::Swapped> Keyspace::CompareSet(std::uint64_t scope, const std::string& key,
                                               const std::string& expected, std::string desired,
                                               std::vector<EndedWait>& ended) {
  RESILIENT_RETURN_IF_ERROR(CheckSizes(key, desired.size()));
  RESILIENT_RETURN_IF_ERROR(CheckValueSize(expected.size(), "an expected value"));
  const Place place = Locate(scope, key);
  if (!place.value && !expected.empty()) return Swapped{expected, false};
  if (place.value && *place.value != expected) return Swapped{*place.value, false};
  RESILIENT_RETURN_IF_ERROR(SetAt(place, scope, key, desired, ended));
  return Swapped{std::move(desired), true};
}

bool Keyspace::Delete(std::uint64_t scope, const std::string& key) {
  const auto found = scopes_.find(scope);
  if (found == scopes_.end()) return false;
  bool existed = false;
  if (const auto entry = found->second.values.find(key); entry != found->second.values.end()) {
    bytes_ -= key.size() + kKeyOverhead + entry->second.size();
    --keys_;
    found->second.values.erase(entry);
    if (Noting()) journal_->Remove(KeyRow(job_, scope, key));
    NoteChange(scope, key, nullptr);
    existed = true;
  }
  if (const auto queue = found->second.queues.find(key); queue != found->second.queues.end()) {
    existed = existed || !queue->second.items.empty();
    RemoveItems(scope, key, queue->second);
    if (queue->second.waiting.empty()) found->second.queues.erase(queue);
  }
  EraseScopeIfEmpty(scope);
  return existed;
}

const Keyspace::Scope* Keyspace::FindScope(std::uint64_t scope) const {
  const auto found = scopes_.find(scope);
  return found == scopes_.end() ? nullptr : &found->second;
}

const std::string* Keyspace::Find(std::uint64_t scope, const std::string& key) const {
  const Scope* found = FindScope(scope);
  if (!found) return nullptr;
  const auto entry = found->values.find(key);
  return entry == found->values.end() ? nullptr : &entry->second;
}

Result<std::vector<std::string>> Keyspace::MultiGet(std::uint64_t scope,
                                                    const std::vector<std::string>& keys) const {
  std::vector<std::string> values;
  values.reserve(keys.size());
  std::size_t bytes = 0;
  for (const std::string& key : keys) {
    const std::string* value = Find(scope, key);
    if (!value) return Status(StatusCode::kNotFound, "there is no key '" + key + "'");
    bytes += value->size();
    if (bytes > kReplyValuesBytesMax) {
      return Status(StatusCode::kTooLarge,
                    "the values of " + std::to_string(keys.size()) + " keys take more than the " +
                        std::to_string(kReplyValuesBytesMax) +
                        " bytes that one answer holds; ask for fewer keys at a time");
    }
    values.push_back(*value);
  }
  return values;
}

bool Keyspace::Exists(std::uint64_t scope, const std::string& key) const {
  return Find(scope, key) || QueueLength(scope, key) > 0;
}

bool Keyspace::HasAll(std::uint64_t scope, const std::vector<std::string>& keys) const {
  for (const std::string& key : keys) {
    if (!Exists(scope, key)) return false;
  }
  return true;
}

std::size_t Keyspace::NumKeys(std::uint64_t scope) const {
  const Scope* found = FindScope(scope);
  return found ? found->values.size() : 0;
}

Keyspace::Page Keyspace::ListKeys(std::uint64_t scope, const std::string& prefix,
                                  const std::string& after) const {
  Page page;
  const Scope* found = FindScope(scope);
  if (!found) return page;
  const auto& values = found->values;
  auto entry =
      !after.empty() && after >= prefix ? values.upper_bound(after) : values.lower_bound(prefix);
  std::size_t bytes = 0;
  for (; entry != values.end() && entry->first.starts_with(prefix); ++entry) {
    if (page.keys.size() >= kKeysPerPage || bytes >= kPageBytesMax) {
      page.more = true;
      break;
    }
    page.keys.push_back(entry->first);
    bytes += entry->first.size();
  }
  return page;
}

Keyspace::ValuePage Keyspace::ListValues(std::uint64_t scope, const std::string& prefix,
                                         const std::string& after) const {
  ValuePage page;
  const Page keys = ListKeys(scope, prefix, after);
  page.more = keys.more;
  std::size_t bytes = 0;
  for (const std::string& key : keys.keys) {
    if (bytes >= kPageBytesMax) {
      page.more = true;
      break;
    }
    const std::string& value = *Find(scope, key);
    bytes += key.size() + value.size();
    page.keys.push_back({0, key, value});
  }
  return page;
}

// ---- Queues ----

const Keyspace::Queue* Keyspace::FindQueue(std::uint64_t scope, const std::string& key) const {
  const Scope* found = FindScope(scope);
  if (!found) return nullptr;
  const auto queue = found->queues.find(key);
  return queue == found->queues.end() ? nullptr : &queue->second;
}

std::size_t Keyspace::QueueLength(std::uint64_t scope, const std::string& key) const {
  const Queue* queue = FindQueue(scope, key);
  return queue ? queue->items.size() : 0;
}

Result<std::size_t> Keyspace::Push(std::uint64_t scope, const std::string& key, std::string item,
                                   std::vector<EndedWait>& ended) {
  RESILIENT_RETURN_IF_ERROR(CheckSizes(key, item.size()));
  const Queue* present = FindQueue(scope, key);
  if (present && !present->waiting.empty()) {
    const WaitId id = present->waiting.begin()->second;
    Detach(id);
    ended.push_back({.wait = id, .value = std::move(item), .mutation = true});
    return std::size_t{0};
  }
  const std::size_t length = present ? present->items.size() : 0;
  if (length >= limits_.queue_items) {
    return Status(StatusCode::kResourceExhausted,
                  "queue '" + key + "' holds " + std::to_string(length) +
                      " items, the most that the store keeps; pop before pushing more");
  }
  const std::size_t bytes =
      item.size() + kItemOverhead + (length == 0 ? key.size() + kKeyOverhead : 0);
  RESILIENT_RETURN_IF_ERROR(CheckRoom(length == 0 ? 1 : 0, 0, bytes));
  Queue& queue = scopes_[scope].queues[key];
  bytes_ += bytes;
  keys_ += length == 0 ? 1 : 0;
  if (Noting()) journal_->Put(QueueRow(job_, scope, key, queue.first + length), item);
  queue.items.push_back(std::move(item));
  Wake(scope, key, true, ended);
  return length + 1;
}

std::optional<std::string> Keyspace::Pop(std::uint64_t scope, const std::string& key) {
  if (QueueLength(scope, key) == 0) return std::nullopt;
  Scope& found = scopes_.at(scope);
  const auto queue = found.queues.find(key);
  std::string item = std::move(queue->second.items.front());
  queue->second.items.front().clear();
  bytes_ -= item.size();
  RemoveItem(scope, key, queue->second);
  if (queue->second.items.empty()) found.queues.erase(queue);
  EraseScopeIfEmpty(scope);
  return item;
}

void Keyspace::RemoveItem(std::uint64_t scope, const std::string& key, Queue& queue) {
  if (Noting()) journal_->Remove(QueueRow(job_, scope, key, queue.first));
  bytes_ -= queue.items.front().size() + kItemOverhead;
  queue.items.pop_front();
  ++queue.first;
  if (!queue.items.empty()) return;
  bytes_ -= key.size() + kKeyOverhead;
  --keys_;
}

void Keyspace::RemoveItems(std::uint64_t scope, const std::string& key, Queue& queue) {
  while (!queue.items.empty()) RemoveItem(scope, key, queue);
}

// ---- Scopes ----

void Keyspace::DropKeys(std::uint64_t scope) {
  NoteDrop(scope);
  const auto found = scopes_.find(scope);
  if (found == scopes_.end()) return;
  for (const auto& [key, value] : found->second.values) {
    bytes_ -= key.size() + kKeyOverhead + value.size();
    if (Noting()) journal_->Remove(KeyRow(job_, scope, key));
  }
  keys_ -= found->second.values.size();
  found->second.values.clear();
  for (auto& [key, queue] : found->second.queues) RemoveItems(scope, key, queue);
  std::erase_if(found->second.queues,
                [](const auto& queue) { return queue.second.waiting.empty(); });
  EraseScopeIfEmpty(scope);
}

void Keyspace::DropAllKeys(const Status& why, std::vector<EndedWait>& ended) {
  std::vector<std::uint64_t> scopes;
  scopes.reserve(scopes_.size());
  for (const auto& [scope, keys] : scopes_) scopes.push_back(scope);
  for (const std::uint64_t scope : scopes) {
    if (scope != 0) EndWaits(scope, why, /*of_survivors=*/true, ended);
    DropKeys(scope);
  }
}

void Keyspace::EraseScopeIfEmpty(std::uint64_t scope) {
  const auto found = scopes_.find(scope);
  if (found == scopes_.end()) return;
  const Scope& keys = found->second;
  if (keys.values.empty() && keys.queues.empty() && keys.awaited.empty() && keys.barriers.empty() &&
      keys.exchanges.empty() && keys.watches.empty()) {
    scopes_.erase(found);
  }
}

// ---- What was kept ----

Status Keyspace::Restore(const RowName& name, std::string_view value) {
  bool fits = false;
  if (name.kind == RowKind::kKey) {
    bytes_ += name.key.size() + kKeyOverhead + value.size();
    ++keys_;
    fits = scopes_[name.scope].values.try_emplace(name.key, value).second;
  } else if (name.kind == RowKind::kQueueItem) {
    fits = RestoreItem(scopes_[name.scope].queues[name.key], name, value);
  }
  if (fits) return {};
  return Status(StatusCode::kInternal, "it does not fit the rows before it");
}

bool Keyspace::RestoreItem(Queue& queue, const RowName& name, std::string_view item) {
  if (queue.items.empty()) {
    queue.first = name.index;
    bytes_ += name.key.size() + kKeyOverhead;
    ++keys_;
  }
  if (name.index != queue.first + queue.items.size()) return false;
  bytes_ += item.size() + kItemOverhead;
  queue.items.emplace_back(item);
  return true;
}

void Keyspace::AppendRows(std::map<std::string, std::string>& rows) const {
  for (const auto& [scope, keys] : scopes_) {
    for (const auto& [key, value] : keys.values) rows.emplace(KeyRow(job_, scope, key), value);
    for (const auto& [key, queue] : keys.queues) {
      for (std::size_t i = 0; i < queue.items.size(); ++i) {
        rows.emplace(QueueRow(job_, scope, key, queue.first + i), queue.items[i]);
      }
    }
  }
}

}  // namespace resilient::store
