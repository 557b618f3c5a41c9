#include "runtime/base/random.h"

#include <sys/random.h>

#include <cerrno>
#include <cstddef>

#include "runtime/base/check.h"

namespace resilient {
namespace {

void FillFromKernel(void* data, std::size_t size) {
  auto* next = static_cast<unsigned char*>(data);
  while (size > 0) {
    const ssize_t got = getrandom(next, size, 0);
    if (got < 0) {
      RESILIENT_CHECK(errno == EINTR);
      continue;
    }
    next += got;
    size -= static_cast<std::size_t>(got);
  }
}

}  // namespace

std::uint64_t Random::Next() {
  state_ += 0x9e3779b97f4a7c15ULL;
  std::uint64_t mixed = state_;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebULL;
  return mixed ^ (mixed >> 31);
}

std::uint64_t Random::Below(std::uint64_t bound) {
  RESILIENT_CHECK(bound > 0);
  // The lowest 2^64 mod bound values are drawn again: without that small results would be likelier.
  const std::uint64_t redraw_below = (0 - bound) % bound;
  std::uint64_t drawn = Next();
  while (drawn < redraw_below) drawn = Next();
  return drawn % bound;
}

double Random::Unit() { return static_cast<double>(Next() >> 11) * 0x1.0p-53; }

std::string RandomBytes(std::size_t count) {
  std::string raw(count, '\0');
  FillFromKernel(raw.data(), raw.size());
  return raw;
}

std::string RandomHex(std::size_t bytes) {
  const std::string raw = RandomBytes(bytes);
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes);
  for (const char byte : raw) {
    text.push_back(kDigits[static_cast<unsigned char>(byte) >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

std::uint64_t RandomSeed() {
  std::uint64_t seed = 0;
  FillFromKernel(&seed, sizeof seed);
  return seed;
}

}  // namespace resilient
