#include "runtime/comm/shm_allowance.h"

#include <algorithm>
#include <bit>

namespace resilient {

ShmAllowance::ShmAllowance(const HostLayout& layout, int rank, std::size_t limit)
    : layout_(layout), rank_(rank) {
  const auto host = static_cast<std::size_t>(layout.host_of[static_cast<std::size_t>(rank)]);
  peers_here_ = layout.hosts[host].size() - 1;
  std::size_t taken = 0;
  if (layout.OneHost()) {
    const auto board = ShmGeometry::Within(limit, static_cast<int>(peers_here_ + 1));
    taken = board ? board->TotalBytes() : limit;
  }
  const std::size_t share = (limit - taken) / (peers_here_ + 1);
  collective_.all = layout.OneHost() ? 0 : share / 2;
  collective_.left = collective_.all;
  point_to_point_.all = share - collective_.all;
  point_to_point_.left = point_to_point_.all;
}

std::optional<ShmStreamGeometry> ShmAllowance::Take(int peer, Lane lane) {
  if (!layout_.SameHost(rank_, peer)) return std::nullopt;
  const bool both_ways = lane == Lane::kCollective;
  Pool& pool = both_ways ? collective_ : point_to_point_;
  std::size_t worth = pool.all / peers_here_;
  // Collectives have all their links at once; of the others few are used where ranks are many, and
  // the first ones may have more than their part.
  if (!both_ways) worth = std::max(worth, pool.left / 4);
  worth = std::min(worth, pool.left);
  constexpr std::size_t kControl = ShmStreamGeometry::kControlBytes;
  constexpr std::size_t kReturn = ShmStreamGeometry::kLeastRingBytes;  // There a goodbye goes.
  const std::size_t fixed = both_ways ? kControl : kControl + kReturn;
  if (worth <= fixed) return std::nullopt;
  const std::size_t room = (worth - fixed) / (both_ways ? 2 : 1);
  const std::size_t best = both_ways ? kBestCollectiveRingBytes : kBestRingBytes;
  const std::size_t ring = std::min(best, std::bit_floor(room));
  if (ring < kLeastRingBytes) return std::nullopt;
  const ShmStreamGeometry geometry{.forward_bytes = ring,
                                   .backward_bytes = both_ways ? ring : kReturn};
  pool.left -= geometry.TotalBytes();
  return geometry;
}

}  // namespace resilient
