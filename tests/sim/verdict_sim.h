#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/random.h"
#include "runtime/recovery/progress_meter.h"
#include "store/core/diagnosis.h"
#include "tests/sim/verdict_oracle.h"
#include "tests/sim/verdict_world.h"

namespace resilient::store::sim {

// Faults of ours in what ranks say of themselves; each must be found.
enum class PlantedAccount : std::uint8_t {
  kNone,
  kNothingEntered,  // A rank says that it has entered nothing: beliefs are taken for proofs.
  kOutdated,        // It says how far it had come some seconds ago.
  kLastNotCounted,  // It does not count the last operation that it has entered.
  kSentNotCounted,  // It does not count what it has sent.
  kAlwaysEntered,   // It says that it has entered everything: no circle can be proved.
  kNoDevice,        // What a device was given it says to be begun.
  kDeviceNotStill,  // Its device is said to have done something just now, always.
  kDeviceNotMoved,  // What a device finishes before it begins an operation does not count.
  kSpinCounts,      // What a main thread burns in one call counts as progress.
  kRanksSorted,     // Of the ranks of a group it does not say the order.
  kRanksOfALine,    // They are told as others where another line has made the group.
};

struct VerdictSimOptions {
  std::uint64_t seed = 1;
  PlantedAccount planted = PlantedAccount::kNone;
};

// Many ranks on one Diagnosis, on one thread and virtual time. Each runs its part of a program over
// several groups: collectives in which all hear of all, or each only of its neighbours, broadcasts,
// messages large and small, and in some groups operations of devices, which begin them when they
// have done what was before: soon, or after several things that take long. In some seeds a device
// hangs from some time on, or a main thread spins in one call for ever. The links between ranks are
// slow, silent in one direction or both, for moments or for longer than a verdict takes; their
// lines to the server are late, and never silent. In half of the seeds the program is wrong: two
// ranks have operations in another order, or a message is not sent. In some a rank makes a group of
// other ranks than the others: fewer, others, or in another order.
//
// VerdictOracle judges what is said of them and what is not. The same seed gives the same run.
// Owner: the test.
class VerdictSim {
 public:
  explicit VerdictSim(VerdictSimOptions options);

  // Empty when all was well; otherwise what was violated, when, and the seed.
  std::string Run();

  struct Count {
    int deadlocks = 0;
    int suspected = 0;  // Runs in which ranks were asked for proof.
    int silences = 0;
    int entered = 0;  // Operations that ranks were told all have entered.
    int ended = 0;    // Programs that came to their end.
    int devices = 0;  // Found to hang.
    int stalls = 0;
    int other_ranks = 0;
  };
  const Count& count() const { return count_; }

 private:
  using Kind = VerdictWorld::Kind;
  using Rank = VerdictWorld::Rank;
  using Step = VerdictWorld::Step;
  // Of one rank to the server, and what it tells of itself there.
  struct Line {
    Instant up{};  // What was sent on it arrives in order.
    Instant down{};
    recovery::ProgressMeter meter;
    // For kOutdated: what it has said, by group.
    std::map<std::string, std::vector<std::pair<Instant, GroupProgress>>> given;
  };

  void MakeGroups();
  void MakeProgram();
  void SpoilProgram();
  void SpoilGroup();
  void PlanSilences();
  void PlanHangs();

  void At(Instant when, std::function<void()> what) { queue_.emplace(when, std::move(what)); }
  Duration Between(int low_ms, int high_ms);
  bool Chance(int percent) { return random_.Below(100) < static_cast<std::uint64_t>(percent); }
  // Runs `what` at `to` when a word of `from` has arrived there.
  void OnLink(int from, int to, std::function<void()> what);

  Line& LineOf(int rank) { return lines_[static_cast<std::size_t>(rank)]; }
  void Compute(int rank);
  void Enter(int rank);
  void EnterCollective(int rank);
  void TellPeers(int rank, int group, std::function<void(Rank& peer)> what);
  void GiveToDevice(int rank);
  void Begin(int rank, std::size_t at);
  void PassWord(int rank, int group, std::uint64_t seq);
  void EnterMessage(int rank);
  void Look(int rank);

  void Tell(int rank, std::size_t at);
  WaitingReport ReportOf(int rank);
  void AddMade(int rank, int group, WaitingReport* report);
  GroupProgress ProgressOf(int rank, int group);
  void Answer(int rank, const std::vector<std::string>& groups);
  DeviceProgress DeviceOf(const Rank& rank, int group) const;
  void Sample(int rank);
  void SampleAgain(int rank);
  void SayWhere(int rank);
  void ToServer(int rank, WaitingReport report);
  void AskServer();

  void Violated(const std::string& what);

  const VerdictSimOptions options_;
  Random random_;
  Instant now_{std::chrono::hours(1)};
  std::multimap<Instant, std::function<void()>> queue_;
  VerdictWorld world_;
  VerdictOracle oracle_{world_};
  std::vector<Line> lines_;  // By rank.
  std::set<int> on_device_;  // Groups.
  std::map<std::pair<int, int>, Instant> silent_until_;
  std::map<std::pair<int, int>, Instant> link_;  // When the last word of it arrives.
  Diagnosis diagnosis_;
  bool over_ = false;  // A verdict has ended it.
  Count count_;
  std::string violation_;
};

}  // namespace resilient::store::sim
