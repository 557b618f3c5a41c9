#include "runtime/comm/shm_ring.h"

#include <algorithm>
#include <cstring>

#include "runtime/base/check.h"

// Sequentially consistent on both sides: an end publishes its index and then looks whether the
// other sleeps; who wants to sleep says so and then looks at the index. One of them sees the other.

namespace resilient {
namespace {

// Clears a flag of who sleeps; whether it was set. Whoever clears it wakes, so that a flag which
// was set anew in between is not lost.
bool TakeFlag(std::atomic<std::uint32_t>& flag) {
  if (flag.load(std::memory_order_seq_cst) == 0) return false;
  flag.store(0, std::memory_order_seq_cst);
  return true;
}

void ClearFlag(std::atomic<std::uint32_t>& flag) {
  if (flag.load(std::memory_order_relaxed) != 0) flag.store(0, std::memory_order_relaxed);
}

}  // namespace

std::optional<std::size_t> ShmRingWriter::Room() {
  const std::uint64_t read = control_.read.load(std::memory_order_seq_cst);
  if (read > written_ || written_ - read > data_.size()) return std::nullopt;
  return data_.size() - static_cast<std::size_t>(written_ - read);
}

void ShmRingWriter::Append(std::span<const std::byte> bytes) {
  RESILIENT_CHECK(bytes.size() <= data_.size());
  const std::size_t at = static_cast<std::size_t>(written_ & (data_.size() - 1));
  const std::size_t first = std::min(bytes.size(), data_.size() - at);
  std::memcpy(data_.data() + at, bytes.data(), first);
  std::memcpy(data_.data(), bytes.data() + first, bytes.size() - first);
  written_ += bytes.size();
}

void ShmRingWriter::Publish() {
  published_ = written_;
  control_.written.store(written_, std::memory_order_seq_cst);
}

bool ShmRingWriter::TakeSleeper() { return TakeFlag(control_.reader_sleeps); }

void ShmRingWriter::WakeUp() { ClearFlag(control_.writer_sleeps); }

std::optional<std::size_t> ShmRingReader::Available() {
  available_up_to_ = control_.written.load(std::memory_order_seq_cst);
  if (available_up_to_ < read_ || available_up_to_ - read_ > data_.size()) return std::nullopt;
  return static_cast<std::size_t>(available_up_to_ - read_);
}

void ShmRingReader::Take(std::span<std::byte> bytes) {
  RESILIENT_CHECK(bytes.size() <= data_.size());
  const std::size_t at = static_cast<std::size_t>(read_ & (data_.size() - 1));
  const std::size_t first = std::min(bytes.size(), data_.size() - at);
  std::memcpy(bytes.data(), data_.data() + at, first);
  std::memcpy(bytes.data() + first, data_.data(), bytes.size() - first);
  read_ += bytes.size();
}

void ShmRingReader::Publish() {
  published_ = read_;
  control_.read.store(read_, std::memory_order_seq_cst);
}

bool ShmRingReader::TakeSleeper() {
  // One that is woken for every few bytes would copy no more than these before it sleeps again.
  // Who sleeps has filled the ring, so what was last seen of its index is where it stands.
  if (available_up_to_ - read_ > data_.size() / 2) return false;
  return TakeFlag(control_.writer_sleeps);
}

void ShmRingReader::WakeUp() { ClearFlag(control_.reader_sleeps); }

}  // namespace resilient
