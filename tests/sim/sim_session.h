#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>
#include <resilient/status.h>

#include "runtime/recovery/flight.h"
#include "runtime/recovery/state_machine.h"
#include "tests/sim/sim.h"

namespace resilient::store::sim {

// What a caller of Rebuild wants beyond an open gate, as RebuildOptions. Thread: value type.
struct SimWish {
  int min_world = 0;
  Duration seat_wait{};
  friend bool operator==(const SimWish&, const SimWish&) = default;
};

// What a SimSession asks of its process: time, chance, the membership line, and the program above
// it. Owner: the session; what it captures outlives the session. Thread: one.
struct SessionHost {
  std::function<Instant()> now;
  std::function<Duration(int low_ms, int high_ms)> between;
  std::function<bool(int percent)> chance;
  // Later on this process; never, when it has ended by then.
  std::function<void(Duration, std::function<void()>)> after;
  std::function<void(std::uint64_t generation, std::uint64_t number, const SimWish&)> join;
  std::function<void(const View&)> take_place;  // Its number in the world that is to be built.
  std::function<void(std::uint64_t generation)> ready;
  std::function<void(const Report&)> report;
  // The operations of that generation are to end with its cause, each in its own time.
  std::function<void(const recovery::Flight&)> abort;
  std::function<void(SessionState)> entered;  // The machine has changed to that state.
  std::function<bool()> is_peace;             // Nothing is made to fail any more.
  std::function<void(const std::string&)> violated;
};

// The shell of recovery::SessionImpl around the real state machine and the real Flight, without its
// threads: the same checks in the same order, with the pauses between two locks and the time that
// the communicators take left to chance. The communicators themselves are the simulator's. Beside
// it a record of what the callers were promised, which each step of the machine is held against.
// Owner: the process. Thread: one.
class SimSession {
 public:
  using Done = std::function<void(const Status&)>;

  // `seat_wait`: how long lost seats may stay empty where no caller says otherwise. `first`: what
  // is wanted of the first world.
  SimSession(Duration budget, Duration seat_wait, const SimWish& first, Planted planted,
             SessionHost host);

  // As Session: callers wait, `done` says that they return.
  void Init(Done done);
  void Rebuild(Duration timeout, const SimWish& wish, Done done);
  void Close();

  // An operation's way in, and the end of it: Leave once for each Enter that was OK, at the moment
  // at which nothing touches the caller's memory any more.
  Result<std::shared_ptr<recovery::Flight>> Enter();
  // What the caller is told when the communicator says `status`.
  Status Outcome(recovery::Flight& flight, const Status& status) const;
  void Leave(recovery::Flight& flight);
  // As Session's AbortGroup; false: nothing runs.
  bool AbortGroup();
  void OnLinkLost(std::uint64_t generation, int rank, const Status& why);
  // An operation waits for `rank` over a link that is lost.
  void ReportNeed(std::uint64_t generation, int rank, const std::string& what);

  // As RendezvousEvents.
  void OnView(const View& view);
  void OnRunning(std::uint64_t generation);
  void OnFence(const Fence& fence);
  void OnJoinRefused(std::uint64_t join, const Status& why);
  void OnSessionLost(const Status& why);

  SessionState state() const { return machine_.state(); }
  bool running() const { return state() == SessionState::kRunning; }
  const View& view() const { return machine_.view(); }
  std::uint64_t generation() const { return view().generation; }
  std::uint64_t ended_generation() const { return machine_.ended_generation(); }
  // Whether the operations of that generation may still complete.
  bool IsPresent(std::uint64_t generation) const;
  // Whether some caller has asked for that since the gate was last open.
  bool WasAsked(const SimWish& wish) const;
  // What the last join was to say.
  const SimWish& wish() const { return wish_; }

 private:
  struct Waiter {
    Deadline deadline;
    std::uint64_t openings_before = 0;
    Done done;
    bool ended = false;
  };
  // What callers of this process were promised.
  struct Promises {
    bool must_acknowledge = false;
    std::map<std::uint64_t, int> in_flight;  // Operations by generation.
    std::uint64_t fenced = 0;                // Newest generation whose fence was delivered.
    std::uint64_t built = 0;
    std::uint64_t said_running = 0;
    std::uint64_t join = 0;       // Number of the last one.
    std::vector<SimWish> wishes;  // Of the callers since the gate was last open.
    // Of the present recovery, or since the last loss in it: what it spent aborting, building and
    // waiting for the others to be ready, up to the last step.
    Duration machine_time{};
    Instant last_step{};
    bool all_ready = false;  // By then.
    bool began_in_peace = false;
  };

  // The machine.
  void Step(const recovery::Event& event);
  void StepFromCaller(const recovery::Event& event);
  void Apply(const recovery::Event& event);
  void Drain();
  void Perform(const recovery::Action& action);
  void BuildWorld(const View& view);
  void Connect(const std::shared_ptr<recovery::Flight>& flight);
  void AbortCommunicators(const Status& cause);
  void PostQuietCheck();
  void CheckQuiet();

  // Callers.
  std::shared_ptr<Waiter> StartWaiting(Deadline deadline, std::uint64_t openings_before, Done done);
  void AwaitFenceOfBroken(Deadline deadline, const SimWish& wish, Done done);
  void Acknowledge(Deadline deadline, const SimWish& wish, Done done);
  void Look(const std::shared_ptr<Waiter>& waiter);
  void Poll(const std::shared_ptr<Waiter>& waiter);
  void WakeWaiters();
  std::optional<Status> Verdict(const Waiter& waiter) const;

  // What must hold.
  void CheckStep(const recovery::Event& event, SessionState from, std::uint64_t openings_before,
                 std::uint64_t ended_before);
  void CheckEdge(recovery::EventKind event, SessionState from, SessionState to);
  void CheckBudget(SessionState from, SessionState to);
  void AccountTime(const recovery::Event& event, SessionState from, std::uint64_t ended_before);
  void CheckNothingInFlight(const char* what);
  void CheckFenceIsHeeded();

  const Duration budget_;
  const Duration seat_wait_;
  const Planted planted_;
  const SessionHost host_;
  recovery::StateMachine machine_;
  std::deque<recovery::Action> actions_;
  std::shared_ptr<recovery::Flight> flight_;  // Of the latest view; null before the first.
  std::vector<std::shared_ptr<Waiter>> waiters_;
  int rebuild_waiters_ = 0;
  SimWish wish_;  // What was wanted last.
  std::map<int, Instant> link_reports_;
  std::uint64_t link_reports_generation_ = 0;
  Promises promises_;
};

}  // namespace resilient::store::sim
