// Goal: a reduction gives the same bits at every vector level, and the right ones. Method: an
// element-by-element reference that shares nothing with the kernels (16-bit and 8-bit floats are
// rounded by search in the table of all their values), on all values where there are few and on
// random ones elsewhere; then tables of what the corners mean.

#include <algorithm>
#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <complex>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <gtest/gtest.h>

#include "runtime/comm/reduce.h"

namespace resilient {
namespace {

using Bytes = std::vector<std::byte>;

constexpr int kTypes = 17;
constexpr int kOperators = 9;

std::vector<VectorLevel> Levels() {
  std::vector<VectorLevel> levels;
  for (const VectorLevel level : {VectorLevel::kPortable, VectorLevel::kAvx2, VectorLevel::kAvx512})
    if (level <= BestVectorLevel()) levels.push_back(level);
  return levels;
}

struct Case {
  DataType type;
  ReduceOp op;
  double factor = 1.0;
  std::size_t count = 0;
  std::vector<Bytes> inputs;
};

std::string Name(const Case& c) {
  return std::string(DataTypeName(c.type)) + " " + std::string(ReduceOpName(c.op)) + ", " +
         std::to_string(c.inputs.size()) + " inputs of " + std::to_string(c.count);
}

// --- The reference ---

// A float of up to 16 bits, known by the list of its values: codes of one sign are in their order.
class Format {
 public:
  Format(int exponent_bits, int mantissa_bits, bool has_infinity, std::uint32_t nan)
      : sign_(1u << (exponent_bits + mantissa_bits)), has_infinity_(has_infinity), nan_(nan) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const std::uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
    const std::uint32_t end = has_infinity ? infinity : sign_ - 1;
    for (std::uint32_t code = 0; code < end; ++code) {
      const int exponent = static_cast<int>(code >> mantissa_bits);
      const int mantissa = static_cast<int>(code & ((1u << mantissa_bits) - 1));
      const int digits = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
      values_.push_back(std::ldexp(digits, std::max(exponent, 1) - bias - mantissa_bits));
    }
  }

  float Decode(std::uint32_t code) const {
    const std::uint32_t magnitude = code & (sign_ - 1);
    double value = std::nan("");
    if (magnitude < values_.size()) value = values_[magnitude];
    if (has_infinity_ && magnitude == values_.size()) value = HUGE_VAL;
    return static_cast<float>((code & sign_) != 0 ? -value : value);
  }

  std::uint32_t Encode(float value) const {
    if (std::isnan(value)) return nan_;
    const double magnitude = std::abs(static_cast<double>(value));
    return Nearest(magnitude) | (std::signbit(value) ? sign_ : 0u);
  }

 private:
  std::uint32_t Nearest(double magnitude) const {
    const auto above = std::lower_bound(values_.begin(), values_.end(), magnitude);
    const auto code = static_cast<std::uint32_t>(above - values_.begin());
    if (above == values_.end()) {
      const double top = values_.back(), step = top - values_[values_.size() - 2];
      return !has_infinity_ || magnitude < top + step / 2 ? code - 1 : code;
    }
    if (*above == magnitude) return code;
    const double up = *above - magnitude, down = magnitude - values_[code - 1];
    if (up == down) return code % 2 == 0 ? code : code - 1;
    return up < down ? code : code - 1;
  }

  const std::uint32_t sign_;
  const bool has_infinity_;
  const std::uint32_t nan_;
  std::vector<double> values_;
};

const Format& FormatOf(DataType type) {
  static const Format kBFloat16(8, 7, true, 0x7fc0), kFloat16(5, 10, true, 0x7e00);
  static const Format kE4M3(4, 3, false, 0x7f), kE5M2(5, 2, true, 0x7f);
  if (type == DataType::kBFloat16) return kBFloat16;
  if (type == DataType::kFloat16) return kFloat16;
  return type == DataType::kFloat8E4M3 ? kE4M3 : kE5M2;
}

template <typename T>
T FoldFloats(const Case& c, std::vector<T> values) {
  if (c.op == ReduceOp::kPremulSum)
    for (T& value : values) value *= static_cast<T>(c.factor);
  T acc = values[0];
  for (std::size_t rank = 1; rank < values.size(); ++rank) {
    const T value = values[rank];
    if (c.op == ReduceOp::kMin || c.op == ReduceOp::kMax) {
      const bool better = c.op == ReduceOp::kMin ? value < acc : value > acc;
      if (std::isnan(value) || better) acc = value;
    } else if (c.op == ReduceOp::kProduct) {
      acc *= value;
    } else {
      acc += value;
    }
  }
  if (c.op == ReduceOp::kAvg) acc /= static_cast<T>(values.size());
  return std::isnan(acc) ? std::numeric_limits<T>::quiet_NaN() : acc;
}

template <typename T>
std::complex<T> FoldComplex(const Case& c, const std::vector<std::complex<T>>& values) {
  std::vector<T> real, imaginary;
  for (const std::complex<T>& value : values) {
    if (c.op != ReduceOp::kProduct || real.empty()) {
      real.push_back(value.real());
      imaginary.push_back(value.imag());
    } else {  // Without the library's rules for infinities, which torch has not either.
      const T x = real[0], y = imaginary[0];
      real[0] = x * value.real() - y * value.imag();
      imaginary[0] = x * value.imag() + y * value.real();
    }
  }
  return {FoldFloats(c, real), FoldFloats(c, imaginary)};
}

template <typename T>
T FoldIntegers(const Case& c, const std::vector<T>& values) {
  using Wide = unsigned __int128;  // Its lower bits are right whatever overflows.
  Wide acc = static_cast<Wide>(values[0]);
  for (std::size_t rank = 1; rank < values.size(); ++rank) {
    const T value = values[rank];
    const Wide wide = static_cast<Wide>(value);
    if (c.op == ReduceOp::kSum || c.op == ReduceOp::kAvg) acc += wide;
    if (c.op == ReduceOp::kProduct) acc *= wide;
    if (c.op == ReduceOp::kMin && value < static_cast<T>(acc)) acc = wide;
    if (c.op == ReduceOp::kMax && value > static_cast<T>(acc)) acc = wide;
    if (c.op == ReduceOp::kBitAnd) acc &= wide;
    if (c.op == ReduceOp::kBitOr) acc |= wide;
    if (c.op == ReduceOp::kBitXor) acc ^= wide;
  }
  if (c.op != ReduceOp::kAvg) return static_cast<T>(acc);
  const __int128 sum =
      sizeof(T) < 4 ? static_cast<__int128>(acc) : static_cast<__int128>(static_cast<T>(acc));
  return static_cast<T>(sum / static_cast<__int128>(values.size()));
}

std::uint8_t FoldBools(const Case& c, const std::vector<std::uint8_t>& values) {
  bool acc = values[0] != 0;
  for (std::size_t rank = 1; rank < values.size(); ++rank) {
    const bool value = values[rank] != 0;
    if (c.op == ReduceOp::kSum || c.op == ReduceOp::kMax || c.op == ReduceOp::kBitOr)
      acc = acc || value;
    else if (c.op == ReduceOp::kBitXor)
      acc = acc != value;
    else
      acc = acc && value;
  }
  return acc ? 1 : 0;
}

template <typename T, typename Fold>
Bytes Each(const Case& c, const Fold& fold) {
  Bytes result(c.count * sizeof(T));
  std::vector<T> values(c.inputs.size());
  for (std::size_t i = 0; i < c.count; ++i) {
    for (std::size_t rank = 0; rank < values.size(); ++rank)
      std::memcpy(&values[rank], &c.inputs[rank][i * sizeof(T)], sizeof(T));
    const T folded = fold(c, values);
    std::memcpy(&result[i * sizeof(T)], &folded, sizeof(T));
  }
  return result;
}

template <typename T>
Bytes EachSmallFloat(const Case& c) {
  const Format& format = FormatOf(c.type);
  return Each<T>(c, [&format](const Case& one, const std::vector<T>& codes) {
    std::vector<float> values;
    for (const T code : codes) values.push_back(format.Decode(code));
    return static_cast<T>(format.Encode(FoldFloats(one, values)));
  });
}

Bytes Reference(const Case& c) {
  switch (c.type) {
    case DataType::kFloat32:
      return Each<float>(c, FoldFloats<float>);
    case DataType::kFloat64:
      return Each<double>(c, FoldFloats<double>);
    case DataType::kBFloat16:
    case DataType::kFloat16:
      return EachSmallFloat<std::uint16_t>(c);
    case DataType::kFloat8E4M3:
    case DataType::kFloat8E5M2:
      return EachSmallFloat<std::uint8_t>(c);
    case DataType::kComplex64:
      return Each<std::complex<float>>(c, FoldComplex<float>);
    case DataType::kComplex128:
      return Each<std::complex<double>>(c, FoldComplex<double>);
    case DataType::kInt8:
      return Each<std::int8_t>(c, FoldIntegers<std::int8_t>);
    case DataType::kInt16:
      return Each<std::int16_t>(c, FoldIntegers<std::int16_t>);
    case DataType::kInt32:
      return Each<std::int32_t>(c, FoldIntegers<std::int32_t>);
    case DataType::kInt64:
      return Each<std::int64_t>(c, FoldIntegers<std::int64_t>);
    case DataType::kUInt8:
      return Each<std::uint8_t>(c, FoldIntegers<std::uint8_t>);
    case DataType::kUInt16:
      return Each<std::uint16_t>(c, FoldIntegers<std::uint16_t>);
    case DataType::kUInt32:
      return Each<std::uint32_t>(c, FoldIntegers<std::uint32_t>);
    case DataType::kUInt64:
      return Each<std::uint64_t>(c, FoldIntegers<std::uint64_t>);
    case DataType::kBool:
      return Each<std::uint8_t>(c, FoldBools);
  }
  return {};
}

// --- The comparison ---

std::string Hex(const Bytes& bytes, std::size_t at, std::size_t size) {
  std::string text;
  for (std::size_t i = at; i < at + size; ++i) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    text += kDigits[static_cast<std::size_t>(bytes[i]) >> 4];
    text += kDigits[static_cast<std::size_t>(bytes[i]) & 15u];
  }
  return text;
}

void ExpectSame(const Case& c, VectorLevel level, const Bytes& expected, const Bytes& seen) {
  ASSERT_EQ(expected.size(), seen.size());
  const auto [a, b] = std::mismatch(expected.begin(), expected.end(), seen.begin());
  if (a == expected.end()) return;
  const std::size_t size = SizeOf(c.type);
  const std::size_t at = static_cast<std::size_t>(a - expected.begin()) / size * size;
  std::string inputs;
  for (const Bytes& input : c.inputs) inputs += " " + Hex(input, at, size);
  ADD_FAILURE() << Name(c) << ", level " << static_cast<int>(level) << ", element " << at / size
                << ":" << inputs << " give " << Hex(seen, at, size) << " instead of "
                << Hex(expected, at, size);
}

constexpr std::byte kGuard{0xa5};

// Runs at `level` on copies that begin anywhere; `place`: the input that is the output too, if any.
void RunAndCompare(const Case& c, VectorLevel level, int place, const Bytes& expected) {
  const std::size_t size = SizeOf(c.type), bytes = c.count * size;
  std::vector<Bytes> memory;
  std::vector<const std::byte*> inputs;
  for (std::size_t rank = 0; rank <= c.inputs.size(); ++rank)
    memory.emplace_back(bytes + 80 * size, kGuard);
  const auto start = [size](std::size_t rank) { return (rank * 7 + 3) % 64 * size; };
  for (std::size_t rank = 0; rank < c.inputs.size(); ++rank) {
    std::copy_n(c.inputs[rank].begin(), bytes, memory[rank].begin() + start(rank));
    inputs.push_back(memory[rank].data() + start(rank));
  }
  const std::size_t target = place < 0 ? c.inputs.size() : static_cast<std::size_t>(place);
  std::vector<Bytes> after = memory;
  std::copy_n(expected.begin(), bytes, after[target].begin() + start(target));
  ReduceInRankOrder(level, c.type, c.op, c.factor, inputs, c.count,
                    memory[target].data() + start(target));
  const auto begin = memory[target].begin() + start(target);
  ExpectSame(c, level, expected, Bytes(begin, begin + static_cast<std::ptrdiff_t>(bytes)));
  EXPECT_EQ(memory, after) << Name(c) << ": memory beside the output was written";
}

void CheckAllLevels(const Case& c) {
  const Bytes expected = Reference(c);
  for (const VectorLevel level : Levels()) {
    for (const int place : {-1, 0, static_cast<int>(c.inputs.size()) - 1})
      RunAndCompare(c, level, place, expected);
  }
}

// Half of the elements are any bits, half are numbers of common size: sums of those have neither
// NaN nor infinity to hide an error in.
template <typename T>
void CommonNumbers(std::mt19937_64& random, Bytes& bytes) {
  for (std::size_t at = 0; at + sizeof(T) <= bytes.size(); at += sizeof(T)) {
    if (random() % 2 == 0) continue;
    const T value = static_cast<T>(static_cast<double>(random() % 20001) / 1000.0 - 10.0);
    std::memcpy(&bytes[at], &value, sizeof(T));
  }
}

Bytes RandomElements(std::mt19937_64& random, DataType type, std::size_t count) {
  Bytes bytes(count * SizeOf(type));
  for (std::byte& one : bytes) one = static_cast<std::byte>(random());
  if (type == DataType::kFloat32 || type == DataType::kComplex64)
    CommonNumbers<float>(random, bytes);
  if (type == DataType::kFloat64 || type == DataType::kComplex128)
    CommonNumbers<double>(random, bytes);
  if (type == DataType::kBool)
    for (std::byte& one : bytes) one &= std::byte{0x81};
  return bytes;
}

Case RandomCase(DataType type, ReduceOp op, std::size_t inputs, std::size_t count) {
  std::mt19937_64 random(inputs * 1000003 + count * 31 + static_cast<std::size_t>(type) * 7 +
                         static_cast<std::size_t>(op));
  Case c{.type = type, .op = op, .factor = 0.3, .count = count, .inputs = {}};
  for (std::size_t rank = 0; rank < inputs; ++rank)
    c.inputs.push_back(RandomElements(random, type, count));
  return c;
}

void ForEachKernel(const std::function<void(DataType, ReduceOp)>& visit) {
  for (int type = 1; type <= kTypes; ++type) {
    for (int op = 1; op <= kOperators; ++op) {
      if (CanReduce(static_cast<DataType>(type), static_cast<ReduceOp>(op)))
        visit(static_cast<DataType>(type), static_cast<ReduceOp>(op));
    }
  }
}

TEST(Reduce, RandomElements_EveryLevelAgreesWithTheReference) {
  ForEachKernel([](DataType type, ReduceOp op) {
    for (std::size_t inputs = 1; inputs <= 9; ++inputs) {
      for (const std::size_t count : {0u, 1u, 7u, 16u, 75u, 200u})
        CheckAllLevels(RandomCase(type, op, inputs, count));
    }
  });
}

TEST(Reduce, LongerThanABlock_EveryLevelAgreesWithTheReference) {
  ForEachKernel([](DataType type, ReduceOp op) {
    for (const std::size_t inputs : {2u, 5u}) CheckAllLevels(RandomCase(type, op, inputs, 8397));
  });
}

// All pairs of the 256 values.
TEST(Reduce, EightBits_AllPairs) {
  Case c{
      .type = DataType::kInt8, .op = ReduceOp::kSum, .factor = 0.3, .count = 65536, .inputs = {}};
  c.inputs.assign(2, Bytes(65536));
  for (std::size_t i = 0; i < 65536; ++i) {
    c.inputs[0][i] = static_cast<std::byte>(i >> 8);
    c.inputs[1][i] = static_cast<std::byte>(i & 255);
  }
  ForEachKernel([&c](DataType type, ReduceOp op) {
    if (SizeOf(type) != 1) return;
    c.type = type;
    c.op = op;
    CheckAllLevels(c);
  });
}

// All values, brought by factors to where they are cut, rounded, too large and too small.
TEST(Reduce, SixteenBits_AllValuesAreConvertedAndRounded) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    Case c{.type = type, .op = ReduceOp::kPremulSum, .factor = 1, .count = 65536, .inputs = {}};
    c.inputs.assign(1, Bytes(2 * 65536));
    for (std::size_t i = 0; i < 65536; ++i) {
      const auto code = static_cast<std::uint16_t>(i);
      std::memcpy(&c.inputs[0][2 * i], &code, 2);
    }
    for (const double factor : {1.0, -1.0, 1.0 / 3, 1 + 0x1p-8, 1 + 0x1p-11, 0x1p-9, 0x3p-11,
                                0x1p-24, 1e5, 0x1p100, 0.0}) {
      c.factor = factor;
      CheckAllLevels(c);
    }
    c.inputs.push_back(c.inputs[0]);
    std::reverse(c.inputs[1].begin(), c.inputs[1].end());  // Other bytes, other values.
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kProduct}) {
      c.op = op;
      CheckAllLevels(c);
    }
  }
}

// The reciprocal in place of a division: the neighbourhood of every multiple is where it could err.
TEST(Reduce, IntegerAverage_IsExactNearMultiples) {
  std::mt19937_64 random(5);
  for (const std::size_t inputs : {2u, 3u, 7u, 10u, 49u, 255u, 1000u}) {
    Case c{
        .type = DataType::kInt32, .op = ReduceOp::kAvg, .factor = 1, .count = 3000, .inputs = {}};
    c.inputs.assign(inputs, Bytes(4 * c.count));
    for (std::size_t i = 0; i < c.count; ++i) {
      const auto quotient =
          static_cast<std::uint32_t>(random()) / static_cast<std::uint32_t>(inputs);
      const std::uint32_t sum =
          quotient * static_cast<std::uint32_t>(inputs) + static_cast<std::uint32_t>(i % 3) - 1;
      std::memcpy(&c.inputs[0][4 * i], &sum, 4);
    }
    CheckAllLevels(c);
    c.type = DataType::kUInt32;
    CheckAllLevels(c);
  }
}

// --- Whoever runs it ---

// The control register of the calling thread, and what programs set in it.
#if defined(__x86_64__)
unsigned Control() { return _mm_getcsr() & ~0x3fu; }  // Without the flags.
void SetControl(unsigned word) { _mm_setcsr(word); }
constexpr unsigned kFlushing = 0x8040;  // FTZ and DAZ, as torch.set_flush_denormal.
#elif defined(__aarch64__)
unsigned Control() {
  std::uint64_t word = 0;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return static_cast<unsigned>(word);
}
void SetControl(unsigned word) {
  asm volatile("msr fpcr, %0" : : "r"(static_cast<std::uint64_t>(word)) : "memory");
}
constexpr unsigned kFlushing = 1u << 24;
#else
unsigned Control() { return 0; }
void SetControl(unsigned) {}
constexpr unsigned kFlushing = 0;
#endif

struct FloatSettings {
  int rounding;
  bool flushes;
};

constexpr std::array kSettings{FloatSettings{FE_TONEAREST, true},
                               FloatSettings{FE_TOWARDZERO, false}, FloatSettings{FE_UPWARD, false},
                               FloatSettings{FE_DOWNWARD, true}};

// Runs `compute` in the settings of another program; they are the same after it.
template <typename Compute>
void RunIn(const FloatSettings& settings, const Compute& compute) {
  const int rounding = std::fegetround();
  const unsigned before = Control();
  std::fesetround(settings.rounding);
  if (settings.flushes) SetControl(Control() | kFlushing);
  const unsigned set = Control();
  compute();
  const unsigned after = Control();
  SetControl(before);
  std::fesetround(rounding);
  EXPECT_EQ(set, after) << "the caller's settings were changed";
}

// Numbers whose sums, products and averages are subnormal or have to be rounded.
template <typename T, typename Bits>
void SmallNumbers(std::mt19937_64& random, Bytes& bytes, int mantissa_bits) {
  for (std::size_t at = 0; at + sizeof(T) <= bytes.size(); at += sizeof(T)) {
    if (random() % 2 == 0) continue;
    Bits bits{};
    std::memcpy(&bits, &bytes[at], sizeof(T));
    const auto sign = static_cast<Bits>(bits >> (8 * sizeof(T) - 1) << (8 * sizeof(T) - 1));
    const auto exponent = static_cast<Bits>(random() % 3) << mantissa_bits;
    bits = static_cast<Bits>(sign | exponent | (bits & ((Bits{1} << mantissa_bits) - 1)));
    std::memcpy(&bytes[at], &bits, sizeof(T));
  }
}

Case CaseOfSmallNumbers(DataType type, ReduceOp op, std::size_t inputs) {
  Case c = RandomCase(type, op, inputs, 203);
  std::mt19937_64 random(inputs);
  for (Bytes& input : c.inputs) {
    if (type == DataType::kFloat32 || type == DataType::kComplex64)
      SmallNumbers<float, std::uint32_t>(random, input, 23);
    if (type == DataType::kFloat64 || type == DataType::kComplex128)
      SmallNumbers<double, std::uint64_t>(random, input, 52);
    if (type == DataType::kBFloat16) SmallNumbers<std::uint16_t, std::uint16_t>(random, input, 7);
  }
  return c;
}

// Without it the tests below would pass whatever the kernels did.
TEST(Reduce, SettingsOfTheTest_ChangeWhatTheThreadComputes) {
  const volatile float tiny = 4e-39f, one = 1.0f, least = 1e-30f;
  RunIn(kSettings[0], [&] { EXPECT_EQ(kFlushing == 0, tiny * one != 0.0f); });
  RunIn(kSettings[2], [&] { EXPECT_GT(one + least, one); });
}

TEST(Reduce, SettingsOfTheThread_GiveTheSameBitsAtEveryLevel) {
  ForEachKernel([](DataType type, ReduceOp op) {
    for (std::size_t inputs = 1; inputs <= 5; ++inputs) {
      const Case c = CaseOfSmallNumbers(type, op, inputs);
      const Bytes expected = Reference(c);
      for (const FloatSettings& settings : kSettings) {
        for (const VectorLevel level : Levels())
          RunIn(settings, [&] { RunAndCompare(c, level, -1, expected); });
      }
    }
  });
}

Bytes InTwoStages(const Case& c) {
  Bytes partial(c.count * SizeOf(PartialTypeOf(c.type, c.op))), out(c.count * SizeOf(c.type));
  std::vector<const std::byte*> inputs;
  for (const Bytes& input : c.inputs) inputs.push_back(input.data());
  ReduceToPartial(c.type, c.op, c.factor, inputs, c.count, partial.data());
  const std::byte* const only = partial.data();
  ReducePartials(c.type, c.op, inputs.size(), {&only, 1}, c.count, out.data());
  return out;
}

TEST(Reduce, SettingsOfTheThread_GiveTheSameBitsInTwoStages) {
  ForEachKernel([](DataType type, ReduceOp op) {
    const Case c = CaseOfSmallNumbers(type, op, 3);
    const Bytes expected = InTwoStages(c);
    for (const FloatSettings& settings : kSettings)
      RunIn(settings, [&] { EXPECT_EQ(InTwoStages(c), expected) << Name(c); });
  });
}

// --- What the corners mean ---

bool Means(DataType type, ReduceOp op) {
  const bool complex = type == DataType::kComplex64 || type == DataType::kComplex128;
  const bool floating = type == DataType::kFloat32 || type == DataType::kFloat64 ||
                        type == DataType::kBFloat16 || type == DataType::kFloat16 ||
                        type == DataType::kFloat8E4M3 || type == DataType::kFloat8E5M2;
  switch (op) {
    case ReduceOp::kNone:
      return false;
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return true;
    case ReduceOp::kAvg:
      return type != DataType::kBool;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !complex;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return !complex && !floating;
    case ReduceOp::kPremulSum:
      return complex || floating;
  }
  return false;
}

TEST(Reduce, CanReduce_WhatHasAMeaning) {
  for (int type = 1; type <= kTypes; ++type) {
    for (int op = 0; op <= kOperators; ++op) {
      const auto t = static_cast<DataType>(type);
      const auto o = static_cast<ReduceOp>(op);
      EXPECT_EQ(CanReduce(t, o), Means(t, o)) << DataTypeName(t) << " " << ReduceOpName(o);
    }
  }
  // Values off the wire.
  EXPECT_FALSE(CanReduce(static_cast<DataType>(0), ReduceOp::kSum));
  EXPECT_FALSE(CanReduce(static_cast<DataType>(kTypes + 1), ReduceOp::kSum));
  EXPECT_FALSE(CanReduce(DataType::kFloat32, static_cast<ReduceOp>(kOperators + 1)));
}

template <typename T>
T ReduceTwo(DataType type, ReduceOp op, T a, T b, double factor = 1.0) {
  std::array<T, 1> x{a}, y{b};
  const std::array<const std::byte*, 2> inputs{reinterpret_cast<const std::byte*>(x.data()),
                                               reinterpret_cast<const std::byte*>(y.data())};
  ReduceInRankOrder(type, op, factor, inputs, 1, reinterpret_cast<std::byte*>(x.data()));
  return x[0];
}

TEST(Reduce, Integers_TruncateTowardZeroAndWrap) {
  EXPECT_EQ(ReduceTwo<std::int64_t>(DataType::kInt64, ReduceOp::kAvg, -3, -4), -3);
  EXPECT_EQ(ReduceTwo<std::int32_t>(DataType::kInt32, ReduceOp::kAvg, 3, 4), 3);
  EXPECT_EQ(ReduceTwo<std::int8_t>(DataType::kInt8, ReduceOp::kAvg, -100, -101), -100);
  EXPECT_EQ(ReduceTwo<std::uint16_t>(DataType::kUInt16, ReduceOp::kAvg, 65535, 65533), 65534);
  constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(ReduceTwo<std::int64_t>(DataType::kInt64, ReduceOp::kSum, kMax, 1),
            std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(ReduceTwo<std::uint8_t>(DataType::kUInt8, ReduceOp::kSum, 200, 100), 44);
  EXPECT_EQ(ReduceTwo<std::uint8_t>(DataType::kUInt8, ReduceOp::kAvg, 200, 100), 150);
  EXPECT_EQ(ReduceTwo<std::uint16_t>(DataType::kUInt16, ReduceOp::kProduct, 65535, 65535), 1);
}

TEST(Reduce, Bool_IsOrAndAnd) {
  EXPECT_EQ(ReduceTwo<std::uint8_t>(DataType::kBool, ReduceOp::kSum, 1, 1), 1);
  EXPECT_EQ(ReduceTwo<std::uint8_t>(DataType::kBool, ReduceOp::kMin, 1, 0), 0);
  EXPECT_EQ(ReduceTwo<std::uint8_t>(DataType::kBool, ReduceOp::kMax, 0, 1), 1);
  EXPECT_EQ(ReduceTwo<std::uint8_t>(DataType::kBool, ReduceOp::kBitXor, 2, 1), 0);  // Both true.
}

TEST(Reduce, Nan_WinsOnEitherSide) {
  const double nan = std::nan("");
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    EXPECT_TRUE(std::isnan(ReduceTwo<double>(DataType::kFloat64, op, nan, 1)));
    EXPECT_TRUE(std::isnan(ReduceTwo<double>(DataType::kFloat64, op, 1, nan)));
  }
}

TEST(Reduce, BFloat16_RoundsOnceToNearestEven) {
  const auto sum = [](std::uint16_t a, std::uint16_t b) {
    return ReduceTwo<std::uint16_t>(DataType::kBFloat16, ReduceOp::kSum, a, b);
  };
  EXPECT_EQ(sum(0x3f80, 0x3b80), 0x3f80);  // 1 + 2^-8 is a tie: down to even.
  EXPECT_EQ(sum(0x3f81, 0x3b80), 0x3f82);  // 1 + 2^-7 + 2^-8 is a tie: up to even.
  EXPECT_EQ(sum(0x7f7f, 0x7f7f), 0x7f80);  // The largest doubled is infinite.
  EXPECT_EQ(sum(0x7f80, 0xff80), 0x7fc0);  // inf - inf
}

TEST(Reduce, Float16_AverageDoesNotOverflow) {
  const auto two = [](ReduceOp op, std::uint16_t a, std::uint16_t b) {
    return ReduceTwo<std::uint16_t>(DataType::kFloat16, op, a, b);
  };
  EXPECT_EQ(two(ReduceOp::kAvg, 0x7bff, 0x7bff), 0x7bff);
  EXPECT_EQ(two(ReduceOp::kSum, 0x7bff, 0x7bff), 0x7c00);
  EXPECT_EQ(two(ReduceOp::kSum, 0x0001, 0x0001), 0x0002);  // The smallest, doubled.
}

TEST(Reduce, Float8_TooLargeIsTheLargestOrInfinite) {
  const auto sum = [](DataType type, std::uint8_t a, std::uint8_t b) {
    return ReduceTwo<std::uint8_t>(type, ReduceOp::kSum, a, b);
  };
  EXPECT_EQ(sum(DataType::kFloat8E4M3, 0x7e, 0x7e), 0x7e);  // 448 + 448, as torch converts 896.
  EXPECT_EQ(sum(DataType::kFloat8E4M3, 0xfe, 0xfe), 0xfe);
  EXPECT_EQ(sum(DataType::kFloat8E4M3, 0xff, 0x00), 0x7f);
  EXPECT_EQ(sum(DataType::kFloat8E5M2, 0x7b, 0x7b), 0x7c);
  EXPECT_EQ(sum(DataType::kFloat8E5M2, 0x7c, 0xfc), 0x7f);
}

TEST(Reduce, PremulSum_MultipliesBeforeItSums) {
  EXPECT_EQ(ReduceTwo<float>(DataType::kFloat32, ReduceOp::kPremulSum, 3e38f, 3e38f, 0.5), 3e38f);
  const std::complex<float> a(1, 2), b(3, -6);
  EXPECT_EQ(ReduceTwo(DataType::kComplex64, ReduceOp::kPremulSum, a, b, 0.5),
            std::complex<float>(2, -2));
}

TEST(Reduce, ComplexProduct_IsThatOfComplexNumbers) {
  const std::complex<double> a(1, 2), b(3, -1);
  EXPECT_EQ(ReduceTwo(DataType::kComplex128, ReduceOp::kProduct, a, b), a * b);
}

}  // namespace
}  // namespace resilient
