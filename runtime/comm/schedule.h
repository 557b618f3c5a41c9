#pragma once

#include <cstddef>
#include <string>
#include <vector>

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

// Which ranks of a group share a host. Thread: value type.
struct HostLayout {
  std::vector<std::vector<int>> hosts;  // The ranks of each, ascending; hosts by their lowest rank.
  std::vector<int> host_of;             // By rank: index in `hosts`.

  // Whether a hierarchical order is another one than rank order: several hosts, one of them with
  // several ranks.
  bool HasLevels() const { return hosts.size() > 1 && hosts.size() < host_of.size(); }
  bool OneHost() const { return hosts.size() == 1; }
  bool SameHost(int rank, int other) const {
    return host_of[static_cast<std::size_t>(rank)] == host_of[static_cast<std::size_t>(other)];
  }
  // The rank of `host` that combines what its ranks have for `home`: `home` itself where it is one
  // of them.
  int OwnerIn(int host, int home) const;
};

// By the host of each rank; who has an empty one is alone. Pure.
HostLayout LayoutOf(const std::vector<std::string>& host_ids);

}  // namespace resilient
