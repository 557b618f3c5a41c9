#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <resilient/abort.h>
#include <resilient/communicator.h>

#include "runtime/base/fork_guard.h"
#include "runtime/comm/op_timeouts.h"
#include "runtime/comm/shm_lane.h"
#include "runtime/comm/step_observer.h"
#include "runtime/net/socket.h"

namespace resilient {

// Wakes the comm thread. Owner: shared by the fabric and its ports, as an abort listener may ring
// it after both are gone. Thread: thread-safe.
class Doorbell {
 public:
  void Ring() const {
    if (!mark_.InChild()) wake_.Wake();  // A forked child has no comm thread, and no descriptor.
  }
  const WakeFd& wake() const { return wake_; }
  bool InChild() const { return mark_.InChild(); }

 private:
  const ProcessMark mark_;
  const WakeFd wake_;
};

// Until when some rank is held: announced to stand still. Owner: shared by the fabric and its
// ports. Thread: thread-safe.
class HoldCell {
 public:
  void Set(Instant until) { until_.store(until, std::memory_order_relaxed); }
  Instant Get() const { return until_.load(std::memory_order_relaxed); }

 private:
  std::atomic<Instant> until_ = Instant::min();
};

// Takes back the events of a device. Owner: shared by a fabric and its operations. Thread:
// thread-safe.
class EventPool {
 public:
  virtual ~EventPool() = default;
  virtual void Give(void* event) = 0;
};
struct ReturnEvent {
  std::shared_ptr<EventPool> pool = nullptr;
  void operator()(void* event) const { pool->Give(event); }
};
using PooledEvent = std::unique_ptr<void, ReturnEvent>;

struct SubmittedOp {
  Operation op;
  Completion done;
  // Of an operation on a device: what its caller's stream had by Submit.
  PooledEvent ready;
  std::uint64_t seq = 0;
  // Of what is queued. What its caller runs at once gets it when it comes to wait.
  Instant submitted = Instant::min();
  OpTimeouts timeouts;
  // Of its caller's stream: the capture in a graph that it is part of. 0: it is not captured.
  std::uint64_t capture = 0;
  // How many of those that follow belong to its batch.
  std::size_t batch_rest = 0;
};

// What a transport does with a valid operation of a group on the thread that submits it. Not OK: it
// does not run it. Null: it runs all.
using Admission = std::function<Status(const GroupSpec& group, SubmittedOp& op)>;

// What is told of `op`, without the ranks. REQUIRES: `submitted` is known.
WaitingOperation ToldOf(const SubmittedOp& op, Instant now);
// By `spec`, ascending.
std::vector<int> GlobalRanks(const GroupSpec& spec, const std::vector<int>& group_ranks);

// What lies between the callers of one communicator and who runs its operations: the comm thread,
// or for collectives, once the group has shared memory, its lane. Owner: shared by the
// communicator, its group on the comm thread, and completions on their way. Thread: thread-safe.
class GroupPort {
 public:
  // Operations accepted and not completed.
  static constexpr std::size_t kMaxOperations = 1u << 16;

  GroupPort(GroupSpec spec, std::shared_ptr<AbortCell> abort, std::shared_ptr<Doorbell> doorbell,
            std::shared_ptr<const HoldCell> held, const Clock& clock, Admission admission,
            StepObserver observer);

  const GroupSpec& spec() const { return spec_; }
  const std::shared_ptr<AbortCell>& abort_cell() const { return abort_; }
  const Doorbell& doorbell() const { return *doorbell_; }
  Instant held_until() const { return held_->Get(); }
  int size() const { return static_cast<int>(spec_.members.size()); }
  // Of each of its ranks on this host a caller and a thread that runs operations can wait awake.
  bool has_cores() const { return has_cores_; }

  // Callers.
  Result<std::uint64_t> Submit(Operation op, Completion done);
  Result<std::vector<std::uint64_t>> SubmitBatch(std::vector<Communicator::Submission> batch);
  Result<Communicator::Ran> Run(Operation op, Completion done,
                                const Communicator::KeepWaiting& keep_waiting);
  void Abort(const Status& cause);
  // `after`: what later submissions get.
  void Leave(const Status& after);
  // The abort cell was set. Any thread.
  void OnAbort();
  bool IsQuiet() const { return outstanding_.load(std::memory_order_acquire) == 0; }
  // As Communicator.
  bool HoldsDevice() const { return holds_device_.load(std::memory_order_acquire); }
  // As Communicator, of this transport.
  ProgressAnswer AskProgress();
  void NoteAllEntered(const EnteredCall& call);

  // Comm thread.
  struct Mail {
    std::vector<SubmittedOp> ops;
    Status aborted;  // Not OK: end everything with it.
    bool leave = false;
    Status left;  // What `leave` completes operations with.
    bool progress_asked = false;
    std::vector<EnteredCall> all_entered;
  };
  // What has come since; the memory of what is in `mail` is used again.
  void Take(Mail* mail);
  // No more operations are accepted but refused with `cause` (the first one wins); returns those
  // not yet taken.
  std::vector<SubmittedOp> Close(const Status& cause);
  // From now on collectives go to a lane on `segment`, which `geometry` divides, beginning with
  // `waiting`. At most once.
  ShmLane& OpenLane(std::unique_ptr<ShmSegment> segment, const ShmGeometry& geometry,
                    std::deque<SubmittedOp> waiting, bool checksums);
  // From before its group begins until that has nothing more to do on its device.
  void SetHoldsDevice(bool holds) { holds_device_.store(holds, std::memory_order_release); }
  void OnCompleted() { outstanding_.fetch_sub(1, std::memory_order_acq_rel); }
  // Whoever runs a collective is at its next step.
  void OnStep() {
    if (observer_) observer_(spec_, steps_.fetch_add(1, std::memory_order_relaxed) + 1);
  }

 private:
  Result<SubmittedOp> Admit(Operation op, Completion done) const;
  // All REQUIRE: mutex_.
  Status AbortCause() const;
  Status CheckOpen(std::size_t operations) const;
  std::uint64_t Number(const Operation& op);
  // True: the comm thread must be woken, best without the mutex.
  bool Queue(SubmittedOp op);

  // Constant.
  const GroupSpec spec_;
  const std::shared_ptr<AbortCell> abort_;  // May be null.
  const std::shared_ptr<Doorbell> doorbell_;
  const std::shared_ptr<const HoldCell> held_;
  const Clock& clock_;
  const Admission admission_;
  const StepObserver observer_;
  const bool has_cores_;
  // Self-synchronised.
  std::atomic<std::size_t> outstanding_{0};
  std::atomic<std::uint64_t> steps_{0};
  std::atomic<bool> holds_device_{false};
  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::vector<SubmittedOp> ops_;
  std::uint64_t collectives_ = 0;
  std::uint64_t point_to_point_ = 0;
  Status aborted_;
  Status closed_;
  bool leave_ = false;
  bool progress_asked_ = false;
  std::vector<EnteredCall> all_entered_;
  std::unique_ptr<ShmLane> lane_;  // Set once.
};

// An operation whose completion is still to run; the comm thread runs them between its turns, when
// no state of its own is in the middle of a change.
struct FinishedOp {
  std::shared_ptr<GroupPort> port;
  Completion done;
  Status status;
};

// kForked: what an operation in a child of a rank's process is told.
Status ForkedFromRank();

// kInvalidArgument when `op` can never run in a group of this size; otherwise OK, and the fields
// that this kind of operation does not have are set to their defaults, so that ranks compare equal.
Status ValidateOperation(Operation& op, int rank, int size);

}  // namespace resilient
