#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "runtime/comm/nccl_types.h"

namespace resilient::testing {

std::size_t SizeOf(NcclDataType type);

// What NCCL makes of the inputs, but for the order and the rounding of sums. `factor`: of an
// operator that multiplies first. Averages of integers wrap where their sums do.
std::vector<std::byte> ReduceAsNccl(NcclDataType type, NcclReduceOp op,
                                    std::optional<double> factor,
                                    const std::vector<const std::byte*>& inputs, std::size_t count);

// The number that `bytes` holds.
double NumberAt(NcclDataType type, const void* bytes);

}  // namespace resilient::testing
