#include "runtime/comm/shm_allowance.h"

#include <algorithm>
#include <bit>

#include "runtime/comm/endpoint.h"

namespace resilient {

ShmAllowance::ShmAllowance(const GroupSpec& spec, std::size_t limit)
    : rank_(static_cast<std::size_t>(spec.rank)) {
  for (const GroupMember& member : spec.members)
    host_ids_.push_back(DecodeEndpoint(member.endpoint).host_id);
  for (std::size_t rank = 0; rank < host_ids_.size(); ++rank) {
    if (host_ids_[rank].empty() || host_ids_[rank] != host_ids_.front()) one_host_ = false;
    if (rank != rank_ && SameHost(static_cast<int>(rank))) ++peers_here_;
  }
  std::size_t taken = 0;
  if (one_host_) {
    const auto board = ShmGeometry::Within(limit, static_cast<int>(host_ids_.size()));
    taken = board ? board->TotalBytes() : limit;
  }
  const std::size_t share = (limit - taken) / (peers_here_ + 1);
  collective_.all = one_host_ ? 0 : share / 2;
  collective_.left = collective_.all;
  point_to_point_.all = share - collective_.all;
  point_to_point_.left = point_to_point_.all;
}

bool ShmAllowance::SameHost(int peer) const {
  const std::string& theirs = host_ids_[static_cast<std::size_t>(peer)];
  return !theirs.empty() && theirs == host_ids_[rank_];
}

std::optional<ShmStreamGeometry> ShmAllowance::Take(int peer, Lane lane) {
  if (!SameHost(peer)) return std::nullopt;
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
