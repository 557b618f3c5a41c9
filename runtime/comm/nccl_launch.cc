#include "runtime/comm/nccl_launch.h"

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/base/log.h"

namespace resilient {
namespace {

Status Unsupported(const Operation& op, std::string_view why) {
  return Status(StatusCode::kUnimplemented, StrCat(Describe(op), " does not run over NCCL: ", why,
                                                   "; use the CPU communicator for it"));
}

// What NCCL can calculate with.
std::optional<NcclDataType> NumberType(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return NcclDataType::kFloat32;
    case DataType::kFloat64:
      return NcclDataType::kFloat64;
    case DataType::kFloat16:
      return NcclDataType::kFloat16;
    case DataType::kBFloat16:
      return NcclDataType::kBFloat16;
    case DataType::kInt64:
      return NcclDataType::kInt64;
    case DataType::kInt32:
      return NcclDataType::kInt32;
    case DataType::kInt8:
      return NcclDataType::kInt8;
    case DataType::kUInt64:
      return NcclDataType::kUInt64;
    case DataType::kUInt32:
      return NcclDataType::kUInt32;
    case DataType::kUInt8:
      return NcclDataType::kUInt8;
    case DataType::kBool:
    case DataType::kInt16:
    case DataType::kUInt16:
    case DataType::kComplex64:
    case DataType::kComplex128:
    case DataType::kFloat8E4M3:
    case DataType::kFloat8E5M2:
      return std::nullopt;
  }
  return std::nullopt;
}

std::optional<NcclReduceOp> Reduction(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return NcclReduceOp::kSum;
    case ReduceOp::kAvg:
      return NcclReduceOp::kAvg;
    case ReduceOp::kMin:
      return NcclReduceOp::kMin;
    case ReduceOp::kMax:
      return NcclReduceOp::kMax;
    case ReduceOp::kProduct:
      return NcclReduceOp::kProduct;
    case ReduceOp::kNone:
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
    case ReduceOp::kPremulSum:
      return std::nullopt;
  }
  return std::nullopt;
}

Status CheckReduction(const Operation& op) {
  if (!NumberType(op.dtype)) return Unsupported(op, "NCCL does not reduce this type");
  if (!Reduction(op.reduce)) return Unsupported(op, "NCCL does not have this reduction");
  return Status::Ok();
}

// Runs all calls as one group, so that they share a launch; the group is closed in any case.
template <typename Call>
NcclResult ForEachRank(const NcclApi& nccl, std::size_t ranks, Call&& call) {
  NcclResult result = nccl.GroupStart();
  if (result != NcclResult::kSuccess) return result;
  for (std::size_t rank = 0; rank < ranks && result == NcclResult::kSuccess; ++rank)
    result = call(rank);
  const NcclResult ended = nccl.GroupEnd();
  const bool failed = result != NcclResult::kSuccess && result != NcclResult::kInProgress;
  return failed ? result : ended;
}

// One broadcast a rank: ncclAllGather takes one block of equal parts, and whether the outputs are
// one block is known to this rank alone. Bytes, as nothing is calculated.
NcclResult AllGather(const NcclApi& nccl, NcclCommHandle comm, int rank, const Operation& op,
                     CudaStreamHandle stream) {
  return ForEachRank(nccl, op.outputs.size(), [&](std::size_t root) {
    const Part& out = op.outputs[root];
    const void* from = root == static_cast<std::size_t>(rank) ? op.data : out.data;
    return nccl.Broadcast(from, out.data, out.count * SizeOf(op.dtype), NcclDataType::kUInt8,
                          static_cast<int>(root), comm, stream);
  });
}

// One reduction a rank, for the same reason.
NcclResult ReduceScatter(const NcclApi& nccl, NcclCommHandle comm, int rank, const Operation& op,
                         CudaStreamHandle stream) {
  return ForEachRank(nccl, op.inputs.size(), [&](std::size_t root) {
    const Part& in = op.inputs[root];
    void* to = root == static_cast<std::size_t>(rank) ? op.data : in.data;  // Read by root alone.
    return nccl.Reduce(in.data, to, in.count, *NumberType(op.dtype), *Reduction(op.reduce),
                       static_cast<int>(root), comm, stream);
  });
}

}  // namespace

Status CheckNcclSupports(const Operation& op) {
  switch (op.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter:
      return CheckReduction(op);
    case OpKind::kBroadcast:
    case OpKind::kAllGather:
      return Status::Ok();
    case OpKind::kBarrier:
      return Unsupported(op, "NCCL has no barrier, and one by a reduction needs device memory");
    case OpKind::kSend:
    case OpKind::kRecv:
      return Unsupported(op, "NCCL has no tags and runs messages in the order of the stream");
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
      return Unsupported(op, "it is not built from NCCL's send and receive yet");
  }
  return Unsupported(op, "it is of an unknown kind");
}

NcclResult LaunchNccl(const NcclApi& nccl, NcclCommHandle comm, int rank, const Operation& op) {
  auto* stream = static_cast<CudaStreamHandle>(op.stream);
  switch (op.kind) {
    case OpKind::kAllReduce:
      return nccl.AllReduce(op.data, op.data, op.count, *NumberType(op.dtype),
                            *Reduction(op.reduce), comm, stream);
    case OpKind::kReduce:
      return nccl.Reduce(op.data, op.data, op.count, *NumberType(op.dtype), *Reduction(op.reduce),
                         op.root, comm, stream);
    case OpKind::kBroadcast:
      return nccl.Broadcast(op.data, op.data, op.count * SizeOf(op.dtype), NcclDataType::kUInt8,
                            op.root, comm, stream);
    case OpKind::kAllGather:
      return AllGather(nccl, comm, rank, op, stream);
    case OpKind::kReduceScatter:
      return ReduceScatter(nccl, comm, rank, op, stream);
    case OpKind::kBarrier:
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
      break;
  }
  RESILIENT_CHECK(false);
}

}  // namespace resilient
