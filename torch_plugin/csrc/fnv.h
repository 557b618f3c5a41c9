#pragma once

#include <cstdint>
#include <string_view>

namespace resilient::plugin {

// FNV-1a of 64 bits (Fowler, Noll, Vo), over eight bytes at a time where there are as many: for
// comparisons between equal programs, not against an opponent. Thread: value type.
class Fnv {
 public:
  // The length counts, so that texts do not run into each other.
  void Add(std::string_view text);
  void Add(std::uint64_t number) { value_ = (value_ ^ number) * 0x100000001b3; }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325;
};

}  // namespace resilient::plugin
