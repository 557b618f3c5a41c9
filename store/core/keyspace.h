#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <resilient/status.h>

#include "store/core/messages.h"

namespace resilient::store {

// Handle of a session inside one server; never reused. 0: none.
using SessionId = std::uint64_t;

// A request that waits, by who asked and under which number.
struct WaitId {
  SessionId session = 0;
  std::uint64_t seq = 0;
  friend auto operator<=>(const WaitId&, const WaitId&) = default;
};

// The answer to a wait that has ended.
struct EndedWait {
  WaitId wait;
  Status status;
  std::string value;  // Of a get.
};

// What a job may hold. Thread: value type.
struct KeyspaceLimits {
  std::size_t keys = kKeysPerJobMax;
  std::size_t bytes = kBytesPerJobMax;  // Keys, values, and the keys that waits name.
};

// The keys of one job, by scope (0: the job's own; else a round), and the waits for them. Waits are
// indexed by key and by session, so that a cancel or a lost connection costs only its own waits.
// Owner: ServerCore. Thread: caller-synchronised. Pure.
class Keyspace {
 public:
  explicit Keyspace(KeyspaceLimits limits = {}) : limits_(limits) {}

  // Mutations append the waits that they end to `ended`. kTooLarge, kResourceExhausted.
  Status Set(std::uint64_t scope, const std::string& key, std::string value,
             std::vector<EndedWait>& ended);
  // The value afterwards, stored as decimal text. kWrongType: the present one is no decimal number;
  // kInvalidArgument: the sum does not fit 64 bits.
  Result<std::int64_t> Add(std::uint64_t scope, const std::string& key, std::int64_t amount,
                           std::vector<EndedWait>& ended);
  struct Swapped {
    std::string value;  // Afterwards; `expected` when the key is missing and expected is not empty.
    bool swapped = false;
  };
  Result<Swapped> CompareSet(std::uint64_t scope, const std::string& key,
                             const std::string& expected, std::string desired,
                             std::vector<EndedWait>& ended);
  // Whether the key existed.
  bool Delete(std::uint64_t scope, const std::string& key);

  // Null when missing; valid until the next mutation.
  const std::string* Find(std::uint64_t scope, const std::string& key) const;
  bool HasAll(std::uint64_t scope, const std::vector<std::string>& keys) const;
  std::size_t NumKeys(std::uint64_t scope) const;

  // Registers a wait until each key has existed once; `get`: answered with the value of the only
  // key. An existing wait of that id is replaced. kResourceExhausted above
  // kInFlightPerSessionMax waits of the session or the bytes of the job. REQUIRES: a key is
  // missing.
  Status AddWait(WaitId id, std::uint64_t scope, const std::vector<std::string>& keys, bool get);
  // False when there is no such wait.
  bool CancelWait(WaitId id);
  // Forgets the waits of a session without an answer: its connection is gone.
  void DropWaits(SessionId session);
  // Ends the waits of a session in scopes other than 0.
  void EndScopedWaits(SessionId session, const Status& why, std::vector<EndedWait>& ended);
  // Ends all waits in a scope; its keys stay.
  void EndWaits(std::uint64_t scope, const Status& why, std::vector<EndedWait>& ended);
  // Removes the keys of a scope. REQUIRES: EndWaits before, or the waits go on.
  void DropKeys(std::uint64_t scope);
  // Removes all keys; ends the waits of all scopes but 0, where waiting goes on.
  void DropAllKeys(const Status& why, std::vector<EndedWait>& ended);

  std::size_t keys() const { return keys_; }
  std::size_t bytes() const { return bytes_; }
  std::size_t waits() const { return waits_; }
  std::size_t WaitsOf(SessionId session) const;

 private:
  struct Wait {
    std::uint64_t scope = 0;
    bool get = false;
    std::set<std::string> missing;
  };
  struct Scope {
    std::unordered_map<std::string, std::string> values;
    std::unordered_map<std::string, std::set<WaitId>> waiting;
  };

  Status CheckRoom(const Scope& scope, const std::string& key, std::size_t value_bytes) const;
  void Store(Scope& scope, const std::string& key, std::string value,
             std::vector<EndedWait>& ended);
  void RemoveWait(WaitId id);
  void EraseScopeIfEmpty(std::uint64_t scope);

  const KeyspaceLimits limits_;
  std::map<std::uint64_t, Scope> scopes_;
  std::unordered_map<SessionId, std::map<std::uint64_t, Wait>> waits_of_;
  std::size_t keys_ = 0;
  std::size_t bytes_ = 0;
  std::size_t waits_ = 0;
};

}  // namespace resilient::store
