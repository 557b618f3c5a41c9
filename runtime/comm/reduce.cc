#include "runtime/comm/reduce.h"

#include <algorithm>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <resilient/float_environment.h>

#include "runtime/base/check.h"
#include "runtime/comm/reduce_kernels.h"

namespace resilient {
namespace {

// The operating system has to save the wide registers too; the compiler's question covers that.
VectorLevel AskProcessor() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & bit_F16C) == 0)
    return VectorLevel::kPortable;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return VectorLevel::kAvx512;
  if (__builtin_cpu_supports("avx2")) return VectorLevel::kAvx2;
#endif
  return VectorLevel::kPortable;
}

// The kernels of a level.
struct Kernels {
  ReduceKernel (*find)(DataType type, ReduceOp op);
  Conversion (*find_conversion)(DataType type);

  ReduceKernel Of(DataType type, ReduceOp op) const {
    const ReduceKernel kernel = find(type, op);
    RESILIENT_CHECK(kernel != nullptr);
    return kernel;
  }
};

Kernels KernelsOf(VectorLevel level) {
  switch (level) {
#if defined(__x86_64__)
    case VectorLevel::kAvx512:
      return {avx512::FindKernel, avx512::FindConversion};
    case VectorLevel::kAvx2:
      return {avx2::FindKernel, avx2::FindConversion};
#else
    case VectorLevel::kAvx512:
    case VectorLevel::kAvx2:
      break;
#endif
    case VectorLevel::kPortable:
      break;
  }
  return {portable::FindKernel, portable::FindConversion};
}

bool IsSmallFloat(DataType type) {
  return type == DataType::kBFloat16 || type == DataType::kFloat16 ||
         type == DataType::kFloat8E4M3 || type == DataType::kFloat8E5M2;
}

// What is computed: numbers of the type are not closed under these.
bool Computes(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kProduct ||
         op == ReduceOp::kPremulSum;
}

// Of wider elements, that these are converted to before they are combined, or when they have been:
// they stay in the first-level cache.
constexpr std::size_t kBlockBytes = 8192;

using Inputs = std::span<const std::byte* const>;

// Asked when the library is loaded: a static in a function has a lock of its own.
const VectorLevel kBestVectorLevel = AskProcessor();

}  // namespace

bool CanReduce(DataType type, ReduceOp op) { return portable::FindKernel(type, op) != nullptr; }

VectorLevel BestVectorLevel() { return kBestVectorLevel; }

void ReduceInRankOrder(DataType type, ReduceOp op, double factor,
                       std::span<const std::byte* const> inputs, std::size_t count,
                       std::byte* out) {
  ReduceInRankOrder(BestVectorLevel(), type, op, factor, inputs, count, out);
}

void ReduceInRankOrder(VectorLevel level, DataType type, ReduceOp op, double factor,
                       std::span<const std::byte* const> inputs, std::size_t count,
                       std::byte* out) {
  RESILIENT_CHECK(!inputs.empty());
  const FloatEnvironment environment;
  KernelsOf(level).Of(type, op)({.environment = environment,
                                 .inputs = inputs.data(),
                                 .input_count = inputs.size(),
                                 .end = count,
                                 .divisor = inputs.size(),
                                 .factor = factor,
                                 .out = out});
}

DataType PartialTypeOf(DataType type, ReduceOp op) {
  if (IsSmallFloat(type)) return Computes(op) ? DataType::kFloat32 : type;
  const bool narrow = type == DataType::kInt8 || type == DataType::kInt16 ||
                      type == DataType::kUInt8 || type == DataType::kUInt16;
  return narrow && op == ReduceOp::kAvg ? DataType::kInt32 : type;
}

void ReduceToPartial(DataType type, ReduceOp op, double factor, Inputs inputs, std::size_t count,
                     std::byte* out) {
  const DataType wide = PartialTypeOf(type, op);
  const ReduceOp undivided = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
  if (wide == type) return ReduceInRankOrder(type, undivided, factor, inputs, count, out);
  const Kernels kernels = KernelsOf(BestVectorLevel());
  const ReduceKernel widen = kernels.find_conversion(type).widen;
  const ReduceKernel multiply = op == ReduceOp::kPremulSum ? kernels.Of(wide, op) : nullptr;
  const ReduceKernel combine = kernels.Of(wide, multiply != nullptr ? ReduceOp::kSum : undivided);
  const FloatEnvironment environment;
  const auto take = [&](const std::byte* in, std::size_t some, std::byte* to) {
    widen({.environment = environment, .inputs = &in, .input_count = 1, .end = some, .out = to});
    if (multiply == nullptr) return;
    const std::byte* const taken = to;
    multiply({.environment = environment,
              .inputs = &taken,
              .input_count = 1,
              .end = some,
              .factor = factor,
              .out = to});
  };
  alignas(64) std::byte next[kBlockBytes];
  const std::size_t block = kBlockBytes / SizeOf(wide);
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t some = std::min(block, count - begin);
    const std::size_t at = begin * SizeOf(type);
    std::byte* const sum = out + begin * SizeOf(wide);
    take(inputs[0] + at, some, sum);
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      take(inputs[rank] + at, some, next);
      const std::byte* const two[] = {sum, next};
      combine(
          {.environment = environment, .inputs = two, .input_count = 2, .end = some, .out = sum});
    }
  }
}

void ReducePartials(DataType type, ReduceOp op, std::size_t ranks, Inputs partials,
                    std::size_t count, std::byte* out) {
  const DataType wide = PartialTypeOf(type, op);
  const Kernels kernels = KernelsOf(BestVectorLevel());
  const ReduceKernel combine = kernels.Of(wide, op == ReduceOp::kPremulSum ? ReduceOp::kSum : op);
  const FloatEnvironment environment;
  ReduceArguments arguments{.environment = environment,
                            .inputs = partials.data(),
                            .input_count = partials.size(),
                            .end = count,
                            .divisor = ranks,
                            .out = out};
  if (wide == type) return combine(arguments);
  const ReduceKernel narrow = kernels.find_conversion(type).narrow;
  alignas(64) std::byte result[kBlockBytes];
  const std::size_t block = kBlockBytes / SizeOf(wide);
  std::vector<const std::byte*> inputs(partials.begin(), partials.end());
  arguments.inputs = inputs.data();
  arguments.out = result;
  for (std::size_t begin = 0; begin < count; begin += block) {
    arguments.end = std::min(block, count - begin);
    combine(arguments);
    const std::byte* const combined = result;
    narrow({.environment = environment,
            .inputs = &combined,
            .input_count = 1,
            .end = arguments.end,
            .out = out + begin * SizeOf(type)});
    for (const std::byte*& input : inputs) input += arguments.end * SizeOf(wide);
  }
}

}  // namespace resilient
