#pragma once

#include <cstdint>

#include <resilient/clock.h>
#include <resilient/operation.h>

namespace resilient {

// What is done at a time is done within milliseconds of it. Where it comes later than this, the
// process was itself stopped or suspended, and what the others did meanwhile is not known yet.
inline constexpr Duration kUnwatched = Millis(1000);

// Whether one operation takes too long, by the bounds that its Operation gives it. Pure: time is an
// argument. Owner: the operation. Thread: caller-synchronised.
class OpTimeouts {
 public:
  OpTimeouts() = default;  // Never.
  OpTimeouts(const Operation& op, Instant submitted);

  // All ranks that it needs are known to have entered it. Only the first call counts.
  void OnAllEntered(Instant now);
  // That was a guess, and was wrong.
  void WithdrawAllEntered() { still_since_ = kNever; }
  // Some of its data has moved.
  void OnMoved(Instant now);

  enum class Verdict : std::uint8_t {
    kInTime,
    kTimedOut,  // The time since its submission is up.
    kStalled    // All have entered it, and nothing moves.
  };
  // A process that was itself stopped or suspended in the meantime, which shows in a check that
  // comes far too late, cannot tell who stood still: it counts anew. Until `held_until` nothing is
  // a standstill, and it counts from then.
  Verdict Check(Instant now, Instant held_until);
  // The verdict stays kInTime until then, whatever happens: check then, or earlier.
  Instant NextCheck(Instant now, Instant held_until) const;
  // All have entered it, and nothing has moved for at least `time`.
  bool StandsFor(Duration time, Instant now) const {
    return still_since_ != kNever && now - still_since_ >= time;
  }
  // When began what `verdict` is about.
  Instant Since(Verdict verdict) const;

 private:
  Instant submitted_{};
  Deadline timeout_ = Deadline::Never();
  Duration stall_ = Duration::zero();  // Zero: none.
  Instant still_since_ = kNever;       // kNever: not all have entered it.
};

}  // namespace resilient
