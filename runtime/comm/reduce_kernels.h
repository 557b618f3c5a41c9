#pragma once

#include <cstddef>

#include <resilient/operation.h>

// What reduce.cc and the kernels share. The kernels are written once (reduce_templates.h) and
// compiled once for each vector level, each in a namespace and a translation unit of its own.
namespace resilient {

class FloatEnvironment;

// `environment` has no default: who calls a kernel must hold one.
struct ReduceArguments {
  const FloatEnvironment& environment;       // Set on the calling thread while the kernel runs.
  const std::byte* const* inputs = nullptr;  // In rank order.
  std::size_t input_count = 0;               // At least one.
  std::size_t begin = 0;                     // The elements of each from begin to end.
  std::size_t end = 0;
  std::size_t divisor = 1;   // Of kAvg.
  double factor = 1.0;       // Of kPremulSum.
  std::byte* out = nullptr;  // May be one of the inputs.
};

using ReduceKernel = void (*)(const ReduceArguments&);

// Copies inputs[0] to the wider type of PartialTypeOf, and back.
struct Conversion {
  ReduceKernel widen = nullptr;
  ReduceKernel narrow = nullptr;
};

// What each level has: the kernel, null where the operator has no meaning for the type, and the
// conversion, null where the type has none.
namespace portable {
ReduceKernel FindKernel(DataType type, ReduceOp op);
Conversion FindConversion(DataType type);
}  // namespace portable
namespace avx2 {
ReduceKernel FindKernel(DataType type, ReduceOp op);
Conversion FindConversion(DataType type);
}  // namespace avx2
namespace avx512 {
ReduceKernel FindKernel(DataType type, ReduceOp op);
Conversion FindConversion(DataType type);
}  // namespace avx512

}  // namespace resilient
