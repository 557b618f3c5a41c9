#pragma once

#include <cstdint>
#include <vector>

#include <resilient/clock.h>
#include <resilient/ladder.h>
#include <resilient/rendezvous.h>
#include <resilient/session.h>
#include <resilient/status.h>

namespace resilient::recovery {

enum class EventKind : std::uint8_t {
  kInit,         // The user wants into the world.
  kView,         // The membership service: who is in the world now.
  kBuilt,        // All links of the world's communicator are up.
  kBuildFailed,  // The world's communicator cannot be built from that view.
  kRunning,      // The membership service: all members are ready.
  kFence,        // The membership service: the generation is over.
  kQuiet,        // No operation of the fenced generation is in flight any more.
  kJoinRefused,  // The membership service: no world for this join.
  kSessionLost,  // This process is out.
  kAcknowledge,  // A caller waits in Rebuild: it knows of the fence.
  kWithdraw,     // The last caller gave up waiting in Rebuild.
  kTick,         // Time passed.
  kClose,
};
inline constexpr int kEventKinds = static_cast<int>(EventKind::kClose) + 1;
inline constexpr int kSessionStates = static_cast<int>(SessionState::kClosed) + 1;

// What happened. `generation` for kBuilt, kBuildFailed, kRunning, kFence, kQuiet; `status` for
// kBuildFailed, kFence, kJoinRefused, kSessionLost; `view` for kView; `wish_changed` for
// kAcknowledge: a join that was sent asks for something else than the caller. Thread: value type.
struct Event {
  EventKind kind = EventKind::kTick;
  std::uint64_t generation = 0;
  Status status;
  View view;
  bool wish_changed = false;
  std::uint64_t join = 0;        // Of kJoinRefused: which one that is.
  bool has_first_cause = false;  // Of kSessionLost: `status` tells what it followed, too.
};

enum class ActionKind : std::uint8_t {
  kSendJoin,    // Ask for a view, `join`; `generation` is the last one this session knows of.
  kBuildWorld,  // Make the world's communicator from `view`.
  kAbortCommunicators,  // End everything of `generation` with `cause`, then say kQuiet.
  kSendReady,           // Tell the service that `generation` is built here.
  kReportBuildFailed,   // Tell the service that `generation` cannot be built here (`cause`).
  kOpenGate,            // Operations are accepted at `generation`.
  kFail,                // Recovery is exhausted: every call returns `cause`.
};

// What the shell has to do, in order. Thread: value type.
struct Action {
  ActionKind kind = ActionKind::kFail;
  std::uint64_t generation = 0;
  Status cause;
  View view;
  std::uint64_t join = 0;
};

// Where one session stands between fences: every transition is a row of one table in the .cc file,
// and an event without a row changes nothing. Owner: SessionImpl. Thread: caller-synchronised.
// Pure: time arrives as an argument.
class StateMachine {
 public:
  // Its budget bounds the machine time of one recovery: aborting and building count, waiting for
  // seats to be filled and for an acknowledgement does not. Deadlines are seen by kTick alone.
  explicit StateMachine(const Ladder& ladder) : ladder_(ladder) {}

  std::vector<Action> Step(const Event& event, Instant now);

  SessionState state() const { return state_; }
  // The latest view; its generation is 0 before the first.
  const View& view() const { return view_; }
  // Highest generation known to be over; 0 when none is.
  std::uint64_t ended_generation() const { return ended_; }
  // How often the gate was opened. Who waits for it compares numbers, for by the time a waiter
  // looks the next fence may have shut it again.
  std::uint64_t openings() const { return openings_; }
  // True once operations were accepted in any generation.
  bool ever_ran() const { return openings_ > 0; }
  // The cause that calls return while the gate is shut by a fence, a refusal or exhaustion. OK when
  // the gate is open, and during a first init, where nothing has run that could be poisoned.
  Status failure() const;
  // The first cause since the gate was last open, whether callers see it or not.
  const Status& first_cause() const { return first_cause_; }
  // When kTick will give up; kNever while no machine time is being used.
  Instant budget_end() const;

 private:
  using Actions = std::vector<Action>;
  struct Row;
  static const Row* FindRow(const StateMachine& machine, const Event& event, Instant now);

  // Guards.
  bool IsNewerView(const Event& event, Instant now) const;
  bool IsThisView(const Event& event, Instant now) const;
  bool EndsThisView(const Event& event, Instant now) const;
  bool EndsMore(const Event& event, Instant now) const;
  bool OpensGate(const Event& event, Instant now) const;
  bool OpensRunningWorld(const Event& event, Instant now) const;
  bool WishChanged(const Event& event, Instant now) const;
  bool IsThisJoin(const Event& event, Instant now) const;
  bool QuietWithView(const Event& event, Instant now) const;
  bool BudgetIsSpent(const Event& event, Instant now) const;
  bool BuildIsOverdue(const Event& event, Instant now) const;

  // Effects; they run before the state changes.
  void Join(const Event& event, Actions* actions);
  void JoinAgain(const Event& event, Actions* actions);
  void Build(const Event& event, Actions* actions);
  void BuildPending(const Event& event, Actions* actions);
  void KeepView(const Event& event, Actions* actions);
  void AbortForView(const Event& event, Actions* actions);
  void Ready(const Event& event, Actions* actions);
  void ReportBuild(const Event& event, Actions* actions);
  void ReportOverdue(const Event& event, Actions* actions);
  void Open(const Event& event, Actions* actions);
  void NoteRunning(const Event& event, Actions* actions);
  void Acknowledge(const Event& event, Actions* actions);
  void AcknowledgeAndJoin(const Event& event, Actions* actions);
  void Withdraw(const Event& event, Actions* actions);
  void AbortForFence(const Event& event, Actions* actions);
  void RaiseEnded(const Event& event, Actions* actions);
  void Refuse(const Event& event, Actions* actions);
  void Lose(const Event& event, Actions* actions);
  void GiveUp(const Event& event, Actions* actions);

  void NoteCause(const Status& cause);
  bool UsesMachineTime() const;
  void AccountTime(Instant now);

  const Ladder ladder_;
  SessionState state_ = SessionState::kInit;
  View view_;
  View pending_view_;  // Arrived before the old generation was quiet; generation 0: none.
  std::uint64_t ended_ = 0;
  std::uint64_t joins_ = 0;  // How many were sent.
  std::uint64_t openings_ = 0;
  bool acknowledged_ = true;  // Nothing to acknowledge before the first generation has run.
  bool world_running_ = false;
  Status first_cause_;
  Duration machine_time_{};         // Used in this recovery, up to machine_since_.
  Instant machine_since_ = kNever;  // kNever: not running.
  Instant build_since_ = kNever;    // kNever: not in BUILDING.
  bool build_reported_ = false;     // That this try takes too long.
};

}  // namespace resilient::recovery
