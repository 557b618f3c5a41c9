#include "runtime/recovery/state_machine.h"

#include <algorithm>
#include <string>

namespace resilient {

std::string_view SessionStateName(SessionState state) {
  switch (state) {
    case SessionState::kInit:
      return "INIT";
    case SessionState::kJoining:
      return "JOINING";
    case SessionState::kBuilding:
      return "BUILDING";
    case SessionState::kReady:
      return "READY";
    case SessionState::kRunning:
      return "RUNNING";
    case SessionState::kAborting:
      return "ABORTING";
    case SessionState::kFenced:
      return "FENCED";
    case SessionState::kFailed:
      return "FAILED";
    case SessionState::kClosed:
      return "CLOSED";
  }
  return "UNKNOWN";
}

namespace recovery {
namespace {

using StateSet = std::uint32_t;

template <typename... States>
constexpr StateSet In(States... states) {
  return ((StateSet{1} << static_cast<int>(states)) | ...);
}

constexpr SessionState kInit = SessionState::kInit;
constexpr SessionState kJoining = SessionState::kJoining;
constexpr SessionState kBuilding = SessionState::kBuilding;
constexpr SessionState kReady = SessionState::kReady;
constexpr SessionState kRunning = SessionState::kRunning;
constexpr SessionState kAborting = SessionState::kAborting;
constexpr SessionState kFenced = SessionState::kFenced;
constexpr SessionState kFailed = SessionState::kFailed;
constexpr SessionState kClosed = SessionState::kClosed;

constexpr StateSet kHasCommunicators = In(kBuilding, kReady, kRunning);
constexpr StateSet kRecovering = In(kJoining, kBuilding, kReady, kAborting);
constexpr StateSet kLive = kRecovering | In(kInit, kRunning, kFenced);

}  // namespace

struct StateMachine::Row {
  StateSet from;
  EventKind on;
  bool (StateMachine::*when)(const Event&, Instant) const;  // Null: always.
  SessionState to;
  bool stays;                                            // `to` does not count: the state is kept.
  void (StateMachine::*effect)(const Event&, Actions*);  // Null: nothing to do.
};

const StateMachine::Row* StateMachine::FindRow(const StateMachine& machine, const Event& event,
                                               Instant now) {
  using M = StateMachine;
  using K = EventKind;
  // The first row that matches counts.
  static constexpr Row kRows[] = {
      // The user asked for it; the join carries no generation yet.
      {In(kInit), K::kInit, nullptr, kJoining, false, &M::Join},

      // The join is complete.
      {In(kJoining), K::kView, &M::IsNewerView, kBuilding, false, &M::Build},
      // The service moved on and its fence was missed: what runs here is over all the same.
      {kHasCommunicators, K::kView, &M::IsNewerView, kAborting, false, &M::AbortForView},
      // Memory of the old generation may still be in use: build when it is quiet.
      {In(kAborting), K::kView, &M::IsNewerView, kAborting, true, &M::KeepView},

      // The links are up; operations wait for all others, and for the acknowledgement.
      {In(kBuilding), K::kBuilt, &M::IsThisView, kReady, false, &M::Ready},
      // A rank cannot build alone another way: the service ends the generation for all.
      {In(kBuilding), K::kBuildFailed, &M::IsThisView, kBuilding, true, &M::ReportBuild},

      // All members are ready, and this one has acknowledged or had nothing to.
      {In(kReady), K::kRunning, &M::OpensGate, kRunning, false, &M::Open},
      // All members are ready, but nobody here has acknowledged the fence yet.
      {In(kReady), K::kRunning, &M::IsThisView, kReady, true, &M::NoteRunning},
      // The acknowledgement was all that was missing.
      {In(kReady), K::kAcknowledge, &M::OpensRunningWorld, kRunning, false, &M::Open},
      // The join that is under way asks for another world than the caller.
      {In(kJoining), K::kAcknowledge, &M::WishChanged, kJoining, true, &M::AcknowledgeAndJoin},
      // Recovery goes on by itself; the gate will open at its end.
      {kRecovering, K::kAcknowledge, nullptr, kInit, true, &M::Acknowledge},
      // A refused join may be tried again, once for each Rebuild.
      {In(kFenced), K::kAcknowledge, nullptr, kJoining, false, &M::AcknowledgeAndJoin},
      // Nobody waits any more: the gate must not open behind the caller's back.
      {kRecovering | In(kFenced), K::kWithdraw, nullptr, kInit, true, &M::Withdraw},

      // The generation is over: every operation of it fails, then this rank joins by itself.
      {kHasCommunicators, K::kFence, &M::EndsThisView, kAborting, false, &M::AbortForFence},
      // One more generation ended meanwhile: only the number to join above changes.
      {In(kAborting, kFenced), K::kFence, &M::EndsMore, kInit, true, &M::RaiseEnded},
      // The world that this join had got into ended before its view arrived: join the next.
      {In(kJoining), K::kFence, &M::EndsMore, kJoining, true, &M::JoinAgain},

      // A newer view is already here.
      {In(kAborting), K::kQuiet, &M::QuietWithView, kBuilding, false, &M::BuildPending},
      // Nothing touches user memory any more: come back, keeping the lease.
      {In(kAborting), K::kQuiet, &M::IsThisView, kJoining, false, &M::Join},

      // Seat not filled in time, duplicate, wrong size: the user decides what next.
      {In(kJoining), K::kJoinRefused, &M::IsThisJoin, kFenced, false, &M::Refuse},
      // The service gave this process up; it can never come back as the same session.
      {kLive, K::kSessionLost, nullptr, kFailed, false, &M::Lose},
      // The last rung of the ladder.
      {kRecovering, K::kTick, &M::BudgetIsSpent, kFailed, false, &M::GiveUp},
      // The rung before it: this try takes so long that another one may do better.
      {In(kBuilding), K::kTick, &M::BuildIsOverdue, kBuilding, true, &M::ReportOverdue},
      // Always possible, always final.
      {kLive | In(kFailed), K::kClose, nullptr, kClosed, false, nullptr},
  };
  for (const Row& row : kRows) {
    if (row.on != event.kind || (row.from & In(machine.state_)) == 0) continue;
    if (row.when == nullptr || (machine.*row.when)(event, now)) return &row;
  }
  return nullptr;
}

std::vector<Action> StateMachine::Step(const Event& event, Instant now) {
  Actions actions;
  const Row* row = FindRow(*this, event, now);
  if (row == nullptr) return actions;
  if (row->effect != nullptr) (this->*row->effect)(event, &actions);
  if (!row->stays) state_ = row->to;
  AccountTime(now);
  return actions;
}

Status StateMachine::failure() const {
  if (state_ == kFenced || state_ == kFailed || ever_ran()) return first_cause_;
  return Status::Ok();
}

Instant StateMachine::budget_end() const {
  if (machine_since_ == kNever) return kNever;
  return Deadline::After(machine_since_, std::max(ladder_.budget - machine_time_, Duration::zero()))
      .when();
}

bool StateMachine::IsNewerView(const Event& event, Instant) const {
  return event.view.generation > std::max({ended_, view_.generation, pending_view_.generation});
}

bool StateMachine::IsThisView(const Event& event, Instant) const {
  return event.generation == view_.generation;
}

// A fence of an older generation is late news. One of a newer generation ends this one as well.
bool StateMachine::EndsThisView(const Event& event, Instant) const {
  return event.generation >= view_.generation;
}

bool StateMachine::EndsMore(const Event& event, Instant) const { return event.generation > ended_; }

bool StateMachine::OpensGate(const Event& event, Instant now) const {
  return IsThisView(event, now) && acknowledged_;
}

bool StateMachine::OpensRunningWorld(const Event&, Instant) const { return world_running_; }

bool StateMachine::WishChanged(const Event& event, Instant) const { return event.wish_changed; }

// An earlier one may have asked for another world.
bool StateMachine::IsThisJoin(const Event& event, Instant) const { return event.join == joins_; }

bool StateMachine::QuietWithView(const Event& event, Instant now) const {
  return IsThisView(event, now) && pending_view_.generation > ended_;
}

// A first init is bounded by its caller, who knows the init timeout.
bool StateMachine::BudgetIsSpent(const Event&, Instant now) const {
  return ever_ran() && now >= budget_end();
}

// Once a try. Not in a first init, where all ranks may have a slow start.
bool StateMachine::BuildIsOverdue(const Event&, Instant now) const {
  return ever_ran() && !build_reported_ &&
         now >= Deadline::After(build_since_, ladder_.build).when();
}

void StateMachine::Join(const Event&, Actions* actions) {
  const std::uint64_t known = std::max(ended_, view_.generation);
  actions->push_back({ActionKind::kSendJoin, known, {}, {}, ++joins_});
}

void StateMachine::JoinAgain(const Event& event, Actions* actions) {
  RaiseEnded(event, actions);
  Join(event, actions);
}

void StateMachine::Build(const Event& event, Actions* actions) {
  view_ = event.view;
  pending_view_ = {};
  world_running_ = false;
  actions->push_back({ActionKind::kBuildWorld, view_.generation, {}, view_});
}

void StateMachine::BuildPending(const Event& event, Actions* actions) {
  Event arrived{.kind = EventKind::kView,
                .generation = event.generation,
                .status = {},
                .view = std::move(pending_view_)};
  Build(arrived, actions);
}

void StateMachine::KeepView(const Event& event, Actions*) { pending_view_ = event.view; }

void StateMachine::AbortForView(const Event& event, Actions* actions) {
  FailureDetail detail;
  detail.generation = view_.generation;
  const Status cause(StatusCode::kCommFailed,
                     "generation " + std::to_string(view_.generation) +
                         " ended without word to this rank: the membership service is at "
                         "generation " +
                         std::to_string(event.view.generation) +
                         "; the group is being rebuilt, call rebuild()",
                     std::move(detail));
  AbortForFence({EventKind::kFence, view_.generation, cause, {}}, actions);
  pending_view_ = event.view;
}

void StateMachine::Ready(const Event&, Actions* actions) {
  actions->push_back({ActionKind::kSendReady, view_.generation, {}, {}});
}

void StateMachine::ReportBuild(const Event& event, Actions* actions) {
  actions->push_back({ActionKind::kReportBuildFailed, view_.generation, event.status, {}});
}

void StateMachine::ReportOverdue(const Event&, Actions* actions) {
  build_reported_ = true;
  FailureDetail detail;
  detail.generation = view_.generation;
  const std::string generation = std::to_string(view_.generation);
  const Status why(StatusCode::kCommFailed,
                   "generation " + generation + " was not built on this rank within " +
                       std::to_string(std::chrono::ceil<Millis>(ladder_.build).count()) +
                       " ms, its share of RESILIENT_BUDGET: links to other ranks do not come up; "
                       "it is tried again in the next generation",
                   std::move(detail));
  actions->push_back({ActionKind::kReportBuildFailed, view_.generation, why, {}});
}

void StateMachine::Open(const Event&, Actions* actions) {
  world_running_ = true;
  ++openings_;
  first_cause_ = Status::Ok();
  machine_time_ = Duration::zero();
  actions->push_back({ActionKind::kOpenGate, view_.generation, {}, {}});
}

void StateMachine::NoteRunning(const Event&, Actions*) { world_running_ = true; }

void StateMachine::Acknowledge(const Event&, Actions*) { acknowledged_ = true; }

void StateMachine::AcknowledgeAndJoin(const Event& event, Actions* actions) {
  acknowledged_ = true;
  Join(event, actions);
}

void StateMachine::Withdraw(const Event&, Actions*) { acknowledged_ = !ever_ran(); }

void StateMachine::AbortForFence(const Event& event, Actions* actions) {
  if (state_ == kRunning) {
    acknowledged_ = false;
    machine_time_ = Duration::zero();
  }
  NoteCause(event.status);
  RaiseEnded(event, actions);
  // The first cause also for the communicators of a generation that ended before its gate opened:
  // its operations, if any, tell the caller what they would tell on any other group.
  actions->push_back({ActionKind::kAbortCommunicators, view_.generation, first_cause_, {}});
}

void StateMachine::RaiseEnded(const Event& event, Actions*) {
  ended_ = std::max(ended_, event.generation);
  world_running_ = false;
  // Another loss is another failure and has a budget of its own; a build that failed is another
  // try of the same recovery, so that ranks which cannot reach each other do not try for ever.
  if (event.status.code() == StatusCode::kRankLost) {
    machine_time_ = Duration::zero();
    machine_since_ = kNever;
  }
}

void StateMachine::Refuse(const Event& event, Actions*) {
  // In a first init the refusal is the answer to the caller; later it is a consequence. So it is of
  // a mismatch, behind which the other rank has given up.
  if (!ever_ran() && first_cause_.code() != StatusCode::kMismatch) first_cause_ = Status::Ok();
  NoteCause(event.status);
}

void StateMachine::Lose(const Event& event, Actions* actions) {
  // Being out of date, or without a device, is a verdict about this very process and hides what
  // happened to others.
  const StatusCode code = event.status.code();
  if (code == StatusCode::kStaleGeneration || code == StatusCode::kDeviceLost ||
      code == StatusCode::kDeviceStalled || event.has_first_cause) {
    first_cause_ = Status::Ok();
  }
  NoteCause(event.status);
  GiveUp(event, actions);
}

void StateMachine::GiveUp(const Event&, Actions* actions) {
  if ((kHasCommunicators & In(state_)) != 0) {
    actions->push_back({ActionKind::kAbortCommunicators, view_.generation, first_cause_, {}});
  }
  actions->push_back({ActionKind::kFail, view_.generation, first_cause_, {}});
}

void StateMachine::NoteCause(const Status& cause) {
  if (first_cause_.ok()) first_cause_ = cause;
}

bool StateMachine::UsesMachineTime() const {
  return state_ == kAborting || state_ == kBuilding || (state_ == kReady && !world_running_);
}

void StateMachine::AccountTime(Instant now) {
  if (UsesMachineTime()) {
    if (machine_since_ == kNever) machine_since_ = now;
  } else if (machine_since_ != kNever) {
    machine_time_ += now - machine_since_;
    machine_since_ = kNever;
  }
  if (state_ == kRunning) machine_time_ = Duration::zero();
  if (state_ != kBuilding) {
    build_since_ = kNever;
    build_reported_ = false;
  } else if (build_since_ == kNever) {
    build_since_ = now;
  }
}

}  // namespace recovery
}  // namespace resilient
