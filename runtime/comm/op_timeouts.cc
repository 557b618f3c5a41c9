#include "runtime/comm/op_timeouts.h"

#include <algorithm>

namespace resilient {
namespace {

// Checks come within milliseconds of their time.
constexpr Duration kUnwatched = Millis(1000);

}  // namespace

OpTimeouts::OpTimeouts(const Operation& op, Instant submitted)
    : submitted_(submitted), stall_(std::max(op.stall, Duration::zero())) {
  if (op.timeout > Duration::zero()) timeout_ = Deadline::After(submitted, op.timeout);
}

void OpTimeouts::OnAllEntered(Instant now) {
  if (still_since_ == kNever) still_since_ = now;
}

void OpTimeouts::OnMoved(Instant now) {
  if (still_since_ != kNever) still_since_ = now;
}

OpTimeouts::Verdict OpTimeouts::Check(Instant now) {
  if (timeout_.ExpiredAt(now)) return Verdict::kTimedOut;
  if (stall_ == Duration::zero() || still_since_ == kNever) return Verdict::kInTime;
  const Deadline deadline = Deadline::After(still_since_, stall_);
  if (!deadline.ExpiredAt(now)) return Verdict::kInTime;
  if (now - deadline.when() < kUnwatched) return Verdict::kStalled;
  still_since_ = now;
  return Verdict::kInTime;
}

Instant OpTimeouts::NextCheck(Instant now) const {
  if (stall_ == Duration::zero()) return timeout_.when();
  const Instant from = still_since_ == kNever ? now : still_since_;
  return std::min(timeout_, Deadline::After(from, stall_)).when();
}

Instant OpTimeouts::Since(Verdict verdict) const {
  return verdict == Verdict::kStalled ? still_since_ : submitted_;
}

}  // namespace resilient
