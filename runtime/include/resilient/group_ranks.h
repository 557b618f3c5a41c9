#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace resilient {

// A text about the ranks of a group is not longer, and a place in the program is cut to the latter.
inline constexpr std::size_t kRanksTextMax = 200;
inline constexpr std::size_t kMadeAtMax = 120;

// Of which ranks a process has made a group, in short: what two ranks of a group compare before
// they do anything in it. Thread: value type.
struct GroupRanks {
  // Of the ranks of the world in group order: the same where members and order are the same. 0: not
  // known.
  std::uint64_t digest = 0;
  std::string text;     // The same for people: "0,1,5-9".
  std::string made_at;  // "train.py:301 main": where the program made the group. May be empty.

  // Both are known and differ. The places in the program may.
  bool Contradicts(const GroupRanks& other) const {
    return digest != 0 && other.digest != 0 && digest != other.digest;
  }
};

// `ranks`: of the world, in group order.
GroupRanks RanksOfGroup(std::span<const int> ranks, std::string made_at);

}  // namespace resilient
