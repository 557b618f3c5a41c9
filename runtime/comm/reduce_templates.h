#pragma once

#ifndef RESILIENT_VECTOR_LEVEL
#error "include this from the unit of a vector level only"
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "runtime/comm/reduce_kernels.h"
#include "runtime/comm/reduce_types.h"

// `out` may be an input, but element by element only: no iteration depends on another.
#if defined(__clang__)
#define RESILIENT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define RESILIENT_INDEPENDENT _Pragma("GCC ivdep")
#endif

// The kernels. Included once by each of reduce_portable.cc, reduce_avx2.cc and reduce_avx512.cc,
// which name the level and are compiled with its instructions. All of it has internal linkage, and
// no inline function of the library is called: the linker might take the copy made for newer
// processors for the whole program.
//
// The loops are plain: the compiler vectorises them. An element is always accumulated in rank
// order, without contraction, so that every level gives the same bits.
namespace resilient::RESILIENT_VECTOR_LEVEL {
namespace {

// The accumulators of a block stay in the first-level cache, with the inputs passing by.
constexpr std::size_t kBlockBytes = 8192;

// An operator: Take(first or next value), Combine in rank order, Finish.
template <typename Acc>
struct Operator {
  explicit Operator(const ReduceArguments&) {}
  Acc Take(Acc value) const { return value; }
  Acc Finish(Acc value) const { return value; }
};

template <typename Acc>
struct Sum : Operator<Acc> {
  using Operator<Acc>::Operator;
  Acc Combine(Acc a, Acc b) const { return static_cast<Acc>(a + b); }
};

template <typename Acc>
struct Product : Operator<Acc> {
  using Operator<Acc>::Operator;
  Acc Combine(Acc a, Acc b) const {
    if constexpr (std::is_integral_v<Acc>) {
      return static_cast<Acc>(1u * a * b);  // 16 bits would be promoted to int and overflow.
    } else {
      return a * b;
    }
  }
};

template <typename T>
struct Product<ComplexNumber<T>> : Operator<ComplexNumber<T>> {
  using Acc = ComplexNumber<T>;
  using Operator<Acc>::Operator;
  Acc Combine(Acc a, Acc b) const {
    // The same as a difference, to the bit. GCC 12 would fuse that in spite of -ffp-contract=off.
    return {a.real * b.real + a.imaginary * -b.imaginary,
            a.real * b.imaginary + a.imaginary * b.real};
  }
};

template <typename Acc>
struct Min : Operator<Acc> {
  using Operator<Acc>::Operator;
  Acc Combine(Acc a, Acc b) const {
    return ((b < a) | (b != b)) ? b : a;  // b != b: a NaN wins; one in `a` loses no comparison.
  }
};

template <typename Acc>
struct Max : Operator<Acc> {
  using Operator<Acc>::Operator;
  Acc Combine(Acc a, Acc b) const { return ((b > a) | (b != b)) ? b : a; }
};

template <typename Acc>
struct And : Operator<Acc> {
  using Operator<Acc>::Operator;
  Acc Combine(Acc a, Acc b) const { return static_cast<Acc>(a & b); }
};

template <typename Acc>
struct Or : Operator<Acc> {
  using Operator<Acc>::Operator;
  Acc Combine(Acc a, Acc b) const { return static_cast<Acc>(a | b); }
};

template <typename Acc>
struct Xor : Operator<Acc> {
  using Operator<Acc>::Operator;
  Acc Combine(Acc a, Acc b) const { return static_cast<Acc>(a ^ b); }
};

template <typename Acc>
struct PremulSum : Sum<Acc> {
  explicit PremulSum(const ReduceArguments& arguments)
      : Sum<Acc>(arguments), factor(Broadcast<Acc>(arguments.factor)) {}
  Acc Take(Acc value) const { return value * factor; }
  Acc factor;
};

template <typename Acc>
struct Average : Sum<Acc> {
  explicit Average(const ReduceArguments& arguments)
      : Sum<Acc>(arguments), divisor(Broadcast<Acc>(static_cast<double>(arguments.divisor))) {}
  Acc Finish(Acc sum) const { return sum / divisor; }
  Acc divisor;
};

// Of sums that are unsigned and wrap but stand for a signed or unsigned number of up to 32 bits.
// Processors divide integers one by one. With half a unit added the quotient is 0.5 / divisor or
// more away from the next integer, which is far more than float64 errs by here, so that the product
// with the reciprocal is cut to the right integer. REQUIRES: a divisor of two or more.
template <bool kSigned>
struct NarrowAverage : Sum<std::uint32_t> {
  explicit NarrowAverage(const ReduceArguments& arguments)
      : Sum<std::uint32_t>(arguments), reciprocal(1.0 / static_cast<double>(arguments.divisor)) {}
  std::uint32_t Finish(std::uint32_t sum) const {
    if constexpr (kSigned) {
      const double value = static_cast<std::int32_t>(sum);
      const double away = value + (value < 0.0 ? -0.5 : 0.5);
      return static_cast<std::uint32_t>(static_cast<std::int32_t>(away * reciprocal));
    } else {  // By way of signed integers: older processors convert no others.
      constexpr std::uint32_t kOffset = 0x80000000u;
      const double away = static_cast<double>(static_cast<std::int32_t>(sum ^ kOffset)) + 0x1p31;
      return static_cast<std::uint32_t>(static_cast<std::int32_t>((away + 0.5) * reciprocal));
    }
  }
  double reciprocal;
};

template <bool kSigned>
struct WideAverage : Sum<std::uint64_t> {
  explicit WideAverage(const ReduceArguments& arguments)
      : Sum<std::uint64_t>(arguments), divisor(static_cast<std::int64_t>(arguments.divisor)) {}
  std::uint64_t Finish(std::uint64_t sum) const {
    if constexpr (kSigned) {
      return static_cast<std::uint64_t>(static_cast<std::int64_t>(sum) / divisor);
    } else {
      return sum / static_cast<std::uint64_t>(divisor);
    }
  }
  std::int64_t divisor;
};

template <typename Storage>
const Storage* Input(const ReduceArguments& arguments, std::size_t rank, std::size_t begin) {
  return reinterpret_cast<const Storage*>(arguments.inputs[rank]) + begin;
}

// A fixed number of inputs: the accumulator never leaves the registers.
template <typename Type, typename Op, int kInputs>
void Direct(const ReduceArguments& arguments) {
  using Storage = typename Type::Storage;
  using Acc = typename Type::Acc;
  const Op op(arguments);
  const Storage* const in0 = Input<Storage>(arguments, 0, 0);
  const Storage* const in1 = Input<Storage>(arguments, 1, 0);
  const Storage* const in2 = Input<Storage>(arguments, kInputs > 2 ? 2 : 0, 0);
  const Storage* const in3 = Input<Storage>(arguments, kInputs > 3 ? 3 : 0, 0);
  Storage* const out = reinterpret_cast<Storage*>(arguments.out);
  const std::size_t end = arguments.end;
  RESILIENT_INDEPENDENT
  for (std::size_t i = arguments.begin; i < end; ++i) {
    Acc acc = op.Combine(op.Take(Type::Load(in0[i])), op.Take(Type::Load(in1[i])));
    if constexpr (kInputs > 2) acc = op.Combine(acc, op.Take(Type::Load(in2[i])));
    if constexpr (kInputs > 3) acc = op.Combine(acc, op.Take(Type::Load(in3[i])));
    out[i] = Type::Store(op.Finish(acc));
  }
}

// The passes over a block. Each is a function of its own: within one nest of loops the compiler
// gives the second one up.
template <typename Type, typename Op, typename Acc>
[[gnu::noinline]] void First(Op op, const typename Type::Storage* in, std::size_t count, Acc* acc) {
  RESILIENT_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) acc[i] = op.Take(Type::Load(in[i]));
}

template <typename Type, typename Op, typename Acc>
[[gnu::noinline]] void Next(Op op, const typename Type::Storage* in, std::size_t count, Acc* acc) {
  RESILIENT_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) acc[i] = op.Combine(acc[i], op.Take(Type::Load(in[i])));
}

template <typename Type, typename Op, typename Acc>
[[gnu::noinline]] void Last(Op op, const Acc* acc, std::size_t count, typename Type::Storage* out) {
  RESILIENT_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) out[i] = Type::Store(op.Finish(acc[i]));
}

// Any number of inputs. All of a block are read before it is written, since it may be one of them.
template <typename Type, typename Op>
void Blocks(const ReduceArguments& arguments) {
  using Storage = typename Type::Storage;
  using Acc = typename Type::Acc;
  constexpr std::size_t kBlock = kBlockBytes / sizeof(Acc);
  alignas(64) Acc acc[kBlock];
  const Op op(arguments);
  for (std::size_t begin = arguments.begin; begin < arguments.end; begin += kBlock) {
    const std::size_t left = arguments.end - begin;
    const std::size_t count = left < kBlock ? left : kBlock;
    First<Type>(op, Input<Storage>(arguments, 0, begin), count, acc);
    for (std::size_t rank = 1; rank < arguments.input_count; ++rank)
      Next<Type>(op, Input<Storage>(arguments, rank, begin), count, acc);
    Last<Type>(op, acc, count, reinterpret_cast<Storage*>(arguments.out) + begin);
  }
}

template <typename Type, typename Op>
void Run(const ReduceArguments& arguments) {
  if constexpr (Type::kDirect) {
    if (arguments.input_count == 2) return Direct<Type, Op, 2>(arguments);
    if (arguments.input_count == 3) return Direct<Type, Op, 3>(arguments);
    if (arguments.input_count == 4) return Direct<Type, Op, 4>(arguments);
  }
  Blocks<Type, Op>(arguments);
}

// A floating type, with what is left by lanes done one by one.
template <typename Type, template <typename> typename Op>
void RunFloat(const ReduceArguments& arguments) {
  ReduceArguments rest = arguments;
#if defined(__F16C__)
  if constexpr (std::is_same_v<Type, Float16>) {
    ReduceArguments lanes = arguments;
    lanes.end = arguments.end / kLanes;
    Run<Float16Lanes, Op<Lanes>>(lanes);
    rest.begin = lanes.end * kLanes;
  }
#endif
  Run<Type, Op<typename Type::Acc>>(rest);
}

// A kernel of parts for an element that has kParts of them.
template <ReduceKernel kKernel, std::size_t kParts>
void Parts(const ReduceArguments& arguments) {
  ReduceArguments parts = arguments;
  parts.begin *= kParts;
  parts.end *= kParts;
  kKernel(parts);
}

template <typename T>
using Unsigned = Integer<std::make_unsigned_t<T>>;

template <typename T>
void IntegerAverage(const ReduceArguments& arguments) {
  if (arguments.divisor == 1) {
    Run<Unsigned<T>, Sum<std::make_unsigned_t<T>>>(arguments);
  } else if constexpr (sizeof(T) == 8) {
    Run<Unsigned<T>, WideAverage<std::is_signed_v<T>>>(arguments);
  } else {  // Sums of less than 32 bits have room in a signed integer of 32.
    Run<Integer<T, std::uint32_t>, NarrowAverage<sizeof(T) != 4 || std::is_signed_v<T>>>(arguments);
  }
}

// Sums and products wrap, so that signed and unsigned integers share them; to operators on bits all
// is bytes.
template <typename T>
ReduceKernel FindInteger(ReduceOp op) {
  using Wrapping = std::make_unsigned_t<T>;
  switch (op) {
    case ReduceOp::kSum:
      return Run<Integer<Wrapping>, Sum<Wrapping>>;
    case ReduceOp::kAvg:
      return IntegerAverage<T>;
    case ReduceOp::kMin:
      return Run<Integer<T>, Min<T>>;
    case ReduceOp::kMax:
      return Run<Integer<T>, Max<T>>;
    case ReduceOp::kProduct:
      return Run<Integer<Wrapping>, Product<Wrapping>>;
    case ReduceOp::kBitAnd:
      return Parts<Run<Integer<std::uint8_t>, And<std::uint8_t>>, sizeof(T)>;
    case ReduceOp::kBitOr:
      return Parts<Run<Integer<std::uint8_t>, Or<std::uint8_t>>, sizeof(T)>;
    case ReduceOp::kBitXor:
      return Parts<Run<Integer<std::uint8_t>, Xor<std::uint8_t>>, sizeof(T)>;
    case ReduceOp::kNone:
    case ReduceOp::kPremulSum:
      break;
  }
  return nullptr;
}

template <typename Type>
ReduceKernel FindFloat(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return RunFloat<Type, Sum>;
    case ReduceOp::kAvg:
      return RunFloat<Type, Average>;
    case ReduceOp::kMin:
      return RunFloat<Type, Min>;
    case ReduceOp::kMax:
      return RunFloat<Type, Max>;
    case ReduceOp::kProduct:
      return RunFloat<Type, Product>;
    case ReduceOp::kPremulSum:
      return RunFloat<Type, PremulSum>;
    case ReduceOp::kNone:
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      break;
  }
  return nullptr;
}

// The factor and the divisor are real: only a product sees more than two separate numbers.
template <typename T>
ReduceKernel FindComplex(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return Parts<Run<Float<T>, Sum<T>>, 2>;
    case ReduceOp::kAvg:
      return Parts<Run<Float<T>, Average<T>>, 2>;
    case ReduceOp::kProduct:
      return Run<Complex<T>, Product<ComplexNumber<T>>>;
    case ReduceOp::kPremulSum:
      return Parts<Run<Float<T>, PremulSum<T>>, 2>;
    case ReduceOp::kNone:
    case ReduceOp::kMin:
    case ReduceOp::kMax:
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      break;
  }
  return nullptr;
}

ReduceKernel FindBool(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr:
      return Run<Bool, Or<std::uint8_t>>;
    case ReduceOp::kMin:
    case ReduceOp::kProduct:
    case ReduceOp::kBitAnd:
      return Run<Bool, And<std::uint8_t>>;
    case ReduceOp::kBitXor:
      return Run<Bool, Xor<std::uint8_t>>;
    case ReduceOp::kNone:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      break;
  }
  return nullptr;
}

template <typename Type>
void Widen(const ReduceArguments& arguments) {
  using Acc = typename Type::Acc;
  First<Type>(
      Operator<Acc>(arguments), Input<typename Type::Storage>(arguments, 0, arguments.begin),
      arguments.end - arguments.begin, reinterpret_cast<Acc*>(arguments.out) + arguments.begin);
}

template <typename Type>
void Narrow(const ReduceArguments& arguments) {
  using Acc = typename Type::Acc;
  Last<Type>(Operator<Acc>(arguments), Input<Acc>(arguments, 0, arguments.begin),
             arguments.end - arguments.begin,
             reinterpret_cast<typename Type::Storage*>(arguments.out) + arguments.begin);
}

template <typename Type>
Conversion ConversionOf() {
  return {.widen = Widen<Type>, .narrow = Narrow<Type>};
}

}  // namespace

ReduceKernel FindKernel(DataType type, ReduceOp op) {
  switch (type) {
    case DataType::kFloat32:
      return FindFloat<Float<float>>(op);
    case DataType::kFloat64:
      return FindFloat<Float<double>>(op);
    case DataType::kBFloat16:
      return FindFloat<BFloat16>(op);
    case DataType::kFloat16:
      return FindFloat<Float16>(op);
    case DataType::kFloat8E4M3:
      return FindFloat<Float8E4M3>(op);
    case DataType::kFloat8E5M2:
      return FindFloat<Float8E5M2>(op);
    case DataType::kComplex64:
      return FindComplex<float>(op);
    case DataType::kComplex128:
      return FindComplex<double>(op);
    case DataType::kInt8:
      return FindInteger<std::int8_t>(op);
    case DataType::kInt16:
      return FindInteger<std::int16_t>(op);
    case DataType::kInt32:
      return FindInteger<std::int32_t>(op);
    case DataType::kInt64:
      return FindInteger<std::int64_t>(op);
    case DataType::kUInt8:
      return FindInteger<std::uint8_t>(op);
    case DataType::kUInt16:
      return FindInteger<std::uint16_t>(op);
    case DataType::kUInt32:
      return FindInteger<std::uint32_t>(op);
    case DataType::kUInt64:
      return FindInteger<std::uint64_t>(op);
    case DataType::kBool:
      return FindBool(op);
  }
  return nullptr;  // A value off the wire that no enumerator has.
}

Conversion FindConversion(DataType type) {
  switch (type) {
    case DataType::kBFloat16:
      return ConversionOf<BFloat16>();
    case DataType::kFloat16:
      return ConversionOf<Float16>();
    case DataType::kFloat8E4M3:
      return ConversionOf<Float8E4M3>();
    case DataType::kFloat8E5M2:
      return ConversionOf<Float8E5M2>();
    case DataType::kInt8:
      return ConversionOf<Integer<std::int8_t, std::int32_t>>();
    case DataType::kInt16:
      return ConversionOf<Integer<std::int16_t, std::int32_t>>();
    case DataType::kUInt8:
      return ConversionOf<Integer<std::uint8_t, std::int32_t>>();
    case DataType::kUInt16:
      return ConversionOf<Integer<std::uint16_t, std::int32_t>>();
    case DataType::kFloat32:
    case DataType::kFloat64:
    case DataType::kComplex64:
    case DataType::kComplex128:
    case DataType::kInt32:
    case DataType::kInt64:
    case DataType::kUInt32:
    case DataType::kUInt64:
    case DataType::kBool:
      break;
  }
  return {};
}

}  // namespace resilient::RESILIENT_VECTOR_LEVEL
