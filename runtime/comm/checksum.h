#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace resilient {

// The checksum of what ranks send each other: XXH3 of 64 bits, the same on all machines. It finds
// what memory, adapters and networks change by accident; who changes bytes on purpose can make it
// fit.
std::uint64_t ChecksumOf(std::span<const std::byte> bytes);

// The checksum of bytes that come in pieces. Takes memory when it is first used.
// Thread: caller-synchronised.
class RunningChecksum {
 public:
  RunningChecksum();
  ~RunningChecksum();
  RunningChecksum(const RunningChecksum&) = delete;
  RunningChecksum& operator=(const RunningChecksum&) = delete;

  // Forgets what came before. Must come first.
  void Begin();
  void Update(std::span<const std::byte> bytes);
  // Of all bytes since Begin: as ChecksumOf would say.
  std::uint64_t Value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace resilient
