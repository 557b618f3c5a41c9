#include "store/core/keyspace.h"

#include <charconv>
#include <utility>

#include "runtime/base/check.h"

namespace resilient::store {
namespace {

Status TooLarge(const char* what, std::size_t size, std::size_t most) {
  return Status(StatusCode::kTooLarge, std::string(what) + " of " + std::to_string(size) +
                                           " bytes is larger than the store takes (" +
                                           std::to_string(most) + " bytes); split it");
}

Status CheckSizes(const std::string& key, std::size_t value_bytes) {
  if (key.size() > kKeyBytesMax) return TooLarge("a key", key.size(), kKeyBytesMax);
  if (value_bytes > kValueBytesMax) return TooLarge("a value", value_bytes, kValueBytesMax);
  return {};
}

bool ParseDecimal(const std::string& text, std::int64_t* number) {
  const char* end = text.data() + text.size();
  const auto [parsed, error] = std::from_chars(text.data(), end, *number);
  return error == std::errc() && parsed == end;
}

}  // namespace

Status Keyspace::CheckRoom(const Scope& scope, const std::string& key,
                           std::size_t value_bytes) const {
  const auto present = scope.values.find(key);
  const bool is_new = present == scope.values.end();
  if (is_new && keys_ >= limits_.keys) {
    return Status(StatusCode::kResourceExhausted,
                  "the job holds " + std::to_string(keys_) +
                      " keys, the most that the store keeps for a job; delete keys no longer used");
  }
  const std::size_t freed = is_new ? 0 : present->second.size();
  const std::size_t needed = value_bytes + (is_new ? key.size() : 0);
  if (needed > freed && bytes_ - freed + needed > limits_.bytes) {
    return Status(StatusCode::kResourceExhausted,
                  "the job's keys and values take " + std::to_string(bytes_) + " of " +
                      std::to_string(limits_.bytes) +
                      " bytes, and this would go beyond; delete keys no longer used");
  }
  return {};
}

void Keyspace::Store(Scope& scope, const std::string& key, std::string value,
                     std::vector<EndedWait>& ended) {
  const auto [entry, is_new] = scope.values.try_emplace(key);
  bytes_ += value.size() + (is_new ? key.size() : 0);
  bytes_ -= entry->second.size();
  keys_ += is_new ? 1 : 0;
  entry->second = std::move(value);
  const auto waiting = scope.waiting.find(key);
  if (waiting == scope.waiting.end()) return;
  const std::set<WaitId> woken = std::move(waiting->second);
  scope.waiting.erase(waiting);
  for (const WaitId id : woken) {
    const auto session = waits_of_.find(id.session);
    RESILIENT_CHECK(session != waits_of_.end());
    Wait& wait = session->second.at(id.seq);
    bytes_ -= key.size();
    wait.missing.erase(key);
    if (!wait.missing.empty()) continue;
    ended.push_back({id, Status(), wait.get ? entry->second : std::string()});
    session->second.erase(id.seq);
    if (session->second.empty()) waits_of_.erase(session);
    --waits_;
  }
}

Status Keyspace::Set(std::uint64_t scope, const std::string& key, std::string value,
                     std::vector<EndedWait>& ended) {
  RESILIENT_RETURN_IF_ERROR(CheckSizes(key, value.size()));
  Scope& keys = scopes_[scope];
  Status room = CheckRoom(keys, key, value.size());
  if (room.ok()) Store(keys, key, std::move(value), ended);
  EraseScopeIfEmpty(scope);
  return room;
}

Result<std::int64_t> Keyspace::Add(std::uint64_t scope, const std::string& key, std::int64_t amount,
                                   std::vector<EndedWait>& ended) {
  RESILIENT_RETURN_IF_ERROR(CheckSizes(key, 0));
  std::int64_t number = 0;
  if (const std::string* present = Find(scope, key); present && !ParseDecimal(*present, &number)) {
    return Status(StatusCode::kWrongType, "add() needs a decimal number, but the value of key '" +
                                              key + "' (" + std::to_string(present->size()) +
                                              " bytes) is none; use another key");
  }
  if (__builtin_add_overflow(number, amount, &number)) {
    return Status(StatusCode::kInvalidArgument,
                  "add() to key '" + key + "' leaves the range of 64-bit integers");
  }
  RESILIENT_RETURN_IF_ERROR(Set(scope, key, std::to_string(number), ended));
  return number;
}

Result<Keyspace::Swapped> Keyspace::CompareSet(std::uint64_t scope, const std::string& key,
                                               const std::string& expected, std::string desired,
                                               std::vector<EndedWait>& ended) {
  RESILIENT_RETURN_IF_ERROR(CheckSizes(key, desired.size()));
  if (expected.size() > kValueBytesMax) {
    return TooLarge("an expected value", expected.size(), kValueBytesMax);
  }
  const std::string* present = Find(scope, key);
  if (!present && !expected.empty()) return Swapped{expected, false};
  if (present && *present != expected) return Swapped{*present, false};
  RESILIENT_RETURN_IF_ERROR(Set(scope, key, desired, ended));
  return Swapped{std::move(desired), true};
}

bool Keyspace::Delete(std::uint64_t scope, const std::string& key) {
  const auto keys = scopes_.find(scope);
  if (keys == scopes_.end()) return false;
  const auto entry = keys->second.values.find(key);
  if (entry == keys->second.values.end()) return false;
  bytes_ -= key.size() + entry->second.size();
  --keys_;
  keys->second.values.erase(entry);
  EraseScopeIfEmpty(scope);
  return true;
}

const std::string* Keyspace::Find(std::uint64_t scope, const std::string& key) const {
  const auto keys = scopes_.find(scope);
  if (keys == scopes_.end()) return nullptr;
  const auto entry = keys->second.values.find(key);
  return entry == keys->second.values.end() ? nullptr : &entry->second;
}

bool Keyspace::HasAll(std::uint64_t scope, const std::vector<std::string>& keys) const {
  for (const std::string& key : keys) {
    if (!Find(scope, key)) return false;
  }
  return true;
}

std::size_t Keyspace::NumKeys(std::uint64_t scope) const {
  const auto keys = scopes_.find(scope);
  return keys == scopes_.end() ? 0 : keys->second.values.size();
}

Status Keyspace::AddWait(WaitId id, std::uint64_t scope, const std::vector<std::string>& keys,
                         bool get) {
  RemoveWait(id);
  if (WaitsOf(id.session) >= kInFlightPerSessionMax) {
    return Status(StatusCode::kResourceExhausted,
                  "the session has " + std::to_string(kInFlightPerSessionMax) +
                      " requests waiting, the most that the store keeps for one");
  }
  Wait wait;
  wait.scope = scope;
  wait.get = get;
  std::size_t bytes = 0;
  for (const std::string& key : keys) {
    if (!Find(scope, key) && wait.missing.insert(key).second) bytes += key.size();
  }
  RESILIENT_CHECK(!wait.missing.empty());
  if (bytes_ + bytes > limits_.bytes) {
    return Status(StatusCode::kResourceExhausted,
                  "the job's keys, values and waits take " + std::to_string(bytes_) + " of " +
                      std::to_string(limits_.bytes) + " bytes, and this would go beyond");
  }
  Scope& waited = scopes_[scope];
  for (const std::string& key : wait.missing) waited.waiting[key].insert(id);
  bytes_ += bytes;
  ++waits_;
  waits_of_[id.session].emplace(id.seq, std::move(wait));
  return {};
}

bool Keyspace::CancelWait(WaitId id) {
  const std::size_t before = waits_;
  RemoveWait(id);
  return waits_ < before;
}

void Keyspace::RemoveWait(WaitId id) {
  const auto session = waits_of_.find(id.session);
  if (session == waits_of_.end()) return;
  const auto found = session->second.find(id.seq);
  if (found == session->second.end()) return;
  const Wait wait = std::move(found->second);
  session->second.erase(found);
  if (session->second.empty()) waits_of_.erase(session);
  --waits_;
  Scope& scope = scopes_.at(wait.scope);
  for (const std::string& key : wait.missing) {
    bytes_ -= key.size();
    const auto waiting = scope.waiting.find(key);
    waiting->second.erase(id);
    if (waiting->second.empty()) scope.waiting.erase(waiting);
  }
  EraseScopeIfEmpty(wait.scope);
}

void Keyspace::DropWaits(SessionId session) {
  while (true) {
    const auto waits = waits_of_.find(session);
    if (waits == waits_of_.end()) return;
    RemoveWait({session, waits->second.begin()->first});
  }
}

void Keyspace::EndScopedWaits(SessionId session, const Status& why, std::vector<EndedWait>& ended) {
  const auto waits = waits_of_.find(session);
  if (waits == waits_of_.end()) return;
  std::vector<WaitId> ids;
  for (const auto& [seq, wait] : waits->second) {
    if (wait.scope != 0) ids.push_back({session, seq});
  }
  for (const WaitId id : ids) {
    RemoveWait(id);
    ended.push_back({id, why, {}});
  }
}

void Keyspace::EndWaits(std::uint64_t scope, const Status& why, std::vector<EndedWait>& ended) {
  const auto found = scopes_.find(scope);
  if (found == scopes_.end()) return;
  std::set<WaitId> ids;
  for (const auto& [key, waiting] : found->second.waiting) {
    ids.insert(waiting.begin(), waiting.end());
  }
  for (const WaitId id : ids) {
    RemoveWait(id);
    ended.push_back({id, why, {}});
  }
}

void Keyspace::DropKeys(std::uint64_t scope) {
  const auto found = scopes_.find(scope);
  if (found == scopes_.end()) return;
  for (const auto& [key, value] : found->second.values) bytes_ -= key.size() + value.size();
  keys_ -= found->second.values.size();
  found->second.values.clear();
  EraseScopeIfEmpty(scope);
}

void Keyspace::DropAllKeys(const Status& why, std::vector<EndedWait>& ended) {
  std::vector<std::uint64_t> scopes;
  for (const auto& [scope, keys] : scopes_) scopes.push_back(scope);
  for (const std::uint64_t scope : scopes) {
    if (scope != 0) EndWaits(scope, why, ended);
    DropKeys(scope);
  }
}

std::size_t Keyspace::WaitsOf(SessionId session) const {
  const auto waits = waits_of_.find(session);
  return waits == waits_of_.end() ? 0 : waits->second.size();
}

void Keyspace::EraseScopeIfEmpty(std::uint64_t scope) {
  const auto found = scopes_.find(scope);
  if (found != scopes_.end() && found->second.values.empty() && found->second.waiting.empty()) {
    scopes_.erase(found);
  }
}

}  // namespace resilient::store
