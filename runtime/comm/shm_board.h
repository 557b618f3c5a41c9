#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <resilient/clock.h>

#include "runtime/comm/shm_segment.h"

namespace resilient {

// Where the ranks of a group meet in shared memory. Time goes in steps: each rank writes its slot
// of the next step and publishes it; when all have published a step, everyone may read all slots of
// it. Slots are used again every kSlots steps: what a step has shown may be read
// until this rank publishes step s + kSlots - 1.
//
// Owner: a lane. Thread: one thread at a time, but WakeSelf and HasPublished. All ranks wait in all
// steps, so nobody is more than one step ahead.
class ShmBoard {
 public:
  // `memory` is shared by all ranks, zeroed before the first has begun, and outlives the board.
  // `checksums`: this rank puts them beside its data.
  ShmBoard(std::span<std::byte> memory, const ShmGeometry& geometry, int rank,
           bool checksums = false);

  int rank() const { return rank_; }
  int size() const { return geometry_.ranks; }
  std::size_t slot_bytes() const { return geometry_.slot_bytes; }

  // The latest step that this rank has published; 0 before the first.
  std::uint64_t step() const { return step_; }
  std::byte* Slot(int rank, std::uint64_t step) const;
  // Where this rank writes what it publishes next.
  std::byte* NextSlot() const { return Slot(rank_, step_ + 1); }
  // Everything written to the next slot, and to slots of earlier steps, is there for the others.
  void Publish();

  bool HasPublished(int rank, std::uint64_t step) const;
  // REQUIRES: it has published a step.
  bool HasChecksums(int rank) const;
  // The lowest rank that has not published the present step; -1 when all have.
  int FirstMissing() const;

  // Sleeps until `missing` has published the present step, WakeSelf is called, or `slice` is over.
  // `stopped` is looked at once more after the last moment at which WakeSelf could be missed; for
  // that it must read sequentially consistently what was written so before WakeSelf.
  template <typename Stopped>
  void Sleep(int missing, Duration slice, const Stopped& stopped) {
    PrepareSleep(missing);
    if (!HasPublished(missing, step_) && !stopped()) SleepUntilWoken(missing, slice);
    FinishSleep();
  }
  // Ends the sleep of this process's thread. Thread-safe.
  void WakeSelf();

 private:
  struct Control;
  Control& ControlOf(int rank) const;
  void PrepareSleep(int missing);
  void SleepUntilWoken(int missing, Duration slice);
  void FinishSleep();

  const std::span<std::byte> memory_;
  const ShmGeometry geometry_;
  const int rank_;
  std::uint64_t step_ = 0;
  mutable int seen_ = 0;  // Ranks below have published the present step.
};

}  // namespace resilient
