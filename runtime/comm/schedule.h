#pragma once

#include <cstddef>

namespace resilient {

// A run of elements.
struct Chunk {
  std::size_t begin = 0;
  std::size_t count = 0;
  friend bool operator==(const Chunk&, const Chunk&) = default;
};

// Part `index` of `count` elements cut into `parts` runs whose sizes differ by at most one; the
// longer ones come first. Pure. REQUIRES: 0 <= index < parts.
Chunk ChunkOf(std::size_t count, int parts, int index);

// How the ranks of a group share the work of one all_reduce. Both give the same bits, because both
// reduce every element in rank order.
enum class AllReducePlan {
  kOneRound,  // Everyone sends all to everyone and reduces all: one latency, n times the traffic.
  kTwoRounds  // Rank r reduces chunk r, then sends it to everyone: least traffic.
};

// The traffic above which a second round is cheaper than sending everything to everyone.
inline constexpr std::size_t kOneRoundLimitBytes = 64u << 10;

// The same on every rank that has the same arguments (they are compared before data is taken).
// Pure.
AllReducePlan PlanAllReduce(std::size_t bytes, int size);

}  // namespace resilient
