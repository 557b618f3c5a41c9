#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <resilient/ladder.h>
#include <resilient/session.h>

#include "runtime/base/thread.h"
#include "runtime/recovery/kept_operation.h"
#include "runtime/recovery/replay_log.h"

namespace resilient::recovery {

// Operations of one group that wait for the end of a replay.
inline constexpr std::size_t kReplayQueueMax = 4096;

// One group in the replay layer. Owner: its ReplayGroup and the completions. Thread: the constants
// are immutable, the rest is guarded by the layer's mutex.
struct Lane {
  const std::shared_ptr<Group> inner;
  const std::vector<int> ranks;
  std::uint64_t instance = 1;

  bool closed = false;
  ReplayLog log;
  std::uint64_t base = 0;          // A collective's number, less that at its communicator.
  std::uint64_t message_base = 0;  // The same of messages, which are counted for themselves.
  std::uint64_t next_message = 1;
  std::map<std::uint64_t, std::shared_ptr<KeptOperation>> collectives;  // Those in the log.
  std::map<std::uint64_t, std::shared_ptr<KeptOperation>> messages;     // Those in flight.
  std::deque<std::shared_ptr<KeptOperation>> queue;  // Not started: the next generation is awaited.
};

// A session that keeps what its operations need to be run again, around one that does not: behind
// a broken link it acknowledges by itself, meets the other members in a group of its own, and runs
// again what the link has ended, by PlanReplay. Until then the program sees nothing of it: what it
// waits for goes on waiting, what it starts is queued. Where it may not, the program meets the
// first cause, as without this layer, and it stays until Rebuild.
//
// Its thread (res-replay) follows the events of the session inside; it alone heals. Owner: shared
// by the user and the groups. Thread: thread-safe. Lifetime: Close joins the thread.
class ReplaySession final : public Session, public std::enable_shared_from_this<ReplaySession> {
 public:
  ReplaySession(std::shared_ptr<Session> inner, const Ladder& ladder, const Clock& clock);
  ~ReplaySession() override;

  Status Init() override;
  Result<std::shared_ptr<Group>> CreateGroup(std::string name, std::vector<int> ranks,
                                             NcclOptions nccl, std::string made_at) override;
  Membership membership() const override;
  Membership acknowledged() const override;
  std::uint64_t epoch() const override;
  Status failure() const override;
  Status AwaitFailure(Deadline deadline) const override;
  bool Object(const Status& told) override;
  std::optional<Incident> last_incident() const override { return inner_->last_incident(); }
  Result<SessionEvent> AwaitEvent(std::uint64_t after, Deadline deadline) const override {
    return inner_->AwaitEvent(after, deadline);
  }
  Status Rebuild(const RebuildOptions& options) override;
  Status OfferRoom(int max_world, std::uint64_t commit) override {
    return inner_->OfferRoom(max_world, commit);
  }
  void AnnounceEnd(const std::string& why, Deadline deadline) override {
    inner_->AnnounceEnd(why, deadline);
  }
  const InterruptCheck& interrupt() const override { return inner_->interrupt(); }
  void BeginBlocked(const std::string& group, bool point_to_point, std::uint64_t seq) override;
  void EndBlocked() override { inner_->EndBlocked(); }
  void Close() override;
  bool InForkedChild() const override { return inner_->InForkedChild(); }

  // For ReplayGroup.
  using LanePtr = std::shared_ptr<Lane>;
  Result<std::uint64_t> Submit(const LanePtr& lane, Operation operation, Completion done);
  Result<Communicator::Ran> Run(const LanePtr& lane, Operation operation, Completion done,
                                const Communicator::KeepWaiting& keep_waiting);
  void CloseGroup(const LanePtr& lane);
  void AbortGroup(const LanePtr& lane, const std::string& why);

  bool OnOwnThread() const { return thread_.IsCurrent(); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Kept = std::shared_ptr<KeptOperation>;
  enum class Phase : std::uint8_t {
    kOpen,     // The session inside decides.
    kHealing,  // A link broke, and nobody has been told.
    kFailed,   // The first cause waits for Rebuild.
  };
  // What one member says to the others in one generation, and hears. Owner: its operations, for as
  // long as they run. Thread: guarded by the layer's mutex once they do.
  struct Meeting {
    std::string said;
    std::string heard;  // As much from each member.
    bool ended = false;
    Status status;
  };
  enum class Met : std::uint8_t { kYes, kNotYet, kNever };

  // In replay_session.cc: the way in and out of an operation. Locked = REQUIRES mutex_.
  Result<Communicator::Ran> Enter(const LanePtr& lane, const Kept& kept,
                                  const Communicator::KeepWaiting* keep_waiting);
  std::optional<Result<Communicator::Ran>> TurnAwayLocked(Lane& lane, const Kept& kept);
  static Operation ToSubmit(KeptOperation& kept, Operation operation);
  void NoteStartedLocked(Lane& lane, const Kept& kept, std::uint64_t seq);
  void NoteEndedLocked(Lane& lane, KeptOperation& kept);
  bool MayRetry(const Status& refused);
  Completion Wrap(const LanePtr& lane, const Kept& kept);
  // nullopt: it will be run again, or its end is told by who gives up. `of_link`: BelongsToLink.
  std::optional<Status> OutcomeLocked(const Lane& lane, const KeptOperation& kept,
                                      const Status& status, bool of_link);
  bool BelongsToLink(const Status& status);
  // Why nothing of that lane starts here any more, or is run again; OK: it may be.
  Status OverLocked(const Lane& lane) const;
  // Null unless who closed it has missed this one, which was still on its way into or out of the
  // session inside.
  Completion TakeMissedLocked(const Lane& lane, KeptOperation& kept);
  void BeginHealingLocked(const Status& cause);
  // Those of the healing hear of `why`; at the latest it ends the generation behind it.
  void ObjectLocked(const std::string& why);
  void ResetLocked(const Membership& now);
  // Those that are not in flight, to be told that they are over.
  static std::vector<std::pair<Completion, Kept>> TakePendingLocked(Lane& lane);

  // In replay_heal.cc, on the layer's thread, except where noted.
  void Follow();
  void OnFence(const SessionEvent& event);
  void GiveUp(const Status& cause, const std::string& why);
  // What that ends, to be told without the lock.
  std::vector<std::pair<Completion, Status>> GiveUpLocked(const Status& cause,
                                                          const std::string& why);
  void GiveUpReplay(const std::string& why);
  bool Heal();
  bool AwaitNobodyInside();
  void MeetAndRunAgain(const Membership& now);
  Met Meet(const Membership& now, std::vector<ReplaySummary>* all);
  std::shared_ptr<Group> MeetingPlace(const Membership& now);  // Any thread. Null: was asked for.
  std::optional<std::string> Gather(Group& place, std::string said, std::size_t size);
  Status Offer(Group& place, const std::shared_ptr<Meeting>& meeting, std::size_t size,
               bool binding);
  void EndMeeting();
  void OfferVeto(const Membership& now);  // Any thread.
  ReplaySummary SummaryLocked() const;
  bool RunAgain(const Membership& now, const std::vector<ReplaySummary>& all,
                const ReplayPlan& plan);
  std::vector<std::pair<LanePtr, Kept>> ToRunLocked(const std::vector<ReplaySummary>& all,
                                                    const ReplayPlan& plan,
                                                    std::vector<Completion>* over);
  void SettleMessagesLocked(Lane& lane, const std::vector<ReplaySummary>& all,
                            std::vector<Completion>* over);
  bool StartQueuedAndOpen(const Membership& now);
  bool StartAgain(const LanePtr& lane, const Kept& kept);

  const std::shared_ptr<Session> inner_;
  const Clock& clock_;
  const Ladder ladder_;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;  // With mutex_: everything below.
  // Guarded by mutex_:
  Phase phase_ = Phase::kOpen;
  Status first_cause_;  // Not OK in kHealing and kFailed.
  Deadline heal_by_ = Deadline::Never();
  std::string veto_;              // Why this rank runs nothing again in this epoch.
  std::uint64_t epoch_ = 0;       // 0: before Init.
  std::uint64_t link_fence_ = 0;  // The latest generation that a link has ended.
  int inside_ = 0;                // Calls that are in the session inside.
  Membership acknowledged_;
  std::map<std::string, std::shared_ptr<Lane>> lanes_;   // The open ones.
  std::map<std::string, std::uint64_t> instances_;       // By name, in this epoch.
  std::vector<std::pair<LanePtr, std::string>> aborts_;  // By the program, while it heals.
  bool closing_ = false;

  std::mutex place_mutex_;
  std::shared_ptr<Group> place_;        // Guarded by place_mutex_.
  std::uint64_t place_generation_ = 0;  // Likewise.

  std::mutex join_mutex_;  // Held while the thread is started or joined.

  Thread thread_;  // Last.
};

// Forwards to its layer. Owner: the Backend. Thread: thread-safe. Lifetime: keeps the session.
class ReplayGroup final : public Group {
 public:
  ReplayGroup(std::shared_ptr<ReplaySession> session, std::shared_ptr<Lane> lane)
      : session_(std::move(session)), lane_(std::move(lane)) {}
  ~ReplayGroup() override { Close(); }

  const std::string& name() const override { return lane_->inner->name(); }
  int rank() const override { return lane_->inner->rank(); }
  int size() const override { return lane_->inner->size(); }
  Status Usable() const override { return lane_->inner->Usable(); }
  Result<std::uint64_t> Submit(Operation op, Completion done) override {
    return session_->Submit(lane_, std::move(op), std::move(done));
  }
  Result<std::vector<std::uint64_t>> SubmitBatch(
      std::vector<Communicator::Submission> /*batch*/) override {
    return Status(StatusCode::kUnimplemented,
                  "batches cannot be run again: unset RESILIENT_REPLAY");
  }
  Result<Communicator::Ran> Run(Operation op, Completion done,
                                const Communicator::KeepWaiting& keep_waiting) override {
    return session_->Run(lane_, std::move(op), std::move(done), keep_waiting);
  }
  void Close() override { session_->CloseGroup(lane_); }
  void Abort(const std::string& why) override { session_->AbortGroup(lane_, why); }
  Session& session() override { return *session_; }

 private:
  const std::shared_ptr<ReplaySession> session_;
  const std::shared_ptr<Lane> lane_;
};

// `inner` with a replay layer around it.
std::shared_ptr<Session> WithReplay(std::shared_ptr<Session> inner, const Ladder& ladder,
                                    const Clock& clock);

}  // namespace resilient::recovery
