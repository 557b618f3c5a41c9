#include "runtime/comm/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "runtime/base/check.h"
#include "runtime/comm/reduce_kernels.h"

namespace resilient {
namespace {

// The operating system has to save the wide registers too; the compiler's question covers that.
VectorLevel AskProcessor() {
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

ReduceKernel FindKernel(VectorLevel level, DataType type, ReduceOp op) {
  switch (level) {
#if defined(__x86_64__)
    case VectorLevel::kAvx512:
      return avx512::FindKernel(type, op);
    case VectorLevel::kAvx2:
      return avx2::FindKernel(type, op);
#else
    case VectorLevel::kAvx512:
    case VectorLevel::kAvx2:
      break;
#endif
    case VectorLevel::kPortable:
      return portable::FindKernel(type, op);
  }
  return nullptr;
}

}  // namespace

bool CanReduce(DataType type, ReduceOp op) { return portable::FindKernel(type, op) != nullptr; }

VectorLevel BestVectorLevel() {
  static const VectorLevel level = AskProcessor();
  return level;
}

void ReduceInRankOrder(DataType type, ReduceOp op, double factor,
                       std::span<const std::byte* const> inputs, std::size_t count,
                       std::byte* out) {
  ReduceInRankOrder(BestVectorLevel(), type, op, factor, inputs, count, out);
}

void ReduceInRankOrder(VectorLevel level, DataType type, ReduceOp op, double factor,
                       std::span<const std::byte* const> inputs, std::size_t count,
                       std::byte* out) {
  const ReduceKernel kernel = FindKernel(level, type, op);
  RESILIENT_CHECK(kernel != nullptr);
  RESILIENT_CHECK(!inputs.empty());
  kernel({.inputs = inputs.data(),
          .input_count = inputs.size(),
          .end = count,
          .factor = factor,
          .out = out});
}

}  // namespace resilient
