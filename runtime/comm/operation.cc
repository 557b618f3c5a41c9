#include <resilient/communicator.h>

#include "runtime/base/check.h"
#include "runtime/base/log.h"

namespace resilient {

std::string_view OpKindName(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce:
      return "all_reduce";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kBarrier:
      return "barrier";
    case OpKind::kSend:
      return "send";
    case OpKind::kRecv:
      return "recv";
  }
  return "unknown";  // A value off the wire that no enumerator has.
}

std::string_view DataTypeName(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return "float32";
    case DataType::kFloat64:
      return "float64";
    case DataType::kBFloat16:
      return "bfloat16";
    case DataType::kInt64:
      return "int64";
    case DataType::kUInt8:
      return "uint8";
    case DataType::kBool:
      return "bool";
    case DataType::kInt32:
      return "int32";
  }
  return "unknown";
}

std::string_view ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kNone:
      return "";
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
  }
  return "unknown";
}

std::size_t SizeOf(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return 4;
    case DataType::kFloat64:
      return 8;
    case DataType::kBFloat16:
      return 2;
    case DataType::kInt64:
      return 8;
    case DataType::kUInt8:
      return 1;
    case DataType::kBool:
      return 1;
    case DataType::kInt32:
      return 4;
  }
  RESILIENT_CHECK(false);
}

std::string Describe(const Operation& op) {
  const std::string name(OpKindName(op.kind));
  const std::string memory = StrCat(DataTypeName(op.dtype), "[", op.count, "]");
  switch (op.kind) {
    case OpKind::kAllReduce:
      return StrCat(name, "(", memory, ", ", ReduceOpName(op.reduce), ")");
    case OpKind::kBroadcast:
      return StrCat(name, "(", memory, ", root ", op.root, ")");
    case OpKind::kAllGather:
      return StrCat(name, "(", memory, ")");
    case OpKind::kBarrier:
      return StrCat(name, "()");
    case OpKind::kSend:
      return StrCat(name, "(", memory, ", to ", op.peer, ", tag ", op.tag, ")");
    case OpKind::kRecv:
      return StrCat(name, "(", memory, ", from ", op.peer, ", tag ", op.tag, ")");
  }
  return StrCat(name, "(", memory, ")");
}

}  // namespace resilient
