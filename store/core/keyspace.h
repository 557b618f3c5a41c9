#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <resilient/status.h>

#include "store/core/awaited_keys.h"
#include "store/core/change_log.h"
#include "store/core/gathering.h"
#include "store/core/journal.h"
#include "store/core/limits.h"
#include "store/core/messages.h"
#include "store/core/quota.h"

namespace resilient::store {

struct RowName;  // storage.h.

// The answer to a wait that has ended.
struct EndedWait {
  WaitId wait;
  Status status;
  std::string value{};                                  // Of a get, or the popped item.
  std::vector<std::string> values{};                    // Of a multi_get.
  std::shared_ptr<const SharedValues> shared_values{};  // Of an exchange.
  // Of a watch; its revision is 0 for all others.
  std::vector<KeyEvent> events{};
  std::uint64_t revision = 0;
  std::uint64_t oldest = 0;  // Of a watch that was compacted.
  // The wait has taken effect, or was about to: its result must be remembered, as a repeat of the
  // request would take effect again.
  bool mutation = false;
};

// What a job may hold. Thread: value type.
struct KeyspaceLimits {
  std::size_t keys = kKeysPerJobMax;  // Values, and queues with items.
  // Keys, values, items, and what waits name and bring, each with what keeping it takes.
  std::size_t bytes = kBytesPerJobMax;
  std::size_t queue_items = kQueueItemsMax;
  std::size_t changes = kChangesPerJobMax;  // That are kept for watches, apart from the above.
  std::size_t change_bytes = kChangeBytesPerJobMax;
};

// What a key, an item, a wait, and each key that a wait is for take beside their bytes: nodes of
// trees and tables, as measured.
inline constexpr std::size_t kKeyOverhead = 128;
inline constexpr std::size_t kItemOverhead = 48;
inline constexpr std::size_t kWaitOverhead = 384;
inline constexpr std::size_t kWaitKeyOverhead = 256;
// Of all waits of one session: what ends with its connection ends in one step.
inline constexpr std::size_t kWaitKeysPerSessionMax = 2 * kKeysPerRequestMax;

// The keys of one job, by scope (0: the job's own; else a round), and all that waits for them.
//
// A key may have a value and, apart from it, a queue of items: operations on values do not see
// queues and the other way round, but Exists, HasAll, waits for keys, and Delete mean both.
// Barriers and exchanges have names of their own besides; nothing is left of one that was released.
//
// There is one registry for all waits, by session and number, so that a cancel, a fence or a lost
// connection ends them alike and costs only its own. In a durable store each change of a value or
// item is noted; waits and arrivals are not, as clients repeat them.
//
// Each change of a value has a revision. A watch is a wait for changes from a revision on, answered
// with those that the log of changes holds; who watches asks again behind what he has seen. So
// nothing waits in the server for one that is slow: he finds his place in the log, or gets
// COMPACTED. Items of queues are not watched. Owner: ServerCore. Thread: caller-synchronised. Pure.
class Keyspace {
 public:
  // `journal` outlives this, or is null; its rows are named by `job`. `all`: what the bytes, and
  // the changes, of all jobs are part of, likewise.
  explicit Keyspace(KeyspaceLimits limits = {}, std::string job = {}, Journal* journal = nullptr,
                    Pool* all = nullptr, Pool* all_changes = nullptr)
      : limits_(limits),
        job_(std::move(job)),
        journal_(journal ? journal : &own_journal_),
        changes_(limits.changes, limits.change_bytes, all_changes),
        bytes_(limits.bytes, all) {}
  Keyspace(const Keyspace&) = delete;
  Keyspace& operator=(const Keyspace&) = delete;

  // ---- Values. Mutations append the waits that they end to `ended`. kTooLarge,
  // kResourceExhausted.

  Status Set(std::uint64_t scope, const std::string& key, std::string value,
             std::vector<EndedWait>& ended);
  // All or none; of a key that is named twice the last value. kInvalidArgument: not one value for
  // each key.
  Status MultiSet(std::uint64_t scope, const std::vector<std::string>& keys,
                  std::vector<std::string> values, std::vector<EndedWait>& ended);
  // The value afterwards, stored as decimal text. kWrongType: the present one is no decimal number;
  // kInvalidArgument: the sum does not fit 64 bits.
  Result<std::int64_t> Add(std::uint64_t scope, const std::string& key, std::int64_t amount,
                           std::vector<EndedWait>& ended);
  // The size of the value afterwards; a missing one counts as empty.
  Result<std::size_t> Append(std::uint64_t scope, const std::string& key, const std::string& value,
                             std::vector<EndedWait>& ended);
  struct Swapped {
    std::string value;  // Afterwards; `expected` when the key is missing and expected is not empty.
    bool swapped = false;
  };
  Result<Swapped> CompareSet(std::uint64_t scope, const std::string& key,
                             const std::string& expected, std::string desired,
                             std::vector<EndedWait>& ended);
  // Removes the value and the items. Whether there was either.
  bool Delete(std::uint64_t scope, const std::string& key);

  // Null when missing; valid until the next mutation.
  const std::string* Find(std::uint64_t scope, const std::string& key) const;
  // In the order of the keys. kNotFound: one has none, or waits may be the answer; kTooLarge: more
  // than a reply holds.
  Result<std::vector<std::string>> MultiGet(std::uint64_t scope,
                                            const std::vector<std::string>& keys) const;
  // A value or an item.
  bool Exists(std::uint64_t scope, const std::string& key) const;
  bool HasAll(std::uint64_t scope, const std::vector<std::string>& keys) const;
  std::size_t NumKeys(std::uint64_t scope) const;  // That have a value.
  // Keys that have a value, begin with `prefix`, and come behind `after` (empty: from the start).
  struct Page {
    std::vector<std::string> keys;  // Sorted; at most kKeysPerPage and about kPageBytesMax.
    bool more = false;
  };
  Page ListKeys(std::uint64_t scope, const std::string& prefix, const std::string& after) const;
  // Likewise with their values, about kPageBytesMax together, one at least.
  struct ValuePage {
    std::vector<KeyEvent> keys;
    bool more = false;
  };
  ValuePage ListValues(std::uint64_t scope, const std::string& prefix,
                       const std::string& after) const;

  // ---- Queues.

  // The number of items afterwards. An item goes straight to the one who has waited longest.
  Result<std::size_t> Push(std::uint64_t scope, const std::string& key, std::string item,
                           std::vector<EndedWait>& ended);
  // The oldest item; nullopt: none.
  std::optional<std::string> Pop(std::uint64_t scope, const std::string& key);
  std::size_t QueueLength(std::uint64_t scope, const std::string& key) const;

  // ---- Waits. An existing wait of that id is replaced. kResourceExhausted above
  // kInFlightPerSessionMax waits of the session, kWaitKeysPerSessionMax keys of them, or the bytes
  // of the job.

  enum class WaitFor : std::uint8_t {
    kKeys,    // Until each key has existed once.
    kTurn,    // Likewise of one key; of several, an item ends the one that has waited longest.
    kValue,   // Likewise with a value: that of the only key is the answer.
    kValues,  // Until all keys have values, which are the answer.
  };
  // REQUIRES: a key is missing.
  Status AddWait(WaitId id, std::uint64_t scope, std::vector<std::string> keys, WaitFor what);
  // Whoever's turn it was does not take the item: if there is one, the next kTurn ends.
  void PassOn(std::uint64_t scope, const std::string& key, std::vector<EndedWait>& ended);
  // Until an item is there, in the order of the waits. REQUIRES: the queue has none.
  Status AddPop(WaitId id, std::uint64_t scope, const std::string& key);
  // Until `size` have arrived: then all of them end, this one among them. kInvalidArgument: the
  // size is not that of those who are here, whose session is then told in `rival`.
  Status ArriveAtBarrier(WaitId id, std::uint64_t scope, const BarrierOp& op,
                         std::vector<EndedWait>& ended, SessionId& rival);
  // Likewise; they end with the values of all ranks. kInvalidArgument also when another is here
  // for the rank; kTooLarge: the values do not fit a reply.
  Status ArriveAtExchange(WaitId id, std::uint64_t scope, const ExchangeOp& op,
                          std::vector<EndedWait>& ended, SessionId& rival);
  // The exchange at `key`, if it is not over, is one of all members of a generation.
  void MarkAsOfMembers(std::uint64_t scope, const std::string& key);
  // There is such a one.
  bool AwaitsMembers(std::uint64_t scope) const;

  // ---- Watches: keyspace_watches.cc.

  // Changes are kept from now on; there was a watch, or there will be.
  void BeginWatches() { changes_.Begin(journal_->revision()); }
  // REQUIRES: BeginWatches before. What has happened to keys that begin with `prefix`, from a
  // revision on.
  ChangeLog::Changes ChangesSince(std::uint64_t from, std::uint64_t scope,
                                  const std::string& prefix) const {
    return changes_.Since(from, scope, prefix, journal_->revision());
  }
  // Until something happens to them from now on.
  Status AddWatch(WaitId id, std::uint64_t scope, const std::string& prefix);
  // At the end of a step: answers the watches whose keys it has changed.
  void AnswerWatches(std::vector<EndedWait>& ended);
  std::uint64_t revision() const { return journal_->revision(); }
  static Status Compacted(const std::string& prefix, std::uint64_t from, std::uint64_t oldest);

  // Ends a wait without an answer. nullopt: there is none of that id; else whom it waited for,
  // empty for keys and items.
  std::optional<std::string> CancelWait(WaitId id);
  // Forgets the waits of a session without an answer: its connection is gone.
  void DropWaits(SessionId session);
  // Ends the waits of a session in scopes other than 0.
  void EndScopedWaits(SessionId session, const Status& why, std::vector<EndedWait>& ended);
  // Ends the waits in a scope, those in exchanges of survivors only if `of_survivors`; its keys
  // stay.
  void EndWaits(std::uint64_t scope, const Status& why, bool of_survivors,
                std::vector<EndedWait>& ended);
  // Ends, with the values, the exchanges of survivors to which all have come that are awaited.
  using AllHaveCome = std::function<bool(std::uint64_t scope, const Gathering& gathering)>;
  void FinishSurvived(const AllHaveCome& all_have_come, std::vector<EndedWait>& ended);
  // Removes the values and items of a scope. REQUIRES: EndWaits before, or the waits go on.
  void DropKeys(std::uint64_t scope);
  // Removes all; ends the waits of all scopes but 0, where waiting goes on.
  void DropAllKeys(const Status& why, std::vector<EndedWait>& ended);

  // ---- What was kept.

  // A row of a value or an item, before anything else; the items of a queue come in their order.
  // kInternal: it does not fit what is there.
  Status Restore(const RowName& name, std::string_view value);
  // The rows that a durable store has of all this, by name.
  void AppendRows(std::map<std::string, std::string>& rows) const;

  std::size_t keys() const { return keys_; }
  std::size_t bytes() const { return bytes_.taken(); }
  std::size_t waits() const { return waits_; }
  std::size_t change_bytes() const { return changes_.bytes(); }

 private:
  enum class Kind : std::uint8_t {
    kKeys,
    kTurn,
    kValue,
    kValues,
    kPop,
    kBarrier,
    kExchange,
    kWatch
  };
  struct Wait {
    Kind kind = Kind::kKeys;
    std::uint64_t scope = 0;
    std::vector<std::string> keys;  // Of kValues all, else the only one, or none of kKeys and
                                    // kTurn; of kWatch the prefix.
    AwaitedKeys::Wait awaited;      // Of kKeys, kTurn, kValue and kValues.
    std::uint64_t ticket = 0;       // Of kPop.
    std::uint64_t from = 0;         // Of kWatch.
    std::size_t names = 0;          // Keys that it counts for.
    std::size_t bytes = 0;          // Likewise, with all that it takes.
  };
  struct SessionWaits {
    std::map<std::uint64_t, Wait> by_seq;
    std::size_t names = 0;
  };
  // Items are numbered without gaps; nobody waits while there are any.
  struct Queue {
    std::deque<std::string> items;
    std::uint64_t first = 0;                  // The number of the oldest item.
    std::map<std::uint64_t, WaitId> waiting;  // By ticket.
  };
  struct Scope {
    std::map<std::string, std::string> values;
    std::unordered_map<std::string, Queue> queues;
    AwaitedKeys awaited;
    std::map<std::string, Gathering> barriers;
    std::map<std::string, Gathering> exchanges;
    std::map<std::string, std::set<WaitId>, std::less<>> watches;  // By prefix.
  };

  // kResourceExhausted: `more` bytes would go beyond what the job, or all of them, may hold.
  Status CheckBytes(std::size_t more) const;
  Status CheckRoom(std::size_t new_keys, std::size_t bytes_freed, std::size_t bytes_needed) const;
  const Scope* FindScope(std::uint64_t scope) const;
  const Queue* FindQueue(std::uint64_t scope, const std::string& key) const;
  bool RestoreItem(Queue& queue, const RowName& name, std::string_view item);
  // Where the value of a key is, or would be: one search serves what is asked and what is then
  // changed. Valid until the next mutation.
  struct Place {
    Scope* scope = nullptr;                             // Null: nothing is in that scope.
    std::map<std::string, std::string>::iterator at{};  // The first key that is not before it.
    const std::string* value = nullptr;                 // Null: the key has none.
  };
  Place Locate(std::uint64_t scope, const std::string& key);
  Status SetAt(const Place& place, std::uint64_t scope, const std::string& key, std::string value,
               std::vector<EndedWait>& ended);
  void Store(const Place& place, std::uint64_t scope, const std::string& key, std::string value);
  void RemoveItem(std::uint64_t scope, const std::string& key, Queue& queue);
  void RemoveItems(std::uint64_t scope, const std::string& key, Queue& queue);
  static std::size_t CostOfWait(std::size_t names, std::size_t bytes) {
    return kWaitOverhead + names * kWaitKeyOverhead + bytes;
  }
  // Null: there is none of that id.
  Wait* FindWait(WaitId id);
  // REQUIRES: there is one.
  Wait& WaitOf(WaitId id) { return waits_of_.at(id.session).by_seq.at(id.seq); }
  const Wait& WaitOf(WaitId id) const { return waits_of_.at(id.session).by_seq.at(id.seq); }
  // Tells those who wait for `key` that it has a value, or an item.
  void Wake(std::uint64_t scope, const std::string& key, bool item, std::vector<EndedWait>& ended);

  // `names`: keys that it is for. `bytes`: of these, and of what it brings.
  Status CheckWait(WaitId id, std::size_t names, std::size_t bytes) const;
  Wait& Register(WaitId id, Kind kind, std::uint64_t scope, std::size_t names, std::size_t bytes);
  // The wait taken out of all there is.
  std::optional<Wait> Detach(WaitId id);
  void End(WaitId id, const Status& why, std::vector<EndedWait>& ended);
  // Of those that it is for, in their order.
  std::vector<std::string> MissingOf(const Wait& wait) const;
  // Nothing is missing any more; a multi_get may find that something is missing again.
  void Finish(WaitId id, Wait& wait, std::vector<EndedWait>& ended);
  void HandOut(Gathering& gathering, std::vector<EndedWait>& ended);
  Status CheckExchange(std::uint64_t scope, const ExchangeOp& op, SessionId& rival) const;
  static std::map<std::string, Gathering>& Gatherings(Scope& scope, Kind kind);
  static bool IsMutation(Kind kind);
  void EraseScopeIfEmpty(std::uint64_t scope);
  // What every change of a value ends with: of one that was set, and of any.
  void NoteValue(std::uint64_t scope, const std::string& key, const std::string& value);
  void NoteChange(std::uint64_t scope, const std::string& key, const std::string* value);
  void NoteWatches(const Scope& scope, std::string_view key);
  void NoteDrop(std::uint64_t scope);
  bool Noting() const { return journal_->on(); }

  const KeyspaceLimits limits_;
  const std::string job_;
  Journal own_journal_{false};
  Journal* const journal_;
  ChangeLog changes_;
  std::set<WaitId> changed_;  // Watches to be answered at the end of the step.
  std::map<std::uint64_t, Scope> scopes_;
  std::unordered_map<SessionId, SessionWaits> waits_of_;
  std::uint64_t last_ticket_ = 0;
  std::size_t keys_ = 0;
  Quota bytes_;
  std::size_t waits_ = 0;
};

}  // namespace resilient::store
