#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
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
#include "runtime/comm/nccl_events.h"
#include "runtime/comm/nccl_loop.h"
#include "runtime/comm/nccl_meeting.h"
#include "runtime/comm/staged_calls.h"
#include "runtime/comm/staged_memory.h"
#include "runtime/comm/staged_plan.h"

namespace resilient {

// One communicator through memory of the host, on the loop's thread.
//
// It begins with a meeting as NcclGroup does, on the same group of the CPU transport, so that ranks
// which go different ways learn of it. Then it makes a second one, under its own name, which runs
// the pieces of its operations: what these wait for, where they differ or stand still is found and
// told there.
//
// One operation, or one batch, is under way at a time. Each of its pieces (StagedPlan) is copied
// from the device, run by the CPU transport, and copied back: three stages, of which several pieces
// are in one each. Where the last copy is in the device's queue the operation is launched, and the
// next one begins; its copies wait there for those of the last.
//
// As in NcclGroup failure and the release of memory are two moments.
//
// Owner: the loop. Thread: loop-confined.
class StagedGroup final : public DeviceGroup {
 public:
  // Pieces under way. In a batch each message may have one beyond.
  static constexpr std::size_t kPieces = 4;
  // Launched and not complete.
  static constexpr std::size_t kMaxLaunched = 64;

  StagedGroup(std::shared_ptr<GroupPort> port, NcclContext& context,
              std::shared_ptr<StagedCalls> calls);
  // Lets a release go that has not ended.
  ~StagedGroup() override;
  StagedGroup(const StagedGroup&) = delete;
  StagedGroup& operator=(const StagedGroup&) = delete;

  const GroupSpec& spec() const override { return spec_; }
  bool done() const override { return state_ == State::kDone; }

  void Start() override;
  void Step() override;
  void RunCompletions() override;
  Instant NextTime() const override;
  void Leave(const Status& status) override;
  void End(const Status& cause) override;

  std::optional<NcclRelease::Work> TakeRelease() override;
  void SetRelease(std::shared_ptr<NcclRelease> release) override { release_ = std::move(release); }

 private:
  enum class State {
    kMeeting,  // The ranks come together.
    kReady,
    kHolding,   // It has failed, and the fence that tells the others comes first.
    kStopping,  // The CPU transport lets go of the buffers.
    kReleasing,
    kDone
  };
  // Of one operation of the CPU transport, which ends on a thread of that one.
  struct Outcome {
    Status status;
    std::atomic<bool> over{false};  // The status is not written any more.
  };
  // Behind what was put into a stream.
  struct Mark {
    PooledEvent event;  // Null: nothing was.
    bool recorded = false;
  };
  struct Piece {
    enum class Stage { kCopying, kRunning, kPlacing };
    Stage stage = Stage::kCopying;
    StagedPiece work;
    std::byte* buffer = nullptr;  // Null: it has no memory.
    Mark copied;
    Mark placed;
    std::shared_ptr<Outcome> outcome;
    std::uint64_t number = 0;  // Of the CPU transport.
  };
  // What the ranks say of their largest parts, and hear.
  struct Sizes {
    std::vector<std::byte> said;
    std::vector<std::byte> heard;
    std::shared_ptr<Outcome> outcome;
    std::uint64_t number = 0;
  };
  struct Transfer {
    SubmittedOp op;
    StagedPlan plan;
    std::unique_ptr<Sizes> sizes;  // While they are being asked.
    bool asked = false;
    std::size_t begun = 0;  // Pieces.
    std::deque<Piece> pieces;
    std::shared_ptr<const StagedCalls::Call> call;
    PooledEvent end;    // Where it is launched.
    bool told = false;  // Its completion has run; its memory may still be in use.
  };
  using Transfers = std::vector<std::unique_ptr<Transfer>>;

  // In staged_group_pieces.cc. Those that return bool: false, the group has ended.
  bool Move(Transfer& transfer);
  bool AskSizes(Transfer& transfer);
  bool BeginPieces(Transfer& transfer);
  bool CopyOut(Transfer& transfer, Piece& piece);
  bool SubmitPieces(Transfer& transfer);
  bool PlacePieces(Transfer& transfer);
  bool Place(Piece& piece);
  bool Launch(Transfer& transfer);
  bool Copy(const std::vector<StagedCopy>& copies, CudaCopy direction, Mark& mark);
  bool SubmitToHost(const Transfer& transfer, Operation op, std::shared_ptr<Outcome> outcome,
                    std::uint64_t* number, std::size_t piece);
  void ForgetPiece(const Transfer& transfer, std::uint64_t number);
  std::string CallSiteOf(const Transfer& transfer, const Operation& op, std::size_t piece) const;
  bool IsBehindAnother(const Transfer& transfer) const;
  bool IsThrough(const Transfer& transfer) const;
  static bool RunsOnHost(const Transfer& transfer);

  void TakeMail();
  void AwaitMeeting();
  void Advance();
  bool MoveHead();
  bool StartNext();
  bool HasStreams();
  bool CompleteLaunched();
  bool IsLeaving() const { return !leave_status_.ok(); }
  void LeaveWhenDone();
  void AwaitStopped();
  void AwaitReleased();
  void Abort(const Status& cause);
  void Release();
  void TellOf(Transfers& transfers);
  void TellWaiting();
  void TellProgress();
  void NoteAllEntered(const EnteredCall& call);
  void CheckDeadline();
  bool IsLate(SubmittedOp& op);
  bool AwaitsDevice() const;

  // True when `result` is a failure, which has ended the group.
  bool Failed(CudaResult result, std::string_view what);
  // For what no fence explains: told to the session.
  void Fail(const Status& status);
  std::string ControlName() const;
  std::string Where() const;

  const std::shared_ptr<GroupPort> port_;
  const GroupSpec& spec_;  // The port's.
  NcclContext& context_;
  const CudaApi& cuda_;
  const std::shared_ptr<StagedCalls> calls_;
  State state_ = State::kMeeting;
  std::shared_ptr<Communicator> control_;
  std::shared_ptr<NcclMeeting> meeting_;
  std::shared_ptr<Communicator> host_;  // Runs the pieces.
  std::uint64_t collectives_ = 0;       // That it has run,
  std::uint64_t messages_ = 0;          // and messages.
  CudaStreamHandle out_ = nullptr;      // From the device,
  CudaStreamHandle in_ = nullptr;       // and to it.
  std::shared_ptr<StagedMemory> memory_;
  Instant spin_until_ = Instant::min();
  Instant next_deadline_check_ = kNever;
  Instant next_wait_told_ = Instant::min();
  Deadline end_by_ = Deadline::Never();  // Of kHolding.
  Status leave_status_;   // Not OK: it leaves as soon as what was submitted has ended.
  GroupPort::Mail mail_;  // Of a turn; kept for its memory.
  Ring<SubmittedOp> pending_;
  std::uint64_t begun_ = 0;                // The latest collective.
  std::map<int, PeerProgress> exchanged_;  // Messages, by group rank.
  Transfers head_;                         // Under way: one operation, or what is left of a batch.
  Transfers launched_;                     // In the order of their ends.
  FinishedOps finished_;
  Status end_status_;  // Not OK: everything completes with it.
  std::optional<NcclRelease::Work> to_release_;
  std::shared_ptr<NcclRelease> release_;
};

}  // namespace resilient
