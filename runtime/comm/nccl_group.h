#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/clock.h>
#include <resilient/communicator.h>

#include "runtime/comm/group_port.h"
#include "runtime/comm/nccl_communicator.h"
#include "runtime/comm/nccl_release.h"

namespace resilient {

// What all groups of one loop share. Owner: the loop. Thread: loop-confined.
struct NcclContext {
  const NcclFabricOptions options;
  NcclIdExchange& ids;
  CommunicatorEvents& events;
  const Clock& clock;
  const std::shared_ptr<Doorbell> doorbell;
  Instant now;  // Of this turn.
};

// Where the unique id of one group arrives, from whatever thread brings it. Owner: shared by the
// group and the exchange, which may answer after the group has ended. Thread: thread-safe.
class NcclIdMailbox {
 public:
  explicit NcclIdMailbox(std::shared_ptr<const Doorbell> doorbell)
      : doorbell_(std::move(doorbell)) {}
  void Put(Result<NcclUniqueId> id);
  std::optional<Result<NcclUniqueId>> Take();

 private:
  const std::shared_ptr<const Doorbell> doorbell_;
  std::mutex mutex_;
  std::optional<Result<NcclUniqueId>> id_;  // Guarded by mutex_.
};

// One communicator on the loop's thread: gets a unique id, connects, launches what callers submit
// in their order, completes it when its event is done, and ends. All calls into one NCCL
// communicator are made here, none of which waits for a peer; the one that may (its abort) is the
// last and is made by NcclRelease.
//
// An operation has the bound from its submission (Operation::timeout). It has none for a standstill
// (Operation::stall): nobody here knows which ranks have entered it. For the same reason OnWaiting
// is not told: its ranks would be a guess.
//
// Failure and the release of memory are two moments: an operation that was launched completes with
// the cause at once, but its completion is destroyed, and IsQuiet holds, only when the device is
// done with its memory.
//
// Owner: the loop. Thread: loop-confined.
class NcclGroup final {
 public:
  // Launched and not complete, in one communicator; a batch is launched as a whole, and may go
  // beyond.
  static constexpr std::size_t kMaxLaunched = 128;

  NcclGroup(std::shared_ptr<GroupPort> port, NcclContext& context);
  // Lets a release go that has not ended.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  const GroupSpec& spec() const { return spec_; }
  bool done() const { return state_ == State::kDone; }

  // Asks for the unique id. Called once, before the first turn.
  void Start();
  // One turn: moves everything that can move without waiting.
  void Step();
  // Between turns, when no state is in the middle of a change.
  void RunCompletions();
  // When the next turn must be, if nothing rings before.
  Instant NextTime() const;
  void Leave(const Status& status);
  void End(const Status& cause);

 private:
  enum class State { kAwaitingId, kConnecting, kReady, kFlushing, kReleasing, kDone };
  struct Launched {
    SubmittedOp op;
    NcclMark mark;
    bool left_device = false;
    bool told = false;  // Its completion has run; its memory may still be in use.
  };
  struct Finished {
    Completion done;
    Status status;
  };

  void TakeMail();
  void Advance();
  void CheckDeadline();
  bool EndIfLate(SubmittedOp& op);
  void AwaitId();
  void Connect(const NcclUniqueId& id);
  void AwaitConnected();
  void AwaitFlushed();
  void CheckHealth();
  void FinishLaunch();
  void CompleteLaunched();
  void StartPending();
  // False: the first of pending_ cannot be launched yet.
  bool LaunchNext();
  bool IsScratchReady();
  bool MakePremulSum(const Operation& op);
  NcclResult Launch(std::size_t operations);
  void OnLaunched();
  CudaEventHandle TakeEvent();
  void Release(NcclRelease::Kind kind);
  void AwaitReleased();

  // True when `result` is a failure, which has ended the group.
  bool Failed(NcclResult result, std::string_view what);
  bool Failed(CudaResult result, std::string_view what);
  // kInProgress or kSuccess; otherwise the group has ended.
  std::optional<NcclResult> AsyncResult(std::string_view what);
  void FailToConnect(std::string_view why);
  // "rank 1 (device 0) of group 'world', generation 7"
  std::string Where() const;
  FailureDetail Detail() const;

  const std::shared_ptr<GroupPort> port_;
  const GroupSpec& spec_;  // The port's.
  NcclContext& context_;
  const NcclApi& nccl_;
  const CudaApi& cuda_;
  const std::shared_ptr<NcclIdMailbox> mailbox_;
  const Deadline connect_by_;
  State state_ = State::kAwaitingId;
  NcclCommHandle comm_ = nullptr;
  bool launching_ = false;  // Of launched_ those without a mark are not on their stream yet.
  std::optional<NcclReduceOp> premul_sum_;  // Made for what is being launched.
  std::shared_ptr<NcclScratch> scratch_;    // From the first barrier on.
  Instant spin_until_ = Instant::min();
  Instant next_health_check_ = Instant::min();
  Instant next_deadline_check_ = kNever;
  Deadline flush_by_ = Deadline::Never();
  std::deque<SubmittedOp> pending_;
  std::deque<Launched> launched_;
  std::vector<Finished> finished_;
  std::vector<CudaEventHandle> free_events_;
  std::vector<CudaStreamHandle> busy_streams_;  // Of one pass over launched_.
  Status end_status_;                           // Not OK: everything completes with it.
  std::unique_ptr<NcclRelease> release_;
};

}  // namespace resilient
