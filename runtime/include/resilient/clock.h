#pragma once

#include <chrono>
#include <cstdint>

namespace resilient {

using Duration = std::chrono::nanoseconds;
using Millis = std::chrono::milliseconds;

// Tag of the one time line of the library: CLOCK_BOOTTIME in production (it goes on through a
// suspend, so a paused process sees the gap), virtual in the simulator. It has no now(): time is an
// argument of pure code.
struct BootClock {
  using duration = Duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<BootClock, duration>;
};

using Instant = BootClock::time_point;

constexpr Instant kNever = Instant::max();

// For messages.
constexpr double ToSeconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Source of time for the shells (threads, loops). Pure code takes an Instant instead.
// Thread: thread-safe. Lifetime: outlives everything that holds a reference to it.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual Instant Now() const = 0;
  // Seconds since the epoch; for messages and tokens, and no deadline is made of it.
  virtual double WallSeconds() const = 0;
};

// The system's CLOCK_BOOTTIME and CLOCK_REALTIME. Thread: immutable.
class SystemClock final : public Clock {
 public:
  Instant Now() const override;
  double WallSeconds() const override;
};

// An absolute point by which something must have happened; passed down instead of a timeout.
// Thread: value type.
class Deadline {
 public:
  static Deadline Never() { return Deadline(kNever); }
  static Deadline At(Instant when) { return Deadline(when); }
  // Saturates: a huge `timeout` means never.
  static Deadline After(Instant now, Duration timeout) {
    return Deadline(timeout >= kNever - now ? kNever : now + timeout);
  }

  Instant when() const { return when_; }
  bool IsNever() const { return when_ == kNever; }
  bool ExpiredAt(Instant now) const { return now >= when_; }
  // Zero when expired.
  Duration LeftAt(Instant now) const { return ExpiredAt(now) ? Duration::zero() : when_ - now; }

  friend bool operator==(Deadline, Deadline) = default;
  friend auto operator<=>(Deadline, Deadline) = default;

 private:
  explicit Deadline(Instant when) : when_(when) {}
  Instant when_;
};

}  // namespace resilient
