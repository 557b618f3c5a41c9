#include "store/client/request_client.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "store/client/identity.h"

namespace resilient::store {
namespace {

constexpr Duration kCancelPatience = std::chrono::seconds(1);
constexpr std::size_t kKeysShown = 8;
constexpr std::size_t kKeyBytesShown = 64;
// What protobuf and the frame add to the keys and values of a request, at most.
constexpr std::size_t kBytesPerField = 16;
constexpr std::size_t kRequestOverhead = 1u << 10;

std::string ShowKeys(std::span<const std::string> keys) {
  std::string text;
  for (std::size_t i = 0; i < std::min(keys.size(), kKeysShown); ++i) {
    if (i > 0) text += ", ";
    for (char c : keys[i].substr(0, kKeyBytesShown)) {
      bool printable = static_cast<unsigned char>(c) >= 0x20 && c != 0x7f;
      text += printable ? c : '?';
    }
    if (keys[i].size() > kKeyBytesShown) text += "...";
  }
  if (keys.size() > kKeysShown) text += StrCat(" and ", keys.size() - kKeysShown, " more");
  return text;
}

std::size_t BytesOf(std::span<const std::string> keys) {
  std::size_t bytes = 0;
  for (const std::string& key : keys) bytes += key.size() + kBytesPerField;
  return bytes;
}

}  // namespace

RequestClient::RequestClient(const ConnectOptions& options, std::vector<HostPort> addresses,
                             InterruptCheck interrupt, const Clock& clock)
    : clock_(clock),
      interrupt_(std::move(interrupt)),
      job_(options.job),
      made_by_pid_(::getpid()),
      core_(MakeHello(options, Role::kRequest)),
      link_(std::move(addresses), RandomSeed()),
      outage_(StrCat("the store client of job ", options.job), clock.Now()) {}

void RequestClient::Release(RequestClient* client) {
  // In a child the state may be torn: another thread of the parent may have been changing it. The
  // descriptors were closed by the fork; nobody is to be told.
  if (!client->mark_.InChild()) delete client;
}

Status RequestClient::Open(Deadline deadline) {
  const Instant begun = clock_.Now();
  Lock lock(mutex_);
  while (true) {
    Instant now = clock_.Now();
    if (link_.open()) return Status();
    if (link_.refused()) return link_.trouble();
    if (deadline.ExpiredAt(now)) {
      if (link_.trouble().ok()) {
        return Status(StatusCode::kUnreachable,
                      StrCat("no connection to the store at ", link_.peer(), " within ",
                             SecondsOf(now - begun), " s (job ", job_, ")"));
      }
      return Status(link_.trouble().code(),
                    StrCat(link_.trouble().message(), " (tried for ", SecondsOf(now - begun),
                           " s until the timeout, job ", job_, ")"));
    }
    Lead(lock, std::min(deadline.when(), now + Millis(kInterruptPollMs)));
    lock.unlock();
    Status stop = Interrupted(Call{});
    lock.lock();
    if (!stop.ok()) return stop;
  }
}

Status RequestClient::Set(const std::string& key, std::string value, const Call& call) {
  Ask ask{"set", {&key, 1}, true};
  std::size_t payload = value.size();
  return Perform(ask, SetOp{key, std::move(value)}, payload, call).status();
}

Result<std::string> RequestClient::Get(const std::string& key, bool wait, const Call& call) {
  Ask ask{"get", {&key, 1}, false};
  Result<Reply> reply = Perform(ask, GetOp{key, wait}, 0, call);
  if (!reply.ok()) return reply.status();
  return std::move(reply->value);
}

Result<std::int64_t> RequestClient::Add(const std::string& key, std::int64_t amount,
                                        const Call& call) {
  Ask ask{"add", {&key, 1}, true};
  Result<Reply> reply = Perform(ask, AddOp{key, amount}, 0, call);
  if (!reply.ok()) return reply.status();
  return reply->number;
}

Result<std::string> RequestClient::CompareSet(const std::string& key, std::string expected,
                                              std::string desired, const Call& call) {
  Ask ask{"compare_set", {&key, 1}, true};
  std::size_t payload = std::max(expected.size(), desired.size());
  // Each is within the limit of a value; both together must fit in a frame as well.
  if (payload <= kValueBytesMax &&
      expected.size() + desired.size() + BytesOf(ask.keys) + kRequestOverhead > kMaxFrameBody) {
    return Status(StatusCode::kTooLarge,
                  StrCat("compare_set of ", ShowKeys(ask.keys), ": expected and desired value of ",
                         expected.size() + desired.size(), " bytes together exceed a message of ",
                         kMaxFrameBody, " bytes"));
  }
  CompareSetOp op{key, std::move(expected), std::move(desired)};
  Result<Reply> reply = Perform(ask, std::move(op), payload, call);
  if (!reply.ok()) return reply.status();
  return std::move(reply->value);
}

Result<bool> RequestClient::Check(const std::vector<std::string>& keys, const Call& call) {
  Ask ask{"check", keys, false};
  Result<Reply> reply = Perform(ask, CheckOp{keys}, 0, call);
  if (!reply.ok()) return reply.status();
  return reply->flag;
}

Status RequestClient::Wait(const std::vector<std::string>& keys, const Call& call) {
  Ask ask{"wait", keys, false};
  return Perform(ask, WaitOp{keys}, 0, call).status();
}

Result<bool> RequestClient::Delete(const std::string& key, const Call& call) {
  Ask ask{"delete", {&key, 1}, true};
  Result<Reply> reply = Perform(ask, DeleteOp{key}, 0, call);
  if (!reply.ok()) return reply.status();
  return reply->flag;
}

Result<std::int64_t> RequestClient::NumKeys(const Call& call) {
  Ask ask{"num_keys", {}, false};
  Result<Reply> reply = Perform(ask, NumKeysOp{}, 0, call);
  if (!reply.ok()) return reply.status();
  return reply->number;
}

Result<std::string> RequestClient::StatusJson(const Call& call) {
  Ask ask{"status", {}, false};
  Result<Reply> reply = Perform(ask, StatusOp{}, 0, call);
  if (!reply.ok()) return reply.status();
  return std::move(reply->status_json);
}

std::string RequestClient::server_id() const {
  if (mark_.InChild()) return {};
  Lock lock(mutex_);
  return server_id_;
}

void RequestClient::Close() {
  if (mark_.InChild()) return;
  Lock lock(mutex_);
  if (closed_) return;
  closed_ = true;
  dead_ = Status(StatusCode::kFailedPrecondition, StrCat("this store client is closed", Where()));
  FailAll(dead_);
  if (led_) {
    wake_.Wake();  // The leader polls the descriptor: it closes.
  } else {
    link_.Close();
  }
}

Result<Reply> RequestClient::Perform(const Ask& ask, Op op, std::size_t payload, const Call& call) {
  if (mark_.InChild()) return ForkedError(ask.name);
  RESILIENT_RETURN_IF_ERROR(CheckSizes(ask, payload));
  Waiter waiter(ask);
  Lock lock(mutex_);
  if (!dead_.ok()) return dead_;
  Result<Request> request = core_.Submit(std::move(op), call.scope, call.generation);
  if (!request.ok()) return request.status();
  waiter.seq = request->seq;
  waiters_[waiter.seq] = &waiter;
  if (link_.open()) {
    waiter.sent = true;
    SendNow(*request);
  }
  request->op = Op();  // It may be large, and the core keeps its own.
  Status outcome = Await(lock, waiter, call);
  waiters_.erase(waiter.seq);
  core_.Forget(waiter.seq);
  HandOver();
  if (!outcome.ok()) return outcome;
  return std::move(waiter.reply);
}

Status RequestClient::Await(Lock& lock, Waiter& waiter, const Call& call) {
  const Instant begun = clock_.Now();
  Instant limit = call.deadline.when();
  Instant next_check = begun + Millis(kInterruptPollMs);
  while (true) {
    Instant now = clock_.Now();
    if (waiter.done) {
      if (!waiter.failure.ok()) return waiter.failure;
      StatusCode code = waiter.reply.status.code();
      bool cut = code == StatusCode::kCancelled || code == StatusCode::kTimeout;
      return cut && waiter.cancelled ? TimeoutError(waiter, now - begun) : waiter.reply.status;
    }
    if (now >= limit) {
      Status end = OnDeadline(waiter, begun, now);
      if (!end.ok()) return end;
      limit = now + kCancelPatience;
    }
    if (now >= next_check) {
      HandOver();
      lock.unlock();
      Status stop = Interrupted(call);
      lock.lock();
      if (!stop.ok() && !waiter.done) {
        if (link_.open()) SendNow(Request{.op = CancelOp{waiter.seq}});
        return stop;
      }
      next_check = clock_.Now() + Millis(kInterruptPollMs);
      continue;
    }
    Instant until = std::min(limit, next_check);
    if (!led_) {
      Lead(lock, until);
    } else {
      waiter.ready.wait_for(lock, until - now);
    }
  }
}

// OK: a cancel is on its way and its answer is to be waited for.
Status RequestClient::OnDeadline(Waiter& waiter, Instant begun, Instant now) {
  if (!link_.open()) return LostError(waiter, now - begun, now);
  if (waiter.cancelled) {
    return waiter.ask.mutation
               ? UnknownOutcome(waiter, StrCat("the store did not answer it, timeout after ",
                                               (now - begun) / Millis(1), " ms"))
               : TimeoutError(waiter, now - begun);
  }
  waiter.cancelled = true;
  SendNow(Request{.op = CancelOp{waiter.seq}});
  return Status();
}

void RequestClient::Lead(Lock& lock, Instant until) {
  led_ = true;
  LinkStep step = link_.NextStep();
  lock.unlock();
  LinkInput input = store::Perform(step, wake_, clock_, until);
  lock.lock();
  led_ = false;
  if (closed_) {
    link_.Close();
    return;
  }
  Instant now = clock_.Now();
  link_.Advance(input, core_, now, inbox_);
  for (ServerMessage& message : inbox_) Dispatch(message);
  inbox_.clear();
  if (link_.TakeOpened()) OnOpened();
  if (!link_.open()) OnTrouble();
  outage_.Note(link_, now);
}

// The caller does not lead (any more): somebody else who waits must.
void RequestClient::HandOver() {
  if (led_) return;
  for (auto& [seq, waiter] : waiters_) {
    if (waiter->done) continue;
    waiter->ready.notify_one();
    return;
  }
}

void RequestClient::SendNow(const Request& request) {
  Request numbered = request;
  numbered.first_unacked = core_.first_unacked();
  if (!link_.Send(numbered) && led_) wake_.Wake();
}

void RequestClient::Dispatch(ServerMessage& message) {
  Reply* reply = std::get_if<Reply>(&message);
  if (reply == nullptr || !core_.OnReply(*reply)) return;  // A repeat, or nobody waits any more.
  auto entry = waiters_.find(reply->seq);
  if (entry == waiters_.end()) return;
  entry->second->reply = std::move(*reply);
  entry->second->done = true;
  entry->second->ready.notify_one();
}

// A connection is up: what was not answered goes out again, in order. A server of another id has
// lost the keys, even if it knows this session (its control line may have come first). The same
// server may have forgotten what it did for a session that was away for long.
void RequestClient::OnOpened() {
  const Welcome& welcome = link_.welcome();
  if (!server_id_.empty() && welcome.server != server_id_) {
    dead_ =
        Status(StatusCode::kStoreLost, StrCat("the store was restarted and lost its keys", Where(),
                                              ": server ", welcome.server, " answers instead of ",
                                              server_id_, "; the job has to start anew"));
    FailAll(dead_);
    return;
  }
  const bool forgotten = !server_id_.empty() && !welcome.session_known;
  server_id_ = welcome.server;
  RenumberReads();
  for (const Request& request : core_.Unanswered()) {
    auto entry = waiters_.find(request.seq);
    if (entry == waiters_.end()) continue;
    Waiter& waiter = *entry->second;
    if (forgotten && waiter.sent && waiter.ask.mutation) {
      waiter.failure = UnknownOutcome(waiter, "the store forgot this session meanwhile");
      waiter.done = true;
      waiter.ready.notify_one();
      core_.Forget(request.seq);
      continue;
    }
    waiter.sent = true;
    SendNow(request);
    if (waiter.cancelled) SendNow(Request{.op = CancelOp{request.seq}});
  }
}

// A wait may be older than all that the server remembers of this session: it would be taken for a
// request that was answered long ago.
void RequestClient::RenumberReads() {
  std::vector<Waiter*> reads;
  for (const auto& [seq, waiter] : waiters_) {
    if (!waiter->done && waiter->sent && !waiter->ask.mutation) reads.push_back(waiter);
  }
  for (Waiter* waiter : reads) {
    waiters_.erase(waiter->seq);
    waiter->seq = core_.Renumber(waiter->seq);
    waiters_[waiter->seq] = waiter;
  }
}

// Ends this client when the peer's refusal is one that waiting does not change.
void RequestClient::OnTrouble() {
  if (!link_.refused() || server_id_.empty() || !dead_.ok()) return;
  const Status& why = link_.trouble();
  if (why.code() == StatusCode::kJob) {
    dead_ = Status(StatusCode::kStoreLost,
                   StrCat("the store of this session is gone, another one answers", Where(), ": ",
                          why.message()));
  } else if (why.code() == StatusCode::kAuth || why.code() == StatusCode::kStaleGeneration) {
    dead_ = why;
  } else {
    return;
  }
  FailAll(dead_);
}

void RequestClient::FailAll(const Status& why) {
  for (auto& [seq, waiter] : waiters_) {
    if (waiter->done) continue;
    core_.Forget(seq);
    waiter->failure = waiter->ask.mutation && waiter->sent && why.code() == StatusCode::kStoreLost
                          ? UnknownOutcome(*waiter, why.message())
                          : why;
    waiter->done = true;
    waiter->ready.notify_one();
  }
}

Status RequestClient::Interrupted(const Call& call) const {
  if (interrupt_) RESILIENT_RETURN_IF_ERROR(interrupt_());
  return call.stop ? call.stop() : Status();
}

Status RequestClient::CheckSizes(const Ask& ask, std::size_t payload) const {
  for (const std::string& key : ask.keys) {
    if (key.size() > kKeyBytesMax) {
      return Status(StatusCode::kTooLarge,
                    StrCat(ask.name, ": a key of ", key.size(), " bytes (", ShowKeys({&key, 1}),
                           ") exceeds the limit of ", kKeyBytesMax, " bytes"));
    }
  }
  if (payload > kValueBytesMax) {
    return Status(StatusCode::kTooLarge,
                  StrCat(ask.name, " of ", ShowKeys(ask.keys), ": a value of ", payload,
                         " bytes exceeds the limit of ", kValueBytesMax, " bytes"));
  }
  if (ask.keys.size() > kKeysPerRequestMax ||
      BytesOf(ask.keys) + kRequestOverhead > kMaxFrameBody) {
    return Status(StatusCode::kTooLarge,
                  StrCat(ask.name, ": ", ask.keys.size(), " keys of ", BytesOf(ask.keys),
                         " bytes exceed one request (", kKeysPerRequestMax, " keys, ",
                         kMaxFrameBody, " bytes); split them"));
  }
  return Status();
}

Status RequestClient::ForkedError(std::string_view name) const {
  return Status(StatusCode::kForked,
                StrCat("store ", name, " in process ", ::getpid(), ", a child forked from process ",
                       made_by_pid_,
                       " that opened this store: connections do not survive a fork; open a store "
                       "of its own in the child, or use the spawn start method"));
}

std::string RequestClient::Where() const {
  return StrCat(" (store ", link_.peer(), ", job ", job_, ")");
}

Status RequestClient::TimeoutError(const Waiter& waiter, Duration waited) const {
  return Status(StatusCode::kTimeout, StrCat(waiter.ask.name, " timeout after ", waited / Millis(1),
                                             " ms, keys: ", ShowKeys(waiter.ask.keys), Where()));
}

Status RequestClient::UnknownOutcome(const Waiter& waiter, std::string_view why) const {
  return Status(StatusCode::kOutcomeUnknown,
                StrCat(waiter.ask.name, " of key ", ShowKeys(waiter.ask.keys),
                       " may or may not have been applied: ", why, Where()));
}

Status RequestClient::LostError(const Waiter& waiter, Duration waited, Instant now) const {
  std::string_view effect = "";
  if (waiter.ask.mutation)
    effect = waiter.sent ? "; it may have been applied" : "; it was not sent";
  return Status(
      StatusCode::kStoreLost,
      StrCat(waiter.ask.name, " timeout after ", waited / Millis(1),
             " ms, keys: ", ShowKeys(waiter.ask.keys), Where(), ": no connection to the store for ",
             SecondsOf(now - outage_.since()), " s (", link_.trouble().message(), ")", effect));
}

Result<std::shared_ptr<Client>> Connect(const ConnectOptions& options, InterruptCheck interrupt,
                                        const Clock& clock, Deadline deadline) {
  Result<std::vector<HostPort>> addresses = ParseAddresses(options.addresses);
  if (!addresses.ok()) return addresses.status();
  std::shared_ptr<RequestClient> client(
      new RequestClient(options, std::move(*addresses), std::move(interrupt), clock),
      &RequestClient::Release);
  RESILIENT_RETURN_IF_ERROR(client->Open(deadline));
  return std::shared_ptr<Client>(std::move(client));
}

}  // namespace resilient::store
