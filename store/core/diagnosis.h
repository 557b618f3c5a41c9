#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>

#include "store/core/group_book.h"
#include "store/core/progress_book.h"
#include "store/core/wait_graph.h"

namespace resilient::store {

// A circle is believed when it is the same in two reports of each of its ranks that are so far
// apart: the second on which they are told, less what the way may take.
inline constexpr Duration kCircleConfirmed = Millis(900);
// Who is asked where it is has this long, a GIL that cannot be had included.
inline constexpr Duration kWhereaboutsPatience = Millis(3500);

// What the members of one world at one generation wait for, and what follows: who is late and where
// it is, who waits in a circle, who makes no progress while others wait for it. Nothing of it is
// kept: it is told again to a server that starts.
//
// How it works: a report names the ranks that its sender has not heard from. Before such a belief
// counts in a verdict, the named rank is asked how far it has come (ProgressBook). A circle is a
// DEADLOCK when it consists of proved edges in two reports of each of its ranks, kCircleConfirmed
// apart, and the accounts that prove it were given after the first of these: no rank of it can have
// acted in between, as all its threads were in the same calls both times. Where all awaited ranks
// have entered the operation by their own account, what is missing is the network's: the waiter
// hears that, and Operation::stall counts from then. Where an awaited rank has submitted the
// operation and says that its device has not begun it, it is the device that is waited for: it
// hangs when that rank has said for WaitingReport::device_stall that the device has begun and
// finished nothing. Each rank also says of which ranks it has made the groups that are asked about
// (GroupBook): two that mean different groups by one name are a MISMATCH, at once where one waits
// for the other in a group that both use, and in place of a DEADLOCK where the group is what keeps
// a circle closed. docs/verdicts.md has the argument.
//
// Owner: its World. Thread: caller-synchronised. Pure.
class Diagnosis {
 public:
  // True for a rank whose silence is announced: it is held.
  using Excused = std::function<bool(int rank)>;

  // No one can go on any more.
  struct Verdict {
    std::optional<GroupBook::Difference> other_ranks;  // A group is made of different ranks. Else,
    std::vector<WaitEdge> circle;  // if not empty, a deadlock. Else a rank stands still,
    int stalled = -1;
    std::optional<DeviceProgress> device = {};  // or this device of it.
    Whereabouts whereabouts;                    // Of that rank.
    std::vector<int> waiters;
    WaitingCall call;  // Of the first of them.
  };
  // What the caller has to do.
  struct Steps {
    std::vector<int> ask;  // Ranks to be asked where they are.
    // Ranks to be asked how far they have come, and in which groups.
    std::map<int, std::vector<std::string>> ask_progress;
    // Operations of these ranks that all others have entered; named again as long as they wait.
    std::map<int, std::vector<EnteredCall>> entered;
    std::vector<int> tell;  // Ranks that wanted to be told who is late.
    std::optional<Verdict> verdict;
  };

  void OnWaiting(int rank, WaitingReport report, Instant now);
  void OnWhereabouts(int rank, Whereabouts whereabouts, Instant now);
  // Ranks that have left the world, ascending: they enter nothing any more, so what is missing of
  // them is on their links.
  void SetLeft(std::vector<int> ranks) { left_ = std::move(ranks); }
  // To be called some times a second; cheap when nobody waits.
  Steps Advance(Instant now, const Excused& excused);

  // Ranks that the calls of `rank` wait for, them or their devices, ascending; those that keep it
  // waiting longest first counted: only of its oldest call.
  std::vector<int> AwaitedBy(int rank) const;
  // Of AwaitedBy(waiter): `rank` says itself that it is in that call, or has left. The network is
  // silent.
  bool IsBeyondAsking(int waiter, int rank) const;
  // Of AwaitedBy(waiter): `rank` has submitted that call, and its device has not begun it.
  bool AwaitsDevice(int waiter, int rank) const;
  // What `rank` has said of the device of that call.
  ProgressBook::Device DeviceAwaited(int waiter, int rank) const;
  // What `rank` waits for itself; null: nothing that it has told of.
  const WaitingCall* OldestCallOf(int rank) const;
  // Of its threads that are blocked the call that has been so longest; null: none is.
  const WaitingCall* OldestBlockedCallOf(int rank) const;
  // Null: it has not answered lately.
  const Whereabouts* Known(int rank, Instant now) const;

 private:
  struct Told {
    WaitingReport report;
    Instant when{};

    ProgressBook::Wait WaitIn(int rank, const WaitingCall& call) const {
      return {rank, call, when - call.operation.age};
    }
  };
  // A rank that somebody waits for.
  struct Awaited {
    Instant asked = Instant::min();
    std::optional<Instant> answered;
    Whereabouts whereabouts;
  };
  struct Candidate {
    std::vector<WaitEdge> circle;
    std::map<int, Instant> told;           // When each of its ranks had told it,
    std::map<int, std::uint64_t> threads;  // and WaitingReport::threads.
    Instant formed{};
  };
  // Group and its ranks, whether a message, number.
  using CallKey = std::tuple<std::string, std::uint64_t, bool, std::uint64_t>;

  void Forget(Instant now);
  std::optional<Verdict> FindOtherRanks() const;
  std::optional<Verdict> FindDeadlock(Instant now, Steps* steps);
  // The ranks whose threads are all blocked, with what they believe; with `since` with what of it
  // is proved by accounts that are not older. A rank that some rank in a collective misses is
  // missing for all in it, where no rank can end it alone: in what is believed as in what is
  // proved, or a circle by way of two ranks in one collective would never be asked about.
  std::vector<BlockedRank> Blocked(std::optional<Instant> since) const;
  std::map<CallKey, std::vector<int>> MissingByCall(std::optional<Instant> since) const;
  // `peer` has not done what the wait needs: by an account that is not older than `since`, or,
  // without `since`, as far as nobody has shown the contrary.
  bool StaysAway(const ProgressBook::Wait& wait, int peer, std::optional<Instant> since) const;
  // The same of two ranks that are in one operation. Two groups of one name may have no rank in
  // common.
  CallKey KeyOf(int rank, const WaitingCall& call) const;
  void AskForProof(const std::vector<BlockedRank>& blocked, Instant now, Steps* steps);
  void AskProgress(int rank, Instant now, Duration interval, Steps* steps);
  std::vector<std::string> GroupsAskedOf(int rank) const;
  void FindEntered(Instant now, Steps* steps);
  void AskForStalls(Instant now, Steps* steps);
  std::optional<Verdict> FindStall(Instant now, const Excused& excused) const;
  void AskForDevices(Instant now, Steps* steps);
  std::optional<Verdict> FindDeviceStall(Instant now, const Excused& excused) const;
  // The device of `rank`, where it hangs and keeps `waiter` waiting in `call`; else null.
  const DeviceProgress* HungDevice(int waiter, const Told& told, const WaitingCall& call, int rank,
                                   Instant now) const;
  bool HasLeft(int rank) const { return std::ranges::binary_search(left_, rank); }
  bool HasToldAll(int listener, int rank, Instant since, Instant now, Steps* steps);
  void AskForListeners(Instant now, Steps* steps);
  void AskOnce(int rank, Instant now, Duration interval, Steps* steps);
  bool WaitsItself(int rank) const;

  std::map<int, Told> told_;
  std::vector<int> left_;  // Ascending.
  ProgressBook progress_;
  GroupBook groups_;
  std::map<int, Instant> asked_progress_;                   // When, by rank.
  std::map<int, std::map<CallKey, Instant>> entered_told_;  // What Steps::entered named, and when.
  std::map<int, Awaited> awaited_;
  std::map<int, Instant> listeners_;  // Since when.
  std::optional<Candidate> candidate_;
  Instant looked_ = Instant::min();
};

}  // namespace resilient::store
