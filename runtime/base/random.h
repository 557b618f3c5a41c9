#pragma once

#include <cstdint>
#include <string>

namespace resilient {

// Seeded generator for jitter (splitmix64). Thread: caller-synchronised. Pure given its seed.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t Next();
  std::uint64_t Below(std::uint64_t bound);  // In [0, bound). REQUIRES: bound > 0.
  double Unit();                             // In [0, 1).

 private:
  std::uint64_t state_;
};

// From the kernel: 128 bits as 32 hexadecimal digits, for ids and secrets.
std::string RandomHexId();
std::uint64_t RandomSeed();

}  // namespace resilient
