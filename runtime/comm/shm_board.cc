#include "runtime/comm/shm_board.h"

#include <atomic>
#include <climits>

#include "runtime/base/check.h"
#include "runtime/base/futex.h"

namespace resilient {

// Each field on a line of its own: one is written by its rank and polled by all, the other is
// written where the rank sleeps and looked at by whoever publishes.
struct ShmBoard::Control {
  alignas(64) std::atomic<std::uint64_t> published;
  std::atomic<std::uint32_t> checksums;             // 1 from before the first step, or 0.
  alignas(64) std::atomic<std::uint32_t> sleeping;  // 0, or 1 + the rank it waits for.
};

namespace {

const std::uint32_t* AddressOf(const std::atomic<std::uint32_t>& word) {
  return reinterpret_cast<const std::uint32_t*>(&word);
}

}  // namespace

ShmBoard::ShmBoard(std::span<std::byte> memory, const ShmGeometry& geometry, int rank,
                   bool checksums)
    : memory_(memory), geometry_(geometry), rank_(rank) {
  static_assert(sizeof(Control) <= ShmGeometry::kControlBytes);
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
  static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
  RESILIENT_CHECK(memory.size() >= geometry.TotalBytes() && rank >= 0 && rank < geometry.ranks);
  ControlOf(rank).checksums.store(checksums ? 1 : 0, std::memory_order_relaxed);
}

ShmBoard::Control& ShmBoard::ControlOf(int rank) const {
  return *reinterpret_cast<Control*>(memory_.data() +
                                     static_cast<std::size_t>(rank) * ShmGeometry::kControlBytes);
}

std::byte* ShmBoard::Slot(int rank, std::uint64_t step) const {
  const std::size_t index =
      static_cast<std::size_t>(rank) * ShmGeometry::kSlots + step % ShmGeometry::kSlots;
  return memory_.data() + geometry_.ControlEnd() + index * geometry_.slot_bytes;
}

void ShmBoard::Publish() {
  ++step_;
  seen_ = 0;
  // Sequentially consistent with PrepareSleep: either we see that a peer sleeps, or it sees this.
  ControlOf(rank_).published.store(step_, std::memory_order_seq_cst);
  for (int peer = 0; peer < size(); ++peer) {
    std::atomic<std::uint32_t>& sleeping = ControlOf(peer).sleeping;
    if (sleeping.load(std::memory_order_seq_cst) != static_cast<std::uint32_t>(rank_) + 1) continue;
    sleeping.store(0, std::memory_order_seq_cst);
    FutexWake(AddressOf(sleeping), INT_MAX);
  }
}

bool ShmBoard::HasPublished(int rank, std::uint64_t step) const {
  // Sequentially consistent for Sleep: must not pass the store of `sleeping`. Costs nothing here.
  return ControlOf(rank).published.load(std::memory_order_seq_cst) >= step;
}

bool ShmBoard::HasChecksums(int rank) const {
  return ControlOf(rank).checksums.load(std::memory_order_relaxed) != 0;
}

int ShmBoard::FirstMissing() const {
  while (seen_ < size() && HasPublished(seen_, step_)) ++seen_;
  return seen_ < size() ? seen_ : -1;
}

void ShmBoard::PrepareSleep(int missing) {
  ControlOf(rank_).sleeping.store(static_cast<std::uint32_t>(missing) + 1,
                                  std::memory_order_seq_cst);
}

void ShmBoard::SleepUntilWoken(int missing, Duration slice) {
  FutexWait(AddressOf(ControlOf(rank_).sleeping), static_cast<std::uint32_t>(missing) + 1, slice);
}

void ShmBoard::FinishSleep() { ControlOf(rank_).sleeping.store(0, std::memory_order_relaxed); }

void ShmBoard::WakeSelf() {
  std::atomic<std::uint32_t>& sleeping = ControlOf(rank_).sleeping;
  sleeping.store(0, std::memory_order_seq_cst);
  FutexWake(AddressOf(sleeping), INT_MAX);
}

}  // namespace resilient
