#pragma once

#ifndef RESILIENT_VECTOR_LEVEL
#error "part of reduce_templates.h"
#endif

#include <cstddef>
#include <cstdint>
#if defined(__F16C__)
#include <immintrin.h>
#endif

// How one data type is stored (Storage), in what it is accumulated (Acc), and whether a few inputs
// are combined in registers (kDirect) or only block by block.
//
// Every NaN that is stored is one and the same, since which of two NaNs an addition returns is the
// compiler's choice. The conversions are integer arithmetic with selections in place of branches,
// so that they are vectorised, and they meet no float32 subnormals, which a thread may flush to
// zero.
namespace resilient::RESILIENT_VECTOR_LEVEL {
namespace {

template <typename To, typename From>
inline To BitCast(From from) {
  return __builtin_bit_cast(To, from);
}

template <typename Acc>
inline Acc Broadcast(double value) {
  return static_cast<Acc>(value);
}

#if defined(__F16C__)
constexpr int kLanes = 8;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

template <>
inline Lanes Broadcast<Lanes>(double value) {
  return _mm256_set1_ps(static_cast<float>(value));
}
#endif

template <typename T>
inline T OneNan(T value) {
  return value == value ? value : Broadcast<T>(__builtin_nan(""));
}

template <typename T, typename Wide = T>
struct Integer {
  using Storage = T;
  using Acc = Wide;
  static constexpr bool kDirect = true;
  static Acc Load(T value) { return static_cast<Acc>(value); }
  static T Store(Acc value) { return static_cast<T>(value); }
};

template <typename T>
struct Float {
  using Storage = T;
  using Acc = T;
  static constexpr bool kDirect = true;
  static T Load(T value) { return value; }
  static T Store(T value) { return OneNan(value); }
};

// Of products; the other operators see two real numbers.
template <typename T>
struct ComplexNumber {
  T real;
  T imaginary;
};

template <typename T>
struct Complex {
  using Storage = ComplexNumber<T>;
  using Acc = ComplexNumber<T>;
  static constexpr bool kDirect = true;
  static Acc Load(Storage value) { return value; }
  static Storage Store(Acc value) { return {OneNan(value.real), OneNan(value.imaginary)}; }
};

struct Bool {
  using Storage = std::uint8_t;
  using Acc = std::uint8_t;
  static constexpr bool kDirect = true;
  static Acc Load(Storage value) { return value != 0 ? 1 : 0; }
  static Storage Store(Acc value) { return value; }
};

constexpr std::uint32_t kFloatSign = 0x80000000u;
constexpr std::uint32_t kFloatInfinity = 0x7f800000u;
constexpr int kFloatMantissa = 23;
constexpr int kFloatBias = 127;

struct BFloat16 {
  using Storage = std::uint16_t;
  using Acc = float;
  static constexpr bool kDirect = true;
  static float Load(Storage bits) { return BitCast<float>(static_cast<std::uint32_t>(bits) << 16); }
  static Storage Store(float value) {
    const auto bits = BitCast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<Storage>((bits & ~kFloatSign) > kFloatInfinity ? 0x7fc0u : rounded);
  }
};

// The smaller formats of IEEE 754's kind. One without infinity has a single NaN, all ones, and what
// is too large becomes the largest number, as in torch.
template <typename StorageType, int kExponentBits, int kMantissaBits, bool kHasInfinity,
          std::uint32_t kNan>
struct SmallFloat {
  using Storage = StorageType;
  using Acc = float;
  static constexpr bool kDirect = false;
  static constexpr int kSignAt = kExponentBits + kMantissaBits;
  static constexpr int kShift = kFloatMantissa - kMantissaBits;
  static constexpr std::uint32_t kMagnitude = (1u << kSignAt) - 1;
  static constexpr std::uint32_t kTopExponent = (1u << kExponentBits) - 1;
  static constexpr std::uint32_t kInfinity = kTopExponent << kMantissaBits;
  static constexpr int kBias = static_cast<int>(kTopExponent >> 1);
  // What an exponent gains on the way to float32, in place.
  static constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(kFloatBias - kBias)
                                           << kFloatMantissa;
  static constexpr std::uint32_t kSmallestNormal = kRebias + (1u << kFloatMantissa);
  static constexpr int kSubnormalExponent = 1 - kBias - kMantissaBits;  // Of the unit.
  static constexpr float kSubnormalUnit = __builtin_bit_cast(
      float, static_cast<std::uint32_t>(kFloatBias + kSubnormalExponent) << kFloatMantissa);
  // The number whose last place is the subnormal unit: adding it rounds to whole units.
  static constexpr std::uint32_t kRounder =
      static_cast<std::uint32_t>(kFloatBias + kSubnormalExponent + kFloatMantissa)
      << kFloatMantissa;
  // From here on a float32 has no finite number to be rounded to, whatever its mantissa.
  static constexpr std::uint32_t kTooLarge =
      kRebias + (kTopExponent << kFloatMantissa) + (kHasInfinity ? 0u : 7u << (kFloatMantissa - 3));

  static float Load(Storage stored) {
    const std::uint32_t bits = stored;
    const std::uint32_t magnitude = bits & kMagnitude;
    std::uint32_t result = (magnitude << kShift) + kRebias;
    if constexpr (kHasInfinity) {
      result += magnitude >= kInfinity ? kRebias : 0u;
    } else {
      result = magnitude == kNan ? kFloatInfinity | 1u : result;
    }
    const float units = static_cast<float>(static_cast<std::int32_t>(magnitude));
    result =
        magnitude < (1u << kMantissaBits) ? BitCast<std::uint32_t>(units * kSubnormalUnit) : result;
    return BitCast<float>(result | ((bits >> kSignAt) << 31));
  }

  static Storage Store(float value) {
    const auto bits = BitCast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & ~kFloatSign;
    const std::uint32_t odd = (magnitude >> kShift) & 1u;
    std::uint32_t result = (magnitude - kRebias + (1u << (kShift - 1)) - 1 + odd) >> kShift;
    const float shifted = BitCast<float>(magnitude) + BitCast<float>(kRounder);
    result = magnitude < kSmallestNormal ? BitCast<std::uint32_t>(shifted) - kRounder : result;
    if constexpr (kHasInfinity) {
      result = magnitude >= kTooLarge ? kInfinity : result;
    } else {
      result = magnitude >= kTooLarge || result >= kNan ? kNan - 1 : result;
    }
    result |= (bits & kFloatSign) >> (31 - kSignAt);
    return static_cast<Storage>(magnitude > kFloatInfinity ? kNan : result);
  }
};

using Float16 = SmallFloat<std::uint16_t, 5, 10, true, 0x7e00>;
using Float8E4M3 = SmallFloat<std::uint8_t, 4, 3, false, 0x7f>;
using Float8E5M2 = SmallFloat<std::uint8_t, 5, 2, true, 0x7f>;

#if defined(__F16C__)
// As many float16 as one instruction converts: an "element" of the same kernels.
struct Float16Lanes {
  struct Storage {
    std::uint16_t bits[kLanes];
  };
  using Acc = Lanes;
  static constexpr bool kDirect = true;
  static Lanes Load(Storage stored) { return _mm256_cvtph_ps(BitCast<__m128i>(stored)); }
  static Storage Store(Lanes value) {
    return BitCast<Storage>(_mm256_cvtps_ph(OneNan(value), _MM_FROUND_TO_NEAREST_INT));
  }
};
#endif

}  // namespace
}  // namespace resilient::RESILIENT_VECTOR_LEVEL
