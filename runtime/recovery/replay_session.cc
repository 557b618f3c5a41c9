#include "runtime/recovery/replay_session.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/recovery/flight.h"

namespace resilient::recovery {
namespace {

// The layer in one of whose completions this thread is, on a thread of the session inside.
thread_local const ReplaySession* inside_layer = nullptr;

// How often a waiting caller looks for an interrupt.
constexpr Duration kPoll = std::chrono::milliseconds(100);

// Only memory of the host is copied, and so can be used again.
Status CheckKept(const Operation& op) {
  if (op.device == kHost) return Status::Ok();
  return Status(StatusCode::kUnimplemented,
                StrCat(Describe(op),
                       " is on memory of a device, which RESILIENT_REPLAY cannot run again: unset "
                       "it, or move the tensors with .cpu()"));
}

Status Cancelled(std::string why) { return Status(StatusCode::kCancelled, std::move(why)); }

// As SessionDeleter: where the thread cannot be joined the memory is given up instead.
struct ReplayDeleter {
  void operator()(ReplaySession* session) const {
    if (session->InForkedChild()) return session->Close();
    if (session->OnOwnThread() || inside_layer == session) {
      RESILIENT_LOG(kError, "the last reference to a session was dropped by one of its own ",
                    "completions; its threads stay until the process ends; close a session ",
                    "before dropping it");
      return session->Close();
    }
    delete session;
  }
};

}  // namespace

std::shared_ptr<Session> WithReplay(std::shared_ptr<Session> inner, const Ladder& ladder,
                                    const Clock& clock) {
  return std::shared_ptr<ReplaySession>(new ReplaySession(std::move(inner), ladder, clock),
                                        ReplayDeleter());
}

ReplaySession::ReplaySession(std::shared_ptr<Session> inner, const Ladder& ladder,
                             const Clock& clock)
    : inner_(std::move(inner)), clock_(clock), ladder_(ladder) {}

ReplaySession::~ReplaySession() { Close(); }

Status ReplaySession::Init() {
  RESILIENT_RETURN_IF_ERROR(inner_->Init());
  const Membership now = inner_->acknowledged();
  {
    Lock lock(mutex_);
    ResetLocked(now);
  }
  // In the first one of all there is nobody who was there before.
  if (now.generation > 1) OfferVeto(now);
  std::lock_guard join_lock(join_mutex_);
  thread_ = Thread("res-replay", [this] { Follow(); });
  return Status::Ok();
}

Result<std::shared_ptr<Group>> ReplaySession::CreateGroup(std::string name, std::vector<int> ranks,
                                                          NcclOptions nccl, std::string made_at) {
  auto inner = inner_->CreateGroup(name, ranks, std::move(nccl), std::move(made_at));
  if (!inner.ok()) return inner.status();
  Lock lock(mutex_);
  const LanePtr lane = std::make_shared<Lane>(
      Lane{.inner = *inner, .ranks = std::move(ranks), .instance = ++instances_[name]});
  lanes_[name] = lane;
  return std::shared_ptr<Group>(std::make_shared<ReplayGroup>(shared_from_this(), lane));
}

// ---- What callers see ----

Membership ReplaySession::membership() const {
  Membership now = inner_->membership();
  if (InForkedChild()) return now;
  Lock lock(mutex_);
  if (epoch_ == 0) return now;
  now.fence_token = acknowledged_.fence_token;
  if (phase_ != Phase::kOpen && now.state == SessionState::kRunning) {
    now.state = SessionState::kReady;
  }
  return now;
}

Membership ReplaySession::acknowledged() const {
  if (InForkedChild()) return inner_->acknowledged();
  Lock lock(mutex_);
  return epoch_ == 0 ? Membership() : acknowledged_;
}

std::uint64_t ReplaySession::epoch() const {
  if (InForkedChild()) return inner_->epoch();
  Lock lock(mutex_);
  return epoch_;
}

Status ReplaySession::failure() const {
  Status inner = inner_->failure();
  if (InForkedChild()) return inner;
  Lock lock(mutex_);
  if (phase_ == Phase::kFailed) return first_cause_;
  if (phase_ == Phase::kHealing) return Status::Ok();
  // The thread is about to take it up.
  return epoch_ != 0 && IsLinkFailure(inner) ? Status::Ok() : inner;
}

Status ReplaySession::AwaitFailure(Deadline deadline) const {
  for (;;) {
    Status cause = failure();
    const Instant now = clock_.Now();
    if (!cause.ok() || deadline.ExpiredAt(now)) return cause;
    if (inner_->membership().state == SessionState::kClosed) return cause;
    Lock lock(mutex_);
    changed_.wait_for(lock, std::min<Duration>(kPoll, deadline.LeftAt(now)));
  }
}

bool ReplaySession::Object(const Status& told) {
  if (InForkedChild() || !IsLinkFailure(told)) return false;
  constexpr char kWhy[] = "a wait of its program in the store has ended with the link's failure";
  LanePtr open;
  {
    Lock lock(mutex_);
    if (epoch_ == 0 || told.detail().generation < epoch_) return false;  // Rebuilt since.
    if (phase_ == Phase::kFailed) return true;
    if (lanes_.empty()) return false;
    // The session inside may not know it yet.
    if (told.detail().generation == acknowledged_.generation) BeginHealingLocked(told);
    if (phase_ == Phase::kHealing) {
      ObjectLocked(kWhy);
      return true;
    }
    open = lanes_.begin()->second;
  }
  AbortGroup(open, kWhy);  // The others go on already.
  return true;
}

// The others may have heard already that this member has nothing against it.
void ReplaySession::ObjectLocked(const std::string& why) {
  veto_ = why;
  if (!lanes_.empty()) aborts_.emplace_back(lanes_.begin()->second, why);
  changed_.notify_all();
}

Status ReplaySession::Rebuild(const RebuildOptions& options) {
  if (InForkedChild()) return inner_->Rebuild(options);
  for (;;) {
    const Status cause = inner_->failure();
    {
      Lock lock(mutex_);
      if (epoch_ != 0 && IsLinkFailure(cause)) BeginHealingLocked(cause);
      // It goes back to its last commit, whatever it was that it has met.
      if (phase_ == Phase::kHealing) ObjectLocked("its program asks for rebuild()");
      while (phase_ == Phase::kHealing && !closing_) {
        if (options.deadline.ExpiredAt(clock_.Now())) {
          return Status(StatusCode::kTimeout,
                        StrCat("operations of generation ", link_fence_,
                               " are being run again (RESILIENT_REPLAY), which did not end by the "
                               "deadline; call rebuild() again; first cause: ",
                               first_cause_.ToString()));
        }
        changed_.wait_for(lock, kPoll);
        lock.unlock();
        if (inner_->interrupt()) RESILIENT_RETURN_IF_ERROR(inner_->interrupt()());
        lock.lock();
      }
    }
    RESILIENT_RETURN_IF_ERROR(inner_->Rebuild(options));
    const Membership now = inner_->acknowledged();
    {
      Lock lock(mutex_);
      if (phase_ == Phase::kHealing) continue;
      // Another thread's rebuild, and what was healed behind that, may be ahead of this one.
      if (phase_ == Phase::kOpen && now.generation <= acknowledged_.generation) return Status::Ok();
      if (now.generation < acknowledged_.generation) continue;
      ResetLocked(now);
    }
    OfferVeto(now);
    // Where a link of that generation has broken already, its fence may have been told while the
    // first cause of the last one still stood.
    const Status next = inner_->failure();
    Lock lock(mutex_);
    if (IsLinkFailure(next)) BeginHealingLocked(next);
    return Status::Ok();
  }
}

// What was numbered before has nothing in common with what comes now.
void ReplaySession::ResetLocked(const Membership& now) {
  phase_ = Phase::kOpen;
  first_cause_ = {};
  veto_.clear();
  epoch_ = now.generation;
  acknowledged_ = now;
  instances_.clear();
  for (auto& [name, lane] : lanes_) {
    lane->instance = ++instances_[name];
    lane->log = ReplayLog();
    lane->base = lane->message_base = 0;
    lane->next_message = 1;
    lane->collectives.clear();
    lane->messages.clear();
  }
  changed_.notify_all();
}

void ReplaySession::BeginBlocked(const std::string& group, bool point_to_point, std::uint64_t seq) {
  std::uint64_t inner = seq;
  if (seq != 0 && !InForkedChild()) {
    Lock lock(mutex_);
    if (const auto found = lanes_.find(group); found != lanes_.end()) {
      const Lane& lane = *found->second;
      const auto& kept = point_to_point ? lane.messages : lane.collectives;
      const std::uint64_t base = point_to_point ? lane.message_base : lane.base;
      const auto one = kept.find(seq);
      inner = one != kept.end() ? one->second->inner : seq > base ? seq - base : 0;
    }
  }
  inner_->BeginBlocked(group, point_to_point, inner);
}

void ReplaySession::Close() {
  if (InForkedChild()) {
    inner_->Close();
    return;
  }
  {
    Lock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  inner_->Close();
  if (OnOwnThread()) return;
  {
    std::lock_guard join_lock(join_mutex_);
    if (thread_.Joinable()) thread_.Join();
  }
  std::vector<std::pair<Completion, Kept>> over;
  {
    Lock lock(mutex_);
    for (auto& [name, lane] : lanes_)
      std::ranges::move(TakePendingLocked(*lane), std::back_inserter(over));
  }
  for (const auto& [done, kept] : over) done(Cancelled("the session was closed"));
}

std::vector<std::pair<Completion, ReplaySession::Kept>> ReplaySession::TakePendingLocked(
    Lane& lane) {
  std::vector<std::pair<Completion, Kept>> pending;
  const auto take = [&pending](const Kept& kept) {
    if (kept->in_flight) return;
    if (Completion done = kept->TakeDone()) pending.emplace_back(std::move(done), kept);
  };
  for (auto& [number, kept] : lane.collectives) take(kept);
  for (auto& [number, kept] : lane.messages) take(kept);
  for (const Kept& kept : lane.queue) take(kept);
  lane.queue.clear();
  return pending;
}

void ReplaySession::CloseGroup(const LanePtr& lane) {
  if (InForkedChild()) return lane->inner->Close();
  {
    Lock lock(mutex_);
    if (std::exchange(lane->closed, true)) return;
    const auto found = lanes_.find(lane->inner->name());
    if (found != lanes_.end() && found->second == lane) lanes_.erase(found);
  }
  lane->inner->Close();
  std::vector<std::pair<Completion, Kept>> over;
  {
    Lock lock(mutex_);
    over = TakePendingLocked(*lane);
  }
  for (const auto& [done, kept] : over) {
    done(Cancelled(StrCat("group '", lane->inner->name(), "' was closed")));
  }
}

void ReplaySession::AbortGroup(const LanePtr& lane, const std::string& why) {
  if (InForkedChild()) return lane->inner->Abort(why);
  {
    Lock lock(mutex_);
    if (lane->closed) return;
    // Also while it is open: the session inside drops it where a link has just ended the
    // generation, which this layer may not know yet.
    veto_ = StrCat("its program has aborted group '", lane->inner->name(), "': ", why);
    if (phase_ == Phase::kHealing) {
      aborts_.emplace_back(lane, why);
      changed_.notify_all();
      return;
    }
  }
  lane->inner->Abort(why);
}

// ---- Operations ----

Result<std::uint64_t> ReplaySession::Submit(const LanePtr& lane, Operation operation,
                                            Completion done) {
  if (InForkedChild()) return lane->inner->Submit(std::move(operation), std::move(done));
  RESILIENT_RETURN_IF_ERROR(CheckKept(operation));
  const auto kept =
      std::make_shared<KeptOperation>(std::move(operation), std::move(done), lane->inner->rank());
  const Result<Communicator::Ran> ran = Enter(lane, kept, nullptr);
  if (!ran.ok()) return ran.status();
  return ran->seq;
}

Result<Communicator::Ran> ReplaySession::Run(const LanePtr& lane, Operation operation,
                                             Completion done,
                                             const Communicator::KeepWaiting& keep_waiting) {
  if (InForkedChild()) return lane->inner->Run(std::move(operation), std::move(done), keep_waiting);
  RESILIENT_RETURN_IF_ERROR(CheckKept(operation));
  const auto kept =
      std::make_shared<KeptOperation>(std::move(operation), std::move(done), lane->inner->rank());
  return Enter(lane, kept, &keep_waiting);
}

Result<Communicator::Ran> ReplaySession::Enter(const LanePtr& lane, const Kept& kept,
                                               const Communicator::KeepWaiting* keep_waiting) {
  for (;;) {
    {
      Lock lock(mutex_);
      if (auto away = TurnAwayLocked(*lane, kept)) return *std::move(away);
      ++inside_;
      kept->in_flight = true;
    }
    Operation operation = ToSubmit(*kept, kept->operation());
    Result<Communicator::Ran> ran = Status(StatusCode::kInternal, "not run");
    if (keep_waiting != nullptr) {
      ran = lane->inner->Run(std::move(operation), Wrap(lane, kept), *keep_waiting);
    } else {
      const auto seq = lane->inner->Submit(std::move(operation), Wrap(lane, kept));
      if (seq.ok()) {
        ran = Communicator::Ran{.seq = *seq, .outcome = std::nullopt};
      } else {
        ran = seq.status();
      }
    }
    const bool ended = ran.ok() && ran->outcome.has_value();
    const bool of_link = ended && BelongsToLink(*ran->outcome);
    Completion missed;
    {
      Lock lock(mutex_);
      if (ended || !ran.ok()) kept->in_flight = false;
      if (ended) ran->outcome = OutcomeLocked(*lane, *kept, *ran->outcome, of_link);
      if (ended && ran->outcome) (void)kept->TakeDone();
      if (ran.ok()) {
        NoteStartedLocked(*lane, kept, ran->seq);
        ran->seq = kept->number;
        missed = TakeMissedLocked(*lane, *kept);
      }
      if (--inside_ == 0) changed_.notify_all();
    }
    if (missed) missed(Cancelled("its group was closed"));
    if (ran.ok() || !MayRetry(ran.status())) return ran;
  }
}

// What becomes of an operation that may not start now; nullopt: it may.
std::optional<Result<Communicator::Ran>> ReplaySession::TurnAwayLocked(Lane& lane,
                                                                       const Kept& kept) {
  const Operation& operation = kept->operation();
  if (Status over = OverLocked(lane); !over.ok()) return over;
  if (epoch_ == 0 || phase_ == Phase::kOpen) return std::nullopt;
  const std::string& name = lane.inner->name();
  if (phase_ == Phase::kFailed) return NotStarted(first_cause_, name, Describe(operation));
  if (lane.queue.size() >= kReplayQueueMax) {
    return Status(
        StatusCode::kResourceExhausted,
        StrCat(Describe(operation), " of group '", name, "' is one too many: ", kReplayQueueMax,
               " wait already for what a broken link has ended to be "
               "run again (RESILIENT_REPLAY)"));
  }
  const bool message = IsPointToPoint(operation.kind);
  const auto before = std::count_if(
      lane.queue.begin(), lane.queue.end(),
      [message](const Kept& other) { return IsPointToPoint(other->operation().kind) == message; });
  lane.queue.push_back(kept);
  const std::uint64_t next = message ? lane.next_message : lane.log.next();
  return Communicator::Ran{.seq = next + static_cast<std::uint64_t>(before),
                           .outcome = std::nullopt};
}

Status ReplaySession::OverLocked(const Lane& lane) const {
  const auto status = [](std::string why) {
    return Status(StatusCode::kFailedPrecondition, std::move(why));
  };
  const std::string& name = lane.inner->name();
  if (lane.closed) return status(StrCat("group '", name, "' is closed on this rank"));
  if (closing_)
    return status(StrCat("the session is closed on this rank, with group '", name, "'"));
  return Status::Ok();
}

Completion ReplaySession::TakeMissedLocked(const Lane& lane, KeptOperation& kept) {
  if (kept.in_flight || OverLocked(lane).ok()) return nullptr;
  return kept.TakeDone();
}

Operation ReplaySession::ToSubmit(KeptOperation& kept, Operation operation) {
  if (operation.kind == OpKind::kRecv) operation.sender = &kept.sender;
  return operation;
}

void ReplaySession::NoteStartedLocked(Lane& lane, const Kept& kept, std::uint64_t seq) {
  kept->inner = seq;
  if (kept->operation().stream != nullptr) veto_ = "an operation of a device was in flight";
  if (IsPointToPoint(kept->operation().kind)) {
    if (kept->number == 0) kept->number = lane.message_base + seq;
    lane.next_message = std::max(lane.next_message, kept->number + 1);
    if (!kept->ended()) lane.messages[kept->number] = kept;
  } else if (kept->number == 0) {
    kept->number = lane.base + seq;
    lane.log.Add(kept->number, kept->bytes(), kept->Synchronises());
    lane.collectives[kept->number] = kept;
  }
  if (kept->ended()) NoteEndedLocked(lane, *kept);
}

// It has ended with OK, and its program knows it from now on.
void ReplaySession::NoteEndedLocked(Lane& lane, KeptOperation& kept) {
  if (kept.number == 0) return;  // Its start is being noted.
  const Operation& operation = kept.operation();
  if (operation.kind == OpKind::kSend) {
    lane.log.CompleteSend({operation.peer, operation.tag});
    lane.messages.erase(kept.number);
  } else if (operation.kind == OpKind::kRecv) {
    const int sender = operation.peer == kAnyPeer ? kept.sender : operation.peer;
    lane.log.CompleteReceive({sender, operation.tag});
    lane.messages.erase(kept.number);
  } else {
    for (const std::uint64_t number : lane.log.Complete(kept.number)) {
      lane.collectives.erase(number);
    }
  }
}

Completion ReplaySession::Wrap(const LanePtr& lane, const Kept& kept) {
  // The session inside runs every completion before it ends, and this outlives it.
  return [this, lane, kept](const Status& status) {
    const bool of_link = BelongsToLink(status);
    std::optional<Status> told;
    Completion done;
    {
      // As one, or who takes what is pending would take it for in flight, and nobody would end it.
      Lock lock(mutex_);
      told = OutcomeLocked(*lane, *kept, status, of_link);
      kept->in_flight = false;
      if (!told) return;
      done = kept->TakeDone();
      if (told->ok()) {
        NoteEndedLocked(*lane, *kept);
      } else {
        lane->messages.erase(kept->number);
      }
    }
    if (told->ok() && kept->operation().sender != nullptr) {
      *kept->operation().sender = kept->sender;
    }
    if (!done) return;
    const ReplaySession* const outer = std::exchange(inside_layer, this);
    done(*told);
    done = nullptr;  // With what it has captured, which may be the last reference to this.
    inside_layer = outer;
  };
}

std::optional<Status> ReplaySession::OutcomeLocked(const Lane& lane, const KeptOperation& kept,
                                                   const Status& status, bool of_link) {
  if (status.ok() || status.code() == StatusCode::kCancelled) return status;
  if (of_link) {
    if (phase_ == Phase::kFailed) {
      return first_cause_.WithOperation(lane.inner->name(), kept.number,
                                        Describe(kept.operation()));
    }
    // Nobody will run it again.
    if (const Status over = OverLocked(lane); !over.ok()) return Cancelled(over.message());
    return std::nullopt;
  }
  veto_ = StrCat("an operation of group '", lane.inner->name(),
                 "' has failed there: ", status.ToString());
  return status;
}

bool ReplaySession::BelongsToLink(const Status& status) {
  if (status.code() != StatusCode::kCommFailed) return false;
  {
    Lock lock(mutex_);
    if (link_fence_ != 0 && status.detail().generation == link_fence_) return true;
  }
  const Status cause = inner_->failure();
  if (!IsLinkFailure(cause)) return false;
  Lock lock(mutex_);
  BeginHealingLocked(cause);
  return true;
}

// The session inside has not taken it: because a link broke, which the thread may not know yet, or
// has healed since.
bool ReplaySession::MayRetry(const Status& refused) {
  const Status cause = inner_->failure();
  if (IsLinkFailure(cause)) {
    Lock lock(mutex_);
    if (epoch_ == 0) return false;
    BeginHealingLocked(cause);
    return true;
  }
  return cause.ok() && refused.code() == StatusCode::kCommFailed &&
         refused.detail().generation < inner_->membership().generation;
}

void ReplaySession::BeginHealingLocked(const Status& cause) {
  // It was found before that generation was healed, or rebuilt. 0: the service has not said which.
  const std::uint64_t ended = cause.detail().generation;
  if (ended != 0 && ended < acknowledged_.generation) return;
  link_fence_ = std::max(link_fence_, cause.detail().generation);
  if (phase_ != Phase::kOpen) return;
  phase_ = Phase::kHealing;
  first_cause_ = cause;
  heal_by_ = Deadline::After(clock_.Now(), ladder_.rebuild);
  changed_.notify_all();
}

}  // namespace resilient::recovery
