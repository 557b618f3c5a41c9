#pragma once

#include <algorithm>
#include <chrono>

#include <resilient/clock.h>

namespace resilient::plugin {

// Seconds of a Python caller: negative and NaN become 0, more than a century becomes a century.
inline Duration FromSeconds(double seconds) {
  constexpr double kLongest = 100.0 * 365 * 24 * 3600;
  if (!(seconds > 0)) return Duration::zero();
  return std::chrono::duration_cast<Duration>(
      std::chrono::duration<double>(std::min(seconds, kLongest)));
}

}  // namespace resilient::plugin
