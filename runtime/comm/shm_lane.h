#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <resilient/abort.h>
#include <resilient/clock.h>
#include <resilient/communicator.h>

#include "runtime/base/thread.h"
#include "runtime/comm/shm_board.h"
#include "runtime/comm/shm_collective.h"
#include "runtime/comm/shm_segment.h"

namespace resilient {

class GroupPort;
struct SubmittedOp;

// Runs the collectives of one group over shared memory, one after the other: on the thread of a
// caller that waits for it, or on a thread of its own, made when it is first needed. A wait spins
// briefly and then sleeps; it ends when the lane is stopped, on an abort, and when a rank that is
// waited for has left. Goodbyes and failures travel over the links of the group's CommGroup.
//
// Owner: the group's port. Thread: thread-safe. Lifetime: Join before the port's last owner goes.
class ShmLane {
 public:
  // `port` owns the lane; `abort` may be null.
  ShmLane(GroupPort& port, const AbortCell* abort, std::unique_ptr<ShmSegment> segment,
          const ShmGeometry& geometry, const Clock& clock, bool checksums);
  ~ShmLane();
  ShmLane(const ShmLane&) = delete;
  ShmLane& operator=(const ShmLane&) = delete;

  // Queues `op` for the lane's thread; its completion runs there. After Stop as well: then it
  // fails.
  void Submit(SubmittedOp op);
  // True: nothing runs and nothing is queued, and Run must follow on this thread.
  bool TryEnter();
  // Runs `op` here. nullopt: `keep_waiting` said no, and the lane's thread goes on with it.
  std::optional<Status> Run(SubmittedOp op, const Communicator::KeepWaiting& keep_waiting);

  // What is running or queued, and what comes, ends with `cause`; the first cause wins. Returns at
  // once; whoever runs an operation ends it.
  void Stop(const Status& cause);
  // `peer` takes part in no more collectives: what needs it fails. `end` as in CommGroup::Peer.
  void OnPeerEnded(int peer, const Status& end);
  // The abort cell was set.
  void Wake() { board_.WakeSelf(); }
  // What runs has waited for kWaitTellAfter, and for whom it waits at present; the doorbell rings
  // when it comes to that.
  std::optional<WaitingOperation> Waiting(Instant now) const;
  // The latest collective that has begun here; 0: none.
  std::uint64_t begun() const { return begun_.load(std::memory_order_relaxed); }
  // Since when there is one to tell; kNever: none.
  Instant waiting_since() const { return waiting_since_.load(std::memory_order_relaxed); }
  // An operation has failed for a reason that the peers must hear. Once.
  std::optional<Status> TakeFailure();
  // Ends the thread when its queue is empty. REQUIRES: Stop; not on the lane's thread.
  void Join();

 private:
  struct Running;
  struct Told {
    WaitingOperation waiting;
    Instant submitted;
    std::uint64_t step = 0;  // Who has published it has entered.
  };

  // nullopt: given up.
  std::optional<Status> Drive(Running& running, const Communicator::KeepWaiting* keep_waiting);
  // nullopt: all have published the present step, or the caller has given up.
  std::optional<Status> Wait(Running& running, const Communicator::KeepWaiting* keep_waiting,
                             bool* given_up);
  // Asks the caller, but not too often.
  bool IsGivenUp(Running& running, const Communicator::KeepWaiting* keep_waiting) const;
  // Not OK: it takes too long.
  Status CheckTime(Running& running, Instant now) const;
  void NoteWaiting(Running& running, Instant now);
  bool Stopping() const;
  Status Cause() const;
  // Not OK: a rank that has not come to the present step never will.
  Status EndOfMissing(const Running& running) const;
  Status Fail(const Status& why);
  Status StartThread();  // REQUIRES: mutex_.
  void ThreadBody();
  void Complete(SubmittedOp op, const Status& outcome);
  void Leave();

  // Constant.
  GroupPort& port_;
  const AbortCell* const abort_;
  const std::unique_ptr<ShmSegment> segment_;
  const Clock& clock_;
  const unsigned spins_;
  // Whoever has entered.
  ShmBoard board_;
  // Self-synchronised.
  std::atomic<bool> stopped_{false};
  std::atomic<unsigned> ended_{0};  // How many of ends_ are set.
  std::atomic<Instant> waiting_since_{kNever};
  std::atomic<std::uint64_t> begun_{0};
  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<SubmittedOp> queue_;
  std::unique_ptr<Running> handed_over_;
  std::optional<Told> told_;  // Of what runs or is handed over.
  bool entered_ = false;
  bool joining_ = false;
  bool thread_started_ = false;
  Status cause_;
  std::optional<Status> failure_;
  std::vector<Status> ends_;
  Thread thread_;
};

}  // namespace resilient
