#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>
#include <resilient/status.h>

#include "runtime/base/log_record.h"
#include "store/core/causes.h"
#include "store/core/journal.h"
#include "store/core/keyspace.h"
#include "store/core/messages.h"
#include "store/core/participant.h"
#include "store/core/presence_key.h"
#include "store/core/secret_maker.h"
#include "store/core/status_page.h"
#include "store/core/storage.h"
#include "store/core/world.h"

namespace resilient::store {

// Now on the core's own line of time, and what a wall clock shows then (for texts only).
struct Moment {
  Instant now{};
  double wall_s = 0;
};

// What follows from a step of the membership. Thread: value type.
struct MembershipEffects {
  struct Push {
    SessionId session;
    Event event;  // For its control connection; pushed again by PushState when that is down.
  };
  struct LostSession {
    SessionId session;
    Status why;  // kStaleGeneration.
  };
  struct EndedScope {
    std::uint64_t round;
    Status why;
    bool drop_keys;
  };

  std::vector<Push> push;
  std::vector<SessionId> granted;   // Its lease and its watch begin.
  std::vector<SessionId> released;  // They end.
  std::vector<SessionId> held;      // Its lease does not run, until it is
  std::vector<SessionId> unheld;    // here: with a full TTL.
  std::vector<LostSession> lost;
  std::vector<std::uint64_t> left;  // Rounds of seats that members have left.
  std::vector<EndedScope> ended;
  bool gone_on = false;            // A member has acknowledged a generation.
  std::vector<StatusCode> fenced;  // The first causes of the generations that ended.
  bool new_life = false;           // All keys of the job are dropped.
  std::optional<bool> listens;     // As that of Effects.
  std::vector<LogRecord> log;

  void Tell(SessionId session, Event event);
};

struct MembershipLimits {
  Duration lone_close_grace = Millis(300);
  Duration ping_grace = Millis(500);
  Duration exit_report_grace = std::chrono::seconds(1);
  Duration presence_life = std::chrono::seconds(6);  // A lease and a beat.
  std::size_t worlds = kWorldsPerJobMax;
  std::size_t seats = kSeatsPerJobMax;  // Of all worlds.
  // How long spares wait for the next world when theirs has ended: six leases.
  Duration spare_grace = std::chrono::seconds(30);
};

// Who is in a job: its lives, worlds and seats, and who is held for dead. The rules are those of
// MEMBERSHIP.md, one method a rule. Each change of what is kept is noted where it is made (Changed)
// and written by Keep at the end of the step. Sessions are known here from their first join on.
// Owner: ServerCore, one per job. Thread: caller-synchronised. Pure.
class Membership {
 public:
  // `make_secret`, `journal`, and what the seats of all jobs are part of outlive this; the latter
  // two may be null.
  Membership(std::string job, MembershipLimits limits, std::uint64_t first_generation,
             const SecretMaker& make_secret, Journal* journal = nullptr, Pool* all_seats = nullptr);

  // ---- Asked by sessions. What is not OK is the answer to the request. ----
  Status Join(SessionId session, const Hello& hello, const JoinRequest& request, Moment moment,
              MembershipEffects& effects);
  Status Ready(SessionId session, std::uint64_t generation, Moment moment,
               MembershipEffects& effects);
  // The program of the session has gone on to that generation: it takes no part in what is left of
  // older ones. membership_survivors.cc.
  Status Acknowledge(SessionId session, std::uint64_t generation, MembershipEffects& effects);
  Status Leave(SessionId session, Moment moment, MembershipEffects& effects);
  Status Report(SessionId session, const resilient::Report& report, Moment moment,
                MembershipEffects& effects);
  // What a session waits for, and where it is: membership_waits.cc. Of the past: nothing happens.
  void Waiting(SessionId session, const WaitingReport& report, Moment moment,
               MembershipEffects& effects);
  void OnWhereabouts(SessionId session, const WhereaboutsOp& op, Moment moment);
  // A session holds the presence key of a rank, or does so no more, for it `how`: "was killed by
  // signal 9 (SIGKILL)". Its process counts as alive, not as missing, until it has joined.
  // membership_presence.cc.
  void OnPresent(SessionId session, const ProcessIdentity& process, const PresenceName& name);
  void OnAbsent(SessionId session, const PresenceName& name, const std::string& how, Moment moment,
                MembershipEffects& effects);
  // The first world whose ranks have waited for others to join since `since`; null: none.
  const World* AwaitingFirstJoins(Instant since) const;
  // Those that wait in the world of `round` are told where the others may be; empty: not there.
  void TellElsewhere(std::uint64_t round, const std::string& text, MembershipEffects& effects);
  // "rank 1 (host a, pid 7)": the lowest one that has joined.
  std::string NameOfFirstJoined(const World& world) const;
  // Asked by an admin: silence of the members that match ends no lease for a while, of those
  // already held anew; or again. How many there are. kNotFound: none. membership_holds.cc.
  Result<std::int64_t> Hold(const HoldOp& op, Moment moment, MembershipEffects& effects);
  Result<std::int64_t> Release(const ReleaseOp& op, Moment moment, MembershipEffects& effects);
  // All members of this world are waited for: it is fenced when one of them has left.
  void NeedAll(std::uint64_t round, Moment moment, MembershipEffects& effects);
  // Whether all members of the exchange's generation that are alive and have not gone on to a later
  // one are there.
  bool HaveSurvivorsCome(std::uint64_t round, const Gathering& gathering) const;
  // OK when the session may touch the keys of `scope` in `generation`; else kStaleGeneration. One
  // that has left may touch those of its round for as long as that lasts.
  Status CheckAccess(SessionId session, std::uint64_t scope, std::uint64_t generation) const;
  // Not OK: the session is dead, and this is what it is to be told.
  Status Standing(SessionId session) const;

  // ---- Signs of life and of death. No-ops for sessions not known here. ----
  void OnControlOpen(SessionId session, Moment moment, MembershipEffects& effects);
  void OnControlFrame(SessionId session, Moment moment, MembershipEffects& effects);
  void OnControlClosed(SessionId session, Moment moment);
  void OnLeaseExpired(SessionId session, Duration silent, Duration ttl, Moment moment,
                      MembershipEffects& effects);
  void OnProcessExit(SessionId session, Moment moment, MembershipEffects& effects);
  void OnExitReport(const ExitReportOp& report, Moment moment, MembershipEffects& effects);
  // `input_drained`: everything that had arrived has been handed in.
  void OnTick(Moment moment, bool input_drained, MembershipEffects& effects);

  // True while a seat names the session, so that it must not be forgotten.
  bool Needs(SessionId session) const;
  // Forgets a session that is not needed.
  void Forget(SessionId session);

  // ---- What is kept: membership_rows.cc. ----
  // Writes the rows that have changed since the last call.
  void Keep();
  // The end of the job: its rows go.
  void RemoveRows();
  // Rows in the order of their kinds, `hello` for participants; then once FinishRestore, which
  // grants leases anew. kInternal says what is wrong.
  Status Restore(const RowName& name, std::string_view value, const Hello* hello);
  Status FinishRestore(Moment moment, MembershipEffects& effects);
  void AppendRows(Rows& rows) const;

  const std::string& job() const { return job_; }
  std::uint64_t generation() const { return generation_; }
  std::size_t participants() const { return participants_.size(); }
  std::size_t worlds() const { return worlds_.size(); }
  std::size_t seats() const { return seats_.taken(); }
  // True when the last one to go said so (or nobody was ever there).
  bool EndedWell() const { return ended_well_; }
  // Appends "life":..,"generation":..,"worlds":[..],"spares":[..] to an open JSON object, as far as
  // the page has room.
  void AppendJson(std::string& out, Moment moment, StatusPage& page) const;

 private:
  using State = ParticipantState;
  // A frame that was under way when the ping was sent must not count as its answer, so the accused
  // answers twice in a row.
  static constexpr int kAnswersWanted = 2;
  enum class TimerKind : std::uint8_t { kLoneClose, kExitReport, kPing, kWorld, kHold, kSpare };
  using Timer = std::pair<TimerKind, std::uint64_t>;  // Of a session, or of a world's round.

  // Joining: membership_join.cc.
  Status CheckRequest(const Participant& who, const JoinRequest& request) const;
  // What a repeated join may change: nothing but a rank or a size that the session may not have
  // heard of, because its world was resized or it was given a seat as a spare.
  bool MayAskAgain(const Participant& who, const JoinRequest& request) const;
  void Place(Participant& who, Moment moment, MembershipEffects& effects);
  bool PlaceIn(World& world, Participant& who, Moment moment, MembershipEffects& effects);
  bool OthersGoOn(const Participant& who) const;
  bool CheckAttempt(Participant& who, Moment moment, MembershipEffects& effects);
  void WaitForHolder(World& world, Participant& who, SessionId holder, Moment moment,
                     MembershipEffects& effects);
  void TakeSeat(World& world, Participant& who, Moment moment, MembershipEffects& effects);
  // The seat that it asks for is its own from now on.
  void Occupy(World& world, Participant& who, MembershipEffects& effects);
  void JoinAgain(World& world, Participant& who, Moment moment, MembershipEffects& effects);
  // By what `who` asks for.
  void Lengthen(World& world, const Participant& who);
  // kDuplicateDevice when two of those with a seat, or with one and the newcomer, use one GPU.
  std::optional<Status> SharedDeviceIn(const World& world,
                                       const Participant* newcomer = nullptr) const;
  static std::size_t BytesInView(const Participant& who);
  // A view names all members of a world of `size` in one message; there is no world without it.
  static Status CheckRoomInView(const Hello& hello, const JoinRequest& request, int size);
  void Refuse(Participant& who, Status why, MembershipEffects& effects);
  void RefuseClaimants(Participant& holder, Moment moment, MembershipEffects& effects);
  void ReplaceClaimants(Participant& holder);
  World& NewWorld(const Participant& who, Moment moment, MembershipEffects& effects);
  // Joins that waited for a seat and have to be looked at again.
  void Settle(Moment moment, MembershipEffects& effects);

  // Phases of a world: membership_phases.cc.
  void BuildIfComplete(World& world, MembershipEffects& effects);
  void FenceWorld(World& world, const Status& cause, Moment moment, MembershipEffects& effects);
  void RefuseIfDue(World& world, Moment moment, MembershipEffects& effects);
  void RefuseWorld(World& world, Moment moment, MembershipEffects& effects);
  // Refuses everybody in a world that never had a view, and drops it.
  void RefuseAll(World& world, const Status& why, MembershipEffects& effects);
  // Drops a world without live seats, but for those that were given to spares and not built yet.
  void EndIfDeserted(std::uint64_t round, const Status& why, Moment moment,
                     MembershipEffects& effects);
  void EndWorld(std::uint64_t round, const Status& why, MembershipEffects& effects);
  void SupersedeWorld(std::uint64_t round, std::uint64_t attempt, Moment moment,
                      MembershipEffects& effects);
  void PushState(const Participant& who, MembershipEffects& effects) const;

  // A world that goes on with fewer seats: membership_shrink.cc.
  // What those who are left want of their world. Thread: value type.
  struct Wishes {
    bool any = false;  // Some of them want to go on without the empty seats,
    bool all = true;   // all of them do, and have joined,
    int least = 0;     // with so many ranks,
    Duration wait{};   // when the seats were empty for so long.
  };
  Wishes WishesOf(const World& world) const;
  // Takes back a refusal, for one that wants less than was refused.
  void ReopenFor(World& world, const Participant& who);
  // True: the world is building with the seats that it has left, or waits for the others' wishes.
  bool ShrinkIfDue(World& world, Moment moment, MembershipEffects& effects);
  void Shrink(World& world, MembershipEffects& effects);

  // A world that takes in more ranks: membership_growth.cc.
  void OfferRoom(World& world, const Participant& who, const resilient::Report& report,
                 Moment moment, MembershipEffects& effects);
  // Those that could take part in a larger world, at most `most`; refuses who can in none.
  std::vector<Participant*> NewcomersFor(const World& world, std::size_t most,
                                         MembershipEffects& effects);
  void Grow(World& world, const std::vector<Participant*>& newcomers, std::uint64_t commit,
            Moment moment, MembershipEffects& effects);
  // What the members were told of was no failure; this is.
  void NoteFailure(World& world, const Status& cause);
  // When a seat is vacant before the larger world has had its view there is none.
  void TakeBackGrowth(World& world, MembershipEffects& effects);

  // Spares: membership_spares.cc.
  void BecomeSpare(Participant& who, Moment moment, MembershipEffects& effects);
  // The lost seats of a world that had a view are given to those who wait for one.
  void SeatSpares(World& world, MembershipEffects& effects);
  void LetWait(Participant& who, Moment moment);
  void Await(Participant& who, MembershipEffects& effects);
  void FillLostSeats(Moment moment, MembershipEffects& effects);
  // False: there is none left that could take the seat.
  bool SeatSpare(World& world, const Seat& seat, MembershipEffects& effects);
  // In the order of their sessions. Forgets those that wait no more.
  std::vector<Participant*> WaitingSpares();
  // Whether it could take a seat of that world now.
  static bool Fits(const World& world, const Participant& who);
  // One on the host of the last holder rather than another, then the one that has waited longest.
  Participant* SpareFor(const World& world, const Seat& seat);
  // Nobody else is there, so that nothing of what the world has done is left.
  bool IsLeftToSpares(const World& world) const;
  // Those in a world that is refused or ends wait for another seat.
  void TakeBackSpares(World& world, Moment moment, MembershipEffects& effects);
  // Those that asked for a rank have it in a world that begins: a world has come, or gone.
  void CallClaimants();
  void TakeClaim(Participant& who, Moment moment, MembershipEffects& effects);
  void LoseSparesBefore(std::uint64_t attempt, Moment moment, MembershipEffects& effects);
  // Their time runs while the job has no world.
  void MindSpares(Moment moment);
  void SendAwayIfDue(Participant& who, Moment moment, MembershipEffects& effects);
  void RestoreSpare(Participant& who, Moment moment);

  // Evidence: membership.cc.
  // `event`: its name in the log.
  void Lose(Participant& who, const Status& cause, Moment moment, MembershipEffects& effects,
            std::string_view event = "lost");
  void Accuse(World& world, const Participant& reporter, const resilient::Report& report,
              Moment moment, MembershipEffects& effects);
  bool HasLeft(const Participant& who, std::uint64_t round) const;
  Status ReportDeath(World& world, const Participant& reporter, const resilient::Report& report,
                     Moment moment, MembershipEffects& effects);
  void ProcessEnded(Participant& who, Moment moment, MembershipEffects& effects);
  Status LossAfterExit(const Participant& who, Moment moment) const;
  void Ping(Participant& who, Moment moment, MembershipEffects& effects);
  void OnAnswers(Participant& who, Moment moment, MembershipEffects& effects);
  void OnTimer(Timer timer, Moment moment, MembershipEffects& effects);
  bool MassClose(Instant now) const;
  bool HasSecondWitness(const Participant& who) const;
  // After something new against one whose connection has ended.
  void ArmLoneClose(const Participant& who, Instant now);

  // Leaving, and the end in a member's own words: membership_leaving.cc.
  void LeaveSeat(World& world, Participant& who, Moment moment, MembershipEffects& effects);
  // `met`: by whom and as what, for the text; may be empty.
  bool FenceForLeaver(World& world, const std::string& met, Moment moment,
                      MembershipEffects& effects);
  void NeedLeaver(World& world, const Participant& reporter, const resilient::Report& report,
                  Moment moment, MembershipEffects& effects);
  void LoseLeaver(Participant& who, const ExitReportOp& report, Moment moment,
                  MembershipEffects& effects);
  void EndBy(Participant& who, const resilient::Report& report, Moment moment,
             MembershipEffects& effects);

  // Holds: membership_holds.cc.
  std::vector<Participant*> Matching(int rank, const std::string& host);
  void BeginHold(Participant& who, Moment moment, MembershipEffects& effects);
  void EndHolds(const std::vector<Participant*>& held, const std::string& why, Moment moment,
                MembershipEffects& effects);
  void EndDueHolds(Moment moment, MembershipEffects& effects);
  void TellHolds(const std::vector<Participant*>& which, HeldEvent event, const std::string& text,
                 Moment moment, MembershipEffects& effects);
  const Participant* HeldLongest() const;  // Null: nobody is held.
  // For one that was not there when it was told: who is held longest.
  void PushHolds(SessionId session, Moment moment, MembershipEffects& effects) const;
  Status LossOf(const Participant& who, const std::string& how, Moment moment) const;

  // Presence of ranks that have not joined: membership_presence.cc.
  void NotePresent(World& world, const Participant& teller, const WaitingReport& report,
                   Moment moment) const;
  void SeatThePresent(World& world);
  void ForgetAbsent(const World& world);

  // Who waits for whom: membership_waits.cc.
  World* RunningWorldOf(SessionId session, std::uint64_t generation);
  void Diagnose(Moment moment, MembershipEffects& effects);
  void Diagnose(World& world, Moment moment, MembershipEffects& effects);
  void TellLate(World& world, int listener, Moment moment, MembershipEffects& effects);
  void TellJoin(const World& world, const Participant& listener, Moment moment,
                MembershipEffects& effects) const;
  std::string LateText(const World& world, int listener, int rank, Moment moment) const;
  std::string AliveText(const Participant& who, Moment moment) const;
  Status Deadlock(const World& world, const std::vector<WaitEdge>& circle, Moment moment) const;
  Status Stall(const World& world, const Diagnosis::Verdict& verdict, Moment moment) const;
  Status DeviceStall(const World& world, const Diagnosis::Verdict& verdict, Moment moment) const;
  Status OtherRanks(const World& world, const GroupBook::Difference& found, Moment moment) const;
  FailureDetail DetailOfStalled(const World& world, const Diagnosis::Verdict& verdict) const;
  std::string NameOf(const World& world, int rank) const;

  // What a row is to be written of: membership_rows.cc.
  void ChangedJob() { changed_.job = true; }
  void Changed(const World& world) { Note(changed_.worlds, world.round); }
  void ChangedView(const World& world) { Note(changed_.views, world.round); }
  void Changed(const World& world, const Seat& seat) {
    Note(changed_.seats, {world.round, world.seats.RankOf(seat)});
  }
  void Changed(const Participant& who) { Note(changed_.participants, who.session); }
  void Gone(const World& world);
  template <typename What>
  void Note(std::vector<What>& list, What what) {
    if (Keeps()) list.push_back(what);
  }
  bool Keeps() const { return journal_ && journal_->on(); }
  std::string JobRowValue() const;
  Status RestoreParticipant(SessionId session, std::string_view value, const Hello* hello);
  Status RestoreSeat(const RowName& name, std::string_view value);
  Status CheckRestored(const Participant& who) const;
  // Forgets spares that ask for what no world has, as a store wrote that did not compare them.
  void DropBadSpares(MembershipEffects& effects);

  Participant* Find(SessionId session);
  const Participant* Find(SessionId session) const;
  World* WorldOf(const Participant& who);
  const World* WorldOf(const Participant& who) const;
  // REQUIRES: WorldOf(who) is that world.
  static Seat& SeatOf(World& world, const Participant& who);
  std::string RowOf(const World& world, const Seat& seat) const;
  static Claimant ClaimantOf(const Participant& who);
  // For the log, about `who`.
  LogRecord Record(std::string_view event, const Participant& who, std::string text) const;
  // Of one world, whose object is open.
  void AppendMembers(const World& world, Moment moment, StatusPage& page, std::string& out) const;
  static void AppendHolder(const Participant& who, Moment moment, std::string& out);
  bool AnyoneSeated() const;
  void Arm(Instant when, TimerKind kind, std::uint64_t id);

  // Of a rank of a world of some size: the processes that hold its presence key, by the session;
  // when there is none, how the last one ended without having joined.
  struct Presence {
    std::map<SessionId, ProcessIdentity> holders;
    std::string note;
  };
  static void Announce(Seat& seat, const Presence& presence);

  struct Changes {
    bool job = true;  // A new one is written in any case.
    std::vector<std::uint64_t> worlds;
    std::vector<std::uint64_t> views;
    std::vector<std::pair<std::uint64_t, int>> seats;  // Round and rank.
    std::vector<SessionId> participants;
  };

  const std::string job_;
  const MembershipLimits limits_;
  Journal* const journal_;
  const SecretMaker& make_secret_;
  std::uint64_t life_ = 0;
  std::uint64_t rounds_ = 0;  // Of this life.
  std::uint64_t generation_;
  std::uint64_t pings_ = 0;
  Instant any_held_until_ = Instant::min();  // The latest end that any hold has had.
  bool ended_well_ = true;
  bool host_left_ = false;                 // The store does not listen: no world begins here.
  std::size_t active_ = 0;                 // Participants with a lease.
  Quota seats_;                            // Outlives the worlds, whose seats it counts.
  std::map<std::uint64_t, World> worlds_;  // By round, of this life.
  std::unordered_map<SessionId, Participant> participants_;
  std::map<std::pair<std::string, std::int64_t>, std::set<SessionId>> by_process_;  // Boot id, pid.
  std::map<std::pair<int, int>, Presence> present_;  // By size and rank; not kept.
  std::multimap<Instant, Timer> timers_;
  std::deque<Instant> closes_;        // Of control connections, within the last second.
  std::vector<SessionId> due_holds_;  // Within a tick.
  std::deque<SessionId> to_replace_;  // Claimants whose holder is gone, or world.
  std::set<SessionId> spares_;        // And some that are none any more.
  bool bereft_ = true;                // The job had no world when spares were looked at last.
  // Of the worlds that have ended, as far as is known: the attempt, and how the last one went.
  std::uint64_t last_attempt_ = 0;
  bool ended_by_leave_ = false;
  Changes changed_;
};

}  // namespace resilient::store
