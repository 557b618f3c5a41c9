#include "runtime/comm/reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "runtime/base/check.h"

namespace resilient {
namespace {

// Elements combined at a time: the accumulator stays in the first-level cache.
constexpr std::size_t kBlockElements = 1024;

// How one data type is stored (Storage) and in what it is accumulated (Acc).
template <typename T, typename Wide = T>
struct Plain {
  using Storage = T;
  using Acc = Wide;
  static Acc Load(T value) { return static_cast<Acc>(value); }
  static T Store(Acc value) { return static_cast<T>(value); }
};

struct BFloat16 {
  using Storage = std::uint16_t;
  using Acc = float;
  static float Load(std::uint16_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  static std::uint16_t Store(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    // A NaN must stay one when its low bits are cut off.
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct Bool {
  using Storage = std::uint8_t;
  using Acc = std::uint8_t;
  static std::uint8_t Load(std::uint8_t value) { return value != 0 ? 1 : 0; }
  static std::uint8_t Store(std::uint8_t value) { return value; }
};

struct Sum {
  template <typename Acc>
  static Acc Combine(Acc a, Acc b) {
    if constexpr (std::is_signed_v<Acc> && std::is_integral_v<Acc>) {
      using Unsigned = std::make_unsigned_t<Acc>;  // Overflow wraps instead of being undefined.
      return static_cast<Acc>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    } else {
      return static_cast<Acc>(a + b);
    }
  }
};

struct Min {
  template <typename Acc>
  static Acc Combine(Acc a, Acc b) {
    return (b < a || b != b) ? b : a;  // b != b: a NaN wins; a NaN in `a` loses no comparison.
  }
};

struct Max {
  template <typename Acc>
  static Acc Combine(Acc a, Acc b) {
    return (b > a || b != b) ? b : a;
  }
};

struct Or {
  template <typename Acc>
  static Acc Combine(Acc a, Acc b) {
    return a | b;
  }
};

struct And {
  template <typename Acc>
  static Acc Combine(Acc a, Acc b) {
    return a & b;
  }
};

template <typename Type, typename Op, bool kDivide>
void Run(std::span<const std::byte* const> inputs, std::size_t count, std::byte* out) {
  using Storage = typename Type::Storage;
  using Acc = typename Type::Acc;
  Acc acc[kBlockElements];
  const auto divisor = static_cast<Acc>(inputs.size());
  for (std::size_t begin = 0; begin < count; begin += kBlockElements) {
    const std::size_t n = std::min(kBlockElements, count - begin);
    const Storage* first = reinterpret_cast<const Storage*>(inputs[0]) + begin;
    for (std::size_t i = 0; i < n; ++i) acc[i] = Type::Load(first[i]);
    for (const std::byte* input : inputs.subspan(1)) {
      const Storage* in = reinterpret_cast<const Storage*>(input) + begin;
      for (std::size_t i = 0; i < n; ++i)
        acc[i] = Op::template Combine<Acc>(acc[i], Type::Load(in[i]));
    }
    if constexpr (kDivide) {
      for (std::size_t i = 0; i < n; ++i) acc[i] = static_cast<Acc>(acc[i] / divisor);
    }
    Storage* to = reinterpret_cast<Storage*>(out) + begin;
    for (std::size_t i = 0; i < n; ++i) to[i] = Type::Store(acc[i]);
  }
}

template <typename Type>
void RunNumber(ReduceOp op, std::span<const std::byte* const> inputs, std::size_t count,
               std::byte* out) {
  switch (op) {
    case ReduceOp::kSum:
      return Run<Type, Sum, false>(inputs, count, out);
    case ReduceOp::kAvg:
      return Run<Type, Sum, true>(inputs, count, out);
    case ReduceOp::kMin:
      return Run<Type, Min, false>(inputs, count, out);
    case ReduceOp::kMax:
      return Run<Type, Max, false>(inputs, count, out);
    case ReduceOp::kNone:
    case ReduceOp::kProduct:
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
    case ReduceOp::kPremulSum:
      break;
  }
  RESILIENT_CHECK(!"a reduction needs an operator");
}

void RunBool(ReduceOp op, std::span<const std::byte* const> inputs, std::size_t count,
             std::byte* out) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
      return Run<Bool, Or, false>(inputs, count, out);
    case ReduceOp::kMin:
      return Run<Bool, And, false>(inputs, count, out);
    case ReduceOp::kAvg:
    case ReduceOp::kNone:
    case ReduceOp::kProduct:
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
    case ReduceOp::kPremulSum:
      break;
  }
  RESILIENT_CHECK(!"bool has no such reduction");
}

}  // namespace

bool CanReduce(DataType type, ReduceOp op) {
  if (op == ReduceOp::kNone || op > ReduceOp::kMax || type > DataType::kInt32) return false;
  return type != DataType::kBool || op != ReduceOp::kAvg;
}

void ReduceInRankOrder(DataType type, ReduceOp op, double /*factor*/,
                       std::span<const std::byte* const> inputs, std::size_t count,
                       std::byte* out) {
  switch (type) {
    case DataType::kFloat32:
      return RunNumber<Plain<float>>(op, inputs, count, out);
    case DataType::kFloat64:
      return RunNumber<Plain<double>>(op, inputs, count, out);
    case DataType::kBFloat16:
      return RunNumber<BFloat16>(op, inputs, count, out);
    case DataType::kInt64:
      return RunNumber<Plain<std::int64_t>>(op, inputs, count, out);
    case DataType::kUInt8:
      return RunNumber<Plain<std::uint8_t, std::uint32_t>>(op, inputs, count, out);
    case DataType::kBool:
      return RunBool(op, inputs, count, out);
    case DataType::kInt32:
      return RunNumber<Plain<std::int32_t>>(op, inputs, count, out);
    case DataType::kFloat16:
    case DataType::kInt8:
    case DataType::kInt16:
    case DataType::kUInt16:
    case DataType::kUInt32:
    case DataType::kUInt64:
    case DataType::kComplex64:
    case DataType::kComplex128:
    case DataType::kFloat8E4M3:
    case DataType::kFloat8E5M2:
      break;
  }
  RESILIENT_CHECK(!"no kernel");
}

}  // namespace resilient
