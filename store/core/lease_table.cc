#include "store/core/lease_table.h"

#include <algorithm>

namespace resilient::store {

Instant AwakeClock::At(Instant now) const {
  return awake_ + std::clamp(now - tick_, Duration::zero(), most_step_);
}

Instant AwakeClock::Tick(Instant now) {
  awake_ = At(now);
  tick_ = std::max(tick_, now);
  return awake_;
}

void LeaseTable::Grant(SessionId session, Instant now) {
  if (Has(session)) return Renew(session, now);
  leases_.emplace(session, Lease{now, false, false});
  by_renewal_.emplace(now, session);
}

void LeaseTable::Renew(SessionId session, Instant now) {
  const auto lease = leases_.find(session);
  if (lease == leases_.end()) return;
  by_renewal_.erase({lease->second.renewed, session});
  lease->second = Lease{std::max(lease->second.renewed, now), false, lease->second.held};
  if (!lease->second.held) by_renewal_.emplace(lease->second.renewed, session);
}

void LeaseTable::Hold(SessionId session) {
  const auto lease = leases_.find(session);
  if (lease == leases_.end()) return;
  lease->second.held = true;
  by_renewal_.erase({lease->second.renewed, session});
}

void LeaseTable::Resume(SessionId session, Instant now) {
  const auto lease = leases_.find(session);
  if (lease == leases_.end()) return;
  lease->second.held = false;
  Renew(session, now);
}

void LeaseTable::Remove(SessionId session) {
  const auto lease = leases_.find(session);
  if (lease == leases_.end()) return;
  by_renewal_.erase({lease->second.renewed, session});
  leases_.erase(lease);
}

std::vector<LeaseTable::Expired> LeaseTable::Tick(Instant now, bool input_drained) {
  std::vector<Expired> expired;
  for (auto next = by_renewal_.begin(); next != by_renewal_.end();) {
    const auto [renewed, session] = *next;
    if (now - renewed < ttl_) break;
    Lease& lease = leases_.at(session);
    if (!lease.suspect || !input_drained) {
      lease.suspect = true;
      ++next;
      continue;
    }
    expired.push_back({session, now - renewed});
    leases_.erase(session);
    next = by_renewal_.erase(next);
  }
  return expired;
}

std::optional<Instant> LeaseTable::LastSeen(SessionId session) const {
  const auto lease = leases_.find(session);
  if (lease == leases_.end()) return std::nullopt;
  return lease->second.renewed;
}

}  // namespace resilient::store
