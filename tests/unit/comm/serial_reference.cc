#include "tests/unit/comm/serial_reference.h"

#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "runtime/base/check.h"
#include "runtime/base/log.h"

namespace resilient::testing {
namespace {

template <typename T>
T Get(const Bytes& bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void Put(Bytes& bytes, std::size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
}

// A float of less than 32 bits: one sign bit, then exponent and mantissa. Every value is computed
// from the definition; encoding searches among all of them.
class SmallFloat {
 public:
  // `overflow`: the bits of what lies beyond the largest value: infinity, or NaN.
  SmallFloat(int bits, int mantissa_bits, int bias, unsigned overflow)
      : sign_(1u << (bits - 1)), overflow_(overflow) {
    for (unsigned raw = 0; raw < sign_; ++raw) {
      const unsigned mantissa = raw & ((1u << mantissa_bits) - 1);
      const int exponent = static_cast<int>(raw >> mantissa_bits);
      values_.push_back(exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                      : std::ldexp(mantissa + (1u << mantissa_bits),
                                                   exponent - bias - mantissa_bits));
    }
  }

  double Decode(unsigned raw) const {
    const double magnitude = values_[raw & ~sign_];
    return (raw & sign_) != 0 ? -magnitude : magnitude;
  }

  unsigned Encode(double value) const {
    const double magnitude = std::abs(value);
    // Magnitudes grow with their bits. That of `overflow_` is what the next finite one would be.
    unsigned below = 0;
    unsigned above = overflow_;
    while (above - below > 1) {
      const unsigned middle = (above + below) / 2;
      (values_[middle] <= magnitude ? below : above) = middle;
    }
    const double down = magnitude - values_[below];
    const double up = values_[above] - magnitude;
    const bool tie_to_above = down == up && (above & 1) == 0;
    const unsigned nearest = up < down || tie_to_above ? above : below;
    return nearest | (std::signbit(value) ? sign_ : 0u);
  }

 private:
  const unsigned sign_;
  const unsigned overflow_;
  std::vector<double> values_;  // Those without sign, by their bits.
};

const SmallFloat& BFloat16Format() {
  static const SmallFloat format(16, 7, 127, 0x7f80);
  return format;
}
const SmallFloat& Float16Format() {
  static const SmallFloat format(16, 10, 15, 0x7c00);
  return format;
}
const SmallFloat& E4M3Format() {
  static const SmallFloat format(8, 3, 7, 0x7f);
  return format;
}
const SmallFloat& E5M2Format() {
  static const SmallFloat format(8, 2, 15, 0x7c);
  return format;
}

struct Reduction {
  ReduceOp reduce;
  double factor;
  const std::vector<Bytes>& inputs;
  const std::vector<std::vector<std::size_t>> hosts;  // Ranks; all in one for rank order.
};

template <typename T>
constexpr bool kIsComplex = false;
template <typename T>
constexpr bool kIsComplex<std::complex<T>> = true;

// Integers are combined in 64 bits without sign, which wrap, and cut at the end.
template <typename T>
T CombineIntegers(ReduceOp reduce, T a, T b) {
  const auto x = static_cast<std::uint64_t>(a);
  const auto y = static_cast<std::uint64_t>(b);
  switch (reduce) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return static_cast<T>(x + y);
    case ReduceOp::kProduct:
      return static_cast<T>(x * y);
    case ReduceOp::kBitAnd:
      return static_cast<T>(x & y);
    case ReduceOp::kBitOr:
      return static_cast<T>(x | y);
    case ReduceOp::kBitXor:
      return static_cast<T>(x ^ y);
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return b > a ? b : a;
    case ReduceOp::kNone:
      break;
  }
  RESILIENT_CHECK(!"no such reduction");
}

template <typename T>
T CombineFloats(ReduceOp reduce, T a, T b) {
  switch (reduce) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return a + b;
    case ReduceOp::kProduct:
      if constexpr (kIsComplex<T>) {
        return {a.real() * b.real() - a.imag() * b.imag(),
                a.real() * b.imag() + a.imag() * b.real()};
      } else {
        return a * b;
      }
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      if constexpr (!kIsComplex<T>) {
        if (std::isnan(a)) return a;
        if (std::isnan(b)) return b;
        if (reduce == ReduceOp::kMin) return b < a ? b : a;
        return b > a ? b : a;
      }
      break;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
    case ReduceOp::kNone:
      break;
  }
  RESILIENT_CHECK(!"no such reduction");
}

bool CombineBools(ReduceOp reduce, bool a, bool b) {
  switch (reduce) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr:
      return a || b;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd:
      return a && b;
    case ReduceOp::kBitXor:
      return a != b;
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
    case ReduceOp::kNone:
      break;
  }
  RESILIENT_CHECK(!"no such reduction");
}

// Elements stored as Stored, combined as Acc.
template <typename Stored, typename Acc, typename Load, typename Combine, typename Store>
Bytes ReduceEach(const Reduction& reduction, Load load, Combine combine, Store store) {
  const auto& [reduce, factor, inputs, hosts] = reduction;
  Bytes result(inputs[0].size());
  for (std::size_t i = 0; i < result.size() / sizeof(Stored); ++i) {
    Acc acc{};
    for (std::size_t host = 0; host < hosts.size(); ++host) {
      Acc partial{};
      for (std::size_t at = 0; at < hosts[host].size(); ++at) {
        Acc next = load(Get<Stored>(inputs[hosts[host][at]], i));
        if constexpr (!std::is_same_v<Acc, bool>) {
          if (reduce == ReduceOp::kPremulSum) {
            if constexpr (kIsComplex<Acc>) {
              next *= static_cast<typename Acc::value_type>(factor);
            } else {
              next = static_cast<Acc>(next * static_cast<Acc>(factor));
            }
          }
        }
        partial = at == 0 ? next : combine(reduce, partial, next);
      }
      acc = host == 0 ? partial : combine(reduce, acc, partial);
    }
    if constexpr (!std::is_same_v<Acc, bool>) {
      if constexpr (kIsComplex<Acc>) {
        if (reduce == ReduceOp::kAvg) acc /= static_cast<typename Acc::value_type>(inputs.size());
      } else if (reduce == ReduceOp::kAvg) {
        acc = static_cast<Acc>(acc / static_cast<Acc>(inputs.size()));
      }
    }
    Put<Stored>(result, i, store(acc));
  }
  return result;
}

template <typename T>
Bytes ReduceIntegers(const Reduction& reduction) {
  // Sums of the 8-bit types do not overflow before they are divided.
  using Acc = std::conditional_t<sizeof(T) == 1, std::int64_t, T>;
  return ReduceEach<T, Acc>(
      reduction, [](T value) { return static_cast<Acc>(value); }, CombineIntegers<Acc>,
      [](Acc value) { return static_cast<T>(value); });
}

template <typename T>
Bytes ReduceFloats(const Reduction& reduction) {
  const auto same = [](T value) { return value; };
  return ReduceEach<T, T>(reduction, same, CombineFloats<T>, same);
}

template <typename Stored>
Bytes ReduceSmallFloats(const Reduction& reduction, const SmallFloat& format) {
  return ReduceEach<Stored, float>(
      reduction, [&](Stored raw) { return static_cast<float>(format.Decode(raw)); },
      CombineFloats<float>, [&](float value) { return static_cast<Stored>(format.Encode(value)); });
}

// Of a product: near one, so that it stays in range. Of a sum: far apart, so that order matters.
double RandomReal(ReduceOp reduce, bool narrow, Random& random) {
  const double sign = random.Below(2) == 0 ? -1.0 : 1.0;
  const double near_one = sign * (0.5 + 1.5 * random.Unit());
  if (reduce == ReduceOp::kProduct) return near_one;
  const bool large = random.Below(2) == 0;
  if (narrow) return near_one * (large ? 8.0 : 1.0);
  return near_one * (large ? 1e3 : 1e-2);
}

template <typename T>
void FillIntegers(Bytes& bytes, ReduceOp reduce, Random& random) {
  for (std::size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
    const T any = static_cast<T>(random.Next());
    Put<T>(bytes, i, reduce == ReduceOp::kAvg ? static_cast<T>(any / 16) : any);
  }
}

template <typename T, typename Store>
void FillReals(Bytes& bytes, ReduceOp reduce, bool narrow, Random& random, Store store) {
  for (std::size_t i = 0; i < bytes.size() / sizeof(T); ++i)
    Put<T>(bytes, i, static_cast<T>(store(RandomReal(reduce, narrow, random))));
}

}  // namespace

std::string Describe(const Call& call) {
  std::string counts;
  for (const auto& row : call.counts) {
    counts += "[";
    for (const std::size_t count : row) counts += StrCat(" ", count);
    counts += " ]";
  }
  return StrCat(OpKindName(call.kind), " ", DataTypeName(call.dtype), " ",
                ReduceOpName(call.reduce), " factor ", call.factor, " root ", call.root,
                call.in_place ? " in place" : "", call.one_block ? " one block" : "", " counts ",
                counts);
}

Bytes RandomElements(DataType type, ReduceOp reduce, std::size_t count, Random& random) {
  Bytes bytes(count * SizeOf(type));
  const auto same = [](double value) { return value; };
  const auto small = [](const SmallFloat& format) {
    return [&format](double value) { return format.Encode(value); };
  };
  switch (type) {
    case DataType::kFloat32:
    case DataType::kComplex64:
      FillReals<float>(bytes, reduce, false, random, same);
      break;
    case DataType::kFloat64:
    case DataType::kComplex128:
      FillReals<double>(bytes, reduce, false, random, same);
      break;
    case DataType::kBFloat16:
      FillReals<std::uint16_t>(bytes, reduce, false, random, small(BFloat16Format()));
      break;
    case DataType::kFloat16:
      FillReals<std::uint16_t>(bytes, reduce, false, random, small(Float16Format()));
      break;
    case DataType::kFloat8E4M3:
      FillReals<std::uint8_t>(bytes, reduce, true, random, small(E4M3Format()));
      break;
    case DataType::kFloat8E5M2:
      FillReals<std::uint8_t>(bytes, reduce, true, random, small(E5M2Format()));
      break;
    case DataType::kInt64:
      FillIntegers<std::int64_t>(bytes, reduce, random);
      break;
    case DataType::kInt32:
      FillIntegers<std::int32_t>(bytes, reduce, random);
      break;
    case DataType::kInt16:
      FillIntegers<std::int16_t>(bytes, reduce, random);
      break;
    case DataType::kInt8:
      FillIntegers<std::int8_t>(bytes, reduce, random);
      break;
    case DataType::kUInt64:
      FillIntegers<std::uint64_t>(bytes, reduce, random);
      break;
    case DataType::kUInt32:
      FillIntegers<std::uint32_t>(bytes, reduce, random);
      break;
    case DataType::kUInt16:
      FillIntegers<std::uint16_t>(bytes, reduce, random);
      break;
    case DataType::kUInt8:
      FillIntegers<std::uint8_t>(bytes, reduce, random);
      break;
    case DataType::kBool:
      for (std::byte& one : bytes) one = static_cast<std::byte>(random.Below(2));
      break;
  }
  return bytes;
}

Bytes ReduceSerially(DataType type, ReduceOp reduce, double factor,
                     const std::vector<Bytes>& inputs,
                     const std::vector<std::vector<std::size_t>>& hosts) {
  std::vector<std::size_t> all(inputs.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  const Reduction reduction{
      .reduce = reduce,
      .factor = factor,
      .inputs = inputs,
      .hosts = hosts.empty() ? std::vector<std::vector<std::size_t>>{all} : hosts};
  const auto to_bool = [](std::uint8_t value) { return value != 0; };
  const auto from_bool = [](bool value) { return static_cast<std::uint8_t>(value ? 1 : 0); };
  switch (type) {
    case DataType::kFloat32:
      return ReduceFloats<float>(reduction);
    case DataType::kFloat64:
      return ReduceFloats<double>(reduction);
    case DataType::kComplex64:
      return ReduceFloats<std::complex<float>>(reduction);
    case DataType::kComplex128:
      return ReduceFloats<std::complex<double>>(reduction);
    case DataType::kBFloat16:
      return ReduceSmallFloats<std::uint16_t>(reduction, BFloat16Format());
    case DataType::kFloat16:
      return ReduceSmallFloats<std::uint16_t>(reduction, Float16Format());
    case DataType::kFloat8E4M3:
      return ReduceSmallFloats<std::uint8_t>(reduction, E4M3Format());
    case DataType::kFloat8E5M2:
      return ReduceSmallFloats<std::uint8_t>(reduction, E5M2Format());
    case DataType::kInt64:
      return ReduceIntegers<std::int64_t>(reduction);
    case DataType::kInt32:
      return ReduceIntegers<std::int32_t>(reduction);
    case DataType::kInt16:
      return ReduceIntegers<std::int16_t>(reduction);
    case DataType::kInt8:
      return ReduceIntegers<std::int8_t>(reduction);
    case DataType::kUInt64:
      return ReduceIntegers<std::uint64_t>(reduction);
    case DataType::kUInt32:
      return ReduceIntegers<std::uint32_t>(reduction);
    case DataType::kUInt16:
      return ReduceIntegers<std::uint16_t>(reduction);
    case DataType::kUInt8:
      return ReduceIntegers<std::uint8_t>(reduction);
    case DataType::kBool:
      return ReduceEach<std::uint8_t, bool>(reduction, to_bool, CombineBools, from_bool);
  }
  RESILIENT_CHECK(!"no such type");
}

std::vector<std::vector<Bytes>> ExpectedOutputs(const Call& call,
                                                const std::vector<std::vector<Bytes>>& sent) {
  const std::size_t n = sent.size();
  const auto root = static_cast<std::size_t>(call.root);
  const auto all_to = [&](std::size_t to) {
    std::vector<Bytes> parts;
    for (const std::vector<Bytes>& of_rank : sent) parts.push_back(of_rank[to]);
    return parts;
  };
  const auto reduced = [&](std::size_t to) -> std::vector<Bytes> {
    return {ReduceSerially(call.dtype, call.reduce, call.factor, all_to(to), call.hosts)};
  };
  std::vector<std::vector<Bytes>> expected(n);
  switch (call.kind) {
    case OpKind::kAllReduce:
      expected.assign(n, reduced(0));
      break;
    case OpKind::kReduce:
      expected[root] = reduced(root);
      break;
    case OpKind::kReduceScatter:
      for (std::size_t rank = 0; rank < n; ++rank) expected[rank] = reduced(rank);
      break;
    case OpKind::kBroadcast:
    case OpKind::kScatter:
      for (std::size_t rank = 0; rank < n; ++rank) expected[rank] = {sent[root][rank]};
      break;
    case OpKind::kAllGather:
    case OpKind::kAllToAll:
      for (std::size_t rank = 0; rank < n; ++rank) expected[rank] = all_to(rank);
      break;
    case OpKind::kGather:
      expected[root] = all_to(root);
      break;
    case OpKind::kBarrier:
    case OpKind::kSend:
    case OpKind::kRecv:
      break;
  }
  return expected;
}

}  // namespace resilient::testing
