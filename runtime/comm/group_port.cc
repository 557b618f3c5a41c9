#include "runtime/comm/group_port.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/wire.h"

namespace resilient {
namespace {

// Sizes stay far from where sums of them could overflow.
constexpr std::size_t kMaxBytes = std::size_t{1} << 48;

Status Invalid(const Operation& op, std::string_view why) {
  return Status(StatusCode::kInvalidArgument, StrCat(Describe(op), " cannot run: ", why));
}

bool IsPointToPoint(OpKind kind) { return kind == OpKind::kSend || kind == OpKind::kRecv; }

bool KnownEnums(const Operation& op) {
  return op.kind >= OpKind::kAllReduce && op.kind <= OpKind::kRecv &&
         op.dtype >= DataType::kFloat32 && op.dtype <= DataType::kInt32 &&
         op.reduce <= ReduceOp::kMax;
}

Status ValidateOutputs(const Operation& op, int size) {
  if (op.outputs.size() != static_cast<std::size_t>(size))
    return Invalid(op, StrCat("it has ", op.outputs.size(), " outputs in a group of ", size));
  const bool null = std::find(op.outputs.begin(), op.outputs.end(), nullptr) != op.outputs.end();
  if (op.count > 0 && null) return Invalid(op, "an output has no memory");
  return Status::Ok();
}

}  // namespace

Status ValidateOperation(Operation& op, int rank, int size) {
  if (!KnownEnums(op))
    return Status(StatusCode::kInvalidArgument, "the operation has an unknown kind or type");
  if (op.call_site.size() > kMaxCallSite) op.call_site.resize(kMaxCallSite);
  if (op.kind == OpKind::kBarrier) {
    op.dtype = DataType::kUInt8;
    op.count = 0;
    op.data = nullptr;
  }
  if (op.kind != OpKind::kAllReduce) op.reduce = ReduceOp::kNone;
  if (op.kind != OpKind::kBroadcast) op.root = -1;
  if (op.kind != OpKind::kAllGather) op.outputs.clear();
  if (!IsPointToPoint(op.kind)) {
    op.peer = -1;
    op.tag = 0;
  }
  if (op.count > kMaxBytes / SizeOf(op.dtype)) return Invalid(op, "it is too large");
  if (op.count > 0 && op.data == nullptr) return Invalid(op, "it has no memory");
  if (IsPointToPoint(op.kind)) {
    if (op.peer < 0 || op.peer >= size)
      return Invalid(op, StrCat("the group has the ranks 0 to ", size - 1));
    if (op.peer == rank) return Invalid(op, "a rank cannot send to itself");
  }
  if (op.kind == OpKind::kBroadcast && (op.root < 0 || op.root >= size))
    return Invalid(op, StrCat("the group has the ranks 0 to ", size - 1));
  if (op.kind == OpKind::kAllGather) RESILIENT_RETURN_IF_ERROR(ValidateOutputs(op, size));
  if (op.kind == OpKind::kAllReduce) {
    if (!CanReduce(op.dtype, op.reduce))
      return Invalid(op, "this reduction is not defined for this type");
    if (reinterpret_cast<std::uintptr_t>(op.data) % SizeOf(op.dtype) != 0)
      return Invalid(op, "its memory is not aligned for its type");
  }
  return Status::Ok();
}

GroupPort::GroupPort(GroupSpec spec, std::shared_ptr<AbortCell> abort,
                     std::shared_ptr<Doorbell> doorbell)
    : spec_(std::move(spec)), abort_(std::move(abort)), doorbell_(std::move(doorbell)) {}

Status GroupPort::AbortCause() const {
  if (!aborted_.ok()) return aborted_;
  return abort_ != nullptr && abort_->IsSet() ? abort_->cause() : Status::Ok();
}

Result<std::uint64_t> GroupPort::Submit(Operation op, Completion done) {
  if (doorbell_->InChild()) {
    return Status(StatusCode::kForked,
                  "this process was forked from a rank and has no part in its groups; start "
                  "workers with spawn, or call init_process_group in the child");
  }
  RESILIENT_RETURN_IF_ERROR(ValidateOperation(op, spec_.rank, size()));
  std::uint64_t seq = 0;
  {
    std::lock_guard lock(mutex_);
    if (!closed_.ok()) return closed_;
    RESILIENT_RETURN_IF_ERROR(AbortCause());
    if (outstanding_.load(std::memory_order_relaxed) >= kMaxOperations) {
      return Status(StatusCode::kResourceExhausted,
                    StrCat("group ", spec_.name, " has ", kMaxOperations,
                           " operations in flight; wait for some of them"));
    }
    outstanding_.fetch_add(1, std::memory_order_acq_rel);
    seq = ++(IsPointToPoint(op.kind) ? point_to_point_ : collectives_);
    ops_.push_back({.op = std::move(op), .done = std::move(done), .seq = seq});
  }
  doorbell_->Ring();
  return seq;
}

void GroupPort::Abort(const Status& cause) {
  if (doorbell_->InChild()) return;
  {
    std::lock_guard lock(mutex_);
    if (!aborted_.ok()) return;
    aborted_ = abort_ != nullptr && abort_->IsSet() ? abort_->cause() : cause;
    if (closed_.ok()) closed_ = aborted_;
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

GroupPort::Mail GroupPort::Take() {
  Mail mail;
  std::lock_guard lock(mutex_);
  mail.aborted = AbortCause();
  mail.leave = leave_;
  if (leave_) mail.left = closed_;
  mail.ops = std::exchange(ops_, {});
  return mail;
}

std::vector<SubmittedOp> GroupPort::Close(const Status& cause) {
  std::lock_guard lock(mutex_);
  if (closed_.ok()) closed_ = cause;
  return std::exchange(ops_, {});
}

}  // namespace resilient
