#include "runtime/comm/schedule.h"

#include <algorithm>
#include <map>
#include <string_view>

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

int HostLayout::OwnerIn(int host, int home) const {
  if (host_of[static_cast<std::size_t>(home)] == host) return home;
  const std::vector<int>& ranks = hosts[static_cast<std::size_t>(host)];
  // The homes of other hosts in turn, so that each rank is the owner of as many as the next.
  const auto below = std::lower_bound(ranks.begin(), ranks.end(), home) - ranks.begin();
  return ranks[(static_cast<std::size_t>(home) - static_cast<std::size_t>(below)) % ranks.size()];
}

HostLayout LayoutOf(const std::vector<std::string>& host_ids) {
  HostLayout layout;
  std::map<std::string_view, int> known;
  for (std::size_t rank = 0; rank < host_ids.size(); ++rank) {
    const int next = static_cast<int>(layout.hosts.size());
    const int host =
        host_ids[rank].empty() ? next : known.try_emplace(host_ids[rank], next).first->second;
    if (host == next) layout.hosts.emplace_back();
    layout.hosts[static_cast<std::size_t>(host)].push_back(static_cast<int>(rank));
    layout.host_of.push_back(host);
  }
  return layout;
}

}  // namespace resilient
