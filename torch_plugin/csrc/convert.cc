#include "torch_plugin/csrc/convert.h"

#include <algorithm>
#include <array>
#include <string>

#include <c10/util/StringUtil.h>
#include <resilient/torch_errors.h>

namespace resilient::plugin {

ErrorKind KindOf(StatusCode code) {
  switch (code) {
    case StatusCode::kJoinTimeout:
    case StatusCode::kStoreLost:
    case StatusCode::kTimeout:
    case StatusCode::kOutcomeUnknown:
    case StatusCode::kNotFound:
    case StatusCode::kWrongType:
    case StatusCode::kTooLarge:
      return ErrorKind::kStore;
    case StatusCode::kQueueEmpty:
      return ErrorKind::kQueueEmpty;
    case StatusCode::kRefused:
    case StatusCode::kUnreachable:
    case StatusCode::kResolve:
    case StatusCode::kProtocol:
    case StatusCode::kAuth:
      return ErrorKind::kNetwork;
    case StatusCode::kOk:
    case StatusCode::kRankLost:
    case StatusCode::kLeft:
    case StatusCode::kStaleGeneration:
    case StatusCode::kCommStalled:
    case StatusCode::kCommFailed:
    case StatusCode::kMismatch:
    case StatusCode::kDeadlock:
    case StatusCode::kStalled:
    case StatusCode::kDeviceLost:
    case StatusCode::kDeviceStalled:
    case StatusCode::kGrowth:
    case StatusCode::kDuplicateRank:
    case StatusCode::kWorldSize:
    case StatusCode::kJob:
    case StatusCode::kDuplicateDevice:
    case StatusCode::kSetting:
    case StatusCode::kTorchVersion:
    case StatusCode::kForked:
    case StatusCode::kCancelled:
    case StatusCode::kInterrupted:
    case StatusCode::kInvalidArgument:
    case StatusCode::kFailedPrecondition:
    case StatusCode::kUnimplemented:
    case StatusCode::kResourceExhausted:
    case StatusCode::kCompacted:
    case StatusCode::kInternal:
      return ErrorKind::kBackend;
  }
  return ErrorKind::kBackend;  // A code of a newer peer.
}

bool RetriedByElastic(StatusCode code) {
  constexpr std::array kRetried = {StatusCode::kRankLost,      StatusCode::kLeft,
                                   StatusCode::kCommStalled,   StatusCode::kCommFailed,
                                   StatusCode::kGrowth,        StatusCode::kDeviceLost,
                                   StatusCode::kDeviceStalled, StatusCode::kStoreLost,
                                   StatusCode::kTimeout,       StatusCode::kOutcomeUnknown};
  return std::find(kRetried.begin(), kRetried.end(), code) != kRetried.end();
}

bool EndsGeneration(StatusCode code) {
  constexpr std::array kEnding = {
      StatusCode::kRankLost,    StatusCode::kLeft,           StatusCode::kCommFailed,
      StatusCode::kCommStalled, StatusCode::kMismatch,       StatusCode::kDeadlock,
      StatusCode::kStalled,     StatusCode::kDeviceLost,     StatusCode::kDeviceStalled,
      StatusCode::kGrowth,      StatusCode::kStaleGeneration};
  return std::find(kEnding.begin(), kEnding.end(), code) != kEnding.end();
}

void ThrowNative(const Status& status) {
  const c10::SourceLocation where{__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)};
  switch (KindOf(status.code())) {
    case ErrorKind::kStore:
      throw StoreError(where, status);
    case ErrorKind::kQueueEmpty:
      throw QueueEmptyError(where, status);
    case ErrorKind::kNetwork:
      throw NetworkError(where, status);
    case ErrorKind::kBackend:
      break;
  }
  throw BackendError(where, status);
}

std::optional<DataType> ToDataType(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DataType::kFloat32;
    case at::kDouble:
      return DataType::kFloat64;
    case at::kBFloat16:
      return DataType::kBFloat16;
    case at::kHalf:
      return DataType::kFloat16;
    case at::kLong:
      return DataType::kInt64;
    case at::kInt:
      return DataType::kInt32;
    case at::kShort:
      return DataType::kInt16;
    case at::kChar:
      return DataType::kInt8;
    case at::kByte:
      return DataType::kUInt8;
    case at::kUInt16:
      return DataType::kUInt16;
    case at::kUInt32:
      return DataType::kUInt32;
    case at::kUInt64:
      return DataType::kUInt64;
    case at::kBool:
      return DataType::kBool;
    case at::kComplexFloat:
      return DataType::kComplex64;
    case at::kComplexDouble:
      return DataType::kComplex128;
    case at::kFloat8_e4m3fn:
      return DataType::kFloat8E4M3;
    case at::kFloat8_e5m2:
      return DataType::kFloat8E5M2;
    default:  // torch's enumeration: it grows.
      return std::nullopt;
  }
}

namespace {

std::optional<ReduceOp> ToReduceOp(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBitAnd;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBitOr;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBitXor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::kPremulSum;
    default:
      return std::nullopt;
  }
}

// Why elements of `type` cannot be combined so; empty when they can.
std::string WhyNot(ReduceOp op, at::ScalarType type) {
  const bool bits = op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
  if (bits && !c10::isIntegralType(type, /*includeBool=*/true)) {
    return "bits are combined in integers and bool only";
  }
  if (c10::isComplexType(type) && (op == ReduceOp::kMin || op == ReduceOp::kMax)) {
    return "complex numbers have no order";
  }
  if (type == at::kBool && (op == ReduceOp::kAvg || op == ReduceOp::kPremulSum)) {
    return "it has no meaning for bool: convert the tensor with .to() first";
  }
  return {};
}

Result<double> FactorOf(const c10d::ReduceOp& op, const char* what) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) {
    return Status(StatusCode::kInvalidArgument,
                  c10::str(what,
                           ": PREMUL_SUM needs a factor: make it with "
                           "torch.distributed._make_nccl_premul_sum(factor)"));
  }
  if (!supplement->tensor_factor.defined()) return supplement->double_factor;
  const at::Tensor& factor = supplement->tensor_factor;
  if (factor.numel() != 1 || c10::isComplexType(factor.scalar_type())) {
    return Status(StatusCode::kInvalidArgument,
                  c10::str(what, ": the factor of PREMUL_SUM is one real number, not ",
                           factor.numel(), " of ", factor.scalar_type()));
  }
  return factor.item<double>();
}

}  // namespace

Result<Reduction> ToReduction(const c10d::ReduceOp& op, at::ScalarType type, const char* what) {
  const std::optional<ReduceOp> reduce = ToReduceOp(op);
  if (!reduce) {
    return Status(StatusCode::kUnimplemented,
                  c10::str(what, ": this reduce operation is not known"));
  }
  if (!ToDataType(type)) {
    return Status(StatusCode::kUnimplemented,
                  c10::str(what, ": elements of ", type,
                           " can be moved but not reduced: convert the tensor with .to() first"));
  }
  if (const std::string why = WhyNot(*reduce, type); !why.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  c10::str(what, ": ", ReduceOpName(*reduce), " of ", type, ": ", why));
  }
  Reduction reduction{.op = *reduce, .factor = 1.0};
  if (*reduce == ReduceOp::kPremulSum) {
    auto factor = FactorOf(op, what);
    if (!factor.ok()) return factor.status();
    reduction.factor = *factor;
  }
  return reduction;
}

Status CheckTensor(const at::Tensor& tensor, const char* what) {
  if (!tensor.defined()) {
    return Status(StatusCode::kInvalidArgument, c10::str(what, ": the tensor is undefined"));
  }
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    return Status(
        StatusCode::kUnimplemented,
        c10::str(what, ": the tensor is on ", tensor.device().str(),
                 ", and this version serves tensors on the CPU and on CUDA devices only: move it "
                 "with .cpu(), or use another backend for tensors of that device"));
  }
  if (tensor.layout() != at::kStrided) {
    return Status(
        StatusCode::kUnimplemented,
        c10::str(what, ": sparse tensors can be all-reduced only, on the CPU: use .to_dense()"));
  }
  return Status::Ok();
}

}  // namespace resilient::plugin
