#pragma once

#include <algorithm>

#include <resilient/clock.h>

namespace resilient {

// So many times within its lease a process says that it lives.
inline constexpr int kHeartbeatsPerLease = 5;
// How long at most a joiner that is late keeps those waiting whose time for its seat is over.
inline constexpr Duration kLastCallMax = std::chrono::seconds(30);

// How long each rung of a recovery may take, on one rank: all of it follows from RESILIENT_BUDGET
// and RESILIENT_SEAT_WAIT, here and nowhere else. A rung that misses its deadline hands over to the
// next: a try to build to another one, the budget to FAILED. Ranks may differ in both settings:
// each rank counts its own, and for an empty seat the longest wait of all ranks counts. Thread:
// value type.
struct Ladder {
  // The machine's time of one failure, in ABORTING, BUILDING and, until all ranks are, READY. All
  // of it may go to ABORTING: while an operation still uses memory of the program nothing else can
  // go on, and there is no gentler way to end it. What it leaves goes to BUILDING and READY.
  Duration budget{};
  // Of that, one try to build. Two fit, with a fifth left for their aborts and joins: a link that
  // does not come up on the way that one try has chosen may come up in the next generation.
  Duration build{};
  // JOINING with a lost seat, from the fence on: not the machine's time, and counted by the store.
  Duration seat_wait{};
  // Behind that, while a process that is to take the seat is known to be on its way to its init.
  Duration last_call{};
  // One answer of a store that has nobody to wait for. Like a whole recovery, for a store that was
  // killed is started again within it; 1 s at least, for a connection.
  Duration answer{};
  // Rebuild, by default: the machine's part and the seats', with the last call. Whatever it waits
  // for has a deadline of its own within.
  Duration rebuild{};
};

// Of those who wait for a seat for so long. REQUIRES: not negative.
constexpr Duration LastCallOf(Duration seat_wait) { return std::min(seat_wait, kLastCallMax); }

constexpr Duration SumOf(Duration a, Duration b) {
  return b > Duration::max() - a ? Duration::max() : a + b;
}

// REQUIRES: both are not negative.
constexpr Ladder LadderOf(Duration budget, Duration seat_wait = Duration::zero()) {
  return {.budget = budget,
          .build = budget / 5 * 2,
          .seat_wait = seat_wait,
          .last_call = LastCallOf(seat_wait),
          .answer = std::max(budget, Duration(std::chrono::seconds(1))),
          .rebuild = SumOf(budget, SumOf(seat_wait, LastCallOf(seat_wait)))};
}

}  // namespace resilient
