#pragma once

#include <cstddef>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include <resilient/operation.h>

namespace resilient::testing {

// Which host each rank is on. Thread: value type.
struct Hosts {
  std::string name;
  std::vector<int> of_rank;
  friend void PrintTo(const Hosts& hosts, std::ostream* out) { *out << hosts.name; }

  int size() const { return static_cast<int>(of_rank.size()); }
  std::vector<std::string> Ids() const {
    std::vector<std::string> ids;
    for (const int host : of_rank) ids.push_back("host" + std::to_string(host));
    return ids;
  }
  // For the reference; by hand, as the code under test has its own way.
  std::vector<std::vector<std::size_t>> Ranks() const {
    std::vector<std::vector<std::size_t>> ranks;
    std::set<int> seen;
    for (const int host : of_rank) {
      if (!seen.insert(host).second) continue;
      ranks.emplace_back();
      for (std::size_t rank = 0; rank < of_rank.size(); ++rank)
        if (of_rank[rank] == host) ranks.back().push_back(rank);
    }
    return ranks;
  }
};

inline constexpr OpKind kReductions[] = {OpKind::kAllReduce, OpKind::kReduce,
                                         OpKind::kReduceScatter};

}  // namespace resilient::testing
