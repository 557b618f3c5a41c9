#include "store/tcpstore/client.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "runtime/base/log.h"

namespace resilient::store::tcpstore {
namespace {

// Where those meet that wait at a barrier; rounds of a job, the scopes of others, count from 1.
constexpr std::uint64_t kBarrierScope = UINT64_MAX;

std::vector<std::string> Part(const std::vector<std::string>& all, std::size_t begin) {
  const std::size_t size = std::min(all.size() - begin, kKeysPerRequestMax);
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(size)};
}

Status TooLong(QueryType type) {
  return Status(StatusCode::kTooLarge,
                StrCat("its ", NameOf(type), " has an answer of more than ", kAnswerBytesMax,
                       " bytes; it has to ask for less at a time"));
}

}  // namespace

// ---- Requests ----

std::optional<Reply> Client::Ask(Op op, Step step, std::uint64_t scope) {
  const std::size_t begin = step.effects.send.size();
  step.core.OnRequest(connection_, {.seq = ++last_seq_, .scope = scope, .op = std::move(op)},
                      step.now, step.effects);
  return TakeReply(last_seq_, begin, step.effects);
}

std::optional<Reply> Client::TakeReply(std::uint64_t seq, std::size_t begin,
                                       Effects& effects) const {
  for (auto out = effects.send.begin() + static_cast<std::ptrdiff_t>(begin);
       out != effects.send.end(); ++out) {
    auto* reply = std::get_if<Reply>(&out->message);
    if (out->connection != connection_ || reply == nullptr || reply->seq != seq) continue;
    std::optional<Reply> taken(std::move(*reply));
    effects.send.erase(out);
    return taken;
  }
  return std::nullopt;
}

Reply Client::Tell(Op op, Step step, std::uint64_t scope) {
  std::optional<Reply> reply = Ask(std::move(op), step, scope);
  if (reply) return std::move(*reply);
  Reply none;
  none.status = Status(StatusCode::kInternal, "the store has closed its session");
  return none;
}

// ---- Queries ----

Status Client::Answer(Step step) {
  Query query = parser_.Take();
  UseTurn(query, step);
  std::string answer;
  Status done = Execute(query, step, answer);
  if (!answer.empty()) {
    Reply bytes;
    bytes.value = std::move(answer);
    step.effects.send.push_back({connection_, std::move(bytes)});
  }
  if (done.ok() || done.message().starts_with("its ")) return done;
  return Status(done.code(), StrCat("its ", NameOf(query.type), ": ", done.message()));
}

Status Client::Execute(Query& query, Step step, std::string& answer) {
  switch (query.type) {
    case QueryType::kValidate:
      return Greet(step);
    case QueryType::kPing:
      AppendNonce(query.number, answer);
      return {};
    case QueryType::kSet:
      return Set(query, step);
    case QueryType::kCompareSet:
      return CompareSet(query, step, answer);
    case QueryType::kGet:
    case QueryType::kMultiGet:
      return Get(query, step, answer);
    case QueryType::kAdd:
      return Add(query, step, answer);
    case QueryType::kCheck:
      return Check(query, step, answer);
    case QueryType::kWait:
      return BeginWait(std::move(query.keys), 0, step, answer);
    case QueryType::kNumKeys:
      return AnswerNumber(Tell(NumKeysOp{}, step), answer);
    case QueryType::kDeleteKey: {
      Reply reply = Tell(DeleteOp{query.keys[0]}, step);
      reply.number = reply.flag ? 1 : 0;
      return AnswerNumber(reply, answer);
    }
    case QueryType::kAppend:
      return Tell(AppendOp{query.keys[0], std::move(query.values[0])}, step).status;
    case QueryType::kMultiSet:
      return MultiSet(query, step);
    case QueryType::kCancelWait:
      CancelWait(step);
      AppendByte(kWaitCancelled, answer);
      return {};
    case QueryType::kQueuePush:
      return Tell(QueuePushOp{query.keys[0], std::move(query.values[0])}, step).status;
    case QueryType::kQueuePop:
      return Pop(query, step, answer);
    case QueryType::kQueueLength:
      return AnswerNumber(Tell(QueueLengthOp{query.keys[0]}, step), answer);
    case QueryType::kListKeys:
      return ListKeys(step, answer);
    case QueryType::kBarrier:
      return ArriveAtBarrier(query, step, answer);
  }
  return Status(StatusCode::kProtocol, "there is no such query");
}

Status Client::Greet(Step step) {
  Hello hello;
  hello.job = kJob;
  hello.role = Role::kAdmin;
  return Tell(std::move(hello), step).status;
}

Status Client::Set(Query& query, Step step) {
  return Tell(SetOp{std::move(query.keys[0]), std::move(query.values[0])}, step).status;
}

Status Client::CompareSet(Query& query, Step step, std::string& answer) {
  CompareSetOp op{std::move(query.keys[0]), std::move(query.values[0]), std::move(query.values[1])};
  const Reply reply = Tell(std::move(op), step);
  if (reply.status.ok()) AppendText(reply.value, answer);
  return reply.status;
}

// The client has waited for its keys, so that they are all there as a rule.
Status Client::Get(const Query& query, Step step, std::string& answer) {
  if (query.keys.size() == 1) return GetEach(query.keys, query.type, step, answer);
  for (std::size_t begin = 0; begin < query.keys.size(); begin += kKeysPerRequestMax) {
    std::vector<std::string> keys = Part(query.keys, begin);
    const Reply all = Tell(MultiGetOp{keys}, step);
    if (!all.status.ok()) {
      RESILIENT_RETURN_IF_ERROR(GetEach(keys, query.type, step, answer));
      continue;
    }
    for (const std::string& value : all.values) {
      RESILIENT_RETURN_IF_ERROR(AppendValue(value, query.type, answer));
    }
  }
  return {};
}

// A key that is missing has an empty value; all of them may be more than one reply holds.
Status Client::GetEach(const std::vector<std::string>& keys, QueryType type, Step step,
                       std::string& answer) {
  for (const std::string& key : keys) {
    const Reply reply = Tell(GetOp{key}, step);
    if (!reply.status.ok() && reply.status.code() != StatusCode::kNotFound) return reply.status;
    RESILIENT_RETURN_IF_ERROR(AppendValue(reply.value, type, answer));
  }
  return {};
}

Status Client::AppendValue(std::string_view value, QueryType type, std::string& answer) {
  if (answer.size() + value.size() > kAnswerBytesMax) {
    answer.clear();
    return TooLong(type);
  }
  AppendText(value, answer);
  return {};
}

Status Client::Add(const Query& query, Step step, std::string& answer) {
  return AnswerNumber(Tell(AddOp{query.keys[0], query.number}, step), answer);
}

Status Client::AnswerNumber(const Reply& reply, std::string& answer) {
  if (reply.status.ok()) AppendNumber(reply.number, answer);
  return reply.status;
}

Status Client::Check(const Query& query, Step step, std::string& answer) {
  bool ready = true;
  for (std::size_t begin = 0; ready && begin < query.keys.size(); begin += kKeysPerRequestMax) {
    const Reply reply = Tell(CheckOp{Part(query.keys, begin)}, step);
    RESILIENT_RETURN_IF_ERROR(reply.status);
    ready = reply.flag;
  }
  AppendByte(ready ? kReady : kNotReady, answer);
  return {};
}

Status Client::MultiSet(const Query& query, Step step) {
  for (std::size_t begin = 0; begin < query.keys.size(); begin += kKeysPerRequestMax) {
    MultiSetOp op{Part(query.keys, begin), Part(query.values, begin)};
    RESILIENT_RETURN_IF_ERROR(Tell(std::move(op), step).status);
  }
  return {};
}

// How many items there were, and the oldest of them.
Status Client::Pop(const Query& query, Step step, std::string& answer) {
  const Reply length = Tell(QueueLengthOp{query.keys[0]}, step);
  RESILIENT_RETURN_IF_ERROR(AnswerNumber(length, answer));
  if (length.number == 0) return {};
  const Reply item = Tell(QueuePopOp{query.keys[0]}, step);
  if (item.status.ok()) AppendText(item.value, answer);
  return item.status;
}

Status Client::ListKeys(Step step, std::string& answer) {
  std::string keys;
  std::int64_t count = 0;
  std::string after;
  bool more = true;
  while (more) {
    const Reply page = Tell(ListKeysOp{{}, after}, step);
    RESILIENT_RETURN_IF_ERROR(page.status);
    for (const std::string& key : page.values) AppendText(key, keys);
    if (keys.size() > kAnswerBytesMax) return TooLong(QueryType::kListKeys);
    count += static_cast<std::int64_t>(page.values.size());
    more = page.flag && !page.values.empty();
    if (more) after = page.values.back();
  }
  AppendNumber(count, answer);
  answer += keys;
  return {};
}

// ---- Waits ----

// The count is a value that all can read, as in torch's server. Who is one too few waits in a scope
// of its own, where nothing but the last one to come wakes it.
Status Client::ArriveAtBarrier(const Query& query, Step step, std::string& answer) {
  const std::string& key = query.keys[0];
  const Reply count = Tell(AddOp{key, 1}, step);
  RESILIENT_RETURN_IF_ERROR(count.status);
  if (count.number < query.number) return BeginWait({key}, kBarrierScope, step, answer);
  RESILIENT_RETURN_IF_ERROR(Tell(SetOp{key, {}}, step, kBarrierScope).status);
  RESILIENT_RETURN_IF_ERROR(Tell(DeleteOp{key}, step, kBarrierScope).status);
  AppendByte(kStopWaiting, answer);
  return {};
}

Status Client::BeginWait(std::vector<std::string> keys, std::uint64_t scope, Step step,
                         std::string& answer) {
  CancelWait(step);
  wait_ = Wait{.keys = std::move(keys), .scope = scope};
  return GoOnWaiting(step, answer);
}

// The core takes fewer keys at a time than a query may name.
Status Client::GoOnWaiting(Step step, std::string& answer) {
  while (wait_->had < wait_->keys.size()) {
    WaitOp op{Part(wait_->keys, wait_->had)};
    wait_->asked = op.keys.size();
    if (wait_->keys.size() == 1) op.turn = WaitOp::Turn::kTake;
    const std::optional<Reply> reply = Ask(std::move(op), step, wait_->scope);
    wait_->seq = last_seq_;
    if (!reply) return {};
    if (!reply->status.ok()) {
      wait_.reset();
      return reply->status;
    }
    wait_->had += wait_->asked;
  }
  wait_.reset();
  AppendByte(kStopWaiting, answer);
  return {};
}

Result<std::string> Client::OnWaitEnded(const Reply& reply, Step step) {
  if (!wait_ || wait_->seq != reply.seq) return std::string();
  // The job had no keys, and nobody else's session, for so long that it was forgotten.
  const bool forgotten = reply.status.code() == StatusCode::kNotFound;
  if (!reply.status.ok() && !forgotten) {
    wait_.reset();
    return Status(reply.status.code(), StrCat("its wait has ended: ", reply.status.message()));
  }
  if (!forgotten) {
    wait_->had += wait_->asked;
    if (wait_->keys.size() == 1 && wait_->scope == 0) turn_ = wait_->keys[0];
  }
  std::string answer;
  RESILIENT_RETURN_IF_ERROR(GoOnWaiting(step, answer));
  return answer;
}

void Client::CancelWait(Step step) {
  if (!wait_) return;
  const std::uint64_t waits = wait_->seq;
  wait_.reset();
  const std::size_t begin = step.effects.send.size();
  (void)Ask(CancelOp{waits}, step);
  (void)TakeReply(waits, begin, step.effects);  // It goes out under the number of the wait.
}

// ---- Turns ----

void Client::UseTurn(const Query& query, Step step) {
  if (!turn_) return;
  const std::string key = *std::exchange(turn_, std::nullopt);
  const bool used = query.type == QueryType::kQueuePop && query.keys[0] == key;
  if (!used) (void)Tell(PassOn(key).op, step);
}

std::optional<Request> Client::LastRequest() {
  if (!turn_) return std::nullopt;
  Request request = PassOn(*std::exchange(turn_, std::nullopt));
  request.seq = ++last_seq_;
  return request;
}

Request Client::PassOn(const std::string& key) {
  Request request;
  request.op = WaitOp{{key}, WaitOp::Turn::kPassOn};
  return request;
}

}  // namespace resilient::store::tcpstore
