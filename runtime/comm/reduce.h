#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <resilient/operation.h>

namespace resilient {

// Whether elements of `type` can be combined with `op`: AVG has no meaning for bool, MIN and MAX
// none for complex numbers, the operators on bits are of integers and bool, PREMUL_SUM is of the
// others.
bool CanReduce(DataType type, ReduceOp op);

// The instructions that the kernels are compiled for, poorest first. All give the same bits.
enum class VectorLevel : std::uint8_t { kPortable, kAvx2, kAvx512 };

// The richest level that this processor and the build have; asked once.
VectorLevel BestVectorLevel();

// Combines `count` elements of every input in the order of `inputs`, which is group-rank order, so
// that the result depends on nothing but the values: not on sizes, offsets, timing or transport.
//   floats    of 16 and 8 bits are accumulated in float32 and rounded once, to nearest even. What
//   is
//             too large for float8_e4m3fn becomes its largest number, as in torch
//   integers  SUM and PRODUCT wrap. AVG divides the sum once, toward zero; sums of 8 and 16 bits do
//             not overflow before that, the wider ones wrap
//   MIN, MAX  a NaN wins, as in torch. Every NaN of a result is the same one
//   bool      SUM, MAX are "or", PRODUCT, MIN are "and". Any byte but 0 is true, the result 0 or 1
//   PREMUL_SUM  multiplies each element by `factor` as it is accumulated
// The calling thread's rounding mode and handling of subnormals play no part: each function here
// computes in a FloatEnvironment.
// `out` may be one of the inputs. Pure. REQUIRES: CanReduce(type, op), at least one input and fewer
// than 32,768, all memory aligned for `type`.
void ReduceInRankOrder(DataType type, ReduceOp op, double factor,
                       std::span<const std::byte* const> inputs, std::size_t count, std::byte* out);

// The same at a level, for tests and measurements. REQUIRES: level <= BestVectorLevel().
void ReduceInRankOrder(VectorLevel level, DataType type, ReduceOp op, double factor,
                       std::span<const std::byte* const> inputs, std::size_t count, std::byte* out);

// A reduction in two stages: ReduceToPartial over the ranks of each host, in rank order, then
// ReducePartials over the results. Only the second stage rounds and divides, only the first one
// multiplies by `factor`, so that the sole difference from ReduceInRankOrder is where the
// parentheses are.

// The type of what lies between the stages: float32 for smaller floats that are computed with, and
// int32 for averages of integers of 8 and 16 bits; all others stay as they are.
DataType PartialTypeOf(DataType type, ReduceOp op);
// `out` has elements of PartialTypeOf(type, op) and is none of the inputs where these are others.
// Pure. REQUIRES: as ReduceInRankOrder.
void ReduceToPartial(DataType type, ReduceOp op, double factor,
                     std::span<const std::byte* const> inputs, std::size_t count, std::byte* out);
// `partials` have elements of PartialTypeOf(type, op), `out` of `type`; it is none of them where
// the types differ. `ranks`: all those whose inputs are in, by which AVG divides. Pure.
void ReducePartials(DataType type, ReduceOp op, std::size_t ranks,
                    std::span<const std::byte* const> partials, std::size_t count, std::byte* out);

}  // namespace resilient
