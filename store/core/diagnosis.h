#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>

#include "store/core/wait_graph.h"

namespace resilient::store {

// A circle is believed when it is the same in two reports of each of its ranks that are so far
// apart: the second on which they are told, less what the way may take.
inline constexpr Duration kCircleConfirmed = Millis(900);
// Who is asked where it is has this long, a GIL that cannot be had included.
inline constexpr Duration kWhereaboutsPatience = Millis(3500);

// What the members of one world at one generation wait for, and what follows: who is late and where
// it is, who waits in a circle, who makes no progress while others wait for it. Nothing of it is
// kept: it is told again to a server that starts. Owner: its World. Thread: caller-synchronised.
// Pure.
class Diagnosis {
 public:
  // True for a rank whose silence is announced: it is held.
  using Excused = std::function<bool(int rank)>;

  // No one can go on any more.
  struct Verdict {
    std::vector<WaitEdge> circle;  // Not empty: a deadlock. Else a rank stands still:
    int stalled = -1;
    Whereabouts whereabouts;  // Of that rank.
    std::vector<int> waiters;
    WaitingCall call;  // Of the first of them.
  };
  // What the caller has to do.
  struct Steps {
    std::vector<int> ask;   // Ranks to be asked where they are.
    std::vector<int> tell;  // Ranks that wanted to be told who is late.
    std::optional<Verdict> verdict;
  };

  void OnWaiting(int rank, WaitingReport report, Instant now);
  void OnWhereabouts(int rank, Whereabouts whereabouts, Instant now);
  // To be called some times a second; cheap when nobody waits.
  Steps Advance(Instant now, const Excused& excused);

  // Ranks that the calls of `rank` wait for, ascending; those that keep it waiting longest first
  // counted: only of its oldest call.
  std::vector<int> AwaitedBy(int rank) const;
  // What `rank` waits for itself; null: nothing that it has told of.
  const WaitingCall* OldestCallOf(int rank) const;
  // Null: it has not answered lately.
  const Whereabouts* Known(int rank, Instant now) const;

 private:
  struct Told {
    WaitingReport report;
    Instant when{};
  };
  // A rank that somebody waits for.
  struct Awaited {
    Instant asked = Instant::min();
    std::optional<Instant> answered;
    Whereabouts whereabouts;
  };
  struct Candidate {
    std::vector<WaitEdge> circle;
    std::map<int, Instant> told;  // When each of its ranks had told it.
  };

  void Forget(Instant now);
  std::optional<Verdict> FindDeadlock();
  void AskForStalls(Instant now, Steps* steps);
  std::optional<Verdict> FindStall(Instant now, const Excused& excused) const;
  void AskForListeners(Instant now, Steps* steps);
  void AskOnce(int rank, Instant now, Duration interval, Steps* steps);
  bool WaitsItself(int rank) const;

  std::map<int, Told> told_;
  std::map<int, Awaited> awaited_;
  std::map<int, Instant> listeners_;  // Since when.
  std::optional<Candidate> candidate_;
  Instant looked_ = Instant::min();
};

}  // namespace resilient::store
