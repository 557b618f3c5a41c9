#include "runtime/comm/nccl_reduction.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/comm/reduce.h"

namespace resilient {
namespace {

constexpr int kFirstWithFloat8 = 22400;
constexpr int kFloat8Capability = 9;

// What NCCL can calculate with; a complex number by its parts.
std::optional<NcclDataType> NumberType(DataType type) {
  switch (type) {
    case DataType::kFloat32:
    case DataType::kComplex64:
      return NcclDataType::kFloat32;
    case DataType::kFloat64:
    case DataType::kComplex128:
      return NcclDataType::kFloat64;
    case DataType::kFloat16:
      return NcclDataType::kFloat16;
    case DataType::kBFloat16:
      return NcclDataType::kBFloat16;
    case DataType::kFloat8E4M3:
      return NcclDataType::kFloat8E4M3;
    case DataType::kFloat8E5M2:
      return NcclDataType::kFloat8E5M2;
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
    case DataType::kBool:
      return NcclDataType::kUInt8;
    case DataType::kInt16:
    case DataType::kUInt16:
      return std::nullopt;
  }
  return std::nullopt;
}

bool IsComplex(DataType type) {
  return type == DataType::kComplex64 || type == DataType::kComplex128;
}

bool IsFloat8(DataType type) {
  return type == DataType::kFloat8E4M3 || type == DataType::kFloat8E5M2;
}

bool IsInteger(DataType type) {
  return type == DataType::kInt64 || type == DataType::kInt32 || type == DataType::kInt8 ||
         type == DataType::kUInt64 || type == DataType::kUInt32 || type == DataType::kUInt8;
}

// A sum of bools would overflow, and a product of those that are not 0 or 1 may be 0: the largest
// says whether one is true, the smallest whether all are.
std::optional<NcclReduceOp> OperatorOfBools(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr:
      return NcclReduceOp::kMax;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd:
      return NcclReduceOp::kMin;
    case ReduceOp::kNone:
    case ReduceOp::kAvg:
    case ReduceOp::kBitXor:
    case ReduceOp::kPremulSum:
      return std::nullopt;
  }
  return std::nullopt;
}

std::optional<NcclReduceOp> OperatorOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kPremulSum:  // What is made takes its place.
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
      return std::nullopt;
  }
  return std::nullopt;
}

std::optional<NcclReduceOp> OperatorOf(const Operation& op) {
  return op.dtype == DataType::kBool ? OperatorOfBools(op.reduce) : OperatorOf(op.reduce);
}

template <typename T>
std::array<std::byte, 8> BytesOf(T value) {
  std::array<std::byte, 8> bytes{};
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

}  // namespace

NcclAbilities AbilitiesOf(const NcclApi& nccl, const CudaApi& cuda, int device) {
  int version = 0;
  int capability = 0;
  const bool known =
      nccl.GetVersion(&version) == NcclResult::kSuccess &&
      cuda.DeviceGetAttribute(&capability, CudaDeviceAttribute::kComputeCapabilityMajor, device) ==
          CudaResult::kSuccess;
  return {.premul_sum = nccl.RedOpCreatePreMulSum != nullptr && nccl.RedOpDestroy != nullptr,
          .float8 = known && version >= kFirstWithFloat8 && capability >= kFloat8Capability};
}

Status NcclCannot(const Operation& op, std::string_view why) {
  return Status(StatusCode::kUnimplemented, StrCat(Describe(op), " does not run over NCCL: ", why,
                                                   "; use the CPU communicator for it"));
}

Status CheckNcclReduction(const Operation& op, int ranks, const NcclAbilities& abilities) {
  if (!NumberType(op.dtype)) return NcclCannot(op, "NCCL does not reduce integers of 16 bits");
  if (IsFloat8(op.dtype) && !abilities.float8) {
    return NcclCannot(op,
                      "to reduce float8 takes NCCL 2.24 and a device of compute capability 9.0");
  }
  if (!OperatorOf(op)) return NcclCannot(op, "NCCL does not have this reduction");
  // Its parts would be multiplied each by itself.
  if (IsComplex(op.dtype) && op.reduce == ReduceOp::kProduct)
    return NcclCannot(op, "NCCL does not multiply complex numbers");
  if (op.reduce != ReduceOp::kPremulSum) return Status::Ok();
  if (!abilities.premul_sum)
    return NcclCannot(op, "this NCCL has no ncclRedOpCreatePreMulSum and ncclRedOpDestroy");
  // What it has for a communicator of one rank multiplies, but no float8: seen in 2.28 to 2.30.
  if (IsFloat8(op.dtype) && ranks == 1)
    return NcclCannot(op, "NCCL does not multiply float8 in a communicator of one rank");
  constexpr double kBeyond = 9223372036854775808.0;  // 2^63
  if (IsInteger(op.dtype) && !(std::abs(op.factor) < kBeyond)) {
    return Status(StatusCode::kInvalidArgument,
                  StrCat(Describe(op), " cannot run: its factor is no number of 64 bits"));
  }
  return Status::Ok();
}

NcclReduction ReductionOf(const Operation& op, int ranks) {
  std::optional<NcclReduceOp> reduce = OperatorOf(op);
  RESILIENT_CHECK(reduce);
  // The mean of one is its sum, which NCCL copies: to a mean it would multiply, without float8.
  if (ranks == 1 && reduce == NcclReduceOp::kAvg) reduce = NcclReduceOp::kSum;
  return {.type = NumberTypeOf(op), .numbers = IsComplex(op.dtype) ? 2u : 1u, .op = *reduce};
}

NcclDataType NumberTypeOf(const Operation& op) {
  const std::optional<NcclDataType> type = NumberType(op.dtype);
  RESILIENT_CHECK(type);
  return *type;
}

std::array<std::byte, 8> PremulScalar(const Operation& op) {
  // The low bytes of an integer are what it is in a narrower type.
  if (IsInteger(op.dtype)) return BytesOf(static_cast<std::int64_t>(op.factor));
  const NcclDataType type = NumberTypeOf(op);
  if (type == NcclDataType::kFloat64) return BytesOf(op.factor);
  // As the kernels convert it, so that the calling thread's rounding mode plays no part.
  const float one = 1.0f;
  float factor = 0.0f;
  const auto* unit = reinterpret_cast<const std::byte*>(&one);
  ReduceInRankOrder(DataType::kFloat32, ReduceOp::kPremulSum, op.factor, {&unit, 1}, 1,
                    reinterpret_cast<std::byte*>(&factor));
  if (type == NcclDataType::kFloat32) return BytesOf(factor);
  // A sum of one: what a small float is computed in is float32, and it is rounded once.
  std::array<std::byte, 8> rounded{};
  const auto* partial = reinterpret_cast<const std::byte*>(&factor);
  ReducePartials(op.dtype, ReduceOp::kSum, 1, {&partial, 1}, 1, rounded.data());
  return rounded;
}

}  // namespace resilient
