#include <resilient/session.h>

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "runtime/recovery/deadlines.h"
#include "runtime/recovery/replay_session.h"
#include "runtime/recovery/session_impl.h"

namespace resilient {
namespace recovery {
namespace {

// The session in whose callback this thread is; null on the user's threads.
thread_local const SessionImpl* inside_session = nullptr;

// How much later than its goodbye in a group a leaver's word to the service may come, with what the
// service makes of it. By then it has left that group alone.
constexpr Duration kLeaveGrace = std::chrono::seconds(1);

Status SessionClosed() {
  return Status(StatusCode::kFailedPrecondition,
                "the session is closed on this rank; open a new one to go on");
}

}  // namespace

OwnThreadScope::OwnThreadScope(const SessionImpl* session)
    : outer_(std::exchange(inside_session, session)) {}
OwnThreadScope::~OwnThreadScope() { inside_session = outer_; }

void SessionDeleter::operator()(SessionImpl* session) const {
  if (session->InForkedChild()) {
    session->AbandonInChild();
    return;
  }
  if (session->OnOwnThread()) {
    RESILIENT_LOG(kError, "the last reference to a session was dropped by one of its own ",
                  "completions; its threads stay until the process ends; close a session before ",
                  "dropping it");
    session->Close();
    return;
  }
  delete session;
}

SessionImpl::SessionImpl(SessionOptions options, std::unique_ptr<Rendezvous> rendezvous,
                         const Clock& clock)
    : options_(std::move(options)),
      ladder_(LadderOf(options_.budget, options_.seat_wait)),
      clock_(clock),
      opener_pid_(getpid()),
      opener_host_(ThisProcess().host),
      rendezvous_(std::move(rendezvous)),
      rank_(options_.rank),
      world_size_(options_.world_size),
      machine_(ladder_),
      incidents_({options_.rank, opener_host_, opener_pid_}),
      wish_{options_.min_world, options_.seat_wait},
      waits_({options_.rank, options_.wait_log, options_.stall, options_.device_stall}),
      outage_(ladder_.answer),
      host_watch_(
          options_.host_watch,
          [this](const Neighbour& neighbour, const ProcessEnd& end) {
            (void)rendezvous_->Post([this, neighbour, end] { ReportDeath(neighbour, end); });
          },
          clock) {}

SessionImpl::~SessionImpl() {
  Close();
  bell_->Silence();
  // The factory outlives its communicators.
  TakeCommunicatorsLocked();
}

Status SessionImpl::MakeFactory(const FactoryMaker& make_factory) {
  Result<std::unique_ptr<CommunicatorFactory>> factory = make_factory(*this);
  if (!factory.ok()) return factory.status();
  RESILIENT_CHECK(*factory != nullptr);
  factory_ = std::move(factory).value();
  return Status::Ok();
}

bool SessionImpl::OnOwnThread() const { return inside_session == this; }

Status SessionImpl::ForkedStatus() const {
  const int rank = rank_;
  FailureDetail detail;
  detail.rank = rank;
  detail.host = opener_host_;
  detail.pid = opener_pid_;
  return Status(StatusCode::kForked,
                StrCat("this process (pid ", getpid(), ") was forked from rank ", rank, " (host ",
                       opener_host_, ", pid ", opener_pid_,
                       "), whose connections and threads exist only there; collectives work only "
                       "in the rank itself: start helpers with the 'spawn' or 'forkserver' method "
                       "when they need a process group of their own"),
                std::move(detail));
}

Status SessionImpl::Init() {
  if (mark_.InChild()) return ForkedStatus();
  {
    Lock lock(mutex_);
    if (machine_.state() == SessionState::kClosed) return SessionClosed();
    if (init_called_) {
      return Status(StatusCode::kFailedPrecondition, "Init was called before on this session");
    }
    init_called_ = true;
  }
  const Instant now = clock_.Now();
  // The service's own verdict comes first: it counts from the first join of the round, and a rank
  // that is on its way then has a last call.
  const Duration last_call =
      options_.min_world > 0 ? LastCallOf(options_.init_timeout) : Duration::zero();
  const Deadline outer = Deadline::After(Deadline::After(now, options_.init_timeout).when(),
                                         SumOf(ladder_.budget, last_call));
  Status status = rendezvous_->Start(*this, Deadline::After(now, options_.init_timeout));
  if (status.ok()) status = CheckAndTellDeadlines();
  if (status.ok()) status = InitConnected(outer);
  if (!status.ok()) Close();
  return status;
}

// The lease is the store's, which may have been started with other settings than this rank.
Status SessionImpl::CheckAndTellDeadlines() const {
  const Duration lease = rendezvous_->lease();
  RESILIENT_RETURN_IF_ERROR(CheckDeadlines(options_, lease));
  if (LogEnabled(LogLevel::kInfo)) LogLine(LogLevel::kInfo, DeadlinesRecord(options_, lease));
  return Status::Ok();
}

Status SessionImpl::InitConnected(Deadline deadline) {
  {
    Lock lock(mutex_);
    StepFromCaller({EventKind::kInit, 0, {}, {}}, &lock);
  }
  return WaitForOpening(deadline, 0);
}

Status SessionImpl::Rebuild(const RebuildOptions& options) {
  if (mark_.InChild()) return ForkedStatus();
  if (options.min_world < 0) {
    return Status(StatusCode::kInvalidArgument,
                  StrCat("a world of at least ", options.min_world, " ranks cannot be"));
  }
  RESILIENT_RETURN_IF_ERROR(AwaitFenceOfBroken(options.deadline));
  RESILIENT_RETURN_IF_ERROR(AwaitFenceOfLeaver(options.deadline));
  RESILIENT_RETURN_IF_ERROR(AwaitWordOfLeavers(options.deadline));
  std::uint64_t openings_before = 0;
  {
    Lock lock(mutex_);
    if (machine_.state() == SessionState::kRunning) return Status::Ok();
    if (machine_.state() == SessionState::kClosed) return SessionClosed();
    if (!machine_.ever_ran() && machine_.state() != SessionState::kFailed) {
      return Status(StatusCode::kFailedPrecondition,
                    "there is nothing to rebuild before Init has returned");
    }
    if (!options.again && machine_.state() == SessionState::kFenced) return machine_.first_cause();
    openings_before = machine_.openings();
    ++rebuild_waiters_;
    const Wish wish{options.min_world, options.seat_wait.value_or(options_.seat_wait)};
    Event acknowledge{.kind = EventKind::kAcknowledge, .status = {}, .view = {}};
    acknowledge.wish_changed = wish != std::exchange(wish_, wish);
    StepFromCaller(acknowledge, &lock);
  }
  Status status = WaitForOpening(options.deadline, openings_before);
  Lock lock(mutex_);
  --rebuild_waiters_;
  // The gate may have opened since the wait ended: then the caller is told so, not that it failed.
  if (machine_.state() == SessionState::kRunning) return Status::Ok();
  // With nobody waiting the fence counts as not acknowledged: the gate stays shut at the end of
  // the recovery until somebody asks again.
  if (rebuild_waiters_ == 0) StepLocked({EventKind::kWithdraw, 0, {}, {}});
  return status;
}

Status SessionImpl::OfferRoom(int max_world, std::uint64_t commit) {
  if (mark_.InChild()) return ForkedStatus();
  if (max_world < 1 || commit < 1) {
    return Status(StatusCode::kInvalidArgument, StrCat("room for ", max_world, " ranks at commit ",
                                                       commit, ": both count from 1"));
  }
  Report offer{.kind = ReportKind::kRoom, .status = {}, .max_world = max_world, .commit = commit};
  {
    Lock lock(mutex_);
    if (machine_.state() != SessionState::kRunning)
      return Status::Ok();  // It would be of the past.
    offer.generation = machine_.view().generation;
  }
  rendezvous_->Send(offer);
  return Status::Ok();
}

// An operation that fails for a reason of its own is told before the fence that it causes. What is
// broken must not be taken for rebuilt.
Status SessionImpl::AwaitFenceOfBroken(Deadline deadline) const {
  for (;;) {
    {
      Lock lock(mutex_);
      const bool due = machine_.state() == SessionState::kRunning && flight_ != nullptr &&
                       flight_->IsBroken() && !flight_->Ended();
      if (!due) return Status::Ok();
      if (deadline.ExpiredAt(clock_.Now())) return OverdueLocked();
      changed_.wait_for(
          lock, std::min<Duration>(Millis(kInterruptPollMs), deadline.LeftAt(clock_.Now())));
    }
    if (options_.interrupt) RESILIENT_RETURN_IF_ERROR(options_.interrupt());
  }
}

// A membership that is given to the program must not hold the member that an operation has missed.
// OK also when no fence comes: it has left a group, not the world.
Status SessionImpl::AwaitFenceOfLeaver(Deadline deadline) {
  const Deadline grace =
      Deadline::At(std::min(deadline.when(), Deadline::After(clock_.Now(), kLeaveGrace).when()));
  bool told = false;
  for (;;) {
    std::optional<int> leaver;
    std::uint64_t generation = 0;
    {
      Lock lock(mutex_);
      if (machine_.state() != SessionState::kRunning || flight_ == nullptr || flight_->Ended()) {
        return Status::Ok();
      }
      leaver = flight_->needed_leaver();
      if (!leaver || grace.ExpiredAt(clock_.Now())) return Status::Ok();
      generation = flight_->generation();
      if (told) {
        changed_.wait_for(lock,
                          std::min<Duration>(Millis(kInterruptPollMs), grace.LeftAt(clock_.Now())));
      }
    }
    // Again: a service that was restarted has forgotten it.
    if (!std::exchange(told, true)) {
      (void)rendezvous_->Post(
          [this, generation, rank = *leaver] { ReportNeed(generation, rank, ""); });
    }
    if (options_.interrupt) RESILIENT_RETURN_IF_ERROR(options_.interrupt());
  }
}

// A membership that is given to the program must not hold a member that has left, needed or not.
// The service hears of each leave; OK once it has said that there was none, or has ended the
// generation.
Status SessionImpl::AwaitWordOfLeavers(Deadline deadline) {
  const Deadline patience = Deadline::After(clock_.Now(), ladder_.answer);
  const auto word = std::make_shared<std::optional<StatusCode>>();  // Guarded by mutex_.
  std::uint64_t generation = 0;
  {
    Lock lock(mutex_);
    if (machine_.state() != SessionState::kRunning || machine_.view().members.size() < 2) {
      return Status::Ok();
    }
    generation = machine_.view().generation;
  }
  rendezvous_->Ask({ReportKind::kRebuild, generation}, [this, word](const Status& answer) {
    Lock lock(mutex_);
    *word = answer.code();
    changed_.notify_all();
  });
  const Deadline end = Deadline::At(std::min(deadline.when(), patience.when()));
  for (;;) {
    {
      Lock lock(mutex_);
      const bool over =
          machine_.state() != SessionState::kRunning || machine_.view().generation != generation;
      if (over || (*word && *word != StatusCode::kLeft)) return Status::Ok();
      const Instant now = clock_.Now();
      if (end.ExpiredAt(now)) return NoWordLocked(generation, now);
      changed_.wait_for(lock, std::min<Duration>(Millis(kInterruptPollMs), end.LeftAt(now)));
    }
    if (options_.interrupt) RESILIENT_RETURN_IF_ERROR(options_.interrupt());
  }
}

Status SessionImpl::NoWordLocked(std::uint64_t generation, Instant now) const {
  const bool heard =
      contact_ != Instant::min() && now < Deadline::After(contact_, rendezvous_->lease()).when();
  return Status(heard ? StatusCode::kTimeout : StatusCode::kStoreLost,
                StrCat("nothing has failed in generation ", generation,
                       ", but the store has not said in time whether a member has left it; see "
                       "whether the store can be reached, and call rebuild() again"));
}

// OK once the gate has been opened; otherwise why the wait ended. Polls the interrupt outside the
// lock.
Status SessionImpl::WaitForOpening(Deadline deadline, std::uint64_t openings_before) {
  Lock lock(mutex_);
  for (;;) {
    StepFromCaller({EventKind::kTick, 0, {}, {}}, &lock);
    if (auto verdict = WaitVerdictLocked(deadline, openings_before)) return *verdict;
    if (options_.interrupt) {
      lock.unlock();
      Status interrupted = options_.interrupt();
      if (!interrupted.ok()) return interrupted;
      lock.lock();
      if (auto verdict = WaitVerdictLocked(deadline, openings_before)) return *verdict;
    }
    // Behind the deadline there may be a reason to wait still.
    const Duration left = deadline.LeftAt(clock_.Now());
    const Duration poll = Millis(kInterruptPollMs);
    changed_.wait_for(lock, left > Duration::zero() ? std::min(poll, left) : poll);
  }
}

std::optional<Status> SessionImpl::WaitVerdictLocked(Deadline deadline,
                                                     std::uint64_t openings_before) const {
  const SessionState state = machine_.state();
  if (state == SessionState::kClosed) return SessionClosed();
  if (state == SessionState::kFailed) return machine_.first_cause();
  // Also when the next fence has shut it since: that one is for the caller's next operation.
  if (machine_.openings() > openings_before) return Status::Ok();
  if (state == SessionState::kFenced) return machine_.first_cause();
  // Ranks that were started with different settings: the next try would end the same way.
  const Status& cause = machine_.first_cause();
  if (!machine_.ever_ran() && cause.code() == StatusCode::kMismatch) return cause;
  const Instant now = clock_.Now();
  if (!deadline.ExpiredAt(now) || MayWaitLongerLocked(now)) return std::nullopt;
  return OverdueLocked();
}

// In a first init, behind its deadline.
bool SessionImpl::MayWaitLongerLocked(Instant now) const {
  if (machine_.ever_ran()) return false;
  // The ranks that the last one let wait have the budget to connect, however long it took.
  if (machine_.state() != SessionState::kJoining) return now < machine_.budget_end();
  // The service that answers has a reason to wait, and will say when there is none any more.
  return contact_ != Instant::min() && now < Deadline::After(contact_, ladder_.answer).when();
}

Status SessionImpl::OverdueLocked() const {
  const std::string where = StrCat("state ", SessionStateName(machine_.state()), ", generation ",
                                   machine_.view().generation, ", ",
                                   rank_ == kSpareRank ? "a spare" : StrCat("rank ", rank_.load()),
                                   " of ", world_size_.load());
  const Status& cause = machine_.first_cause();
  if (machine_.ever_ran()) {
    return Status(
        StatusCode::kTimeout,
        StrCat("rebuild did not finish by its deadline (", where,
               "); recovery goes on, call rebuild() again; first cause: ", cause.ToString()),
        cause.detail());
  }
  // A fence that could not be healed in time says more than that time is over.
  if (!cause.ok()) return cause;
  return Status(
      StatusCode::kJoinTimeout,
      StrCat("the world did not start within the init timeout of ",
             ToSeconds(options_.init_timeout), " s and the budget of ", ToSeconds(ladder_.budget),
             " s (", where, "), and the store gave no verdict; see its log for who is missing"));
}

Membership SessionImpl::membership() const {
  if (mark_.InChild()) return MembershipInChild();
  Lock lock(mutex_);
  return MembershipLocked();
}

Membership SessionImpl::acknowledged() const {
  if (mark_.InChild()) return MembershipInChild();
  Lock lock(mutex_);
  return acknowledged_;
}

// No lock: another thread may have held it at the fork.
Membership SessionImpl::MembershipInChild() const {
  Membership membership;
  membership.rank = rank_;
  membership.state = SessionState::kClosed;
  return membership;
}

Membership SessionImpl::MembershipLocked() const {
  const View& view = machine_.view();
  return {.state = machine_.state(),
          .life = view.life,
          .round = view.round,
          .generation = view.generation,
          .rank = rank_,
          .members = view.members,
          .fence_token = acknowledged_.fence_token,
          .world_secret = view.world_secret};
}

Status SessionImpl::failure() const {
  if (mark_.InChild()) return ForkedStatus();
  Lock lock(mutex_);
  return machine_.failure();
}

Status SessionImpl::AwaitFailure(Deadline deadline) const {
  if (mark_.InChild()) return ForkedStatus();
  Lock lock(mutex_);
  while (machine_.failure().ok() && machine_.state() != SessionState::kClosed) {
    const Instant now = clock_.Now();
    if (deadline.ExpiredAt(now)) break;
    changed_.wait_for(lock, std::min<Duration>(Millis(kInterruptPollMs), deadline.LeftAt(now)));
  }
  return machine_.failure();
}

std::optional<Incident> SessionImpl::last_incident() const {
  if (mark_.InChild()) return std::nullopt;
  Lock lock(mutex_);
  return incidents_.latest();
}

Result<SessionEvent> SessionImpl::AwaitEvent(std::uint64_t after, Deadline deadline) const {
  if (mark_.InChild()) return ForkedStatus();
  Lock lock(mutex_);
  while (true) {
    if (std::optional<SessionEvent> event = events_.Next(after)) return std::move(*event);
    if (machine_.state() == SessionState::kClosed) {
      return Status(StatusCode::kFailedPrecondition, "this session is closed: no event will come");
    }
    const Instant now = clock_.Now();
    if (deadline.ExpiredAt(now)) return Status(StatusCode::kTimeout, "no event came in time");
    changed_.wait_for(lock, std::min<Duration>(Millis(kInterruptPollMs), deadline.LeftAt(now)));
  }
}

void SessionImpl::AnnounceEnd(const std::string& why, Deadline deadline) {
  if (mark_.InChild()) return;
  Report report{.kind = ReportKind::kEnding, .status = Status(StatusCode::kRankLost, why)};
  Lock lock(mutex_);
  const auto ended = [this] {
    return machine_.state() == SessionState::kFailed || machine_.state() == SessionState::kClosed;
  };
  if (ended() || std::exchange(end_announced_, true)) return;
  report.generation = machine_.view().generation;
  lock.unlock();
  rendezvous_->Send(report);
  lock.lock();
  // The service answers that this process is out.
  while (!ended() && !deadline.ExpiredAt(clock_.Now())) {
    changed_.wait_for(lock,
                      std::min<Duration>(Millis(kInterruptPollMs), deadline.LeftAt(clock_.Now())));
  }
  if (ended()) return;
  StepFromCaller({EventKind::kSessionLost,
                  0,
                  Status(StatusCode::kStaleGeneration,
                         "this process ends, and the store has not answered: " + why),
                  {}},
                 &lock);
}

void SessionImpl::Close() {
  if (mark_.InChild()) {
    AbandonInChild();
    return;
  }
  if (!OnOwnThread()) AwaitDevices();
  {
    Lock lock(mutex_);
    StepLocked({EventKind::kClose, 0, {}, {}});
    // One of our threads cannot join itself: operations end here and now, the threads are joined
    // by the next Close or the destructor.
    if (OnOwnThread()) return;
    if (close_started_) {
      changed_.wait_for(lock, 2 * kCloseBound, [this] { return closed_; });
      return;
    }
    close_started_ = true;
  }
  WriteLines();  // The control thread, which writes them otherwise, ends.
  CloseThreads();
  Lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

// A program goes on ahead of what its devices do, and the peers need this rank's part in that.
// Until it has ended, the session lives: it tells what it waits for, and hears of losses, which end
// it.
void SessionImpl::AwaitDevices() {
  constexpr Duration kLongestLook = Millis(20);
  Lock lock(mutex_);
  const auto runs = [this] {
    return machine_.state() == SessionState::kRunning && flight_ != nullptr && !flight_->Ended();
  };
  if (!runs() || end_announced_ || close_started_ || std::exchange(leaving_, true)) return;
  const auto communicators = CommunicatorsLocked();
  const auto hold = [&communicators] {
    return std::ranges::any_of(communicators, [](const auto& one) { return one->HoldsDevice(); });
  };
  lock.unlock();
  if (!hold()) return;
  for (const auto& communicator : communicators) communicator->Leave();
  for (Duration look = Millis(1); hold(); look = std::min(2 * look, kLongestLook)) {
    if (options_.interrupt != nullptr && !options_.interrupt().ok()) return;
    lock.lock();
    if (!runs()) return;
    changed_.wait_for(lock, look);
    lock.unlock();
  }
}

void SessionImpl::CloseThreads() {
  const Instant now = clock_.Now();
  std::shared_ptr<Flight> flight;
  std::vector<std::shared_ptr<Communicator>> communicators;
  {
    Lock lock(mutex_);
    flight = flight_;
    communicators = TakeCommunicatorsLocked();
  }
  // Goodbye to the peers first: they must not take the closing links for a death.
  for (const auto& communicator : communicators) Dismiss(*communicator, flight.get());
  host_watch_.Close();
  // Before its thread ends, so that nobody takes this for a death.
  (void)rendezvous_->Post([this] { host_watch_.LetGo(); });
  rendezvous_->Close(Deadline::After(now, kCloseBound / 2));
  aborting_.clear();  // The control thread, which owned it, is gone.
  if (factory_ != nullptr) {
    std::lock_guard create_lock(create_mutex_);
    factory_->Close(Deadline::After(now, kCloseBound));
  }
}

void SessionImpl::AbandonInChild() {
  if (!abandoned_.exchange(true)) rendezvous_->AbandonInChild();
}

}  // namespace recovery

Result<std::shared_ptr<Session>> OpenSession(SessionOptions options,
                                             std::unique_ptr<Rendezvous> rendezvous,
                                             const FactoryMaker& make_factory, const Clock& clock) {
  const bool is_rank = options.rank >= 0 && options.rank < options.world_size;
  if (options.world_size < 1 || (!is_rank && options.rank != kSpareRank)) {
    return Status(StatusCode::kInvalidArgument,
                  StrCat("rank ", options.rank, " is outside a world of ", options.world_size,
                         "; ranks run from 0 to world size - 1"));
  }
  if (options.min_world < 0 || options.min_world > options.world_size) {
    return Status(StatusCode::kInvalidArgument,
                  StrCat("a world of at least ", options.min_world, " of ", options.world_size,
                         " ranks cannot be"));
  }
  RESILIENT_RETURN_IF_ERROR(recovery::CheckDeadlines(options, Duration::zero()));
  RESILIENT_RETURN_IF_ERROR(CheckNcclOptions(options.nccl));
  if (rendezvous == nullptr || !make_factory) {
    return Status(StatusCode::kInvalidArgument,
                  "a session needs a rendezvous and a communicator factory");
  }
  const bool replay = options.replay;
  const Ladder ladder = LadderOf(options.budget, options.seat_wait);
  std::shared_ptr<recovery::SessionImpl> session(
      new recovery::SessionImpl(std::move(options), std::move(rendezvous), clock),
      recovery::SessionDeleter());
  RESILIENT_RETURN_IF_ERROR(session->MakeFactory(make_factory));
  if (replay) return recovery::WithReplay(std::move(session), ladder, clock);
  return std::shared_ptr<Session>(std::move(session));
}

}  // namespace resilient
