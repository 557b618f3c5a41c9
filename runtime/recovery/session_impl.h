#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <resilient/communicator.h>
#include <resilient/ladder.h>
#include <resilient/rendezvous.h>
#include <resilient/session.h>

#include "runtime/base/fork_guard.h"
#include "runtime/base/log.h"
#include "runtime/recovery/callers.h"
#include "runtime/recovery/event_ring.h"
#include "runtime/recovery/flight.h"
#include "runtime/recovery/host_watch.h"
#include "runtime/recovery/hung_device.h"
#include "runtime/recovery/incident.h"
#include "runtime/recovery/lost_links.h"
#include "runtime/recovery/pause_watch.h"
#include "runtime/recovery/state_machine.h"
#include "runtime/recovery/store_outage.h"
#include "runtime/recovery/thread_census.h"
#include "runtime/recovery/wait_desk.h"

namespace resilient::recovery {

inline constexpr std::size_t kOpenGroupsMax = 4096;
inline constexpr std::size_t kGroupNamesPerGenerationMax = 65536;
// Communicators of closed groups that are kept so that their last bytes can still leave, beside
// those that hold a device.
inline constexpr std::size_t kLeftCommunicatorsMax = 16;
inline constexpr Duration kLinkReportInterval = std::chrono::seconds(1);
// A link that cannot be made for so long has a line in the log, and one again each time.
inline constexpr Duration kUnreachedTold = std::chrono::seconds(10);
inline constexpr Duration kCloseBound = std::chrono::seconds(1);

// The session's side of one Group. Owner: GroupImpl. Thread: the name is immutable, the rest is
// guarded by the session's mutex.
struct GroupSlot {
  const std::string name;
  std::vector<int> ranks;  // Global ranks in group order.
  int rank = -1;           // Group rank of this process.
  const NcclOptions nccl;  // The world's: of the session.
  const std::string made_at;
  // Of the ranks of a world that has been numbered anew since; never the world's group.
  bool outdated = false;

  bool closed = false;
  std::shared_ptr<Communicator> communicator;  // Of the present generation; null until needed.
  // In that generation this process has aborted it, for that: also where it had no communicator.
  std::uint64_t aborted_in = 0;
  Status aborted;
};

// The shell around StateMachine: feeds it with what the membership service, the communicators and
// the callers say, and does what it answers.
//
// The machine is stepped under mutex_ by whichever thread has news; its actions are queued in that
// order and carried out by the control thread alone, so that joins, builds and aborts never
// overtake each other.
//
// Owner: shared by the user and the groups. Thread: thread-safe. Lifetime: see SessionDeleter.
class SessionImpl final : public Session,
                          public RendezvousEvents,
                          public CommunicatorEvents,
                          public std::enable_shared_from_this<SessionImpl> {
 public:
  SessionImpl(SessionOptions options, std::unique_ptr<Rendezvous> rendezvous, const Clock& clock);
  ~SessionImpl() override;

  // REQUIRES: called once, before anything else.
  Status MakeFactory(const FactoryMaker& make_factory);

  // Session.
  Status Init() override;
  Result<std::shared_ptr<Group>> CreateGroup(std::string name, std::vector<int> ranks,
                                             NcclOptions nccl, std::string made_at) override;
  Membership membership() const override;
  Membership acknowledged() const override;
  std::uint64_t epoch() const override { return acknowledged().generation; }
  Status failure() const override;
  Status AwaitFailure(Deadline deadline) const override;
  bool Object(const Status& /*told*/) override { return false; }
  std::optional<Incident> last_incident() const override;
  Result<SessionEvent> AwaitEvent(std::uint64_t after, Deadline deadline) const override;
  Status Rebuild(const RebuildOptions& options) override;
  Status OfferRoom(int max_world, std::uint64_t commit) override;
  const InterruptCheck& interrupt() const override { return options_.interrupt; }
  void BeginBlocked(const std::string& group, bool point_to_point, std::uint64_t seq) override {
    callers_.Block({group, point_to_point, seq});
  }
  void EndBlocked() override { callers_.Unblock(); }
  void AnnounceEnd(const std::string& why, Deadline deadline) override;
  void Close() override;
  bool InForkedChild() const override { return mark_.InChild(); }

  // RendezvousEvents, on the control thread.
  void OnView(const View& view) override;
  void OnRunning(std::uint64_t generation) override;
  void OnFence(const Fence& fence) override;
  void OnJoinRefused(std::uint64_t join, const Status& why) override;
  void OnSessionLost(const Status& why) override;
  void OnHeld(Instant until) override { factory_->Hold(until); }

  void OnWhere(std::uint64_t ask) override;
  void OnLate(const LateNotice& notice) override;
  void OnAskProgress(std::uint64_t generation, const std::vector<std::string>& groups) override;
  void OnAllEntered(std::uint64_t generation, const std::vector<EnteredCall>& calls) override;
  void OnBeat(Instant now, Instant contact, Duration lease) override;
  void OnPaused() override { pause_watch_.OnPaused(); }
  void OnConfirmed() override;

  // CommunicatorEvents, on a communicator thread.
  void OnConnected(const std::string& group, std::uint64_t generation) override;
  void OnLinkLost(const std::string& group, std::uint64_t generation, int global_rank,
                  const Status& why) override;
  void OnUnreached(const std::string& group, std::uint64_t generation, int global_rank,
                   const Status& why) override;
  void OnMismatch(const std::string& group, std::uint64_t generation,
                  const Status& mismatch) override;
  void OnStalled(const std::string& group, std::uint64_t generation, const Status& why) override;
  void OnWaiting(const std::string& group, std::uint64_t generation,
                 std::vector<WaitingOperation> waiting) override;
  void OnProgress(std::uint64_t generation, GroupProgress progress) override;
  void OnKnocked(std::uint64_t generation, int global_rank, const Status& found) override;

  // For GroupImpl.
  Result<std::uint64_t> Submit(GroupSlot& slot, Operation operation, Completion done);
  Result<std::vector<std::uint64_t>> SubmitBatch(GroupSlot& slot,
                                                 std::vector<Communicator::Submission> batch);
  Result<Communicator::Ran> Run(GroupSlot& slot, Operation operation, Completion done,
                                const Communicator::KeepWaiting& keep_waiting);
  Status Refused(const OperationRecord& record, const std::string& group, Status why);
  void CloseGroup(GroupSlot& slot);
  int RankIn(const GroupSlot& slot) const;
  int SizeOf(const GroupSlot& slot) const;
  Status UsableOf(const GroupSlot& slot) const;
  void AbortGroup(GroupSlot& slot, const std::string& why);

  // In a forked child: drops the connection without a word. Idempotent.
  void AbandonInChild();
  // True on a thread that is inside a callback of this session.
  bool OnOwnThread() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  // What a join asks for beyond a seat: Rebuild says so, until the gate is open.
  struct Wish {
    int min_world = 0;
    Duration seat_wait{};
    friend bool operator==(const Wish&, const Wish&) = default;
  };
  // An operation's way into the present generation.
  struct Entry {
    std::shared_ptr<Flight> flight;
    std::shared_ptr<Communicator> communicator;  // Null: to be made first.
  };

  // In session.cc: callers that wait, and the end.
  Status ForkedStatus() const;
  Status CheckAndTellDeadlines() const;
  Status InitConnected(Deadline deadline);
  Status AwaitFenceOfBroken(Deadline deadline) const;
  Status AwaitFenceOfLeaver(Deadline deadline);
  Status AwaitWordOfLeavers(Deadline deadline);
  Status NoWordLocked(std::uint64_t generation, Instant now) const;
  Status WaitForOpening(Deadline deadline, std::uint64_t openings_before);
  std::optional<Status> WaitVerdictLocked(Deadline deadline, std::uint64_t openings_before) const;
  bool MayWaitLongerLocked(Instant now) const;
  Status OverdueLocked() const;
  Membership MembershipInChild() const;
  Membership MembershipLocked() const;
  void AwaitDevices();
  void CloseThreads();

  // In session_events.cc: the machine and what it asks for. StepLocked and StepFromCaller REQUIRE
  // mutex_; the latter gives it up for a moment. The rest runs on the control thread.
  void StepLocked(const Event& event);
  void NoteProgressLocked(const Event& event, SessionState from, std::uint64_t ended_before);
  void NoteStateLocked(SessionState from, double wall_s);
  void AddEventLocked(SessionEvent::Kind kind, std::uint64_t generation, const Status& cause,
                      double wall_s);
  void NoteEndLocked(const Event& event, SessionState from, std::uint64_t ended_before,
                     double wall_s);
  void StepFromCaller(const Event& event, Lock* lock);
  void TakePlaceLocked(const View& view);
  void Apply(const Event& event);
  void Drain();
  bool WriteLines();
  void Perform(const Action& action);
  void SendJoin(const Action& action);
  void BuildWorld(const View& view);
  void AbortCommunicators(const Action& action);
  void PostQuietCheck();
  void CheckQuiet();
  void ReportVerdict(const Report& report);
  void ReportLink(ReportKind kind, std::uint64_t generation, int rank, const Status& why);
  // Any thread: an operation has ended with `status`, perhaps for want of a leaver.
  void NoteNeed(const OperationRecord& record, const Status& status);
  // `what`: the operation, for the text; may be empty.
  void ReportNeed(std::uint64_t generation, int rank, const std::string& what);
  void ReportDeath(const Neighbour& neighbour, const ProcessEnd& end);
  bool IsPresent(std::uint64_t generation) const;
  bool EndIsAnnounced() const;

  // In session_waits.cc, on the control thread: what this rank waits for.
  void PostTellWaiting();
  void LookWhileDeviceHangs();
  // `again`: only what has been told differently before.
  void TellWaiting(Instant now, bool again);
  void AskForThreads();
  // Null: the generation is another one, or no operation was submitted there.
  std::shared_ptr<Communicator> CommunicatorOf(std::uint64_t generation,
                                               const std::string& transport, bool* left);
  // What the groups that `report` is about were made of here.
  void AddMade(WaitingReport* report) const;
  std::optional<GroupMade> MadeOfLocked(const std::string& transport) const;
  std::string LinkText(int rank) const;
  void AddSilentRanks(LateNotice* notice) const;
  void TellJoining(bool first, Instant now);
  // `lease`: as OnBeat.
  void LookWithoutStore(Instant now, Duration lease);
  void Knock(const View& view, const std::vector<int>& ranks, Duration patience);

  // In session_groups.cc: groups and operations. Locked = REQUIRES mutex_.
  Status NotRunningLocked(const std::string& group, const std::string& what) const;
  Status CheckNewGroupLocked(const std::string& name, const std::vector<int>& ranks) const;
  Result<Entry> Enter(GroupSlot& slot, const Operation& operation);
  Status AwaitConfirmation(const GroupSlot& slot, const Operation& operation);
  std::shared_ptr<Communicator>& CommunicatorLocked(GroupSlot& slot);
  Status CreateCommunicator(GroupSlot& slot, const Flight& flight);
  Result<GroupSpec> SpecOf(const std::string& name, const std::vector<int>& ranks, int rank,
                           const View& view) const;
  Completion Wrap(std::shared_ptr<OperationRecord> record, Completion done);
  std::vector<std::shared_ptr<Communicator>> CommunicatorsLocked() const;
  std::vector<std::shared_ptr<Communicator>> TakeCommunicatorsLocked();

  const SessionOptions options_;
  const Ladder ladder_;
  const Clock& clock_;
  const ProcessMark mark_;
  const std::int64_t opener_pid_;
  const std::string opener_host_;
  const std::unique_ptr<Rendezvous> rendezvous_;  // Self-synchronised.
  std::atomic<bool> abandoned_{false};

  // Held while the factory makes a communicator: the factory is not closed meanwhile, and no
  // communicator is made twice. Taken before mutex_.
  std::mutex create_mutex_;

  // This rank and the size of its world, as of the latest view. Written under mutex_ on the control
  // thread.
  std::atomic<int> rank_;
  std::atomic<int> world_size_;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;  // With mutex_: the state, closed_, events_.
  // Guarded by mutex_:
  StateMachine machine_;
  std::deque<Action> actions_;  // At most a few: the control thread never blocks.
  std::deque<std::pair<LogLevel, LogRecord>> log_lines_;  // Written outside the lock.
  IncidentLog incidents_;
  EventRing events_;
  bool init_called_ = false;
  int rebuild_waiters_ = 0;
  Wish wish_;
  Membership acknowledged_;           // Of the generation that ran here last.
  Instant contact_ = Instant::min();  // The service was heard last.
  bool end_announced_ = false;
  bool leaving_ = false;  // No operation is let in any more.
  bool close_started_ = false;
  bool closed_ = false;
  std::shared_ptr<Flight> flight_;  // Of the latest view; null before the first.
  std::shared_ptr<Communicator> world_;
  std::map<std::string, GroupSlot*> groups_;        // The open ones.
  std::map<std::string, GroupRanks> used_names_;    // Communicators of this generation, by group.
  std::deque<std::shared_ptr<Communicator>> left_;  // Of closed groups of this generation.

  // Self-synchronised.
  const std::shared_ptr<QuietBell> bell_ =
      std::make_shared<QuietBell>([this] { PostQuietCheck(); });
  Callers callers_;
  WaitDesk waits_;
  PauseWatch pause_watch_;
  std::atomic<bool> waiting_posted_{false};
  std::atomic<bool> opened_before_{false};  // The gate to operations.

  // Confined to the control thread.
  // By kind and rank: the last one of this generation.
  std::map<std::pair<ReportKind, int>, Instant> link_reports_;
  std::map<int, Instant> unreached_since_;  // By rank, of this generation; moved on when told.
  std::uint64_t link_reports_generation_ = 0;
  LostLinks lost_links_;  // Of that generation.
  StoreOutage outage_;
  std::optional<Instant> joining_since_;
  ThreadCensus census_;
  Duration no_progress_{};  // Of this process, as the observer told it then.
  Instant no_progress_told_{};
  HungDevice hung_device_;
  std::vector<std::shared_ptr<Communicator>> aborting_;  // Until they are quiet.

  // Last: their threads call into everything above until they are closed. The factory is set once
  // by MakeFactory.
  HostWatch host_watch_;
  std::unique_ptr<CommunicatorFactory> factory_;
};

// Marks the calling thread as inside a callback of `session` for its life. Thread: confined.
class OwnThreadScope {
 public:
  explicit OwnThreadScope(const SessionImpl* session);
  ~OwnThreadScope();
  OwnThreadScope(const OwnThreadScope&) = delete;
  OwnThreadScope& operator=(const OwnThreadScope&) = delete;

 private:
  const SessionImpl* const outer_;
};

// Destroys a session, except where its threads cannot be joined: in a forked child they do not
// exist, and on one of them it would wait for itself. There the memory is given up instead.
struct SessionDeleter {
  void operator()(SessionImpl* session) const;
};

// Forwards to its session. Owner: the Backend. Thread: thread-safe. Lifetime: keeps the session.
class GroupImpl final : public Group {
 public:
  GroupImpl(std::shared_ptr<SessionImpl> session, std::string name, std::vector<int> ranks,
            int rank, NcclOptions nccl, std::string made_at)
      : session_(std::move(session)),
        slot_{.name = std::move(name),
              .ranks = std::move(ranks),
              .rank = rank,
              .nccl = std::move(nccl),
              .made_at = std::move(made_at),
              .communicator = {}} {}
  ~GroupImpl() override { Close(); }

  const std::string& name() const override { return slot_.name; }
  int rank() const override { return session_->RankIn(slot_); }
  int size() const override { return session_->SizeOf(slot_); }
  Status Usable() const override { return session_->UsableOf(slot_); }
  Result<std::uint64_t> Submit(Operation op, Completion done) override {
    return session_->Submit(slot_, std::move(op), std::move(done));
  }
  Result<std::vector<std::uint64_t>> SubmitBatch(
      std::vector<Communicator::Submission> batch) override {
    return session_->SubmitBatch(slot_, std::move(batch));
  }
  Result<Communicator::Ran> Run(Operation op, Completion done,
                                const Communicator::KeepWaiting& keep_waiting) override {
    return session_->Run(slot_, std::move(op), std::move(done), keep_waiting);
  }
  void Close() override { session_->CloseGroup(slot_); }
  void Abort(const std::string& why) override { session_->AbortGroup(slot_, why); }
  Session& session() override { return *session_; }

  GroupSlot& slot() { return slot_; }

 private:
  const std::shared_ptr<SessionImpl> session_;
  GroupSlot slot_;
};

}  // namespace resilient::recovery
