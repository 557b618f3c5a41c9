#pragma once

#include <cstddef>
#include <functional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/core/gathering.h"

namespace resilient::store {

// Which keys of a scope are waited for, and by which waits. A wait is for several keys and is over
// when each has come once; the waits for a key hear of it in the order in which they began. To
// begin and to end a wait costs as much as it has keys, whatever else there is: the part that a
// wait has in a key is a link of that key's list.
//
// Owner: Keyspace, one for each scope. Thread: caller-synchronised. Pure.
class AwaitedKeys {
  struct Key;

 public:
  // The keys of one wait. Stays where it is while there are any.
  class Wait {
   public:
    bool all_have_come() const { return missing_ == 0; }

   private:
    friend class AwaitedKeys;
    struct Part {
      Wait* wait;
      std::unordered_map<std::string, Key>::value_type* key;
      bool missing = true;     // It is in the key's list,
      Part* before = nullptr;  // between these.
      Part* after = nullptr;
    };

    WaitId id_;
    std::vector<Part> parts_;
    std::size_t missing_ = 0;
  };

  AwaitedKeys() = default;
  AwaitedKeys(const AwaitedKeys&) = delete;
  AwaitedKeys& operator=(const AwaitedKeys&) = delete;

  // `wait` is for `keys`; what is named twice counts once. REQUIRES: it is for none yet.
  void Begin(WaitId id, Wait& wait, std::vector<std::string> keys);
  // It is for none any more. Idempotent.
  void End(Wait& wait);
  // `key` has come. Returns those that waited for it, and now do not: all for which `is_meant`, or
  // null, says so.
  std::vector<WaitId> Come(const std::string& key, const std::function<bool(WaitId)>& is_meant);

  // Adds all that wait for something.
  void AddTo(std::set<WaitId>& ids) const;
  bool empty() const { return keys_.empty(); }

 private:
  struct Key {
    Wait::Part* first = nullptr;
    Wait::Part* last = nullptr;
    std::size_t parts = 0;  // Of waits that are not over, missing or not.
  };

  static void Link(Wait::Part& part);
  static void Unlink(Wait::Part& part);

  std::unordered_map<std::string, Key> keys_;
};

}  // namespace resilient::store
