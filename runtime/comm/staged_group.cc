#include "runtime/comm/staged_group.h"

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/nccl_group.h"

namespace resilient {
namespace {

constexpr Duration kStagedPoll = Millis(1);

}  // namespace

StagedGroup::StagedGroup(std::shared_ptr<GroupPort> port, NcclContext& context,
                         std::shared_ptr<StagedCalls> calls)
    : port_(std::move(port)),
      spec_(port_->spec()),
      context_(context),
      cuda_(context.options.cuda),
      calls_(std::move(calls)) {}

StagedGroup::~StagedGroup() {
  port_->SetHoldsDevice(false);
  if (control_ != nullptr) control_->Leave();
  if (host_ != nullptr) host_->Leave();
  if (release_ == nullptr || release_->IsFinished()) return;
  RESILIENT_LOG(kError, "the end of ", Where(),
                " has not come back from CUDA; its memory and the thread stay until it does");
  for (Transfers* left : {&head_, &launched_})
    release_->Abandon(std::make_shared<Transfers>(std::move(*left)));
}

std::string StagedGroup::ControlName() const { return spec_.name + kControlSuffix; }

std::string StagedGroup::Where() const { return WhereOf(spec_, context_.options.device); }

void StagedGroup::Start() {
  GroupSpec spec = spec_;
  spec.name = ControlName();
  control_ = context_.control.Create(std::move(spec), port_->abort_cell());
  meeting_ =
      NcclMeeting::Begin(*control_, EncodeIdentity(context_.options.identity), context_.doorbell);
}

void StagedGroup::AwaitMeeting() {
  if (!meeting_->IsOver()) return;
  const std::shared_ptr<NcclMeeting> meeting = std::exchange(meeting_, nullptr);
  if (!meeting->status().ok()) return End(meeting->status());
  context_.waits->Forget(ControlName(), spec_.generation);
  const auto identities = IdentitiesOf(*meeting, spec_);
  if (!identities.ok()) return End(identities.status());  // The same on all ranks.
  host_ = context_.control.Create(spec_, port_->abort_cell());
  state_ = State::kReady;
  Advance();
}

bool StagedGroup::Failed(CudaResult result, std::string_view what) {
  if (result == CudaResult::kSuccess) return false;
  Fail(CudaStatus(cuda_, result, what, Where(), DetailOf(spec_, spec_.rank, 0)));
  return true;
}

// The links stay as they are until the fence comes: by a goodbye, or by a lost link, the peers
// would hear something else first.
void StagedGroup::Fail(const Status& status) {
  RESILIENT_LOG(kWarn, status.message());
  context_.events.OnStalled(spec_.name, spec_.generation, status);
  end_status_ = status;
  for (SubmittedOp& op : port_->Close(status)) pending_.push_back(std::move(op));
  state_ = State::kHolding;
  end_by_ = Deadline::After(context_.now, context_.options.verdict_wait);
}

void StagedGroup::Step() {
  // Not in the turn in which it began: completions run before their memory is let go.
  if (state_ == State::kReleasing) return AwaitReleased();
  TakeMail();
  switch (state_) {
    case State::kMeeting:
      AwaitMeeting();
      break;
    case State::kReady:
      Advance();
      if (IsLeaving()) LeaveWhenDone();
      break;
    case State::kHolding:
      if (end_by_.ExpiredAt(context_.now)) End(end_status_);
      break;
    case State::kStopping:
      AwaitStopped();
      break;
    case State::kReleasing:
    case State::kDone:
      break;
  }
  TellWaiting();
  CheckDeadline();  // Of what is complete by now nobody is told that it is late.
}

void StagedGroup::TakeMail() {
  port_->Take(&mail_);
  for (SubmittedOp& op : mail_.ops) {
    if (op.op.kind == OpKind::kSend) ++exchanged_[op.op.peer].sent;
    pending_.push_back(std::move(op));
  }
  if (!mail_.aborted.ok()) return Abort(mail_.aborted);
  if (mail_.leave) return Leave(mail_.left);
  for (const EnteredCall& call : mail_.all_entered) NoteAllEntered(call);
  if (mail_.progress_asked) TellProgress();
}

void StagedGroup::Advance() {
  while (state_ == State::kReady && CompleteLaunched() && MoveHead() && head_.empty()) {
    if (!StartNext()) return;
  }
}

// False: the group has ended.
bool StagedGroup::MoveHead() {
  for (std::size_t i = 0; i < head_.size();) {
    if (!Move(*head_[i])) return false;
    if (!IsThrough(*head_[i])) {
      ++i;
      continue;
    }
    if (!Launch(*head_[i])) return false;
    launched_.push_back(std::move(head_[i]));
    head_.erase(head_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return true;
}

bool StagedGroup::HasStreams() {
  if (memory_ == nullptr) {
    memory_ = std::make_shared<StagedMemory>(cuda_, context_.options.device,
                                             context_.options.piece_bytes, context_.doorbell);
    if (Failed(cuda_.SetDevice(context_.options.device), "cudaSetDevice")) return false;
  }
  for (CudaStreamHandle* stream : {&out_, &in_}) {
    if (*stream != nullptr) continue;
    if (Failed(cuda_.StreamCreateWithFlags(stream, kCudaStreamNonBlocking), "cudaStreamCreate"))
      return false;
  }
  return true;
}

// The next operation, with its batch. False: there is none, or the group has ended.
bool StagedGroup::StartNext() {
  if (pending_.empty() || launched_.size() >= kMaxLaunched || !HasStreams()) return false;
  for (std::size_t left = pending_.front().batch_rest + 1; left > 0; --left) {
    auto transfer = std::make_unique<Transfer>();
    transfer->op = pending_.pop_front();
    const Operation& op = transfer->op.op;
    if (!IsPointToPoint(op.kind)) begun_ = transfer->op.seq;
    transfer->plan = StagedPlan(op, spec_.rank, port_->size(), context_.options.piece_bytes);
    transfer->call = std::make_shared<const StagedCalls::Call>(StagedCalls::Call{
        .seq = transfer->op.seq, .what = Describe(op), .call_site = op.call_site});
    const CudaEventHandle ready = HandleOf(transfer->op.ready);
    head_.push_back(std::move(transfer));
    for (const CudaStreamHandle stream : {out_, in_}) {
      if (Failed(cuda_.StreamWaitEvent(stream, ready, 0), "cudaStreamWaitEvent")) return false;
    }
  }
  return true;
}

// False: the group has ended.
bool StagedGroup::CompleteLaunched() {
  while (!launched_.empty()) {
    Transfer& first = *launched_.front();
    const CudaResult result = cuda_.EventQuery(HandleOf(first.end));
    if (result == CudaResult::kNotReady) return true;
    if (Failed(result, "work on the device")) return false;
    for (const Piece& piece : first.pieces) {
      if (piece.buffer != nullptr) memory_->Give(piece.buffer);
    }
    if (first.op.op.sender != nullptr) *first.op.op.sender = first.op.op.peer;
    if (first.op.op.kind == OpKind::kRecv) ++exchanged_[first.op.op.peer].received;
    finished_.Add(std::move(first.op), Status::Ok());  // Before its event is used again.
    launched_.erase(launched_.begin());
  }
  return true;
}

bool StagedGroup::AwaitsDevice() const {
  if (!launched_.empty()) return true;
  return std::any_of(head_.begin(), head_.end(), [](const auto& transfer) {
    return std::any_of(transfer->pieces.begin(), transfer->pieces.end(),
                       [](const Piece& piece) { return piece.stage != Piece::Stage::kRunning; });
  });
}

Instant StagedGroup::NextTime() const {
  switch (state_) {
    case State::kMeeting:
      return std::min(next_deadline_check_,
                      pending_.empty() ? kNever : context_.now + kWaitTellAfter);
    case State::kReady: {
      const Instant next = std::min(next_deadline_check_, end_by_.when());
      if (!AwaitsDevice()) return next;
      return context_.now < spin_until_ ? context_.now : std::min(next, context_.now + kStagedPoll);
    }
    case State::kHolding:
      return end_by_.when();
    case State::kStopping:
      return context_.now + kStagedPoll;
    case State::kReleasing:
    case State::kDone:
      return kNever;
  }
  return kNever;
}

// What was submitted is run to its end, as in NcclGroup.
void StagedGroup::Leave(const Status& status) {
  if (state_ > State::kReady) return End(status);
  if (IsLeaving()) return;
  leave_status_ = status;
  for (SubmittedOp& op : port_->Close(status)) {
    if (op.op.kind == OpKind::kSend) ++exchanged_[op.op.peer].sent;
    pending_.push_back(std::move(op));
  }
  LeaveWhenDone();
}

void StagedGroup::LeaveWhenDone() {
  if (state_ <= State::kReady && pending_.empty() && head_.empty() && launched_.empty())
    End(leave_status_);
}

void StagedGroup::Abort(const Status& cause) {
  if (state_ >= State::kStopping) return;
  for (const auto& group : {control_, host_}) {
    if (group != nullptr) group->Abort(cause);
  }
  End(cause);
}

// Goodbye to the peers, unless an abort has taken their links from them.
void StagedGroup::End(const Status& cause) {
  if (state_ >= State::kStopping) return;
  port_->SetHoldsDevice(false);
  if (end_status_.ok()) end_status_ = cause;
  for (SubmittedOp& op : port_->Close(end_status_)) pending_.push_back(std::move(op));
  context_.waits->Forget(ControlName(), spec_.generation);
  for (const auto& group : {control_, host_}) {
    if (group != nullptr) group->Leave();
  }
  state_ = State::kStopping;
}

void StagedGroup::AwaitStopped() {
  if (host_ != nullptr && !host_->IsQuiet()) return;
  Release();
}

// What was put into the device's queue is waited for there: it touches memory until it has ended.
void StagedGroup::Release() {
  for (const auto& transfer : head_) {
    for (const Piece& piece : transfer->pieces) ForgetPiece(*transfer, piece.number);
    if (transfer->sizes != nullptr) ForgetPiece(*transfer, transfer->sizes->number);
  }
  state_ = State::kReleasing;
  to_release_ = NcclRelease::Work{.kind = NcclRelease::Kind::kAbort,
                                  .comm = nullptr,
                                  .stream = out_,
                                  .marks = {},
                                  .scratch = std::exchange(memory_, nullptr),
                                  .name = spec_.name,
                                  .second_stream = in_};
  const auto await = [this](const Mark& mark, CudaStreamHandle stream) {
    to_release_->marks.push_back({HandleOf(mark.event), mark.recorded, stream});
  };
  for (const Transfers* transfers : {&head_, &launched_}) {
    for (const auto& transfer : *transfers) {
      for (const Piece& piece : transfer->pieces) {
        await(piece.copied, out_);
        await(piece.placed, in_);
      }
    }
  }
  for (const auto& transfer : launched_)
    to_release_->marks.push_back({HandleOf(transfer->end), true, in_});
  out_ = in_ = nullptr;
}

std::optional<NcclRelease::Work> StagedGroup::TakeRelease() {
  return std::exchange(to_release_, std::nullopt);
}

void StagedGroup::AwaitReleased() {
  if (release_ == nullptr || !release_->IsFinished()) return;
  release_.reset();
  std::size_t left = 0;
  for (Transfers* transfers : {&head_, &launched_}) left += std::exchange(*transfers, {}).size();
  // What they held is gone before the communicator says it is quiet.
  for (; left > 0; --left) port_->OnCompleted();
  state_ = State::kDone;
}

void StagedGroup::TellOf(Transfers& transfers) {
  for (const auto& one : transfers) {
    if (std::exchange(one->told, true)) continue;
    if (one->op.op.mark != nullptr) one->op.op.mark->End();
    if (one->op.done) one->op.done(end_status_);
  }
}

// In the order of their submission.
void StagedGroup::RunCompletions() {
  finished_.Run(*port_);
  if (end_status_.ok()) return;
  // What these hold stays until the device is done with it.
  TellOf(launched_);
  TellOf(head_);
  while (!pending_.empty()) finished_.Add(pending_.pop_front(), end_status_);
  finished_.Run(*port_);
}

// At the meeting; behind it the CPU transport tells, but of what has not begun.
void StagedGroup::TellWaiting() {
  if (state_ != State::kMeeting || pending_.empty() || context_.now < next_wait_told_) return;
  const SubmittedOp& first = pending_.front();
  if (context_.now - first.submitted < kWaitTellAfter) return;
  WaitingOperation told = ToldOf(first, context_.now);
  told.missing = context_.waits->Missing(ControlName(), spec_.generation, context_.now);
  told.behind = pending_.size() - 1;
  next_wait_told_ = context_.now + kWaitTellAfter;
  context_.events.OnWaiting(spec_.name, spec_.generation, {std::move(told)});
}

void StagedGroup::TellProgress() {
  if (state_ > State::kReady) return;  // The fence or the end is on its way.
  GroupProgress progress;
  progress.group = spec_.name;
  progress.entered = begun_;
  const bool next = head_.empty() && !pending_.empty();  // It lacks nothing but the meeting.
  if (next && !IsPointToPoint(pending_.front().op.kind)) progress.entered = pending_.front().seq;
  for (auto [peer, exchanged] : exchanged_) {
    exchanged.rank = spec_.members[static_cast<std::size_t>(peer)].global_rank;
    progress.peers.push_back(exchanged);
  }
  context_.events.OnProgress(spec_.generation, std::move(progress));
}

// The CPU transport counts the standstill of each piece.
void StagedGroup::NoteAllEntered(const EnteredCall& call) {
  for (const auto& transfer : head_) {
    const bool meant =
        IsPointToPoint(transfer->op.op.kind) == call.point_to_point && transfer->op.seq == call.seq;
    if (!meant || host_ == nullptr) continue;
    for (const Piece& piece : transfer->pieces)
      host_->NoteAllEntered({spec_.name, call.point_to_point, piece.number});
  }
}

// Of what the CPU transport has, it judges itself.
void StagedGroup::CheckDeadline() {
  next_deadline_check_ = kNever;
  if (state_ > State::kReady) return;
  for (const auto& transfer : head_) {
    if (!RunsOnHost(*transfer) && IsLate(transfer->op)) return;
  }
  if (head_.empty() && !pending_.empty()) IsLate(pending_.front());
}

bool StagedGroup::IsLate(SubmittedOp& op) {
  const OpTimeouts::Verdict verdict = op.timeouts.Check(context_.now, port_->held_until());
  next_deadline_check_ =
      std::min(next_deadline_check_, op.timeouts.NextCheck(context_.now, port_->held_until()));
  if (verdict == OpTimeouts::Verdict::kInTime) return false;
  LateOp late = LateSince(op, verdict, context_.now, context_.clock);
  for (int rank = 0; state_ == State::kMeeting && rank < port_->size(); ++rank) {
    if (rank != spec_.rank) late.missing.push_back(rank);
  }
  Fail(LateStatus(spec_, late, verdict));
  return true;
}

}  // namespace resilient
