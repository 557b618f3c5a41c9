#include "runtime/comm/group_port.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/spin.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/wire.h"

namespace resilient {
namespace {

// Sizes stay far from where sums of them could overflow.
constexpr std::size_t kMaxBytes = std::size_t{1} << 48;

Status Invalid(const Operation& op, std::string_view why) {
  return Status(StatusCode::kInvalidArgument, StrCat(Describe(op), " cannot run: ", why));
}

bool KnownEnums(const Operation& op) {
  return op.kind >= OpKind::kAllReduce && op.kind <= OpKind::kAllToAll &&
         op.dtype >= DataType::kFloat32 && op.dtype <= DataType::kFloat8E5M2 &&
         op.reduce <= ReduceOp::kPremulSum;
}

bool TakesInputs(const Operation& op, int rank) {
  return op.kind == OpKind::kReduceScatter || op.kind == OpKind::kAllToAll ||
         (op.kind == OpKind::kScatter && op.root == rank);
}

bool TakesOutputs(const Operation& op, int rank) {
  return op.kind == OpKind::kAllGather || op.kind == OpKind::kAllToAll ||
         (op.kind == OpKind::kGather && op.root == rank);
}

// What this kind of operation does not have gets its default.
void ClearUnused(Operation& op, int rank) {
  if (op.kind == OpKind::kBarrier) op.dtype = DataType::kUInt8;
  if (op.kind == OpKind::kBarrier || op.kind == OpKind::kAllToAll) {
    op.count = 0;
    op.data = nullptr;
  }
  if (!Reduces(op.kind)) op.reduce = ReduceOp::kNone;
  if (op.reduce != ReduceOp::kPremulSum) op.factor = 1.0;
  if (!HasRoot(op.kind)) op.root = -1;
  if (!TakesInputs(op, rank)) op.inputs.clear();
  if (!TakesOutputs(op, rank)) op.outputs.clear();
  if (op.kind != OpKind::kAllGather && op.kind != OpKind::kReduceScatter) op.one_block = false;
  if (op.kind != OpKind::kRecv) op.sender = nullptr;
  if (IsPointToPoint(op.kind)) return;
  op.peer = -1;
  op.tag = 0;
}

Status ValidateMemory(const Operation& op, void* data, std::size_t count) {
  if (count > kMaxBytes / SizeOf(op.dtype)) return Invalid(op, "it is too large");
  if (count > 0 && data == nullptr) return Invalid(op, "it has no memory");
  if (Reduces(op.kind) && reinterpret_cast<std::uintptr_t>(data) % SizeOf(op.dtype) != 0)
    return Invalid(op, "its memory is not aligned for its type");
  return Status::Ok();
}

Status ValidateParts(const Operation& op, const std::vector<Part>& parts, std::string_view what,
                     int size) {
  if (parts.size() != static_cast<std::size_t>(size))
    return Invalid(op, StrCat("it has ", parts.size(), " ", what, " in a group of ", size));
  for (const Part& part : parts)
    RESILIENT_RETURN_IF_ERROR(ValidateMemory(op, part.data, part.count));
  return Status::Ok();
}

// What a rank sends to itself must have one size.
Status ValidateOwnPart(const Operation& op, int rank) {
  const auto own = static_cast<std::size_t>(rank);
  if (op.inputs.empty() && op.outputs.empty()) return Status::Ok();
  const std::size_t in = op.inputs.empty() ? op.count : op.inputs[own].count;
  const std::size_t out = op.outputs.empty() ? op.count : op.outputs[own].count;
  if (in == out) return Status::Ok();
  return Invalid(op, StrCat("this rank's own part has ", in, " elements on one side and ", out,
                            " on the other"));
}

Status ValidateBlock(const Operation& op) {
  const std::vector<Part>& parts = op.kind == OpKind::kAllGather ? op.outputs : op.inputs;
  const auto* begin = static_cast<const std::byte*>(parts.front().data);
  const std::size_t bytes = parts.front().count * SizeOf(op.dtype);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].count != parts.front().count)
      return Invalid(op, StrCat("its parts are no block: part ", i, " has ", parts[i].count,
                                " elements and part 0 has ", parts.front().count));
    if (bytes > 0 && parts[i].data != begin + i * bytes)
      return Invalid(op, StrCat("its parts are no block: part ", i, " is not behind the last"));
  }
  return Status::Ok();
}

// No rank can end it before each has entered it, whatever the parts are.
bool NeedsAll(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter ||
         kind == OpKind::kAllGather || kind == OpKind::kBarrier;
}

std::size_t RanksHere(const GroupSpec& spec) {
  const std::string& host = spec.members.at(static_cast<std::size_t>(spec.rank)).host;
  return static_cast<std::size_t>(std::ranges::count(spec.members, host, &GroupMember::host));
}

// What cannot be for any of a batch, beside what it cannot be by itself.
Status ValidateBatched(const Operation& op, const Operation& first) {
  if (!IsPointToPoint(op.kind)) return Invalid(op, "a batch has sends and receives only");
  if (op.stream != first.stream || op.device != first.device)
    return Invalid(op, "a batch has one device and one stream");
  return Status::Ok();
}

}  // namespace

Status ForkedFromRank() {
  return Status(StatusCode::kForked,
                "this process was forked from a rank and has no part in its groups; start "
                "workers with spawn, or call init_process_group in the child");
}

Status ValidateOperation(Operation& op, int rank, int size) {
  if (!KnownEnums(op))
    return Status(StatusCode::kInvalidArgument, "the operation has an unknown kind or type");
  if (op.call_site.size() > kMaxCallSite) op.call_site.resize(kMaxCallSite);
  ClearUnused(op, rank);
  RESILIENT_RETURN_IF_ERROR(ValidateMemory(op, op.data, op.count));
  if (IsPointToPoint(op.kind)) {
    const bool any = op.kind == OpKind::kRecv && op.peer == kAnyPeer;
    if (!any && (op.peer < 0 || op.peer >= size))
      return Invalid(op, StrCat("the group has the ranks 0 to ", size - 1));
    if (op.peer == rank) return Invalid(op, "a rank cannot send to itself");
    if (any && size == 1) return Invalid(op, "no other rank could send");
  }
  if (HasRoot(op.kind) && (op.root < 0 || op.root >= size))
    return Invalid(op, StrCat("the group has the ranks 0 to ", size - 1));
  if (TakesInputs(op, rank))
    RESILIENT_RETURN_IF_ERROR(ValidateParts(op, op.inputs, "inputs", size));
  if (TakesOutputs(op, rank))
    RESILIENT_RETURN_IF_ERROR(ValidateParts(op, op.outputs, "outputs", size));
  RESILIENT_RETURN_IF_ERROR(ValidateOwnPart(op, rank));
  if (op.one_block) RESILIENT_RETURN_IF_ERROR(ValidateBlock(op));
  if (Reduces(op.kind) && !CanReduce(op.dtype, op.reduce))
    return Invalid(op, "this reduction is not defined for this type");
  return Status::Ok();
}

WaitingOperation ToldOf(const SubmittedOp& op, Instant now) {
  return {.seq = op.seq,
          .point_to_point = IsPointToPoint(op.op.kind),
          .what = Describe(op.op),
          .call_site = op.op.call_site,
          .age = now - op.submitted,
          .missing = {},
          .sends = op.op.kind == OpKind::kSend,
          .needs_all = NeedsAll(op.op.kind)};
}

std::vector<int> GlobalRanks(const GroupSpec& spec, const std::vector<int>& group_ranks) {
  std::vector<int> ranks(group_ranks.size());
  std::transform(group_ranks.begin(), group_ranks.end(), ranks.begin(), [&](int rank) {
    return spec.members[static_cast<std::size_t>(rank)].global_rank;
  });
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

GroupPort::GroupPort(GroupSpec spec, std::shared_ptr<AbortCell> abort,
                     std::shared_ptr<Doorbell> doorbell, std::shared_ptr<const HoldCell> held,
                     const Clock& clock, Admission admission, StepObserver observer)
    : spec_(std::move(spec)),
      abort_(std::move(abort)),
      doorbell_(std::move(doorbell)),
      held_(std::move(held)),
      clock_(clock),
      admission_(std::move(admission)),
      observer_(std::move(observer)),
      has_cores_(HasCoresFor(2 * RanksHere(spec_))) {}

Result<SubmittedOp> GroupPort::Admit(Operation op, Completion done) const {
  if (doorbell_->InChild()) return ForkedFromRank();
  RESILIENT_RETURN_IF_ERROR(ValidateOperation(op, spec_.rank, size()));
  SubmittedOp submitted{
      .op = std::move(op), .done = std::move(done), .ready = nullptr, .timeouts = {}};
  // Only a bound that counts from here needs to know the time.
  const bool timed = submitted.op.timeout > Duration::zero();
  submitted.timeouts = OpTimeouts(submitted.op, timed ? clock_.Now() : Instant{});
  if (admission_ != nullptr) RESILIENT_RETURN_IF_ERROR(admission_(spec_, submitted));
  if (has_cores_ && submitted.op.mark != nullptr) submitted.op.mark->ExpectSoon();
  return submitted;
}

Status GroupPort::AbortCause() const {
  if (!aborted_.ok()) return aborted_;
  return abort_ != nullptr && abort_->IsSet() ? abort_->cause() : Status::Ok();
}

Status GroupPort::CheckOpen(std::size_t operations) const {
  if (!closed_.ok()) return closed_;
  RESILIENT_RETURN_IF_ERROR(AbortCause());
  if (outstanding_.load(std::memory_order_relaxed) + operations <= kMaxOperations)
    return Status::Ok();
  return Status(StatusCode::kResourceExhausted,
                StrCat("group ", spec_.name, " has at most ", kMaxOperations,
                       " operations in flight; wait for some of them"));
}

std::uint64_t GroupPort::Number(const Operation& op) {
  outstanding_.fetch_add(1, std::memory_order_acq_rel);
  return ++(IsPointToPoint(op.kind) ? point_to_point_ : collectives_);
}

bool GroupPort::Queue(SubmittedOp op) {
  if (lane_ != nullptr && !IsPointToPoint(op.op.kind)) {
    lane_->Submit(std::move(op));
    return false;
  }
  ops_.push_back(std::move(op));
  return true;
}

Result<std::uint64_t> GroupPort::Submit(Operation op, Completion done) {
  Result<SubmittedOp> admitted = Admit(std::move(op), std::move(done));
  if (!admitted.ok()) return admitted.status();
  SubmittedOp& submitted = *admitted;
  submitted.submitted = clock_.Now();
  std::unique_lock lock(mutex_);
  RESILIENT_RETURN_IF_ERROR(CheckOpen(1));
  const std::uint64_t seq = Number(submitted.op);
  submitted.seq = seq;
  const bool wake = Queue(std::move(submitted));
  lock.unlock();
  if (wake) doorbell_->Ring();
  return seq;
}

Result<std::vector<std::uint64_t>> GroupPort::SubmitBatch(
    std::vector<Communicator::Submission> batch) {
  for (const Communicator::Submission& one : batch)
    RESILIENT_RETURN_IF_ERROR(ValidateBatched(one.op, batch.front().op));
  std::vector<SubmittedOp> submitted;
  for (Communicator::Submission& one : batch) {
    Result<SubmittedOp> admitted = Admit(std::move(one.op), std::move(one.done));
    if (!admitted.ok()) return admitted.status();
    submitted.push_back(std::move(admitted).value());
    submitted.back().submitted = clock_.Now();
    submitted.back().batch_rest = batch.size() - submitted.size();
  }
  std::vector<std::uint64_t> seqs;
  std::unique_lock lock(mutex_);
  RESILIENT_RETURN_IF_ERROR(CheckOpen(submitted.size()));
  for (SubmittedOp& one : submitted) {
    one.seq = Number(one.op);
    seqs.push_back(one.seq);
    Queue(std::move(one));
  }
  lock.unlock();
  doorbell_->Ring();
  return seqs;
}

Result<Communicator::Ran> GroupPort::Run(Operation op, Completion done,
                                         const Communicator::KeepWaiting& keep_waiting) {
  Result<SubmittedOp> admitted = Admit(std::move(op), std::move(done));
  if (!admitted.ok()) return admitted.status();
  SubmittedOp& submitted = *admitted;
  std::unique_lock lock(mutex_);
  RESILIENT_RETURN_IF_ERROR(CheckOpen(1));
  const std::uint64_t seq = Number(submitted.op);
  submitted.seq = seq;
  if (lane_ == nullptr || IsPointToPoint(submitted.op.kind) || !lane_->TryEnter()) {
    submitted.submitted = clock_.Now();
    const bool wake = Queue(std::move(submitted));
    lock.unlock();
    if (wake) doorbell_->Ring();
    return Communicator::Ran{.seq = seq, .outcome = std::nullopt};
  }
  lock.unlock();
  Communicator::Ran ran{.seq = seq, .outcome = lane_->Run(std::move(submitted), keep_waiting)};
  if (ran.outcome) OnCompleted();
  return ran;
}

ShmLane& GroupPort::OpenLane(std::unique_ptr<ShmSegment> segment, const ShmGeometry& geometry,
                             std::deque<SubmittedOp> waiting, bool checksums) {
  std::lock_guard lock(mutex_);
  RESILIENT_CHECK(lane_ == nullptr);
  lane_ = std::make_unique<ShmLane>(*this, abort_.get(), std::move(segment), geometry, clock_,
                                    checksums);
  // In the order in which they were submitted.
  for (SubmittedOp& op : waiting) lane_->Submit(std::move(op));
  for (SubmittedOp& op : std::exchange(ops_, {})) Queue(std::move(op));
  return *lane_;
}

void GroupPort::OnAbort() {
  if (doorbell_->InChild()) return;  // The lane's memory is not there.
  {
    std::lock_guard lock(mutex_);
    if (lane_ != nullptr) lane_->Wake();
  }
  doorbell_->Ring();
}

void GroupPort::Abort(const Status& cause) {
  if (doorbell_->InChild()) return;
  {
    std::lock_guard lock(mutex_);
    if (!aborted_.ok()) return;
    aborted_ = abort_ != nullptr && abort_->IsSet() ? abort_->cause() : cause;
    if (closed_.ok()) closed_ = aborted_;
    if (lane_ != nullptr) lane_->Stop(aborted_);
  }
  doorbell_->Ring();
}

void GroupPort::Leave(const Status& after) {
  if (doorbell_->InChild()) return;
  {
    std::lock_guard lock(mutex_);
    if (leave_) return;
    leave_ = true;
    if (closed_.ok()) {
      const Status cause = AbortCause();
      closed_ = cause.ok() ? after : cause;
    }
  }
  doorbell_->Ring();
}

ProgressAnswer GroupPort::AskProgress() {
  using Answer = ProgressAnswer;
  if (doorbell_->InChild()) return Answer::kOver;
  {
    std::lock_guard lock(mutex_);
    if (!closed_.ok() || !aborted_.ok()) return Answer::kOver;
    progress_asked_ = true;
  }
  doorbell_->Ring();
  return Answer::kComing;
}

void GroupPort::NoteAllEntered(const EnteredCall& call) {
  if (doorbell_->InChild()) return;
  {
    std::lock_guard lock(mutex_);
    // As many as one report has; the service says it again for what is dropped here.
    if (!closed_.ok() || all_entered_.size() >= kWaitingOperationsMax) return;
    all_entered_.push_back(call);
  }
  doorbell_->Ring();
}

void GroupPort::Take(Mail* mail) {
  mail->ops.clear();
  mail->all_entered.clear();
  std::lock_guard lock(mutex_);
  mail->progress_asked = std::exchange(progress_asked_, false);
  mail->all_entered.swap(all_entered_);
  mail->aborted = AbortCause();
  mail->leave = leave_;
  if (leave_) mail->left = closed_;
  mail->ops.swap(ops_);
}

std::vector<SubmittedOp> GroupPort::Close(const Status& cause) {
  std::lock_guard lock(mutex_);
  if (closed_.ok()) closed_ = cause;
  return std::exchange(ops_, {});
}

}  // namespace resilient
