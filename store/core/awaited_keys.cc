#include "store/core/awaited_keys.h"

#include <utility>

#include "runtime/base/check.h"

namespace resilient::store {

void AwaitedKeys::Link(Wait::Part& part) {
  Key& key = part.key->second;
  part.before = key.last;
  (key.last == nullptr ? key.first : key.last->after) = &part;
  key.last = &part;
}

void AwaitedKeys::Unlink(Wait::Part& part) {
  Key& key = part.key->second;
  (part.before == nullptr ? key.first : part.before->after) = part.after;
  (part.after == nullptr ? key.last : part.after->before) = part.before;
  part.missing = false;
  --part.wait->missing_;
}

void AwaitedKeys::Begin(WaitId id, Wait& wait, std::vector<std::string> keys) {
  RESILIENT_CHECK(wait.parts_.empty());
  wait.id_ = id;
  wait.parts_.reserve(keys.size());  // Links point to them.
  for (std::string& name : keys) {
    auto& key = *keys_.try_emplace(std::move(name)).first;
    if (key.second.last != nullptr && key.second.last->wait == &wait) continue;
    wait.parts_.push_back({&wait, &key});
    Link(wait.parts_.back());
    ++key.second.parts;
    ++wait.missing_;
  }
}

void AwaitedKeys::End(Wait& wait) {
  for (Wait::Part& part : wait.parts_) {
    if (part.missing) Unlink(part);
    if (--part.key->second.parts == 0) keys_.erase(keys_.find(part.key->first));
  }
  wait.parts_ = {};
}

std::vector<WaitId> AwaitedKeys::Come(const std::string& key,
                                      const std::function<bool(WaitId)>& is_meant) {
  std::vector<WaitId> told;
  const auto found = keys_.find(key);
  if (found == keys_.end()) return told;
  Wait::Part* next = found->second.first;
  while (Wait::Part* part = next) {
    next = part->after;
    if (is_meant != nullptr && !is_meant(part->wait->id_)) continue;
    Unlink(*part);
    told.push_back(part->wait->id_);
  }
  return told;
}

void AwaitedKeys::AddTo(std::set<WaitId>& ids) const {
  for (const auto& [name, key] : keys_) {
    for (const Wait::Part* part = key.first; part != nullptr; part = part->after) {
      ids.insert(part->wait->id_);
    }
  }
}

}  // namespace resilient::store
