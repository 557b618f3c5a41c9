#include "torch_plugin/csrc/convert.h"

#include <string>

#include <c10/util/StringUtil.h>
#include <resilient/torch.h>

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

Result<DataType> ToDataType(at::ScalarType type) {
  if (type == at::kFloat) return DataType::kFloat32;
  if (type == at::kDouble) return DataType::kFloat64;
  if (type == at::kBFloat16) return DataType::kBFloat16;
  if (type == at::kLong) return DataType::kInt64;
  if (type == at::kInt) return DataType::kInt32;
  if (type == at::kByte) return DataType::kUInt8;
  if (type == at::kBool) return DataType::kBool;
  return Status(StatusCode::kUnimplemented,
                c10::str("tensors of dtype ", c10::toString(type),
                         " are not supported; supported are float32, float64, bfloat16, int64, "
                         "int32, uint8 and bool: convert the tensor with .to() first"));
}

Result<ReduceOp> ToReduceOp(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op.op_)) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    default:  // torch's enumeration: it grows.
      return Status(StatusCode::kUnimplemented,
                    "this reduce operation is not supported; supported are SUM, AVG, MIN and MAX");
  }
}

Status CheckTensor(const at::Tensor& tensor, const char* what) {
  if (!tensor.defined()) {
    return Status(StatusCode::kInvalidArgument, c10::str(what, ": the tensor is undefined"));
  }
  if (!tensor.device().is_cpu()) {
    return Status(
        StatusCode::kUnimplemented,
        c10::str(what, ": the tensor is on ", tensor.device().str(),
                 ", and this version serves CPU tensors only: move it with .cpu(), or use another "
                 "backend for tensors of that device"));
  }
  if (tensor.layout() != at::kStrided) {
    return Status(StatusCode::kUnimplemented,
                  c10::str(what, ": sparse tensors are not supported: use .to_dense()"));
  }
  return ToDataType(tensor.scalar_type()).status();
}

}  // namespace resilient::plugin
