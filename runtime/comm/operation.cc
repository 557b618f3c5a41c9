#include <resilient/operation.h>

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
    case OpKind::kReduce:
      return "reduce";
    case OpKind::kGather:
      return "gather";
    case OpKind::kScatter:
      return "scatter";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAllToAll:
      return "all_to_all";
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
    case DataType::kFloat16:
      return "float16";
    case DataType::kInt8:
      return "int8";
    case DataType::kInt16:
      return "int16";
    case DataType::kUInt16:
      return "uint16";
    case DataType::kUInt32:
      return "uint32";
    case DataType::kUInt64:
      return "uint64";
    case DataType::kComplex64:
      return "complex64";
    case DataType::kComplex128:
      return "complex128";
    case DataType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DataType::kFloat8E5M2:
      return "float8_e5m2";
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
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kBitAnd:
      return "bit_and";
    case ReduceOp::kBitOr:
      return "bit_or";
    case ReduceOp::kBitXor:
      return "bit_xor";
    case ReduceOp::kPremulSum:
      return "premul_sum";
  }
  return "unknown";
}

std::size_t SizeOf(DataType type) {
  switch (type) {
    case DataType::kUInt8:
    case DataType::kInt8:
    case DataType::kBool:
    case DataType::kFloat8E4M3:
    case DataType::kFloat8E5M2:
      return 1;
    case DataType::kBFloat16:
    case DataType::kFloat16:
    case DataType::kInt16:
    case DataType::kUInt16:
      return 2;
    case DataType::kFloat32:
    case DataType::kInt32:
    case DataType::kUInt32:
      return 4;
    case DataType::kFloat64:
    case DataType::kInt64:
    case DataType::kUInt64:
    case DataType::kComplex64:
      return 8;
    case DataType::kComplex128:
      return 16;
  }
  RESILIENT_CHECK(false);
}

bool IsPointToPoint(OpKind kind) { return kind == OpKind::kSend || kind == OpKind::kRecv; }

bool HasRoot(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}

bool Reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}

bool HasOneCount(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kBroadcast ||
         kind == OpKind::kBarrier;
}

Operation OutlineOf(const Operation& op) {
  Operation outline;
  outline.kind = op.kind;
  outline.dtype = op.dtype;
  outline.reduce = op.reduce;
  outline.root = op.root;
  outline.peer = op.peer;
  outline.tag = op.tag;
  outline.count = op.count;
  outline.device = op.device;
  outline.binding = op.binding;
  return outline;
}

std::string CommunicatorName(const std::string& group, int device) {
  return device == kHost ? group : StrCat(group, "/cuda");
}

std::string Describe(const Operation& op) {
  const std::string name(OpKindName(op.kind));
  const std::string memory = StrCat(DataTypeName(op.dtype), "[", op.count, "]");
  switch (op.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter:
      return StrCat(name, "(", memory, ", ", ReduceOpName(op.reduce), ")");
    case OpKind::kReduce:
      return StrCat(name, "(", memory, ", ", ReduceOpName(op.reduce), ", root ", op.root, ")");
    case OpKind::kBroadcast:
    case OpKind::kGather:
    case OpKind::kScatter:
      return StrCat(name, "(", memory, ", root ", op.root, ")");
    case OpKind::kAllGather:
      return StrCat(name, "(", memory, ")");
    case OpKind::kAllToAll:
      return StrCat(name, "(", DataTypeName(op.dtype), ")");
    case OpKind::kBarrier:
      return StrCat(name, "()");
    case OpKind::kSend:
      return StrCat(name, "(", memory, ", to ", op.peer, ", tag ", op.tag, ")");
    case OpKind::kRecv:
      if (op.peer == kAnyPeer)
        return StrCat(name, "(", memory, ", from any rank, tag ", op.tag, ")");
      return StrCat(name, "(", memory, ", from ", op.peer, ", tag ", op.tag, ")");
  }
  return StrCat(name, "(", memory, ")");
}

}  // namespace resilient
