#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/random.h"
#include "runtime/recovery/progress_meter.h"
#include "store/core/diagnosis.h"

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
  kDeviceNotMoved,  // What a device finishes before it begins an operation does not count.
  kSpinCounts,      // What a main thread burns in one call counts as progress.
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
// ranks have operations in another order, or a message is not sent.
//
// The oracle knows the programs and what is on the links: a DEADLOCK is true when some rank could
// not go on even if every link delivered at once, and such a circle must be found in kFoundWithin
// where the ranks that are in these calls know of it;
// `all have entered` is true when it is, and a rank that waits for nothing but links must hear it
// in time; DEVICE_STALLED is true of a device that hangs, STALLED of a rank that does nothing, and
// both must be found in time. The same seed gives the same run. Owner: the test.
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
  };
  const Count& count() const { return count_; }

 private:
  enum class Kind : std::uint8_t {
    kAll,        // Every rank hears of every other one.
    kDevice,     // As kAll, once the rank's device has begun it.
    kChain,      // A word goes along the ranks and back; none ends before all have entered.
    kBroadcast,  // From the first rank of the group, which ends at once.
    kSend,
    kLargeSend,  // Ends when the receiver has begun its recv.
    kRecv
  };
  struct Step {
    Kind kind = Kind::kAll;
    int group = 0;
    std::uint64_t seq = 0;  // Of a collective, in its group.
    int peer = -1;
  };
  // What runs the operations of one rank. It is given one at a time.
  struct Device {
    bool hangs = false;
    std::map<int, std::uint64_t> begun;  // By group.
    Instant given{};                     // The latest.
    Instant moved{};                     // It has begun or finished something.
  };
  // Where one rank stands.
  struct Rank {
    std::vector<Step> steps;
    std::size_t at = 0;
    bool in_call = false;
    Instant since{};
    std::map<int, std::uint64_t> entered;  // By group.
    std::map<int, std::uint64_t> sent;     // By peer.
    std::map<int, std::uint64_t> begun;    // Recvs, by peer.
    std::map<int, std::uint64_t> arrived;  // Messages, by peer.
    std::map<int, std::uint64_t> wanted;   // By peer: recvs there that it has heard of.
    std::map<std::pair<int, int>, std::uint64_t> heard;   // By group and rank: entered there.
    std::map<std::pair<int, int>, std::uint64_t> passed;  // By group and neighbour: the word.
    Device device;
    std::map<std::pair<int, int>, std::uint64_t> submitted;  // By group and rank: heard of there.
    bool spins = false;
    Instant acted{};  // The program has done something.
    recovery::ProgressMeter meter;
    Instant line_up{};  // What was sent on its line to the server arrives in order.
    Instant line_down{};
    // For kOutdated: what it has said, by group.
    std::map<std::string, std::vector<std::pair<Instant, GroupProgress>>> given;
  };

  void MakeGroups();
  void MakeProgram();
  void SpoilProgram();
  void PlanSilences();
  void PlanHangs();

  void At(Instant when, std::function<void()> what) { queue_.emplace(when, std::move(what)); }
  Duration Between(int low_ms, int high_ms);
  bool Chance(int percent) { return random_.Below(100) < static_cast<std::uint64_t>(percent); }
  // Runs `what` at `to` when a word of `from` has arrived there.
  void OnLink(int from, int to, std::function<void()> what);

  Step& StepOf(Rank& rank) { return rank.steps[rank.at]; }
  const std::vector<int>& MembersOf(int group) const {
    return groups_[static_cast<std::size_t>(group)];
  }
  int PlaceIn(int group, int rank) const;
  void Compute(int rank);
  void Enter(int rank);
  void EnterCollective(int rank);
  void TellPeers(int rank, int group, std::function<void(Rank& peer)> what);
  void GiveToDevice(int rank);
  void Begin(int rank, std::size_t at);
  bool IsQueued(Rank& rank);
  void PassWord(int rank, int group, std::uint64_t seq);
  void EnterMessage(int rank);
  void Look(int rank);
  // Ranks that it has not heard of in its call, as a communicator would tell.
  std::vector<int> Missing(int rank);

  void Tell(int rank, std::size_t at);
  WaitingReport ReportOf(int rank);
  GroupProgress ProgressOf(int rank, int group);
  void Answer(int rank, const std::vector<std::string>& groups);
  DeviceProgress DeviceOf(Rank& rank, int group) const;
  void Sample(int rank);
  void SampleAgain(int rank);
  void SayWhere(int rank);
  void ToServer(int rank, WaitingReport report);
  void AskServer();

  bool HasEntered(int peer, int waiter, const Step& step);
  // Of a rank in a call: whom the step needs, and who of them some rank in the same step misses.
  std::vector<int> Needed(int rank);
  std::vector<int> SeenMissing(int rank);
  // What a circle is looked for in: all that is known here, or what ranks can tell.
  enum class Sight : std::uint8_t { kAll, kMissing };
  // Whether it would go on if the ranks in `goes_on` did, and every link delivered at once.
  bool CanGoOn(int rank, const std::vector<bool>& goes_on, Sight sight);
  bool IsDeadlocked(Sight sight);
  bool AllArrived();
  void CheckStall(const Diagnosis::Verdict& verdict);
  void CheckHangsFound();
  void CheckCircle(const Diagnosis::Verdict& verdict);
  void CheckEntered(int rank, const EnteredCall& call);
  void CheckLiveness();
  void Violated(const std::string& what);

  const VerdictSimOptions options_;
  Random random_;
  Instant now_{std::chrono::hours(1)};
  std::multimap<Instant, std::function<void()>> queue_;
  std::vector<std::vector<int>> groups_;  // 0: the world.
  std::vector<Rank> ranks_;
  std::set<int> on_device_;  // Groups.
  std::map<std::pair<int, int>, Instant> silent_until_;
  std::map<std::pair<int, int>, Instant> link_;  // When the last word of it arrives.
  Diagnosis diagnosis_;
  bool over_ = false;  // A verdict has ended it.
  std::optional<Instant> deadlocked_since_;
  std::map<int, Instant> only_links_since_;
  std::map<int, std::uint64_t> heard_entered_;  // By rank: its steps of which it was told.
  Count count_;
  std::string violation_;
};

}  // namespace resilient::store::sim
