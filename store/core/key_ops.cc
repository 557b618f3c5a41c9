#include "store/core/key_ops.h"

#include <cstdint>
#include <string>
#include <utility>

namespace resilient::store {
namespace {

Status CheckKeys(const std::vector<std::string>& keys) {
  if (keys.size() > kKeysPerRequestMax) {
    return Status(StatusCode::kTooLarge, "a request names " + std::to_string(keys.size()) +
                                             " keys; at most " +
                                             std::to_string(kKeysPerRequestMax) + " are taken");
  }
  for (const std::string& key : keys) {
    if (key.size() > kKeyBytesMax) {
      return Status(StatusCode::kTooLarge, "a key of " + std::to_string(key.size()) +
                                               " bytes is larger than the store takes (" +
                                               std::to_string(kKeyBytesMax) + " bytes)");
    }
  }
  return {};
}

}  // namespace

bool IsKeyOp(const Op& op) {
  return std::holds_alternative<SetOp>(op) || std::holds_alternative<GetOp>(op) ||
         std::holds_alternative<AddOp>(op) || std::holds_alternative<CompareSetOp>(op) ||
         std::holds_alternative<CheckOp>(op) || std::holds_alternative<WaitOp>(op) ||
         std::holds_alternative<DeleteOp>(op) || std::holds_alternative<NumKeysOp>(op);
}

bool IsKeyMutation(const Op& op) {
  return std::holds_alternative<SetOp>(op) || std::holds_alternative<AddOp>(op) ||
         std::holds_alternative<CompareSetOp>(op) || std::holds_alternative<DeleteOp>(op);
}

Status ExecuteKeyOp(Keyspace& keys, SessionId session, const Request& request,
                    KeyOutcome& outcome) {
  Reply& reply = outcome.reply;
  const std::uint64_t scope = request.scope;
  const WaitId id{session, request.seq};
  if (const auto* op = std::get_if<SetOp>(&request.op)) {
    return keys.Set(scope, op->key, op->value, outcome.ended);
  }
  if (const auto* op = std::get_if<GetOp>(&request.op)) {
    RESILIENT_RETURN_IF_ERROR(CheckKeys({op->key}));
    if (const std::string* value = keys.Find(scope, op->key)) {
      reply.value = *value;
      return {};
    }
    if (!op->wait) return Status(StatusCode::kNotFound, "there is no key '" + op->key + "'");
    outcome.waits = true;
    return keys.AddWait(id, scope, {op->key}, true);
  }
  if (const auto* op = std::get_if<AddOp>(&request.op)) {
    const Result<std::int64_t> sum = keys.Add(scope, op->key, op->amount, outcome.ended);
    if (sum) reply.number = *sum;
    return sum.status();
  }
  if (const auto* op = std::get_if<CompareSetOp>(&request.op)) {
    Result<Keyspace::Swapped> swapped =
        keys.CompareSet(scope, op->key, op->expected, op->desired, outcome.ended);
    if (!swapped) return swapped.status();
    reply.value = std::move(swapped->value);
    reply.flag = swapped->swapped;
    return {};
  }
  if (const auto* op = std::get_if<CheckOp>(&request.op)) {
    RESILIENT_RETURN_IF_ERROR(CheckKeys(op->keys));
    reply.flag = keys.HasAll(scope, op->keys);
    return {};
  }
  if (const auto* op = std::get_if<WaitOp>(&request.op)) {
    RESILIENT_RETURN_IF_ERROR(CheckKeys(op->keys));
    if (keys.HasAll(scope, op->keys)) return {};
    outcome.waits = true;
    return keys.AddWait(id, scope, op->keys, false);
  }
  if (const auto* op = std::get_if<DeleteOp>(&request.op)) {
    reply.flag = keys.Delete(scope, op->key);
    return {};
  }
  reply.number = static_cast<std::int64_t>(keys.NumKeys(scope));
  return {};
}

}  // namespace resilient::store
