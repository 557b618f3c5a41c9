#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <resilient/session.h>

#include "runtime/base/random.h"
#include "store/client/client_core.h"
#include "store/client/watch_cursor.h"
#include "store/core/server_core.h"
#include "store/core/storage.h"

namespace resilient::store::sim {

// Faults of ours rather than of the world: each must be found by an invariant, or the simulator
// proves nothing.
enum class Planted : std::uint8_t {
  kNone,
  kRetryUnderNewSeq,  // A client repeats what was not answered as if it were new.
  kAlwaysDrained,     // The server's shell says that all input was read when it was not.
  kFenceDropped,      // A fence does not reach one of the members.
  kReadyForAll,       // A rank says Ready before it was given the view of that generation.
  kAckTooEarly,       // A client acknowledges answers that it has not got.
  kWatchFromLast,     // A watch goes on from the last revision it saw instead of the next.
  kCompactedIgnored,  // A watch that is too far behind goes on without listing anew.
  // Of the store's shell and its disk.
  kReleasedBeforeCommit,  // What a step says is said before what it changed is kept.
  kResultsNotKept,        // The rows of results are not written.
  kResultsNotRestored,    // They are written, and not read.
  kJobNotKept,            // The generation stays as it was written first.
  kRemovalsNotKept,       // Rows once written stay.
  kTornCommit,            // A crash leaves a half of the writes of a commit.
  kStaleLeases,           // A server that starts counts the time that it was away.
  kChangeNotNoted,        // The core forgets to say that a seat has changed.
  kHoldsForgotten,        // A server that starts again knows of no hold.
  // Of those that wait.
  kWaitsOutliveTheirCalls,  // A rank goes on telling of a call that is over.
  kWaitsNotTold,            // A rank tells nothing of what it waits for.
  kProgressNotSeen,         // A rank says that it stands still, and does not.
  kNeedsNotTold,            // A rank does not say that it waits over a link that is lost.
  kNeedsUnasked,            // A rank says so of each link that is lost.
  // Of the shell around the state machine of recovery, and of the program.
  kQuietUnchecked,          // The end of any operation of a generation counts as that of the last.
  kBuildsBeforeQuiet,       // An abort counts as done when it was asked for.
  kOpensUnasked,            // The shell acknowledges for its callers.
  kNotWithdrawn,            // The last caller gives up without a word.
  kGateNotAsked,            // Operations ask for the communicators, not for the gate.
  kFenceIgnoredInBuilding,  // A fence is overlooked while the links are made.
  kOldOperationCompletes,   // An abort leaves operations, which the next generation completes.
  kCommitsWithoutGeneration,  // The store is not told of which generation a commit is.
  // Of worlds that become smaller.
  kWishInvented,      // A rank that wants all or nothing is said to be content with less.
  kSeatWaitNotTold,   // The store is not told how long a lost seat may stay empty.
  kWishKept,          // What a caller wanted counts in the next recovery as well.
  kNumberedAnew,      // The ranks that are left are numbered in another order.
  kOldNumberKept,     // A rank goes on under the number that it had.
  kRefusalOfAnyJoin,  // The refusal of an earlier join counts.
  // Of spares.
  kClaimKept,  // One whose seat was taken goes on under the rank that it had asked for.
  // Of worlds that take them in.
  kOffersAhead,  // A rank offers room at a commit that it has not made yet.
  // Of what a broken link has ended, and is run again.
  kDroppedIgnored,        // The plan asks for inputs that a member keeps no more.
  kReplacedTakenForSame,  // Members are known by their rank alone.
  kPlansAlone,            // A member goes by what it knows itself.
  kVetoIgnored,           // A member does not hear that another one objects.
};

// What may happen to a process in each state of its recovery.
enum class Blow : std::uint8_t {
  kFence,    // Of a generation that was not known to be over.
  kLoss,     // Of another rank.
  kRestart,  // Of the server.
  kClose,
  kCrash,
};
inline constexpr std::size_t kBlows = 5;
inline constexpr std::size_t kStates = static_cast<std::size_t>(SessionState::kClosed) + 1;

// How far a rank is in running again what a broken link has ended.
enum class Heal : std::uint8_t {
  kNot,
  kComing,   // On its way to the next generation.
  kMeeting,  // There, and not all have told what they know.
  kRunning,  // By the plan of all, and not yet done with it.
};
inline constexpr std::size_t kHeals = 4;

struct SimWish;

struct SimOptions {
  std::uint64_t seed = 1;
  Planted planted = Planted::kNone;
  bool trace = false;                          // Print what the server logs.
  Duration faults = std::chrono::seconds(20);  // Then the world is kind.
  Duration settle = std::chrono::seconds(20);  // And by then all ranks run.
};

// One job on a real ServerCore, with processes around real ClientCores, on one thread and virtual
// time. The network delays and cuts connections, the server pauses or reads late, processes stop,
// crash, close and are replaced; each goes through recovery with a real state machine. With most
// seeds the store is durable: what a step says waits until its writes are kept, and the server
// crashes, also before and after a commit, and starts again from what was kept. What must never
// happen is looked at in each step; what must happen, after the faults. The same seed gives the
// same run. Owner: the test.
class Sim {
 public:
  explicit Sim(SimOptions options);
  ~Sim();
  Sim(const Sim&) = delete;
  Sim& operator=(const Sim&) = delete;

  // Empty when all was well; otherwise what was violated, when, and the seed.
  std::string Run();

  // What a run was made of, to see that the faults do happen.
  struct Count {
    int crashes = 0;
    int cuts = 0;
    int fences = 0;
    int losses = 0;
    int views = 0;
    int adds = 0;
    int repeats = 0;  // Mutations sent again after a cut.
    int barriers = 0;
    int pops = 0;
    int restarts = 0;  // Of the server.
    int commits = 0;
    int changes = 0;    // That watches told of.
    int snapshots = 0;  // Of watches, behind their first.
    int holds = 0;
    int deaths_seen = 0;  // By neighbours, and reported.
    int waits_told = 0;
    int late_told = 0;
    int silences = 0;  // Of links between ranks.
    int progress_asked = 0;
    int deadlocks = 0;
    int stalls = 0;
    int openings = 0;  // Of gates.
    int rebuilds = 0;  // That returned OK.
    int given_up = 0;  // Callers that did not wait to the end of a recovery.
    int refused = 0;   // Operations at a shut gate.
    int operations = 0;
    int aborted = 0;  // Operations that ended with the cause of a fence.
    int closes = 0;
    int exhausted = 0;
    int kept_commits = 0;
    int stale_commits = 0;
    int shrinks = 0;            // Of worlds,
    int shrinks_again = 0;      // that had become smaller before.
    int first_shrinks = 0;      // First worlds of some of the ranks that ran before.
    int contents = 0;           // Ranks in such a world that had been refused a larger one.
    int shrink_crashes = 0;     // While its rank waits for a smaller world.
    int shrink_restarts = 0;    // Of the server, likewise.
    int late_replacements = 0;  // In a world that had become smaller.
    int spares_waited = 0;
    int spares_seated = 0;
    int spares_taken_back = 0;
    int spares_in_smaller = 0;  // In their first view.
    int growths = 0;            // Of worlds,
    int newcomers = 0;          // by so many in all.
    int growths_taken_back = 0;
    int heals = 0;         // Begun, by ranks.
    int replays = 0;       // Of ranks that did run again,
    int replayed = 0;      // so many operations,
    int replayed_for = 0;  // and those of them whose result was known there.
    // Of ranks that did not: an objection, no such member any more, no such input, the time.
    int vetoed = 0;
    int strangers = 0;
    int dropped = 0;
    int too_late = 0;
    // By what came, and when.
    std::array<std::array<int, kHeals>, kBlows> heal_blows{};
    std::array<std::array<int, kStates>, kBlows> blows{};  // By what came, and when.
    int& Of(Blow blow, SessionState state) {
      return blows[static_cast<std::size_t>(blow)][static_cast<std::size_t>(state)];
    }
  };
  const Count& count() const { return count_; }

 private:
  struct Line;
  struct Process;
  struct Connection;
  struct Contribution;

  // Who wants to go on with fewer ranks.
  enum class Policy : std::uint8_t { kNobody, kAll, kSome, kSecondThoughts };

  // What the server has decided, as seen from outside: of what its steps say. A crash takes back
  // what was not kept.
  struct Truth {
    struct Seat {
      Process* holder = nullptr;
      bool gone = false;
      bool left = false;
      bool for_good = false;
      Instant since{};  // Without its holder.
    };
    std::map<std::pair<std::uint64_t, int>, Seat> seats;     // By round and place.
    std::map<std::uint64_t, std::vector<Process*>> members;  // Of the latest view of each round.
    std::map<std::uint64_t, Instant> begun;                  // First joins, by round.
    std::set<std::uint64_t> smaller;                // Rounds of worlds that have become smaller.
    std::set<std::int64_t> ended_well;              // Pids of which the launcher has said code 0.
    std::map<std::int64_t, std::uint64_t> heard;    // By pid, the number of the last join.
    std::map<std::int64_t, std::uint64_t> refused;  // Likewise, of the last that was refused.
    std::set<std::int64_t> dropped;                 // Pids of those whose seats are no more.
    std::map<std::int64_t, int> places;             // By pid, of those that have had a seat.
    std::set<std::int64_t> spares;                  // Pids of those that have waited for one.
    std::uint64_t generation = 0;                   // Of the latest view.
  };

  // Time and chance.
  void At(Instant when, std::function<void()> what);
  void After(Duration delay, std::function<void()> what) { At(now_ + delay, std::move(what)); }
  Duration Between(int low_ms, int high_ms);
  bool Chance(int percent) { return random_.Below(100) < static_cast<std::uint64_t>(percent); }
  void RunUntil(Instant end, const std::function<bool()>& done);

  // What a step of the server says, until what it wrote is kept.
  struct Step {
    Effects effects;
    std::vector<Process*> lost;
    std::optional<Truth> truth;  // When it has changed.
  };

  // The server and its shell: sim_server.cc.
  void StartServer();
  void ForgetHolds(Effects& effects);
  void CrashServer();
  void ToServer(std::function<void(Effects&)> input);
  void Input(const std::function<void(Effects&)>& input);
  void Tick();
  void Wake();
  void Finish(Effects effects);
  void Commit();
  void OnCommitted(std::size_t steps);
  void Keep(const std::vector<Write>& writes, std::size_t most, Rows& rows) const;
  void Release(const Step& step);
  void CheckRows();
  void CheckRestored();
  void OnServerSent(const Connection& connection, const ServerMessage& message,
                    std::map<std::uint64_t, std::set<Process*>>& fenced);
  void CheckFencesReachAll(const std::map<std::uint64_t, std::set<Process*>>& fenced);
  Process& ProcessOf(const LogRecord& record);
  bool Runs(const Process& process) const;
  Process* CheckLoss(const LogRecord& record);
  Duration AwakeSince(Instant when) const;

  // The network.
  void Connect(Process& process, Line& line);
  void SendUp(Line& line, const Request& request);
  void SendDown(Connection& connection, const ServerMessage& message);
  void Break(const std::shared_ptr<Connection>& connection);
  void BreakAtClient(const std::shared_ptr<Connection>& connection);

  // Processes and their launcher.
  void Spawn(int place);
  Process& NewProcess(int place, int rank, int size);
  void Begin(Process& process);
  void Respawn(Process& process);
  void Do(Process& process, std::function<void()> what);
  void DoAfter(Process& process, Duration delay, std::function<void()> what);
  void Crash(Process& process);
  void End(Process& process, int wait_status);
  void TellNeighbours(const Process& dead, int wait_status);
  void Receive(Process& process, Line& line, const ServerMessage& message);
  void OnReply(Process& process, Line& line, const Reply& reply);
  void OnWelcome(Process& process, Line& line, const Reply& reply);
  void OnResult(Process& process, const Op& op, const Reply& reply);
  void OnEvent(Process& process, const Event& event);
  void OnView(Process& process, const View& view);
  void OnLost(Process& process, const Status& why);
  void Beat(Process& process);
  void Work(Process& process);
  // The number of the request.
  std::uint64_t Submit(Process& process, Line& line, Op op, std::uint64_t scope = 0,
                       std::uint64_t generation = 0);
  void JoinWorld(Process& process, std::uint64_t generation, std::uint64_t number,
                 const SimWish& wish);

  // Watches and holds: sim_watch.cc.
  void WriteKey(Process& process);
  void AskWatch(Process& process);
  void OnWatched(Process& process, Reply reply);
  void OnSnapshot(Process& process, const WatchBatch& batch);
  void OnChange(Process& process, const KeyChange& change);
  void CheckRevision(const std::string& key, std::int64_t number, std::uint64_t revision);
  void CheckWatches();
  std::string PresenceOf(const Process& process) const;
  void CheckPresence();
  // A connection of its own, as an operator's command makes it.
  void AskAsAdmin(Op op);
  void HoldSomebody(Process& process);
  void NoteHolds(const LogRecord& record, bool kept);

  // Operations and who waits for whom: sim_waits.cc.
  void Compute(Process& process);
  void Enter(Process& process);
  void Announce(Process& process, std::uint64_t generation);
  void Hear(Process& process, std::uint64_t generation, int rank, Contribution heard);
  void Finish(Process& process, std::uint64_t generation);
  void EndCall(Process& process, std::uint64_t generation, const Status& status);
  void Succeed(Process& process, std::uint64_t generation);
  void CheckResult(Process& process, std::uint64_t generation);
  void AbortCalls(Process& process, std::uint64_t generation);
  std::vector<int> Missing(Process& process, std::uint64_t generation) const;
  void ReportGone(Process& process, std::uint64_t generation);
  void MissLeavers(Process& process, std::uint64_t generation);
  void TellWaiting(Process& process, std::uint64_t generation, int number);
  void SendWaiting(Process& process, WaitingReport report);
  WaitingReport WaitsOf(Process& process, std::uint64_t generation, bool over);
  void OnWhere(Process& process, std::uint64_t generation);
  void OnAskProgress(Process& process, const AskProgressEvent& ask);
  void SilenceLink();
  void OnLate(Process& process, const LateNotice& notice);
  static bool InGeneration(const Process& process, std::uint64_t generation);
  bool StandsInTheWay(const Process& process) const;
  void CheckWaits();
  bool IsDeadlocked(std::uint64_t generation);
  bool NeedsALeaver(std::uint64_t generation);
  void CheckVerdict(std::uint64_t generation, const Status& cause);
  void CheckDeadlockIsFound();

  // The session of a process, and the program above it: sim_program.cc.
  void StartSession(Process& process);
  void OnState(Process& process, SessionState state);
  void MeetFailure(Process& process);
  void MeetLeaver(Process& process);
  void Rebuild(Process& process);
  void OnRebuilt(Process& process, const Status& status);
  void Poke(Process& process);
  void Commit(Process& process);
  void OnCommit(const SetOp& commit, const Reply& reply);
  void Destroy(Process& process);
  void OnLeft(Process& process);
  void Accuse(Process& process);
  void LoseLinks(const Process& gone);
  void ArmBlow(Process& process);
  void CountBlow(Blow blow, const Process* but);
  void Strike(Process& process);
  void AbortGroup(Process& process);

  // Worlds that become smaller: sim_shrink.cc.
  SimWish PickWish(Process& process);
  SimWish SomeWish(int most);
  bool WantsLess(const Process& process) const;
  void TakePlace(Process& process, const View& view);
  std::optional<std::pair<int, int>> NumberOf(int place) const;
  void FollowWorld(const std::vector<Process*>& members);
  void NumberAnew(Effects& effects) const;
  void NoteSeats(const LogRecord& record);
  void NoteExit(const ExitReportOp& report);
  void NoteJoin(Process& process, const JoinRequest& request);
  void NoteDecided(Step& step);
  void CheckRefusal(const Process& process, const JoinRefusedEvent& refused);
  std::optional<SimWish> HeardOf(const Process& process) const;
  void CheckMembers(const View& view);
  void CheckFirst(std::uint64_t round, const std::vector<Process*>& members);
  void CheckSmaller(std::uint64_t round, const std::vector<Process*>& before,
                    const std::vector<Process*>& members);
  void CheckWish(const Process& process, std::size_t size, Duration* wait);
  void CheckShrinks();

  // Spares: sim_spares.cc.
  void SpawnSpare();
  void RespawnAtHome(const Process& process);
  bool IsGivenUp(int place) const;
  int PlaceOf(const Process& process) const;
  void MoveTo(Process& process, int place);
  void NoteSpare(Process& process);
  bool IsFresh(const Process& process) const;
  Process* PickVictim();
  void CheckSpares();

  // Worlds that take in spares: sim_growth.cc.
  void OfferRoom(Process& process, std::uint64_t generation);
  void CheckGrowth(std::uint64_t generation, const Status& cause);
  void CheckLarger(const std::vector<Process*>& before, const std::vector<Process*>& members);
  void NoteGrowthTakenBack(std::uint64_t round);
  bool GrowthIsDue() const;

  // What is run again behind a broken link: sim_replay.cc.
  void PlanReplays();
  bool MayStart(Process& process);
  void Number(Process& process, std::uint64_t generation);
  void NoteNotStarted(Process& process, const Status& why);
  void StartCall(Process& process);
  void EndKept(Process& process, std::uint64_t generation, const Status& outcome, bool ended);
  void KeepResult(Process& process, std::uint64_t generation);
  std::uint64_t ResultOf(Process& process, std::uint64_t generation);
  void StartNext(Process& process);
  void FollowFence(Process& process, const Fence& fence);
  void BeginHealing(Process& process, const Status& cause);
  void AbortInHealing(Process& process);
  void GiveUpReplay(Process& process);
  void HealStep(Process& process);
  void OnHealRebuilt(Process& process, const Status& status);
  void Meet(Process& process);
  void Tell(Process& process, std::uint64_t generation, const std::string& said);
  void LookAround(Process& process, std::uint64_t generation);
  void LeaveMeeting(Process& process, std::uint64_t generation);
  void Decide(Process& process, std::uint64_t generation);
  void RunAgain(Process& process, std::uint64_t generation, std::uint64_t from);
  void BeginAnew(Process& process);
  void CountHealBlow(Blow blow, const Process& process);
  void StrikeSoon(Process& process);
  void CheckOneEnd(std::uint64_t generation, const std::string& end);

  void PlanFaults();
  void Fault();
  void StopProcess(Process& process);
  void StopServer();
  bool AllRun() const;
  void Violated(const std::string& what);

  const SimOptions options_;
  Random random_;
  const Duration budget_;  // Of one recovery.
  Policy policy_ = Policy::kNobody;
  Duration seat_wait_{};  // Where nobody says otherwise.
  // The first ranks ran together at a store that was lost: those that come may go on.
  bool ran_before_ = false;
  int spare_count_ = 0;
  int room_ = 0;       // For so many more than it begins with;
  int max_world_ = 0;  // 0: no world takes in anybody.
  bool replays_ = false;
  Instant now_{std::chrono::hours(1)};
  std::multimap<Instant, std::function<void()>> queue_;
  std::map<std::pair<std::int64_t, std::int64_t>, Instant> silent_;  // By pids, from and to.
  std::string violation_;
  Count count_;
  int ranks_ = 0;
  bool supervised_ = false;
  bool kind_ = false;   // The faults are over.
  bool quiet_ = false;  // And nobody changes keys any more.

  bool durable_ = false;
  int start_ = 0;  // Of the server; what belongs to an earlier one is void.
  bool server_down_ = true;
  Instant started_at_{};
  Rows disk_;     // What is kept.
  Rows written_;  // What was written, kept or not yet.
  std::deque<Step> held_;
  bool committing_ = false;
  std::uint64_t steps_ = 0;
  std::uint64_t epoch_ = 0;
  std::string server_id_;

  std::unique_ptr<ServerCore> core_;  // Null while the server is down.
  bool server_paused_ = false;        // It neither reads nor ticks.
  bool input_held_back_ = false;      // It ticks, but its input is not read yet.
  std::deque<std::function<void(Effects&)>> inbox_;
  std::vector<std::pair<Instant, Duration>> stalls_;  // When they ended, and how long they count.
  bool last_member_left_ = false;

  ConnectionId last_connection_ = 0;
  std::map<ConnectionId, std::shared_ptr<Connection>> connections_;
  std::vector<std::unique_ptr<Process>> processes_;  // All that ever were; pid = index + 1.
  std::vector<Process*> at_;                         // The present one of each place.
  std::vector<Process*> spares_;                     // Those without a place.
  bool all_want_less_ = false;
  int given_up_ = -1;  // The place that its launcher does not fill again.
  int last_place_ = 0;
  int coming_ = 0;  // Processes that their launchers are about to start.

  // Ghosts: what the truth is, as seen from outside.
  Truth truth_;
  Truth kept_truth_;
  bool truth_changed_ = false;
  std::map<std::uint64_t, std::vector<Process*>> views_;  // Members by generation.
  std::map<std::uint64_t, std::string> secrets_;          // Of each view.
  // Of each (life, round).
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::string> world_secrets_;
  std::set<std::pair<Process*, std::uint64_t>> ready_;  // Handed to the server.
  std::set<std::uint64_t> fenced_;                      // Generations.
  std::uint64_t running_ = 0;                           // The generation that ran last.
  std::map<std::uint64_t, Process*> watches_;
  // Of the commits of each generation the lowest and the highest revision.
  std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>> commits_;
  // Results of collectives by the generation in which their numbers began.
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t> results_;
  std::map<std::uint64_t, std::string> ends_;  // Of the meetings of each generation.
  // Of the changes that somebody was told of, by key and number.
  std::map<std::pair<std::string, std::int64_t>, std::uint64_t> revisions_;
};

}  // namespace resilient::store::sim
