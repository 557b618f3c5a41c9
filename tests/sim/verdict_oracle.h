#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "store/core/diagnosis.h"
#include "tests/sim/verdict_world.h"

namespace resilient::store::sim {

// Says of what a Diagnosis says whether it is true, and of what is true whether it was said in
// time. It knows the programs, where the ranks stand in them and what is on the links.
//
// A DEADLOCK is true when some rank could not go on even if every link delivered at once, and such
// a circle must be found in time where the ranks that are in these calls know of it. `All have
// entered` is true when it is, and a rank that waits for nothing but links must hear it in time.
// DEVICE_STALLED is true of a device that hangs, STALLED of a rank that does nothing, and both must
// be found in time. MISMATCH is true of two ranks that have made a group of different ranks; it
// must be found in time where one waits for the other in it and both use it, and a circle that such
// a group closes is called by it. docs/verdicts.md says what each verdict is proved by.
//
// Each check returns what is violated; empty: nothing. Owner: the VerdictSim. Thread: its only one.
class VerdictOracle {
 public:
  // The world outlives it.
  explicit VerdictOracle(const VerdictWorld& world) : world_(world) {}

  std::string OnVerdict(const Diagnosis::Verdict& verdict, Instant now) const;
  std::string OnEntered(int rank, const EnteredCall& call);
  // Without a verdict by now.
  std::string CheckNothingMissed(Instant now);

 private:
  using Kind = VerdictWorld::Kind;
  using Rank = VerdictWorld::Rank;
  using Step = VerdictWorld::Step;
  // What a circle is looked for in: all that is known here, or what ranks can tell.
  enum class Sight : std::uint8_t { kAll, kMissing };

  bool HasEntered(int peer, int waiter, const Step& step) const;
  // By group, its ranks and number: whom some rank in that collective misses, where each hears of
  // others.
  using MissingByCollective =
      std::map<std::tuple<int, std::vector<int>, std::uint64_t>, std::set<int>>;
  MissingByCollective SeenMissing() const;
  // Of a rank in a call: whom the step needs.
  std::vector<int> Needed(int rank) const;
  // Of these, without `seen`, or of those that ranks in its step miss: who has not entered it, and
  // whom it would wait for if every link delivered at once.
  std::vector<int> WaitsFor(int rank, const MissingByCollective* seen) const;
  // Some rank could not go on if every link delivered at once.
  bool IsDeadlocked(Sight sight) const;
  bool AllArrived() const;
  std::string OnCircle(const Diagnosis::Verdict& verdict) const;
  std::string OnStall(const Diagnosis::Verdict& verdict, Instant now) const;
  std::string OnOtherRanks(const GroupBook::Difference& found) const;
  bool WaitsForOtherRanks(int rank) const;
  std::string CheckOtherRanksFound(Instant now);
  std::string CheckCircleFound(Instant now);
  std::string CheckHangsFound(Instant now) const;
  // When the first of the others has begun to wait in that step of `rank`.
  std::optional<Instant> AwaitedSince(const Rank& rank) const;
  std::string CheckEnteredHeard(Instant now);
  bool WaitsForLinksAlone(int rank) const;

  const VerdictWorld& world_;
  std::optional<Instant> deadlocked_since_;
  std::map<int, Instant> only_links_since_;
  std::map<int, Instant> other_ranks_since_;
  std::map<int, std::uint64_t> heard_entered_;  // By rank: its steps of which it was told.
};

}  // namespace resilient::store::sim
