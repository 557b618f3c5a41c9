#include "runtime/comm/op_timeouts.h"

#include <algorithm>

namespace resilient {

OpTimeouts::OpTimeouts(const Operation& op, Instant submitted)
    : submitted_(submitted), stall_(std::max(op.stall, Duration::zero())) {
  if (op.timeout > Duration::zero()) timeout_ = Deadline::After(submitted, op.timeout);
}

void OpTimeouts::OnAllEntered(Instant now) {
  if (still_since_ == kNever) still_since_ = now;
}

void OpTimeouts::OnMoved(Instant now) {
  if (still_since_ != kNever) still_since_ = std::max(still_since_, now);
}

OpTimeouts::Verdict OpTimeouts::Check(Instant now, Instant held_until) {
  if (timeout_.ExpiredAt(now)) return Verdict::kTimedOut;
  const bool still = still_since_ != kNever && now >= held_until;
  if (stall_ == Duration::zero() || !still) return Verdict::kInTime;
  const Deadline deadline = Deadline::After(std::max(still_since_, held_until), stall_);
  if (!deadline.ExpiredAt(now)) return Verdict::kInTime;
  if (now - deadline.when() < kUnwatched) return Verdict::kStalled;
  still_since_ = now;
  return Verdict::kInTime;
}

Instant OpTimeouts::NextCheck(Instant now, Instant held_until) const {
  if (stall_ == Duration::zero()) return timeout_.when();
  const bool still = still_since_ != kNever && now >= held_until;
  const Instant from = still ? std::max(still_since_, held_until) : now;
  return std::min(timeout_, Deadline::After(from, stall_)).when();
}

Instant OpTimeouts::Since(Verdict verdict) const {
  return verdict == Verdict::kStalled ? still_since_ : submitted_;
}

}  // namespace resilient
