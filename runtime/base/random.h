#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace resilient {

// Seeded generator for jitter (splitmix64), and for nothing that is to be kept secret: one number
// gives all that follow. Thread: caller-synchronised. Pure given its seed.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t Next();
  std::uint64_t Below(std::uint64_t bound);  // In [0, bound). REQUIRES: bound > 0.
  double Unit();                             // In [0, 1).

 private:
  std::uint64_t state_;
};

// From the kernel, for nonces.
std::string RandomBytes(std::size_t count);
// From the kernel, two hexadecimal digits a byte, for ids and secrets.
std::string RandomHex(std::size_t bytes);
inline std::string RandomHexId() { return RandomHex(16); }
std::uint64_t RandomSeed();

}  // namespace resilient
