#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/clock.h>
#include <resilient/communicator.h>

#include "runtime/base/ring.h"
#include "runtime/comm/group_port.h"
#include "runtime/comm/mismatch.h"
#include "runtime/comm/nccl_captures.h"
#include "runtime/comm/nccl_communicator.h"
#include "runtime/comm/nccl_control.h"
#include "runtime/comm/nccl_events.h"
#include "runtime/comm/nccl_launch.h"
#include "runtime/comm/nccl_loop.h"
#include "runtime/comm/nccl_meeting.h"
#include "runtime/comm/nccl_release.h"
#include "runtime/comm/nccl_scratch.h"
#include "runtime/comm/nccl_watch.h"

namespace resilient {

// One communicator on the loop's thread. All calls into one NCCL communicator are made here, none
// of which waits for a peer; the one that may (its abort) is the last and is NcclRelease's.
//
// It begins with a meeting of its ranks on a group of the CPU transport: they compare what they are
// and take rank 0's unique id. Then NCCL connects; then they meet again, to know that all are
// connected: if not, all begin anew, with another id, for an id of an attempt that failed would
// poison the next.
//
// Operations are launched in the order of their submission on a stream of the group's own, which
// first waits for the caller's. Over the CPU transport the ranks tell each other where they stand
// when one has waited for some time: who is late or in another operation is found by that
// (NcclWatch).
//
// An error of NCCL's names no rank. It is held until the fence that does comes, or for a time.
//
// Failure and the release of memory are two moments: an operation that was launched completes with
// the cause at once, but its completion is destroyed, and IsQuiet holds, only when the device is
// done with its memory. Graphs of the program hold the communicator itself for longer
// (NcclCaptures): what NCCL has of it is freed when they are gone, and nobody waits for that.
//
// Owner: the loop. Thread: loop-confined.
class NcclGroup final : public DeviceGroup {
 public:
  // Launched and not complete, in one communicator; a batch is launched as a whole, and may go
  // beyond.
  static constexpr std::size_t kMaxLaunched = 128;
  // How often its ranks try to connect.
  static constexpr int kAttempts = 2;
  // How often the ranks tell each other where they stand, and from when on: a difference is to be
  // known within 2 s, and what is told of a wait is to be right.
  static constexpr Duration kTellPeers = kWaitTellAfter / 2;
  // What is to be heard first: by the peers of a mismatch, of a fence where a rank has left.
  static constexpr Duration kBriefly = Millis(200);
  // After a launch the thread does not sleep for this long: small operations take less than a
  // sleep's granularity. Nor, where it has a core of its own, when they have ended: who has waited
  // for one starts the next, and to be woken takes longer than to launch it.
  static constexpr Duration kSpin = std::chrono::microseconds(200);

  NcclGroup(std::shared_ptr<GroupPort> port, NcclContext& context);
  // Lets a release go that has not ended.
  ~NcclGroup() override;
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  const GroupSpec& spec() const override { return spec_; }
  bool done() const override { return state_ == State::kDone; }

  void Start() override;
  void Step() override;
  void RunCompletions() override;
  Instant NextTime() const override;
  void Leave(const Status& status) override;
  // Goodbye to the peers. An abort instead takes their links from them.
  void End(const Status& cause) override;
  void Abort(const Status& cause);

  std::optional<NcclRelease::Work> TakeRelease() override;
  void SetRelease(std::shared_ptr<NcclRelease> release) override { release_ = std::move(release); }

 private:
  enum class State {
    kMeeting,     // The ranks come together.
    kConnecting,  // NCCL connects.
    kComparing,   // Whether it has, on all ranks.
    kReady,
    kHolding,  // It has failed, and others are to hear or to say why first.
    kFlushing,
    kReleasing,
    kDone
  };
  struct Launched {
    SubmittedOp op;
    PooledEvent start;  // Of the first of a batch.
    PooledEvent end;
    bool recorded = false;     // `end` is on the stream.
    bool entered = false;      // `start` has been seen.
    bool reached = false;      // So has `op.ready`, while it was behind others.
    std::uint64_t number = 0;  // Of NcclWatch::OnEntered.
    Instant entered_at{};
    bool told = false;  // Its completion has run; its memory may still be in use.
  };

  // In nccl_group_connect.cc.
  void BeginMeeting();
  void AwaitMeeting();
  void Connect(const NcclUniqueId& id);
  void AwaitConnected();
  void Compare();
  void AwaitCompared();
  void BeginAnew();
  std::uint64_t Attempt() const { return static_cast<std::uint64_t>(attempt_) + 1; }
  std::string ControlName() const;

  // In nccl_group_watch.cc.
  void HearPeers();
  bool Tell(int peer, bool asks);
  void Watch();
  void WatchConnecting();
  void NoteEntered();
  void EnterFirst();
  void NoteDevice();
  void NoteReached();
  bool IsQueued() const;
  void TellPeers();
  void TellAll(bool asks);
  void TellWaiting();
  void TellProgress();
  void CheckLeft();
  void WatchFailure();
  bool HasGoneFrom(const Launched& one, int rank) const;
  void CheckDeadline();
  bool EndIfLate(SubmittedOp& op, std::uint64_t number, bool entered);
  void OnMismatch(const Status& mismatch);
  // Group ranks but this one.
  std::vector<int> Others() const;
  std::vector<int> NotCome() const;
  // Of launched_ those that the device has begun and not ended, the first of them first: one
  // operation, or a batch.
  std::size_t HeadSize() const;
  const Launched* Head() const { return HeadSize() == 0 ? nullptr : &launched_[0]; }

  // In nccl_group_graphs.cc.
  bool LaunchCaptured();
  void SweepCaptures();
  void WatchReplay();
  std::vector<int> MissingInReplay() const;
  void CheckLeftReplay(const std::vector<int>& left);
  // Whether one is being launched into a capture for that long.
  bool IsLaunchingFor(Duration time) const;
  void CheckLeftLaunching(const std::vector<int>& left);
  OpTimeouts::Verdict JudgeReplay();
  bool EndIfReplayIsLate();
  static std::string ReplayText(const Operation& op);
  bool HasLeftTheDevice(bool is_released) const;
  void LetGraphsKeep();

  void TakeMail();
  void Advance();
  bool IsLeaving() const { return !leave_status_.ok(); }
  void CancelCaptured();
  void LeaveWhenDone();
  void Flush();
  // Others that have not left, and are not known to have all that this rank has done for them.
  std::vector<int> WhoAwaitsUs() const;
  void WatchFlush();
  void AwaitFlushed();
  void CheckHealth();
  void FinishLaunch();
  void CompleteLaunched();
  void StartPending();
  // False: the first of pending_ cannot be launched yet.
  bool LaunchNext();
  bool IsStreamReady();
  bool IsScratchReady();
  bool MakePremulSum(const Operation& op);
  bool PutOnStream(Launched& launched, bool first);
  NcclResult Launch(std::size_t operations);
  NcclLaunch LaunchOn(CudaStreamHandle stream) const;
  void OnLaunched();
  void Release(NcclRelease::Kind kind);
  void AwaitReleased();

  // True when `result` is a failure, which has ended the group or is held.
  bool Failed(NcclResult result, std::string_view what);
  bool Failed(CudaResult result, std::string_view what);
  Status NcclStatus(NcclResult result, std::string_view what) const;
  void Hold(const Status& status, Duration time, bool known);
  // For what no fence explains: told to the session.
  void Fail(const Status& status);
  // kInProgress or kSuccess; otherwise the group has ended, or holds.
  std::optional<NcclResult> AsyncResult(std::string_view what);
  // "rank 1 (device 0) of group 'world/cuda', generation 7"
  std::string Where() const;
  // "GPU 0 (GPU-8f2c...)"
  std::string DeviceName() const;
  // Of what this rank has brought about.
  FailureDetail Detail() const { return DetailOf(spec_, spec_.rank, 0); }
  Status DeviceStatus() const;

  const std::shared_ptr<GroupPort> port_;
  const GroupSpec& spec_;  // The port's.
  NcclContext& context_;
  const NcclApi& nccl_;
  const CudaApi& cuda_;
  State state_ = State::kMeeting;
  std::shared_ptr<NcclControl> control_;
  std::shared_ptr<NcclMeeting> meeting_;
  int attempt_ = 0;         // Those that have failed.
  OpTimeouts connecting_;   // Of this attempt.
  Status connect_failure_;  // Of this rank in this attempt. kCancelled: because of a peer's.
  std::uint64_t failed_attempt_ = 0;       // Of this rank, from 1: the latest.
  std::uint64_t peer_failed_attempt_ = 0;  // Of a peer's.
  NcclCommHandle comm_ = nullptr;
  CudaStreamHandle stream_ = nullptr;
  bool launching_ = false;  // Of launched_ those not recorded are not on the stream yet.
  std::optional<NcclReduceOp> premul_sum_;  // Made for what is being launched.
  std::shared_ptr<NcclScratch> scratch_;    // From the first barrier on.
  NcclWatch watch_;
  NcclCaptures captures_;
  Status held_;              // In kHolding: what has failed.
  bool held_known_ = false;  // The session knows of it, or need not.
  Deadline hold_until_ = Deadline::Never();
  Instant spin_until_ = Instant::min();
  Instant next_health_check_ = Instant::min();
  Instant next_deadline_check_ = kNever;
  Instant next_tell_ = Instant::min();       // The peers.
  Instant next_wait_told_ = Instant::min();  // The session.
  Deadline flush_by_ = Deadline::Never();    // From when nobody awaits what is still under way.
  Instant flushing_since_{};
  Status leave_status_;   // Not OK: it leaves as soon as what was submitted has ended.
  GroupPort::Mail mail_;  // Of a turn; kept for its memory.
  Ring<SubmittedOp> pending_;
  Ring<Launched> launched_;
  FinishedOps finished_;
  Status end_status_;  // Not OK: everything completes with it.
  std::optional<NcclRelease::Work> to_release_;
  bool in_graphs_ = false;  // What is released waits for graphs, and its marks are waited for here.
  std::shared_ptr<NcclRelease> release_;
};

}  // namespace resilient
