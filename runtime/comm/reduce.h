#pragma once

#include <cstddef>
#include <span>

#include <resilient/communicator.h>

namespace resilient {

// Whether elements of `type` can be combined with `op` (AVG of bool has no meaning).
bool CanReduce(DataType type, ReduceOp op);

// Combines `count` elements of every input in the order of `inputs`, which is group-rank order, so
// that the result depends on nothing but the values: not on sizes, offsets, timing or transport.
//   SUM, AVG  bfloat16 is summed in float32 and rounded once, to nearest even; uint8 is summed
//             without overflow and then cut to 8 bits; the wider integers wrap. AVG divides the sum
//             once, integers toward zero.
//   MIN, MAX  a NaN wins, as in torch.
//   bool      SUM and MAX are "or", MIN is "and".
// `out` may be one of the inputs. Pure. REQUIRES: CanReduce(type, op), at least one input, all
// memory aligned for `type`.
void ReduceInRankOrder(DataType type, ReduceOp op, double factor,
                       std::span<const std::byte* const> inputs, std::size_t count, std::byte* out);

}  // namespace resilient
