#include "tests/support/fake_nccl_reduce.h"

#include <cstdint>
#include <cstring>

#include "runtime/base/check.h"
#include "runtime/comm/reduce.h"

namespace resilient::testing {
namespace {

DataType Ours(NcclDataType type) {
  switch (type) {
    case NcclDataType::kInt8:
      return DataType::kInt8;
    case NcclDataType::kUInt8:
      return DataType::kUInt8;
    case NcclDataType::kInt32:
      return DataType::kInt32;
    case NcclDataType::kUInt32:
      return DataType::kUInt32;
    case NcclDataType::kInt64:
      return DataType::kInt64;
    case NcclDataType::kUInt64:
      return DataType::kUInt64;
    case NcclDataType::kFloat16:
      return DataType::kFloat16;
    case NcclDataType::kFloat32:
      return DataType::kFloat32;
    case NcclDataType::kFloat64:
      return DataType::kFloat64;
    case NcclDataType::kBFloat16:
      return DataType::kBFloat16;
    case NcclDataType::kFloat8E4M3:
      return DataType::kFloat8E4M3;
    case NcclDataType::kFloat8E5M2:
      return DataType::kFloat8E5M2;
  }
  RESILIENT_CHECK(!"no such type");
}

ReduceOp Ours(NcclReduceOp op) {
  switch (op) {
    case NcclReduceOp::kSum:
      return ReduceOp::kSum;
    case NcclReduceOp::kProduct:
      return ReduceOp::kProduct;
    case NcclReduceOp::kMax:
      return ReduceOp::kMax;
    case NcclReduceOp::kMin:
      return ReduceOp::kMin;
    case NcclReduceOp::kAvg:
      return ReduceOp::kAvg;
  }
  RESILIENT_CHECK(!"an operator that was made");
}

// The sum is one of the type, as NCCL's.
template <typename T>
std::vector<std::byte> AverageOfBytes(const std::vector<const std::byte*>& inputs,
                                      std::size_t count) {
  std::vector<std::byte> result(count);
  for (std::size_t i = 0; i < count; ++i) {
    T sum = 0;
    for (const std::byte* input : inputs) sum = static_cast<T>(sum + std::to_integer<T>(input[i]));
    result[i] = static_cast<std::byte>(sum / static_cast<int>(inputs.size()));
  }
  return result;
}

template <typename T>
double As(const void* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return static_cast<double>(value);
}

}  // namespace

std::size_t SizeOf(NcclDataType type) { return resilient::SizeOf(Ours(type)); }

std::vector<std::byte> ReduceAsNccl(NcclDataType type, NcclReduceOp op,
                                    std::optional<double> factor,
                                    const std::vector<const std::byte*>& inputs,
                                    std::size_t count) {
  if (op == NcclReduceOp::kAvg && type == NcclDataType::kInt8)
    return AverageOfBytes<std::int8_t>(inputs, count);
  if (op == NcclReduceOp::kAvg && type == NcclDataType::kUInt8)
    return AverageOfBytes<std::uint8_t>(inputs, count);
  std::vector<std::byte> result(count * SizeOf(type));
  ReduceInRankOrder(Ours(type), factor ? ReduceOp::kPremulSum : Ours(op), factor.value_or(1.0),
                    inputs, count, result.data());
  return result;
}

double NumberAt(NcclDataType type, const void* bytes) {
  switch (type) {
    case NcclDataType::kFloat32:
      return As<float>(bytes);
    case NcclDataType::kFloat64:
      return As<double>(bytes);
    case NcclDataType::kInt8:
      return As<std::int8_t>(bytes);
    case NcclDataType::kUInt8:
      return As<std::uint8_t>(bytes);
    case NcclDataType::kInt32:
      return As<std::int32_t>(bytes);
    case NcclDataType::kUInt32:
      return As<std::uint32_t>(bytes);
    case NcclDataType::kInt64:
      return As<std::int64_t>(bytes);
    case NcclDataType::kUInt64:
      return As<std::uint64_t>(bytes);
    case NcclDataType::kFloat16:
    case NcclDataType::kBFloat16:
    case NcclDataType::kFloat8E4M3:
    case NcclDataType::kFloat8E5M2:
      break;
  }
  float number = 0;
  const auto* input = static_cast<const std::byte*>(bytes);
  ReduceToPartial(Ours(type), ReduceOp::kSum, 1.0, {&input, 1}, 1,
                  reinterpret_cast<std::byte*>(&number));
  return number;
}

}  // namespace resilient::testing
