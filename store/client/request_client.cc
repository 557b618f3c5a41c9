#include "store/client/request_client.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "runtime/base/texts.h"
#include "store/client/identity.h"

namespace resilient::store {
namespace {

constexpr Duration kCancelPatience = std::chrono::seconds(1);
constexpr std::size_t kKeysShown = 8;
constexpr std::size_t kKeyBytesShown = 64;

}  // namespace

std::string RequestClient::Ask::ShowKeys() const {
  return ListOf(keys, kKeysShown, [](const std::string& key) {
    std::string text;
    for (char c : key.substr(0, kKeyBytesShown)) {
      bool printable = static_cast<unsigned char>(c) >= 0x20 && c != 0x7f;
      text += printable ? c : '?';
    }
    return key.size() > kKeyBytesShown ? text + "..." : text;
  });
}

RequestClient::RequestClient(const ConnectOptions& options, std::vector<HostPort> addresses,
                             Credentials credentials, InterruptCheck interrupt, const Clock& clock)
    : clock_(clock),
      interrupt_(std::move(interrupt)),
      job_(options.job),
      made_by_pid_(::getpid()),
      core_(MakeHello(options, Role::kRequest)),
      link_(std::move(addresses), RandomSeed(), std::move(credentials)),
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
    Lead(lock, std::min(deadline.when(), now + Millis(kInterruptPollMs)), /*quickly=*/false);
    lock.unlock();
    Status stop = Interrupted(Call{});
    lock.lock();
    if (!stop.ok()) return stop;
  }
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
    CloseLink();
  }
}

// A goodbye that the socket does not take at once is not sent: then the store remembers the session
// for its hour.
void RequestClient::CloseLink() {
  if (link_.open()) link_.Send(Request{.op = LeaveOp{}});
  link_.Close();
}

Result<Reply> RequestClient::Perform(const Ask& ask, Op&& op, const Call& call) {
  if (mark_.InChild()) return ForkedError(ask.name);
  RESILIENT_RETURN_IF_ERROR(CheckSizes(ask));
  Waiter waiter(ask);
  Lock lock(mutex_);
  if (!dead_.ok()) return dead_;
  const Result<const Request*> request = core_.Submit(std::move(op), call.scope, call.generation);
  if (!request.ok()) return request.status();
  waiter.seq = (*request)->seq;
  waiters_.push_back(&waiter);
  if (link_.open()) {
    waiter.sent = true;
    SendNow(**request);
  }
  Status outcome = Await(lock, waiter, call);
  std::erase(waiters_, &waiter);
  core_.Forget(waiter.seq);
  HandOver();
  if (!outcome.ok()) return outcome;
  return std::move(waiter.reply);
}

Status RequestClient::Await(Lock& lock, Waiter& waiter, const Call& call) {
  const Instant begun = clock_.Now();
  Instant limit = call.deadline.when();
  Instant next_check = begun + Millis(kInterruptPollMs);
  bool fresh = true;
  while (true) {
    Instant now = clock_.Now();
    if (waiter.done) {
      if (!waiter.failure.ok()) return waiter.failure;
      StatusCode code = waiter.reply.status.code();
      bool cut = code == StatusCode::kCancelled || code == StatusCode::kTimeout;
      if (!cut || !waiter.cancelled) return waiter.reply.status;
      return waiter.stopped.ok() ? TimeoutError(waiter, now - begun) : waiter.stopped;
    }
    if (now >= limit) {
      Status end = OnDeadline(waiter, call, begun, now);
      if (!end.ok()) return end;
      limit = std::min(waiter.settled_by, now + kCancelPatience);
    }
    if (now >= next_check) {
      HandOver();
      lock.unlock();
      Status stop = Interrupted(call);
      lock.lock();
      // An answer that came meanwhile counts, unless a signal's exception must not be swallowed.
      if (!stop.ok() && (!waiter.done || stop.code() == StatusCode::kInterrupted)) {
        if (OnStop(waiter, call, stop)) return stop;
        limit = std::min(limit, clock_.Now() + kCancelPatience);
      }
      next_check = clock_.Now() + Millis(kInterruptPollMs);
      continue;
    }
    Instant until = std::min(limit, next_check);
    if (!led_) {
      const bool quickly =
          std::exchange(fresh, false) && waiters_.size() == 1 && until - now >= kQuickAnswerMax;
      Lead(lock, until, quickly);
    } else {
      waiter.ready.wait_for(lock, until - now);
    }
  }
}

// False: there is no connection to send it on, and the call is not to wait for one.
bool RequestClient::Cancel(Waiter& waiter, const Call& call, Instant now) {
  if (!link_.open() && call.settle <= Duration::zero()) return false;
  waiter.cancelled = true;
  waiter.received_at_cancel = link_.received();
  waiter.settled_by = now + std::max(kCancelPatience, call.settle);
  if (link_.open()) SendCancel(waiter);
  return true;
}

// True: the call ends with `stop` now.
bool RequestClient::OnStop(Waiter& waiter, const Call& call, Status stop) {
  if (stop.code() == StatusCode::kInterrupted || call.settle <= Duration::zero()) {
    if (!waiter.done && link_.open()) SendCancel(waiter);
    return true;
  }
  if (!waiter.cancelled) Cancel(waiter, call, clock_.Now());
  if (waiter.stopped.ok()) waiter.stopped = std::move(stop);
  return false;
}

// OK: a cancel is on its way and its answer is to be waited for.
Status RequestClient::OnDeadline(Waiter& waiter, const Call& call, Instant begun, Instant now) {
  // Its time ended while the store was connected, whatever became of the connection since.
  if (waiter.cancelled) {
    // Something takes our bytes and lets none through: TCP would never find out.
    if (link_.open() && !link_.local() && link_.received() == waiter.received_at_cancel) {
      silent_ = true;
      if (led_) wake_.Wake();
    }
    if (now < waiter.settled_by) return Status();
    if (!waiter.stopped.ok()) return waiter.stopped;
    return waiter.ask.mutation
               ? UnknownOutcome(waiter, StrCat("the store did not answer it, timeout after ",
                                               (now - begun) / Millis(1), " ms"))
               : TimeoutError(waiter, now - begun);
  }
  return Cancel(waiter, call, now) ? Status() : LostError(waiter, now - begun, now);
}

void RequestClient::Lead(Lock& lock, Instant until, bool quickly) {
  led_ = true;
  if (std::exchange(silent_, false) && link_.open()) {
    link_.Drop(Status(StatusCode::kUnreachable, StrCat("the store at ", link_.peer(),
                                                       " answered neither a request nor its "
                                                       "cancellation for ",
                                                       SecondsOf(kCancelPatience), " s")),
               clock_.Now());
  }
  LinkStep step = link_.NextStep();
  lock.unlock();
  LinkInput input = quickly && step.may_receive ? PerformQuickly(step)
                                                : store::Perform(step, wake_, clock_, until);
  lock.lock();
  led_ = false;
  if (closed_) {
    CloseLink();
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
  for (Waiter* waiter : waiters_) {
    if (waiter->done) continue;
    waiter->ready.notify_one();
    return;
  }
}

void RequestClient::SendNow(const Request& request) {
  if (!link_.Send(request) && led_) wake_.Wake();
}

void RequestClient::SendCancel(const Waiter& waiter) {
  SendNow(Request{.first_unacked = core_.first_unacked(), .op = CancelOp{waiter.seq}});
}

void RequestClient::Dispatch(ServerMessage& message) {
  Reply* reply = std::get_if<Reply>(&message);
  if (reply == nullptr || !core_.OnReply(*reply)) return;  // A repeat, or nobody waits any more.
  Waiter* waiter = FindWaiter(reply->seq);
  if (waiter == nullptr) return;
  waiter->reply = std::move(*reply);
  waiter->done = true;
  waiter->ready.notify_one();
}

RequestClient::Waiter* RequestClient::FindWaiter(std::uint64_t seq) const {
  const auto found = std::find_if(waiters_.begin(), waiters_.end(),
                                  [seq](const Waiter* waiter) { return waiter->seq == seq; });
  return found == waiters_.end() ? nullptr : *found;
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
    Waiter* found = FindWaiter(request.seq);
    if (found == nullptr) continue;
    Waiter& waiter = *found;
    if (forgotten && waiter.sent && waiter.ask.mutation) {
      waiter.failure = UnknownOutcome(waiter, "the store forgot this session meanwhile");
      waiter.done = true;
      waiter.ready.notify_one();
      core_.Forget(request.seq);
      continue;
    }
    waiter.sent = true;
    SendNow(request);
    if (waiter.cancelled) SendCancel(waiter);
  }
}

// A wait may be older than all that the server remembers of this session: it would be taken for a
// request that was answered long ago.
void RequestClient::RenumberReads() {
  for (Waiter* waiter : waiters_) {
    if (waiter->done || !waiter->sent || waiter->ask.mutation) continue;
    waiter->seq = core_.Renumber(waiter->seq);
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
  for (Waiter* waiter : waiters_) {
    if (waiter->done) continue;
    core_.Forget(waiter->seq);
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
  std::string text = StrCat(waiter.ask.name, " timeout after ", waited / Millis(1),
                            " ms, keys: ", waiter.ask.ShowKeys(), Where());
  // The store knows who is late.
  const Status& told = waiter.reply.status;
  if (waiter.ask.meeting && !told.message().empty()) text += StrCat(": ", told.message());
  return Status(StatusCode::kTimeout, std::move(text), told.detail());
}

Status RequestClient::UnknownOutcome(const Waiter& waiter, std::string_view why) const {
  return Status(StatusCode::kOutcomeUnknown,
                StrCat(waiter.ask.name, " of key ", waiter.ask.ShowKeys(),
                       " may or may not have been applied: ", why, Where()));
}

// A mutation that was sent may have been applied; all else has not been.
Status RequestClient::LostError(const Waiter& waiter, Duration waited, Instant now) const {
  const bool unknown = waiter.ask.mutation && waiter.sent;
  std::string_view effect = "";
  if (unknown) effect = "; it may or may not have been applied";
  if (waiter.ask.mutation && !waiter.sent) effect = "; it was not sent";
  return Status(
      unknown ? StatusCode::kOutcomeUnknown : StatusCode::kStoreLost,
      StrCat(waiter.ask.name, " timeout after ", waited / Millis(1),
             " ms, keys: ", waiter.ask.ShowKeys(), Where(), ": no connection to the store for ",
             SecondsOf(now - outage_.since()), " s (", link_.trouble().message(), ")", effect));
}

Result<std::shared_ptr<Client>> Connect(const ConnectOptions& options, InterruptCheck interrupt,
                                        const Clock& clock, Deadline deadline) {
  Result<std::vector<HostPort>> addresses = ParseAddresses(options.addresses);
  if (!addresses.ok()) return addresses.status();
  Result<Credentials> credentials = Credentials::Open(options, interrupt, clock, deadline);
  if (!credentials.ok()) return credentials.status();
  std::shared_ptr<RequestClient> client(
      new RequestClient(options, std::move(*addresses), std::move(*credentials),
                        std::move(interrupt), clock),
      &RequestClient::Release);
  RESILIENT_RETURN_IF_ERROR(client->Open(deadline));
  return std::shared_ptr<Client>(std::move(client));
}

}  // namespace resilient::store
