#include "store/core/key_ops.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "store/core/sizes.h"

namespace resilient::store {
namespace {

Status CheckKeys(const std::vector<std::string>& keys) {
  if (keys.size() > kKeysPerRequestMax) {
    return Status(StatusCode::kTooLarge, "a request names " + std::to_string(keys.size()) +
                                             " keys; at most " +
                                             std::to_string(kKeysPerRequestMax) + " are taken");
  }
  for (const std::string& key : keys) RESILIENT_RETURN_IF_ERROR(CheckKeySize(key));
  return {};
}

// One overload per operation.
struct Executor {
  Keyspace& keys;
  const WaitId id;
  const std::uint64_t scope;
  const bool fenced;  // The request is of a generation.
  KeyOutcome& outcome;

  Status operator()(SetOp& op) const {
    return keys.Set(scope, op.key, std::move(op.value), outcome.ended);
  }
  Status operator()(MultiSetOp& op) const {
    RESILIENT_RETURN_IF_ERROR(CheckKeys(op.keys));
    return keys.MultiSet(scope, op.keys, std::move(op.values), outcome.ended);
  }
  Status operator()(const GetOp& op) const {
    RESILIENT_RETURN_IF_ERROR(CheckKeySize(op.key));
    if (const std::string* value = keys.Find(scope, op.key)) {
      outcome.reply.value = *value;
      return {};
    }
    if (!op.wait) return Status(StatusCode::kNotFound, "there is no key '" + op.key + "'");
    outcome.waits = true;
    return keys.AddWait(id, scope, {op.key}, Keyspace::WaitFor::kValue);
  }
  Status operator()(const MultiGetOp& op) const {
    RESILIENT_RETURN_IF_ERROR(CheckKeys(op.keys));
    Result<std::vector<std::string>> values = keys.MultiGet(scope, op.keys);
    if (values) {
      outcome.reply.values = std::move(*values);
      return {};
    }
    if (!op.wait || values.status().code() != StatusCode::kNotFound) return values.status();
    outcome.waits = true;
    return keys.AddWait(id, scope, op.keys, Keyspace::WaitFor::kValues);
  }
  Status operator()(const AddOp& op) const {
    return Number(keys.Add(scope, op.key, op.amount, outcome.ended));
  }
  Status operator()(const AppendOp& op) const {
    return Number(keys.Append(scope, op.key, op.value, outcome.ended));
  }
  Status operator()(CompareSetOp& op) const {
    Result<Keyspace::Swapped> swapped =
        keys.CompareSet(scope, op.key, op.expected, std::move(op.desired), outcome.ended);
    if (!swapped) return swapped.status();
    outcome.reply.value = std::move(swapped->value);
    outcome.reply.flag = swapped->swapped;
    return {};
  }
  Status operator()(const CheckOp& op) const {
    RESILIENT_RETURN_IF_ERROR(CheckKeys(op.keys));
    outcome.reply.flag = keys.HasAll(scope, op.keys);
    return {};
  }
  Status operator()(WaitOp& op) const {
    RESILIENT_RETURN_IF_ERROR(CheckKeys(op.keys));
    if (op.turn == WaitOp::Turn::kPassOn) {
      keys.PassOn(scope, op.keys.front(), outcome.ended);
      return {};
    }
    if (keys.HasAll(scope, op.keys)) return {};
    outcome.waits = true;
    return keys.AddWait(
        id, scope, std::move(op.keys),
        op.turn == WaitOp::Turn::kTake ? Keyspace::WaitFor::kTurn : Keyspace::WaitFor::kKeys);
  }
  Status operator()(const DeleteOp& op) const {
    outcome.reply.flag = keys.Delete(scope, op.key);
    return {};
  }
  Status operator()(const NumKeysOp&) const {
    return Number(Result<std::size_t>(keys.NumKeys(scope)));
  }
  Status operator()(const ListKeysOp& op) const {
    if (op.values) {
      keys.BeginWatches();
      Keyspace::ValuePage page = keys.ListValues(scope, op.prefix, op.after);
      outcome.reply.events = std::move(page.keys);
      outcome.reply.flag = page.more;
      return {};
    }
    Keyspace::Page page = keys.ListKeys(scope, op.prefix, op.after);
    outcome.reply.values = std::move(page.keys);
    outcome.reply.flag = page.more;
    return {};
  }
  Status operator()(const WatchOp& op) const {
    RESILIENT_RETURN_IF_ERROR(CheckKeySize(op.prefix));
    keys.BeginWatches();
    if (op.from_revision > keys.revision() + 1) {
      return Status(StatusCode::kInvalidArgument,
                    "a watch from revision " + std::to_string(op.from_revision) +
                        " of a store that is at " + std::to_string(keys.revision()) +
                        ": it was seen at another store");
    }
    ChangeLog::Changes changes = keys.ChangesSince(op.from_revision, scope, op.prefix);
    if (changes.compacted > 0) {
      outcome.reply.number = static_cast<std::int64_t>(changes.compacted);
      return Keyspace::Compacted(op.prefix, op.from_revision, changes.compacted);
    }
    if (changes.events.empty() && op.wait) {
      outcome.waits = true;
      return keys.AddWatch(id, scope, op.prefix);
    }
    outcome.reply.events = std::move(changes.events);
    outcome.reply.revision = changes.seen;
    return {};
  }
  Status operator()(QueuePushOp& op) const {
    return Number(keys.Push(scope, op.key, std::move(op.value), outcome.ended));
  }
  Status operator()(const QueuePopOp& op) const {
    RESILIENT_RETURN_IF_ERROR(CheckKeySize(op.key));
    if (std::optional<std::string> item = keys.Pop(scope, op.key)) {
      outcome.reply.value = std::move(*item);
      return {};
    }
    if (!op.wait) return Status(StatusCode::kQueueEmpty, "queue '" + op.key + "' has no items");
    outcome.waits = true;
    return keys.AddPop(id, scope, op.key);
  }
  Status operator()(const QueueLengthOp& op) const {
    return Number(Result<std::size_t>(keys.QueueLength(scope, op.key)));
  }
  Status operator()(const BarrierOp& op) const {
    outcome.waits = true;
    return keys.ArriveAtBarrier(id, scope, op, outcome.ended, outcome.rival);
  }
  Status operator()(const ExchangeOp& op) const {
    RESILIENT_RETURN_IF_ERROR(CheckValueSize(op.value.size()));
    if (op.survivors_of != 0 && scope == 0) {
      return Status(StatusCode::kInvalidArgument,
                    "exchange " + op.key + ": an exchange of survivors is one of a round");
    }
    outcome.waits = true;
    Status arrived = keys.ArriveAtExchange(id, scope, op, outcome.ended, outcome.rival);
    if (arrived.ok() && fenced) keys.MarkAsOfMembers(scope, op.key);
    return arrived;
  }
  template <typename Other>
  Status operator()(const Other&) const {
    return Status(StatusCode::kInternal, "no operation on keys");
  }

  Status Number(const Result<std::int64_t>& number) const {
    if (number) outcome.reply.number = *number;
    return number.status();
  }
  Status Number(const Result<std::size_t>& number) const {
    if (number) outcome.reply.number = static_cast<std::int64_t>(*number);
    return number.status();
  }
};

}  // namespace

bool IsKeyOp(const Op& op) {
  return IsKeyMutation(op) || std::holds_alternative<GetOp>(op) ||
         std::holds_alternative<CheckOp>(op) || std::holds_alternative<WaitOp>(op) ||
         std::holds_alternative<NumKeysOp>(op) || std::holds_alternative<MultiGetOp>(op) ||
         std::holds_alternative<ListKeysOp>(op) || std::holds_alternative<QueueLengthOp>(op) ||
         std::holds_alternative<WatchOp>(op);
}

bool IsKeyMutation(const Op& op) {
  return std::holds_alternative<SetOp>(op) || std::holds_alternative<AddOp>(op) ||
         std::holds_alternative<CompareSetOp>(op) || std::holds_alternative<DeleteOp>(op) ||
         std::holds_alternative<AppendOp>(op) || std::holds_alternative<MultiSetOp>(op) ||
         std::holds_alternative<QueuePushOp>(op) || std::holds_alternative<QueuePopOp>(op) ||
         std::holds_alternative<BarrierOp>(op) || std::holds_alternative<ExchangeOp>(op);
}

Status ExecuteKeyOp(Keyspace& keys, SessionId session, Request& request, KeyOutcome& outcome) {
  Status done = std::visit(
      Executor{keys, {session, request.seq}, request.scope, request.generation != 0, outcome},
      request.op);
  keys.AnswerWatches(outcome.ended);
  if (outcome.reply.revision == 0) outcome.reply.revision = keys.revision();
  return done;
}

}  // namespace resilient::store
