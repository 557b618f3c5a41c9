#include "tests/sim/sim_session.h"

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"

namespace resilient::store::sim {
namespace {

using recovery::Action;
using recovery::ActionKind;
using recovery::EventKind;
using recovery::Flight;
// Beside the Event of the store.
using MachineEvent = recovery::Event;

constexpr Duration kPoll = Millis(250);
constexpr Duration kLinkReportInterval = std::chrono::seconds(1);
// So long a fault of before may still keep a recovery up.
constexpr Duration kStillFelt = std::chrono::seconds(10);
constexpr int kBuildFailsPercent = 1;    // At once.
constexpr int kConnectFailsPercent = 1;  // After a while.

struct Edge {
  EventKind on;
  SessionState from;
  SessionState to;
};

// Every move there is, but for kSessionLost and kClose, which may come at any time.
constexpr Edge kEdges[] = {
    {EventKind::kInit, SessionState::kInit, SessionState::kJoining},
    {EventKind::kView, SessionState::kJoining, SessionState::kBuilding},
    {EventKind::kJoinRefused, SessionState::kJoining, SessionState::kFenced},
    {EventKind::kBuilt, SessionState::kBuilding, SessionState::kReady},
    {EventKind::kRunning, SessionState::kReady, SessionState::kRunning},
    {EventKind::kAcknowledge, SessionState::kReady, SessionState::kRunning},
    {EventKind::kAcknowledge, SessionState::kFenced, SessionState::kJoining},
    {EventKind::kFence, SessionState::kBuilding, SessionState::kAborting},
    {EventKind::kFence, SessionState::kReady, SessionState::kAborting},
    {EventKind::kFence, SessionState::kRunning, SessionState::kAborting},
    {EventKind::kView, SessionState::kBuilding, SessionState::kAborting},
    {EventKind::kView, SessionState::kReady, SessionState::kAborting},
    {EventKind::kView, SessionState::kRunning, SessionState::kAborting},
    {EventKind::kQuiet, SessionState::kAborting, SessionState::kJoining},
    {EventKind::kQuiet, SessionState::kAborting, SessionState::kBuilding},
    {EventKind::kTick, SessionState::kJoining, SessionState::kFailed},
    {EventKind::kTick, SessionState::kBuilding, SessionState::kFailed},
    {EventKind::kTick, SessionState::kReady, SessionState::kFailed},
    {EventKind::kTick, SessionState::kAborting, SessionState::kFailed},
};

bool HasCommunicators(SessionState state) {
  return state == SessionState::kBuilding || state == SessionState::kReady ||
         state == SessionState::kRunning;
}

Status Closed() { return Status(StatusCode::kFailedPrecondition, "the session is closed"); }

}  // namespace

SimSession::SimSession(Duration budget, Duration seat_wait, const SimWish& first, Planted planted,
                       SessionHost host)
    : budget_(budget),
      seat_wait_(seat_wait),
      planted_(planted),
      host_(std::move(host)),
      machine_(LadderOf(budget)),
      wish_(first) {
  promises_.wishes.push_back(first);
}

// ---- Callers ----

void SimSession::Init(Done done) {
  StepFromCaller({EventKind::kInit, 0, {}, {}});
  Look(StartWaiting(Deadline::Never(), 0, [this, done = std::move(done)](const Status& status) {
    if (!status.ok()) Close();
    done(status);
  }));
}

void SimSession::Rebuild(Duration timeout, const SimWish& wish, Done done) {
  AwaitFenceOfBroken(Deadline::After(host_.now(), timeout), wish, std::move(done));
}

// What is broken must not be taken for rebuilt: its fence is on its way.
void SimSession::AwaitFenceOfBroken(Deadline deadline, const SimWish& wish, Done done) {
  const bool due = running() && flight_ && flight_->IsBroken() && !flight_->Ended();
  if (!due) return Acknowledge(deadline, wish, std::move(done));
  const Instant now = host_.now();
  if (deadline.ExpiredAt(now)) return done(Status(StatusCode::kTimeout, "its fence did not come"));
  host_.after(
      std::min(kPoll, deadline.LeftAt(now)),
      [this, deadline, wish, done = std::move(done)] { AwaitFenceOfBroken(deadline, wish, done); });
}

void SimSession::Acknowledge(Deadline deadline, const SimWish& wish, Done done) {
  if (running()) return done(Status::Ok());
  if (state() == SessionState::kClosed) return done(Closed());
  ++rebuild_waiters_;
  promises_.must_acknowledge = false;
  const std::uint64_t openings_before = machine_.openings();
  promises_.wishes.push_back(wish);
  MachineEvent acknowledge{EventKind::kAcknowledge, 0, {}, {}};
  acknowledge.wish_changed = wish != std::exchange(wish_, wish);
  StepFromCaller(acknowledge);
  const auto over = [this, done = std::move(done)](const Status& status) {
    --rebuild_waiters_;
    // The gate may have opened since the wait ended.
    if (running()) return done(Status::Ok());
    if (rebuild_waiters_ == 0) {
      promises_.must_acknowledge = machine_.ever_ran();
      if (planted_ != Planted::kNotWithdrawn) Step({EventKind::kWithdraw, 0, {}, {}});
    }
    done(status);
  };
  Look(StartWaiting(deadline, openings_before, over));
}

std::shared_ptr<SimSession::Waiter> SimSession::StartWaiting(Deadline deadline,
                                                             std::uint64_t openings_before,
                                                             Done done) {
  waiters_.push_back(
      std::make_shared<Waiter>(Waiter{deadline, openings_before, std::move(done), false}));
  host_.after(kPoll, [this, waiter = waiters_.back()] { Poll(waiter); });
  return waiters_.back();
}

void SimSession::Look(const std::shared_ptr<Waiter>& waiter) {
  if (waiter->ended) return;
  StepFromCaller({EventKind::kTick, 0, {}, {}});
  const std::optional<Status> verdict = Verdict(*waiter);
  if (!verdict) return;
  waiter->ended = true;
  std::erase(waiters_, waiter);
  // The lock is given up in between, and anything may happen.
  host_.after(host_.between(0, 3), [waiter, status = *verdict] { waiter->done(status); });
}

void SimSession::Poll(const std::shared_ptr<Waiter>& waiter) {
  Look(waiter);
  if (!waiter->ended) host_.after(kPoll, [this, waiter] { Poll(waiter); });
}

void SimSession::WakeWaiters() {
  for (const std::shared_ptr<Waiter>& waiter : waiters_) {
    host_.after(host_.between(0, 3), [this, waiter] { Look(waiter); });
  }
}

std::optional<Status> SimSession::Verdict(const Waiter& waiter) const {
  if (state() == SessionState::kClosed) return Closed();
  if (state() == SessionState::kFailed) return machine_.first_cause();
  if (machine_.openings() > waiter.openings_before) return Status::Ok();
  if (state() == SessionState::kFenced) return machine_.first_cause();
  if (!waiter.deadline.ExpiredAt(host_.now())) return std::nullopt;
  return Status(StatusCode::kTimeout, "rebuild did not finish by its deadline");
}

void SimSession::Close() {
  Step({EventKind::kClose, 0, {}, {}});
  actions_.clear();
}

// ---- Operations ----

Result<std::shared_ptr<Flight>> SimSession::Enter() {
  // Nobody may be waiting in Rebuild to notice that the budget is spent.
  if (!running()) StepFromCaller({EventKind::kTick, 0, {}, {}});
  const bool open = planted_ == Planted::kGateNotAsked ? flight_ && !flight_->Ended() : running();
  if (!open) {
    const Status cause = machine_.failure();
    return cause.ok() ? Closed() : cause;
  }
  if (promises_.must_acknowledge) {
    host_.violated("an operation was accepted before its fence was acknowledged");
  }
  flight_->Enter();
  ++promises_.in_flight[flight_->generation()];
  return flight_;
}

Status SimSession::Outcome(Flight& flight, const Status& status) const {
  if (status.ok() && planted_ == Planted::kOldOperationCompletes) return status;
  if (!status.ok() && status.code() == StatusCode::kCommFailed) flight.NoteBroken();
  return flight.Ended() ? flight.cause() : status;
}

void SimSession::Leave(Flight& flight) {
  --promises_.in_flight[flight.generation()];
  if (flight.Leave() || planted_ == Planted::kQuietUnchecked) PostQuietCheck();
}

bool SimSession::AbortGroup() {
  if (!running() || flight_->Ended()) return false;
  const Status cause =
      Status(StatusCode::kCommFailed, "the group was aborted").WithOperation("world", 0, "abort()");
  host_.report({ReportKind::kCommFailed, flight_->generation(), -1, cause});
  return true;
}

void SimSession::OnLinkLost(std::uint64_t generation, int rank, const Status& why) {
  if (!IsPresent(generation)) return;
  if (std::exchange(link_reports_generation_, generation) != generation) link_reports_.clear();
  const Instant now = host_.now();
  const auto last = link_reports_.find(rank);
  if (last != link_reports_.end() && now - last->second < kLinkReportInterval) return;
  link_reports_[rank] = now;
  host_.report({ReportKind::kLinkLost, generation, rank, why});
}

void SimSession::ReportNeed(std::uint64_t generation, int rank, const std::string& what) {
  if (!IsPresent(generation)) return;
  host_.report({ReportKind::kNeedsLeaver, generation, rank, Status(StatusCode::kLeft, what)});
}

bool SimSession::IsPresent(std::uint64_t generation) const {
  return flight_ && flight_->generation() == generation && !flight_->Ended() &&
         state() != SessionState::kClosed;
}

bool SimSession::WasAsked(const SimWish& wish) const {
  const std::vector<SimWish>& asked = promises_.wishes;
  return std::find(asked.begin(), asked.end(), wish) != asked.end();
}

// ---- What the membership service says ----

void SimSession::OnView(const View& view) { Apply({EventKind::kView, view.generation, {}, view}); }

void SimSession::OnRunning(std::uint64_t generation) {
  promises_.said_running = generation;
  if (planted_ == Planted::kOpensUnasked) Step({EventKind::kAcknowledge, 0, {}, {}});
  Apply({EventKind::kRunning, generation, {}, {}});
}

void SimSession::OnFence(const Fence& fence) {
  promises_.fenced = std::max(promises_.fenced, fence.generation);
  const bool builds = state() == SessionState::kBuilding;
  if (builds && planted_ == Planted::kFenceIgnoredInBuilding) return CheckFenceIsHeeded();
  Apply({EventKind::kFence, fence.generation, fence.cause, {}});
  CheckFenceIsHeeded();
}

void SimSession::OnJoinRefused(std::uint64_t join, const Status& why) {
  MachineEvent refused{EventKind::kJoinRefused, 0, why, {}};
  refused.join = planted_ == Planted::kRefusalOfAnyJoin ? promises_.join : join;
  const bool joins = state() == SessionState::kJoining;
  Apply(refused);
  if (joins && state() == SessionState::kFenced && join != promises_.join) {
    host_.violated(StrCat("the refusal of join ", join, " ended a rebuild that had sent join ",
                          promises_.join));
  }
}

void SimSession::OnSessionLost(const Status& why) { Apply({EventKind::kSessionLost, 0, why, {}}); }

// ---- The machine ----

void SimSession::Step(const MachineEvent& event) {
  const SessionState from = state();
  const std::uint64_t openings_before = machine_.openings();
  const std::uint64_t ended_before = machine_.ended_generation();
  for (Action& action : machine_.Step(event, host_.now())) {
    if (action.kind == ActionKind::kSendJoin) promises_.join = action.join;
    const bool opens = action.kind == ActionKind::kOpenGate;
    if (opens && planted_ != Planted::kWishKept) wish_ = {0, seat_wait_};
    // The two that operations must see at once.
    if (action.kind == ActionKind::kBuildWorld) {
      host_.take_place(action.view);
      flight_ = std::make_shared<Flight>(action.generation);
    }
    if (action.kind == ActionKind::kAbortCommunicators && flight_) flight_->End(action.cause);
    actions_.push_back(std::move(action));
  }
  CheckStep(event, from, openings_before, ended_before);
  if (state() == from) return;
  WakeWaiters();
  host_.entered(state());
}

// What it asks for is done by the control thread, in its time.
void SimSession::StepFromCaller(const MachineEvent& event) {
  Step(event);
  if (!actions_.empty()) host_.after(host_.between(0, 3), [this] { Drain(); });
}

void SimSession::Apply(const MachineEvent& event) {
  Step(event);
  Drain();
}

void SimSession::Drain() {
  while (!actions_.empty()) {
    const Action action = std::move(actions_.front());
    actions_.pop_front();
    Perform(action);
  }
}

void SimSession::Perform(const Action& action) {
  switch (action.kind) {
    case ActionKind::kSendJoin:
      return host_.join(action.generation, action.join, wish_);
    case ActionKind::kBuildWorld:
      return BuildWorld(action.view);
    case ActionKind::kAbortCommunicators:
      return AbortCommunicators(action.cause);
    case ActionKind::kSendReady:
      if (promises_.built != action.generation) host_.violated("ready for what is not built");
      return host_.ready(action.generation);
    case ActionKind::kReportBuildFailed:
      return host_.report({ReportKind::kCommFailed, action.generation, -1, action.cause});
    case ActionKind::kOpenGate:
    case ActionKind::kFail:
      return;  // The state alone lets operations in, and says so to callers.
  }
}

// The links take their time, and now and then cannot be made.
void SimSession::BuildWorld(const View& view) {
  if (state() == SessionState::kClosed) return;
  CheckNothingInFlight("is built");
  if (!host_.is_peace() && host_.chance(kBuildFailsPercent)) {
    const Status failed(StatusCode::kCommFailed, "the communicator could not be made");
    return Step({EventKind::kBuildFailed, view.generation, failed, {}});  // Drain goes on.
  }
  const Duration takes = host_.between(0, host_.chance(20) ? 600 : 150);
  host_.after(takes, [this, flight = flight_] { Connect(flight); });
}

void SimSession::Connect(const std::shared_ptr<Flight>& flight) {
  if (flight->cell()->IsSet() || state() == SessionState::kClosed) return;
  const std::uint64_t generation = flight->generation();
  if (!host_.is_peace() && host_.chance(kConnectFailsPercent)) {
    if (!IsPresent(generation)) return;
    const Status stalled(StatusCode::kCommFailed, "a link cannot be made");
    return host_.report({ReportKind::kCommFailed, generation, -1, stalled});
  }
  promises_.built = std::max(promises_.built, generation);
  // It is over by then, perhaps.
  host_.after(host_.between(0, 20), [this, generation] {
    Apply({EventKind::kBuilt, generation, {}, {}});
  });
}

void SimSession::AbortCommunicators(const Status& cause) {
  if (flight_) {
    flight_->cell()->Set(cause);
    host_.abort(*flight_);
    if (planted_ == Planted::kBuildsBeforeQuiet) {
      Step({EventKind::kQuiet, flight_->generation(), {}, {}});
    }
  }
  CheckQuiet();
}

void SimSession::PostQuietCheck() {
  host_.after(host_.between(0, 3), [this] {
    CheckQuiet();
    Drain();
  });
}

void SimSession::CheckQuiet() {
  const bool unchecked = planted_ == Planted::kQuietUnchecked && flight_ && flight_->Ended();
  if (!flight_ || !(flight_->IsQuiet() || unchecked)) return;
  Step({EventKind::kQuiet, flight_->generation(), {}, {}});
}

// ---- What must hold ----

void SimSession::CheckStep(const MachineEvent& event, SessionState from,
                           std::uint64_t openings_before, std::uint64_t ended_before) {
  const SessionState to = state();
  CheckEdge(event.kind, from, to);
  if (from == SessionState::kRunning && to == SessionState::kAborting) {
    promises_.must_acknowledge = true;
  }
  if (machine_.openings() != openings_before) {
    const bool first = openings_before == 0;
    if (promises_.must_acknowledge || (!first && rebuild_waiters_ == 0)) {
      host_.violated("the gate was opened, and no caller has acknowledged the fence and waits");
    }
    promises_.wishes.clear();
    if (promises_.said_running != generation() || promises_.built != generation()) {
      host_.violated("the gate was opened before all were ready");
    }
  }
  AccountTime(event, from, ended_before);
  if (from == SessionState::kAborting && event.kind == EventKind::kQuiet && to != from) {
    CheckNothingInFlight("is said to be quiet");
  }
  if (event.kind == EventKind::kTick && machine_.ever_ran()) CheckBudget(from, to);
}

void SimSession::CheckEdge(EventKind event, SessionState from, SessionState to) {
  if (from == to) return;
  bool known = std::any_of(std::begin(kEdges), std::end(kEdges), [&](const Edge& edge) {
    return edge.on == event && edge.from == from && edge.to == to;
  });
  if (event == EventKind::kClose) known = to == SessionState::kClosed;
  if (event == EventKind::kSessionLost) known = to == SessionState::kFailed;
  if (from == SessionState::kClosed) known = false;
  if (from == SessionState::kFailed && event != EventKind::kClose) known = false;
  if (known) return;
  host_.violated(StrCat("no edge leads from ", SessionStateName(from), " to ", SessionStateName(to),
                        " by event ", static_cast<int>(event)));
}

// The machine's time runs while it, or a peer, has something to do; neither while a seat is empty
// nor while nobody acknowledges.
void SimSession::AccountTime(const MachineEvent& event, SessionState from,
                             std::uint64_t ended_before) {
  const Instant now = host_.now();
  const bool works = from == SessionState::kAborting || from == SessionState::kBuilding ||
                     (from == SessionState::kReady && !promises_.all_ready);
  if (works) promises_.machine_time += now - promises_.last_step;
  promises_.last_step = now;
  promises_.all_ready = promises_.said_running == generation();
  const bool lost = event.kind == EventKind::kFence && machine_.ended_generation() > ended_before &&
                    event.status.code() == StatusCode::kRankLost;
  if (from != SessionState::kRunning && !lost) return;
  promises_.machine_time = Duration::zero();
  promises_.began_in_peace = host_.is_peace();
}

// It gives up when its budget is spent, not before and not later; in peace no recovery takes so
// long.
void SimSession::CheckBudget(SessionState from, SessionState to) {
  const bool works = to == SessionState::kAborting || to == SessionState::kBuilding ||
                     (to == SessionState::kReady && !promises_.all_ready);
  const bool spent = promises_.machine_time >= budget_;
  if (works && spent) host_.violated("a recovery goes on, and its budget is spent");
  if (to != SessionState::kFailed || from == to) return;
  if (!spent) host_.violated("recovery was given up before its budget was spent");
  if (promises_.began_in_peace && budget_ > kStillFelt) {
    host_.violated("recovery was given up without any fault");
  }
}

void SimSession::CheckNothingInFlight(const char* what) {
  for (const auto& [generation, count] : promises_.in_flight) {
    if (count == 0) continue;
    return host_.violated(StrCat("generation ", this->generation(), " ", what, " while ", count,
                                 " operations of generation ", generation, " are in flight"));
  }
}

void SimSession::CheckFenceIsHeeded() {
  if (!HasCommunicators(state()) || promises_.fenced < generation()) return;
  host_.violated(StrCat("generation ", generation(), " goes on in ", SessionStateName(state()),
                        " behind its fence"));
}

}  // namespace resilient::store::sim
