#include <resilient/clock.h>

#include <ctime>

#include "runtime/base/check.h"

namespace resilient {
namespace {

timespec Read(clockid_t clock) {
  timespec now{};
  RESILIENT_CHECK(clock_gettime(clock, &now) == 0);
  return now;
}

}  // namespace

Instant SystemClock::Now() const {
  const timespec now = Read(CLOCK_BOOTTIME);
  return Instant(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec));
}

double SystemClock::WallSeconds() const {
  const timespec now = Read(CLOCK_REALTIME);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace resilient
