#include "runtime/comm/schedule.h"

#include <algorithm>

namespace resilient {

Chunk ChunkOf(std::size_t count, int parts, int index) {
  const auto n = static_cast<std::size_t>(parts);
  const auto i = static_cast<std::size_t>(index);
  const std::size_t base = count / n;
  const std::size_t longer = count % n;
  return {.begin = i * base + std::min(i, longer), .count = base + (i < longer ? 1 : 0)};
}

AllReducePlan PlanAllReduce(std::size_t bytes, int size) {
  return bytes <= kOneRoundLimitBytes / static_cast<std::size_t>(size) ? AllReducePlan::kOneRound
                                                                       : AllReducePlan::kTwoRounds;
}

}  // namespace resilient
