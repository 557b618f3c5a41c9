#include "runtime/comm/nccl_group.h"

#include <algorithm>
#include <array>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/nccl_launch.h"

namespace resilient {
namespace {

constexpr Duration kConnectPoll = Millis(5);
constexpr Duration kNcclPoll = Millis(1);
// How soon an error is noticed while nothing is in flight.
constexpr Duration kHealthInterval = Millis(100);

// Of this communicator alone: no rank that was lost has brought it about.
bool IsOwnFault(NcclResult result) {
  return result == NcclResult::kInvalidArgument || result == NcclResult::kInvalidUsage;
}

}  // namespace

NcclGroup::NcclGroup(std::shared_ptr<GroupPort> port, NcclContext& context)
    : port_(std::move(port)),
      spec_(port_->spec()),
      context_(context),
      nccl_(context.options.nccl),
      cuda_(context.options.cuda),
      watch_(spec_),
      captures_(cuda_, spec_.nccl.is_high_priority_stream, context.pool, context.timed_pool,
                context.doorbell) {}

NcclGroup::~NcclGroup() {
  port_->SetHoldsDevice(false);
  context_.device_clock.NoteRuns(this, false);
  if (control_ != nullptr) control_->link().Leave();
  if (release_ == nullptr || release_->IsFinished()) return;
  RESILIENT_LOG(kError, "the end of ", Where(),
                " has not come back from NCCL; its memory and the thread stay until it does");
  release_->Abandon(captures_.Keep());
  release_->Abandon(std::make_shared<Ring<Launched>>(std::move(launched_)));
}

std::string NcclGroup::DeviceName() const {
  const std::string& uuid = context_.options.identity.device.uuid;
  return StrCat("GPU ", context_.options.device, uuid.empty() ? "" : StrCat(" (", uuid, ")"));
}

std::string NcclGroup::Where() const { return WhereOf(spec_, context_.options.device); }

// What CUDA says of the device. OK as well where it says nothing.
Status NcclGroup::DeviceStatus() const {
  PooledEvent event;
  CudaResult result = context_.pool->Mark(stream_, &event);
  if (result == CudaResult::kSuccess) result = cuda_.EventQuery(HandleOf(event));
  Status status = CudaStatus(cuda_, result, "work on the device", Where(), Detail());
  return status.code() == StatusCode::kDeviceLost ? status : Status::Ok();
}

Status NcclGroup::NcclStatus(NcclResult result, std::string_view what) const {
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return Status::Ok();
  // The text is of the process, not of this communicator: it may be about another call.
  const char* last = nccl_.GetLastError(comm_);
  const std::string more =
      last == nullptr || *last == '\0' ? "" : StrCat(" (last error: ", last, ")");
  return Status(StatusCode::kCommFailed,
                StrCat(what, " failed on ", Where(), ": ", nccl_.GetErrorString(result), more,
                       "; NCCL_DEBUG=INFO makes NCCL tell more"),
                Detail());
}

bool NcclGroup::Failed(NcclResult result, std::string_view what) {
  Status status = NcclStatus(result, what);
  if (status.ok()) return false;
  // NCCL says of a lost device what it says of others.
  if (result == NcclResult::kUnhandledCudaError) {
    if (const Status lost = DeviceStatus(); !lost.ok()) {
      Fail(lost);
      return true;
    }
  }
  if (state_ < State::kReady) {
    connect_failure_ = std::move(status);
  } else if (IsLeaving()) {
    End(leave_status_);  // Who leaves fences nobody.
  } else if (state_ == State::kReady && !IsOwnFault(result)) {
    RESILIENT_LOG(kInfo, status.message());
    Hold(status, context_.options.verdict_wait, false);
    next_tell_ = context_.now;  // The peers, of whom one may have left.
  } else {
    Fail(status);
  }
  return true;
}

bool NcclGroup::Failed(CudaResult result, std::string_view what) {
  if (result == CudaResult::kSuccess) return false;
  const Status status = CudaStatus(cuda_, result, what, Where(), Detail());
  if (state_ < State::kReady) {
    connect_failure_ = status;
  } else {
    Fail(status);
  }
  return true;
}

void NcclGroup::Hold(const Status& status, Duration time, bool known) {
  state_ = State::kHolding;
  held_ = status;
  held_known_ = known;
  hold_until_ = Deadline::After(context_.now, time);
}

void NcclGroup::Fail(const Status& status) {
  RESILIENT_LOG(kWarn, status.message());
  context_.events.OnStalled(spec_.name, spec_.generation, status);
  End(status);
}

std::optional<NcclResult> NcclGroup::AsyncResult(std::string_view what) {
  NcclResult state = NcclResult::kSuccess;
  if (Failed(nccl_.CommGetAsyncError(comm_, &state), "ncclCommGetAsyncError")) return std::nullopt;
  if (Failed(state, what)) return std::nullopt;
  return state;
}

void NcclGroup::Step() {
  // Not in the turn in which it began: completions run before their memory is let go.
  if (state_ == State::kReleasing) return AwaitReleased();
  TakeMail();
  HearPeers();
  Advance();
  NoteDevice();
  Watch();
  CheckDeadline();  // Of what is complete by now nobody is told that it is late.
}

void NcclGroup::Advance() {
  switch (state_) {
    case State::kMeeting:
      return AwaitMeeting();
    case State::kConnecting:
      return AwaitConnected();
    case State::kComparing:
      return AwaitCompared();
    case State::kReady:
      CheckHealth();
      if (state_ == State::kReady) FinishLaunch();
      if (state_ == State::kReady) CompleteLaunched();
      if (state_ == State::kReady) SweepCaptures();
      if (state_ == State::kReady) StartPending();
      if (state_ == State::kReady && IsLeaving()) LeaveWhenDone();
      return;
    case State::kHolding:
      if (!hold_until_.ExpiredAt(context_.now)) return;
      return held_known_ ? End(held_) : Fail(held_);
    case State::kFlushing:
      return AwaitFlushed();
    case State::kReleasing:
    case State::kDone:
      return;
  }
}

void NcclGroup::TakeMail() {
  port_->Take(&mail_);
  for (SubmittedOp& op : mail_.ops) {
    // Of a replay, which runs it, nobody is told.
    if (op.capture == 0) watch_.OnSubmitted(op.op, op.seq);
    pending_.push_back(std::move(op));
  }
  if (!mail_.aborted.ok()) return Abort(mail_.aborted);
  if (mail_.leave) return Leave(mail_.left);
  if (mail_.progress_asked) TellProgress();
}

Instant NcclGroup::NextTime() const {
  switch (state_) {
    case State::kMeeting:
    case State::kComparing: {
      const bool waits = !pending_.empty();
      return std::min(next_deadline_check_, waits ? context_.now + kWaitTellAfter : kNever);
    }
    case State::kConnecting:
      return std::min(context_.now + kConnectPoll, next_deadline_check_);
    case State::kReady: {
      const bool busy = !launched_.empty() || launching_ || captures_.is_capturing();
      if (context_.now < spin_until_ && (busy || port_->has_cores())) return context_.now;
      return busy ? context_.now + kNcclPoll : next_health_check_;
    }
    case State::kHolding:
      return held_known_ ? hold_until_.when() : std::min(hold_until_.when(), next_tell_);
    case State::kFlushing:
      return std::min(flush_by_.when(), context_.now + kNcclPoll);
    case State::kReleasing:
      return in_graphs_ ? context_.now + kNcclPoll : kNever;
    case State::kDone:
      return kNever;
  }
  return kNever;
}

// Nobody else would notice the failure of a communicator in which nothing moves.
void NcclGroup::CheckHealth() {
  if (launching_ || context_.now < next_health_check_) return;
  next_health_check_ = context_.now + kHealthInterval;
  (void)AsyncResult("the communicator");
}

void NcclGroup::FinishLaunch() {
  if (!launching_) return;
  const std::optional<NcclResult> result = AsyncResult("launching the last operation");
  if (!result || *result == NcclResult::kInProgress) return;
  OnLaunched();
}

void NcclGroup::OnLaunched() {
  launching_ = false;
  // What was launched with it has it by now.
  if (premul_sum_ && Failed(nccl_.RedOpDestroy(*std::exchange(premul_sum_, std::nullopt), comm_),
                            "ncclRedOpDestroy"))
    return;
  if (!captures_.launching().empty()) {
    Failed(captures_.OnLaunched(context_.joiner, Where(), finished_), "cudaEventRecord");
    return;
  }
  for (std::size_t i = launched_.size(); i > 0 && !launched_[i - 1].recorded; --i) {
    Launched& one = launched_[i - 1];
    if (Failed(cuda_.EventRecord(HandleOf(one.end), stream_), "cudaEventRecord")) return;
    one.recorded = true;
    if (one.op.op.mark != nullptr) one.op.op.mark->Launch(context_.joiner, one.end.get());
  }
}

void NcclGroup::CompleteLaunched() {
  std::size_t over = 0;
  for (; over < launched_.size() && launched_[over].recorded; ++over) {
    const CudaResult result = cuda_.EventQuery(HandleOf(launched_[over].end));
    if (result == CudaResult::kNotReady) break;
    if (Failed(result, "work on the device")) return;
  }
  if (over == 0) return;
  // Asked after the events: a kernel that is stopped leaves the device as one that has done its
  // work. kInProgress: a later one is being launched, which may wait for a peer that waits for this
  // one. It hides other errors; but then no kernel has left by them, as only an abort lets it.
  if (!AsyncResult("the communicator")) return;
  for (; over > 0; --over) {
    if (!launched_.front().entered) EnterFirst();
    Launched one = launched_.pop_front();
    if (!IsPointToPoint(one.op.op.kind)) watch_.OnEnded(one.op.seq);
    if (over == 1) context_.device_clock.OnEnded(one.op.op, one.op.seq, spec_.name, context_.now);
    if (one.op.op.sender != nullptr) *one.op.op.sender = one.op.op.peer;
    finished_.Add(std::move(one.op), Status::Ok());  // Before its event is used again.
  }
}

void NcclGroup::StartPending() {
  while (state_ == State::kReady && !launching_ && !pending_.empty() &&
         launched_.size() < kMaxLaunched) {
    if (!LaunchNext()) return;
  }
}

bool NcclGroup::LaunchNext() {
  if (!IsStreamReady()) return false;
  if (pending_.front().op.kind == OpKind::kBarrier && !IsScratchReady()) return false;
  if (pending_.front().capture != 0) return LaunchCaptured();
  if (!MakePremulSum(pending_.front().op)) return false;
  const std::size_t operations = pending_.front().batch_rest + 1;
  for (std::size_t i = 0; i < operations; ++i) {
    Launched& launched = launched_.push_back({});
    launched.op = pending_.pop_front();
    if (!PutOnStream(launched, i == 0)) return false;
  }
  const NcclResult result = Launch(operations);
  if (result != NcclResult::kSuccess && result != NcclResult::kInProgress) {
    const SubmittedOp& first = launched_[launched_.size() - operations].op;
    Failed(result, StrCat("launching ", Describe(first.op), " #", first.seq));
    return false;
  }
  spin_until_ = context_.now + kSpin;
  launching_ = result == NcclResult::kInProgress;
  if (!launching_) OnLaunched();
  return state_ == State::kReady;
}

// Behind what its caller's stream had, its start is marked. False: the group has ended.
bool NcclGroup::PutOnStream(Launched& launched, bool first) {
  if (Failed(context_.pool->Take(&launched.end), "cudaEventCreate")) return false;
  if (Failed(cuda_.StreamWaitEvent(stream_, HandleOf(launched.op.ready), 0), "cudaStreamWaitEvent"))
    return false;
  if (!first) return true;
  return !Failed(context_.pool->Mark(stream_, &launched.start), "cudaEventRecord");
}

NcclLaunch NcclGroup::LaunchOn(CudaStreamHandle stream) const {
  return {.nccl = nccl_,
          .comm = comm_,
          .stream = stream,
          .rank = spec_.rank,
          .ranks = port_->size(),
          .premul_sum = premul_sum_.value_or(NcclReduceOp::kSum),
          .scratch = scratch_ == nullptr ? nullptr : scratch_->memory()};
}

// The last of launched_.
NcclResult NcclGroup::Launch(std::size_t operations) {
  const NcclLaunch launch = LaunchOn(stream_);
  if (operations == 1) return LaunchNccl(launch, launched_.back().op.op);
  std::vector<const Operation*> batch;
  for (std::size_t i = launched_.size() - operations; i < launched_.size(); ++i)
    batch.push_back(&launched_[i].op.op);
  return LaunchNcclBatch(launch, batch);
}

bool NcclGroup::IsStreamReady() {
  if (stream_ != nullptr) return true;
  return !Failed(MakeStream(cuda_, spec_.nccl.is_high_priority_stream, &stream_),
                 "cudaStreamCreate");
}

bool NcclGroup::IsScratchReady() {
  if (scratch_ == nullptr) {
    scratch_ = std::make_shared<NcclScratch>(cuda_, context_.options.device, context_.doorbell);
  }
  return scratch_->IsReady() && !Failed(scratch_->result(), "cudaMalloc");
}

// It must be made while nothing is under way, and is for one operation: they come with any factor.
bool NcclGroup::MakePremulSum(const Operation& op) {
  if (op.reduce != ReduceOp::kPremulSum) return true;
  std::array<std::byte, 8> scalar = PremulScalar(op);
  NcclReduceOp made = NcclReduceOp::kSum;
  if (Failed(nccl_.RedOpCreatePreMulSum(&made, scalar.data(), NumberTypeOf(op),
                                        NcclScalarResidence::kHostImmediate, comm_),
             "ncclRedOpCreatePreMulSum"))
    return false;
  premul_sum_ = made;
  return true;
}

// Every submitted operation runs to its end: wait() has let the program go on, and the peers need
// this rank's part. The loop watches it as before: the line names a rank that is late, and a peer
// that is lost or has left ends it.
void NcclGroup::Leave(const Status& status) {
  if (state_ == State::kHolding) return held_known_ ? End(held_) : Fail(held_);
  if (state_ > State::kReady || IsLeaving()) return;
  leave_status_ = status;
  for (SubmittedOp& op : port_->Close(status)) {
    if (op.capture == 0) watch_.OnSubmitted(op.op, op.seq);
    pending_.push_back(std::move(op));
  }
  CancelCaptured();
  if (state_ == State::kReady) return LeaveWhenDone();
  if (pending_.empty()) End(status);
}

// Nothing waits for what is not in a graph yet, and its capture may have been given up.
void NcclGroup::CancelCaptured() {
  for (std::size_t left = pending_.size(); left > 0; --left) {
    SubmittedOp op = pending_.pop_front();
    if (op.capture == 0) {
      pending_.push_back(std::move(op));
    } else {
      finished_.Add(std::move(op), leave_status_);
    }
  }
}

void NcclGroup::LeaveWhenDone() {
  if (!launched_.empty() || !pending_.empty()) return;
  if (!launching_) return Flush();
  // Into a capture.
  if (flush_by_.when() == kNever) {
    flush_by_ = Deadline::After(context_.now, context_.options.flush_timeout);
  } else if (flush_by_.ExpiredAt(context_.now)) {
    End(leave_status_);
  }
}

void NcclGroup::Flush() {
  end_status_ = leave_status_;
  // An abort could take from the peers what NCCL has not sent yet. While graphs hold it that would
  // wait for them: it is part of the end then, for which nobody waits.
  if (captures_.graphs() == 0) {
    const NcclResult result = nccl_.CommFinalize(comm_);
    if (result != NcclResult::kSuccess && result != NcclResult::kInProgress)
      return End(leave_status_);
  }
  // So that those who wait for others know that this rank has done its part.
  TellAll(false);
  state_ = State::kFlushing;
  flushing_since_ = context_.now;
  next_tell_ = context_.now + kTellPeers;
}

void NcclGroup::AwaitFlushed() {
  NcclResult result = NcclResult::kSuccess;
  const bool asked = nccl_.CommGetAsyncError(comm_, &result) == NcclResult::kSuccess;
  const bool flushing = asked && result == NcclResult::kInProgress;
  const bool flushed = asked && result == NcclResult::kSuccess;
  if (flushing) WatchFlush();
  if (flush_by_.when() == kNever && (!flushing || WhoAwaitsUs().empty()))
    flush_by_ = Deadline::After(context_.now, context_.options.flush_timeout);
  const bool late = flush_by_.ExpiredAt(context_.now);
  if (!late && (flushing || (flushed && !control_->IsIdle()))) return;
  context_.waits->Forget(ControlName(), spec_.generation);
  control_->link().Leave();
  Release(flushed ? NcclRelease::Kind::kDestroy : NcclRelease::Kind::kAbort);
}

void NcclGroup::Abort(const Status& cause) {
  if (state_ >= State::kReleasing) return;
  if (control_ != nullptr) control_->link().Abort(cause);
  End(cause);
}

void NcclGroup::End(const Status& cause) {
  if (state_ >= State::kReleasing) return;
  if (end_status_.ok()) end_status_ = cause;
  for (SubmittedOp& op : port_->Close(end_status_)) pending_.push_back(std::move(op));
  if (control_ != nullptr) {
    context_.waits->Forget(ControlName(), spec_.generation);
    control_->link().Leave();
  }
  Release(NcclRelease::Kind::kAbort);
}

void NcclGroup::Release(NcclRelease::Kind kind) {
  port_->SetHoldsDevice(false);
  if (comm_ == nullptr && stream_ == nullptr) {
    state_ = State::kDone;
    return;
  }
  state_ = State::kReleasing;
  in_graphs_ = captures_.graphs() > 0;
  to_release_ = NcclRelease::Work{.kind = kind,
                                  .comm = std::exchange(comm_, nullptr),
                                  .stream = stream_,
                                  .marks = {},
                                  .scratch = std::exchange(scratch_, nullptr),
                                  .name = spec_.name,
                                  .second_stream = captures_.stream(),
                                  .in_graphs = in_graphs_};
  for (std::size_t i = 0; i < launched_.size(); ++i) {
    const Launched& one = launched_[i];
    if (in_graphs_ && one.recorded) continue;
    to_release_->marks.push_back({HandleOf(one.end), one.recorded, stream_});
  }
  stream_ = nullptr;
}

std::optional<NcclRelease::Work> NcclGroup::TakeRelease() {
  return std::exchange(to_release_, std::nullopt);
}

void NcclGroup::AwaitReleased() {
  if (release_ == nullptr) return;
  const bool is_released = release_->IsFinished();
  if (!is_released && (!in_graphs_ || !captures_.IsIdle())) return;
  if (in_graphs_ && !HasLeftTheDevice(is_released)) return;
  if (captures_.TakeHold()) port_->OnCompleted();
  if (!is_released) LetGraphsKeep();
  release_.reset();
  for (std::size_t left = std::exchange(launched_, {}).size(); left > 0; --left)
    port_->OnCompleted();  // What they held is gone before the communicator says it is quiet.
  state_ = State::kDone;
}

// In the order of their submission.
void NcclGroup::RunCompletions() {
  finished_.Run(*port_);
  if (state_ != State::kReleasing && captures_.graphs() == 0 && captures_.TakeHold())
    port_->OnCompleted();
  if (end_status_.ok()) return;
  // What these hold stays until the device is done with it.
  for (std::size_t i = 0; i < launched_.size(); ++i) {
    Launched& one = launched_[i];
    if (std::exchange(one.told, true)) continue;
    if (one.op.op.mark != nullptr) one.op.op.mark->End();
    if (one.op.done) one.op.done(end_status_);
  }
  captures_.EndAll(end_status_, finished_);
  while (!pending_.empty()) finished_.Add(pending_.pop_front(), end_status_);
  finished_.Run(*port_);
}

}  // namespace resilient
