#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace resilient {

// What the two ends of a ring tell each other, in memory that they share. Indices count bytes from
// the beginning of time. Each line is written by one side, but for the clearing of a flag.
struct ShmRingControl {
  alignas(64) std::atomic<std::uint64_t> written;
  std::atomic<std::uint32_t> closed;  // Nothing follows what is written.
  alignas(64) std::atomic<std::uint64_t> read;
  // Set by who sleeps, before its last look; cleared by who then wakes it, or by itself.
  alignas(64) std::atomic<std::uint32_t> reader_sleeps;
  alignas(64) std::atomic<std::uint32_t> writer_sleeps;
};
static_assert(sizeof(ShmRingControl) == 256);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// The two ends of a queue of bytes in shared memory. Neither trusts the other: each keeps its own
// index, and takes the other's only where it makes sense, so that nothing outside of `data` is ever
// touched. Sleeping itself is the owner's: these say whether the other side is to be woken.
//
// Owner: a ShmStream. Thread: one thread at an end. Lifetime: control and data outlive both.
class ShmRingWriter {
 public:
  // `data`: a power of two. The control is zeroed, but for a reader_sleeps of 1.
  ShmRingWriter(ShmRingControl& control, std::span<std::byte> data)
      : control_(control), data_(data) {}

  // Bytes that Append may take; nullopt when the reader's index makes no sense.
  std::optional<std::size_t> Room();
  // REQUIRES: `bytes` is within Room().
  void Append(std::span<const std::byte> bytes);
  // The reader may have what was appended.
  void Publish();
  // Nothing follows. The reader is to be woken whether it sleeps or not: it may wait for just this.
  void Close() { control_.closed.store(1, std::memory_order_seq_cst); }
  std::size_t unpublished() const { return static_cast<std::size_t>(written_ - published_); }
  // After Publish: whether the reader sleeps; it is to be woken then, and said only once.
  bool TakeSleeper();

  // From here to WakeUp the reader says when there is room. Room() is to be looked at once more.
  void PrepareSleep() { control_.writer_sleeps.store(1, std::memory_order_seq_cst); }
  void WakeUp();

 private:
  ShmRingControl& control_;
  const std::span<std::byte> data_;
  std::uint64_t written_ = 0;
  std::uint64_t published_ = 0;
};

class ShmRingReader {
 public:
  ShmRingReader(ShmRingControl& control, std::span<const std::byte> data)
      : control_(control), data_(data) {}

  // Bytes that Take may give; nullopt when the writer's index makes no sense.
  std::optional<std::size_t> Available();
  // Whether the writer has closed the ring. What Available() says from then on is final.
  bool Closed() const { return control_.closed.load(std::memory_order_seq_cst) != 0; }
  // REQUIRES: `bytes` is within Available().
  void Take(std::span<std::byte> bytes);
  // The writer may have the room of what was taken.
  void Publish();
  std::size_t unpublished() const { return static_cast<std::size_t>(read_ - published_); }
  // After Publish: whether the writer sleeps and has room enough by now to be worth waking. Said
  // only once.
  bool TakeSleeper();

  void PrepareSleep() { control_.reader_sleeps.store(1, std::memory_order_seq_cst); }
  void WakeUp();

 private:
  ShmRingControl& control_;
  const std::span<const std::byte> data_;
  std::uint64_t read_ = 0;
  std::uint64_t published_ = 0;
  std::uint64_t available_up_to_ = 0;  // The writer's index as last seen.
};

}  // namespace resilient
