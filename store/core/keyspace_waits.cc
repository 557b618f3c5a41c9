#include <algorithm>
#include <iterator>
#include <utility>

#include "runtime/base/check.h"
#include "store/core/codec.h"
#include "store/core/keyspace.h"
#include "store/core/sizes.h"

// What waits in a keyspace: for keys, for items, and for each other.
namespace resilient::store {
namespace {

// Those who are here keep waiting: only the newcomer is told.
Status OtherSize(const std::string& name, std::int64_t here, std::int64_t came) {
  return Status(StatusCode::kInvalidArgument,
                name + ": the callers disagree on how many they are: " + std::to_string(here) +
                    " by those who wait, " + std::to_string(came) + " by the one who came last");
}

}  // namespace

bool Keyspace::IsMutation(Kind kind) {
  return kind == Kind::kPop || kind == Kind::kBarrier || kind == Kind::kExchange;
}

std::map<std::string, Gathering>& Keyspace::Gatherings(Scope& scope, Kind kind) {
  RESILIENT_CHECK(kind == Kind::kBarrier || kind == Kind::kExchange);
  return kind == Kind::kBarrier ? scope.barriers : scope.exchanges;
}

// ---- The registry ----

Status Keyspace::CheckWait(WaitId id, std::size_t names, std::size_t bytes) const {
  const auto present = waits_of_.find(id.session);
  if (present != waits_of_.end() && present->second.by_seq.size() >= kInFlightPerSessionMax) {
    return Status(StatusCode::kResourceExhausted,
                  "the session has " + std::to_string(kInFlightPerSessionMax) +
                      " requests waiting, the most that the store keeps for one");
  }
  if (present != waits_of_.end() && present->second.names + names > kWaitKeysPerSessionMax) {
    return Status(StatusCode::kResourceExhausted,
                  "the session waits for " + std::to_string(present->second.names) +
                      " keys, and for " + std::to_string(names) + " more it would be beyond the " +
                      std::to_string(kWaitKeysPerSessionMax) +
                      " that the store keeps for one; wait for fewer at a time");
  }
  return CheckBytes(CostOfWait(names, bytes));
}

Keyspace::Wait& Keyspace::Register(WaitId id, Kind kind, std::uint64_t scope, std::size_t names,
                                   std::size_t bytes) {
  SessionWaits& session = waits_of_[id.session];
  session.names += names;
  Wait& wait = session.by_seq[id.seq];
  wait.kind = kind;
  wait.scope = scope;
  wait.names = names;
  wait.bytes = CostOfWait(names, bytes);
  bytes_ += wait.bytes;
  ++waits_;
  return wait;
}

Keyspace::Wait* Keyspace::FindWait(WaitId id) {
  const auto session = waits_of_.find(id.session);
  if (session == waits_of_.end()) return nullptr;
  const auto wait = session->second.by_seq.find(id.seq);
  return wait == session->second.by_seq.end() ? nullptr : &wait->second;
}

std::optional<Keyspace::Wait> Keyspace::Detach(WaitId id) {
  const auto session = waits_of_.find(id.session);
  if (session == waits_of_.end()) return std::nullopt;
  auto node = session->second.by_seq.extract(id.seq);
  if (node.empty()) return std::nullopt;
  Scope& scope = scopes_.at(node.mapped().scope);
  scope.awaited.End(node.mapped().awaited);
  Wait wait = std::move(node.mapped());
  session->second.names -= wait.names;
  if (session->second.by_seq.empty()) waits_of_.erase(session);
  --waits_;
  bytes_ -= wait.bytes;
  if (wait.kind == Kind::kPop) {
    const auto queue = scope.queues.find(wait.keys.front());
    queue->second.waiting.erase(wait.ticket);
    if (queue->second.waiting.empty()) scope.queues.erase(queue);
  } else if (wait.kind == Kind::kBarrier || wait.kind == Kind::kExchange) {
    auto& gatherings = Gatherings(scope, wait.kind);
    const auto gathering = gatherings.find(wait.keys.front());
    gathering->second.Withdraw(id);
    if (gathering->second.empty()) gatherings.erase(gathering);
  } else if (wait.kind == Kind::kWatch) {
    const auto watches = scope.watches.find(wait.keys.front());
    watches->second.erase(id);
    if (watches->second.empty()) scope.watches.erase(watches);
  }
  EraseScopeIfEmpty(wait.scope);
  return wait;
}

void Keyspace::End(WaitId id, const Status& why, std::vector<EndedWait>& ended) {
  const std::optional<Wait> wait = Detach(id);
  if (wait) ended.push_back({.wait = id, .status = why, .mutation = IsMutation(wait->kind)});
}

std::optional<std::string> Keyspace::CancelWait(WaitId id) {
  const Wait* wait = FindWait(id);
  if (wait == nullptr) return std::nullopt;
  std::string late;
  const Kind kind = wait->kind;
  if (kind == Kind::kBarrier || kind == Kind::kExchange) {
    const std::string& key = wait->keys.front();
    const Gathering& gathering = Gatherings(scopes_.at(wait->scope), kind).at(key);
    late = (kind == Kind::kBarrier ? "barrier " : "exchange ") + key + ": " + gathering.Late();
  }
  Detach(id);
  return late;
}

void Keyspace::DropWaits(SessionId session) {
  while (true) {
    const auto waits = waits_of_.find(session);
    if (waits == waits_of_.end()) return;
    Detach({session, waits->second.by_seq.begin()->first});
  }
}

void Keyspace::EndScopedWaits(SessionId session, const Status& why, std::vector<EndedWait>& ended) {
  const auto waits = waits_of_.find(session);
  if (waits == waits_of_.end()) return;
  std::vector<WaitId> ids;
  for (const auto& [seq, wait] : waits->second.by_seq) {
    if (wait.scope != 0) ids.push_back({session, seq});
  }
  for (const WaitId id : ids) End(id, why, ended);
}

void Keyspace::EndWaits(std::uint64_t scope, const Status& why, bool of_survivors,
                        std::vector<EndedWait>& ended) {
  const Scope* found = FindScope(scope);
  if (!found) return;
  std::set<WaitId> ids;
  found->awaited.AddTo(ids);
  for (const auto& [key, queue] : found->queues) {
    for (const auto& [ticket, id] : queue.waiting) ids.insert(id);
  }
  for (const auto& [prefix, watches] : found->watches) ids.insert(watches.begin(), watches.end());
  for (const auto* gatherings : {&found->barriers, &found->exchanges}) {
    for (const auto& [key, gathering] : *gatherings) {
      if (gathering.survivors_of() != 0 && !of_survivors) continue;
      for (const WaitId id : gathering.Ids()) ids.insert(id);
    }
  }
  for (const WaitId id : ids) End(id, why, ended);
}

// ---- For keys ----

Status Keyspace::AddWait(WaitId id, std::uint64_t scope, std::vector<std::string> keys,
                         WaitFor what) {
  Detach(id);
  const Kind kind = what == WaitFor::kKeys    ? Kind::kKeys
                    : what == WaitFor::kTurn  ? Kind::kTurn
                    : what == WaitFor::kValue ? Kind::kValue
                                              : Kind::kValues;
  const bool for_values = kind == Kind::kValue || kind == Kind::kValues;
  std::size_t bytes = 0;
  std::size_t names = keys.size();
  // Of values each may be missing again before the others have come.
  if (for_values) {
    for (const std::string& key : keys) bytes += 2 * key.size();
  } else {
    std::erase_if(keys, [&](const std::string& key) { return Exists(scope, key); });
    names = keys.size();
    for (const std::string& key : keys) bytes += key.size();
  }
  RESILIENT_RETURN_IF_ERROR(CheckWait(id, names, bytes));
  Wait& wait = Register(id, kind, scope, names, bytes);
  if (for_values) {
    wait.keys = std::move(keys);
    keys = MissingOf(wait);
  }
  scopes_[scope].awaited.Begin(id, wait.awaited, std::move(keys));
  RESILIENT_CHECK(!wait.awaited.all_have_come());
  return {};
}

std::vector<std::string> Keyspace::MissingOf(const Wait& wait) const {
  std::vector<std::string> missing;
  for (const std::string& key : wait.keys) {
    if (Find(wait.scope, key) == nullptr) missing.push_back(key);
  }
  return missing;
}

void Keyspace::PassOn(std::uint64_t scope, const std::string& key, std::vector<EndedWait>& ended) {
  if (QueueLength(scope, key) > 0) Wake(scope, key, /*item=*/true, ended);
}

void Keyspace::Wake(std::uint64_t scope, const std::string& key, bool item,
                    std::vector<EndedWait>& ended) {
  bool taken = false;  // The item, by the one that has waited longest for its turn.
  const auto may_have_item = [&](WaitId id) {
    const Kind kind = WaitOf(id).kind;
    return kind == Kind::kKeys || (kind == Kind::kTurn && !std::exchange(taken, true));
  };
  AwaitedKeys& awaited = scopes_.at(scope).awaited;
  const std::vector<WaitId> woken =
      item ? awaited.Come(key, may_have_item) : awaited.Come(key, nullptr);
  if (ended.empty()) ended.reserve(woken.size());
  for (const WaitId id : woken) {
    Wait& wait = WaitOf(id);
    if (wait.awaited.all_have_come()) Finish(id, wait, ended);
  }
}

void Keyspace::Finish(WaitId id, Wait& wait, std::vector<EndedWait>& ended) {
  EndedWait end{.wait = id};
  if (wait.kind == Kind::kValue) {
    end.value = *Find(wait.scope, wait.keys.front());
  } else if (wait.kind == Kind::kValues) {
    Result<std::vector<std::string>> values = MultiGet(wait.scope, wait.keys);
    if (!values && values.status().code() == StatusCode::kNotFound) {
      // One that was there when the wait began has been deleted: it is waited for as well.
      AwaitedKeys& awaited = scopes_.at(wait.scope).awaited;
      awaited.End(wait.awaited);
      awaited.Begin(id, wait.awaited, MissingOf(wait));
      return;
    }
    end.status = values.status();
    if (values) end.values = std::move(*values);
  }
  Detach(id);
  ended.push_back(std::move(end));
}

// ---- For items ----

Status Keyspace::AddPop(WaitId id, std::uint64_t scope, const std::string& key) {
  Detach(id);
  RESILIENT_RETURN_IF_ERROR(CheckKeySize(key));
  RESILIENT_RETURN_IF_ERROR(CheckWait(id, 1, key.size()));
  Queue& queue = scopes_[scope].queues[key];
  RESILIENT_CHECK(queue.items.empty());
  Wait& wait = Register(id, Kind::kPop, scope, 1, key.size());
  wait.keys = {key};
  wait.ticket = ++last_ticket_;
  queue.waiting.emplace(wait.ticket, id);
  return {};
}

// ---- For each other ----

Status Keyspace::ArriveAtBarrier(WaitId id, std::uint64_t scope, const BarrierOp& op,
                                 std::vector<EndedWait>& ended, SessionId& rival) {
  Detach(id);
  RESILIENT_RETURN_IF_ERROR(CheckKeySize(op.key));
  if (op.size < 1) {
    return Status(StatusCode::kInvalidArgument,
                  "barrier " + op.key + " is of " + std::to_string(op.size) + " callers");
  }
  if (const Scope* found = FindScope(scope)) {
    const auto present = found->barriers.find(op.key);
    if (present != found->barriers.end() && present->second.size() != op.size) {
      rival = present->second.Ids().front().session;
      return OtherSize("barrier " + op.key, present->second.size(), op.size);
    }
  }
  RESILIENT_RETURN_IF_ERROR(CheckWait(id, 1, op.key.size()));
  Gathering& gathering = scopes_[scope].barriers.try_emplace(op.key, op.size).first->second;
  Register(id, Kind::kBarrier, scope, 1, op.key.size()).keys = {op.key};
  gathering.Arrive(id);
  if (!gathering.complete()) return {};
  for (const WaitId arrived : gathering.Ids()) End(arrived, Status(), ended);
  return {};
}

Status Keyspace::ArriveAtExchange(WaitId id, std::uint64_t scope, const ExchangeOp& op,
                                  std::vector<EndedWait>& ended, SessionId& rival) {
  Detach(id);
  RESILIENT_RETURN_IF_ERROR(CheckExchange(scope, op, rival));
  const std::size_t bytes = op.key.size() + op.value.size();
  RESILIENT_RETURN_IF_ERROR(CheckWait(id, 1, bytes));
  Gathering& gathering =
      scopes_[scope].exchanges.try_emplace(op.key, op.size, op.survivors_of).first->second;
  Register(id, Kind::kExchange, scope, 1, bytes).keys = {op.key};
  gathering.Arrive(id, op.rank, op.value);
  if (gathering.complete()) HandOut(gathering, ended);
  return {};
}

void Keyspace::FinishSurvived(const AllHaveCome& all_have_come, std::vector<EndedWait>& ended) {
  std::vector<Gathering*> done;
  for (auto& [scope, found] : scopes_) {
    for (auto& [key, gathering] : found.exchanges) {
      if (gathering.survivors_of() != 0 && all_have_come(scope, gathering)) {
        done.push_back(&gathering);
      }
    }
  }
  for (Gathering* gathering : done) HandOut(*gathering, ended);
}

// The gathering is gone afterwards.
void Keyspace::HandOut(Gathering& gathering, std::vector<EndedWait>& ended) {
  const std::vector<WaitId> ids = gathering.Ids();
  const std::shared_ptr<const SharedValues> values = Share(gathering.TakeValues());
  for (const WaitId arrived : ids) {
    End(arrived, Status(), ended);
    ended.back().shared_values = values;
  }
}

void Keyspace::MarkAsOfMembers(std::uint64_t scope, const std::string& key) {
  const auto found = scopes_.find(scope);
  if (found == scopes_.end()) return;
  const auto exchange = found->second.exchanges.find(key);
  if (exchange != found->second.exchanges.end()) exchange->second.set_of_members();
}

bool Keyspace::AwaitsMembers(std::uint64_t scope) const {
  const Scope* found = FindScope(scope);
  return found && std::any_of(found->exchanges.begin(), found->exchanges.end(),
                              [](const auto& entry) { return entry.second.of_members(); });
}

Status Keyspace::CheckExchange(std::uint64_t scope, const ExchangeOp& op, SessionId& rival) const {
  RESILIENT_RETURN_IF_ERROR(CheckKeySize(op.key));
  const std::string name = "exchange " + op.key;
  if (op.size < 1 || op.size > kWorldSizeMax || op.rank < 0 || op.rank >= op.size) {
    return Status(StatusCode::kInvalidArgument,
                  name + ": there is no rank " + std::to_string(op.rank) + " of " +
                      std::to_string(op.size) + "; a size is from 1 to " +
                      std::to_string(kWorldSizeMax) + ", ranks count from 0");
  }
  std::size_t bytes = op.value.size();
  if (const Scope* found = FindScope(scope); found && found->exchanges.contains(op.key)) {
    const Gathering& present = found->exchanges.at(op.key);
    if (present.size() != op.size) {
      rival = present.Ids().front().session;
      return OtherSize(name, present.size(), op.size);
    }
    if (const WaitId* holder = present.Holder(op.rank)) {
      rival = holder->session;
      return Status(StatusCode::kInvalidArgument,
                    name + ": another caller waits as rank " + std::to_string(op.rank));
    }
    bytes += present.value_bytes();
  }
  if (bytes > kReplyValuesBytesMax) {
    return Status(StatusCode::kTooLarge,
                  name + ": the values of all ranks so far take " + std::to_string(bytes) +
                      " bytes, and one answer holds " + std::to_string(kReplyValuesBytesMax) +
                      "; exchange less at a time");
  }
  return {};
}

}  // namespace resilient::store
