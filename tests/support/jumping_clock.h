#pragma once

#include <atomic>

#include <resilient/clock.h>

namespace resilient::testing {

// Real time that a test can move on, as a suspended process sees it. Thread: thread-safe.
class JumpingClock final : public Clock {
 public:
  Instant Now() const override { return clock_.Now() + ahead_.load(); }
  double WallSeconds() const override { return clock_.WallSeconds(); }
  void Jump(Duration by) { ahead_ = by; }

 private:
  const SystemClock clock_{};
  std::atomic<Duration> ahead_{Duration::zero()};
};

}  // namespace resilient::testing
