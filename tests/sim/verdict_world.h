#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <resilient/clock.h>

#include "runtime/base/log.h"

namespace resilient::store::sim {

// Of the settings of all ranks. What a device does before an operation takes less than the latter
// each, and more together.
inline constexpr Duration kVerdictStall = std::chrono::seconds(45);
inline constexpr Duration kVerdictDeviceStall = std::chrono::seconds(15);

// What is not counted yet is 0.
template <typename Key>
std::uint64_t CountOf(const std::map<Key, std::uint64_t>& counts,
                      const std::type_identity_t<Key>& key) {
  const auto count = counts.find(key);
  return count == counts.end() ? 0 : count->second;
}

// The ranks of a VerdictSim: their programs, and how far each has come in its own. VerdictSim moves
// them, VerdictOracle judges by them. Owner: the VerdictSim. Thread: its only one. Value type.
struct VerdictWorld {
  enum class Kind : std::uint8_t {
    kAll,        // Every rank hears of every other one.
    kDevice,     // As kAll, once the rank's device has begun it.
    kChain,      // A word goes along the ranks and back; none ends before all have entered.
    kBroadcast,  // From the first rank of the group, which ends at once.
    kSend,
    kLargeSend,  // Ends when the receiver has begun its recv.
    kRecv
  };
  struct Step {
    Kind kind = Kind::kAll;
    int group = 0;
    std::uint64_t seq = 0;  // Of a collective, in its group.
    int peer = -1;

    bool IsMessage() const { return peer >= 0; }
    bool IsSameCollective(const Step& other) const {
      return group == other.group && seq == other.seq;
    }
  };
  // What runs the operations of one rank. It is given one at a time.
  struct Device {
    bool hangs = false;
    std::map<int, std::uint64_t> begun;  // By group.
    Instant given{};                     // The latest.
    Instant moved{};                     // It has begun or finished something.
  };
  struct Rank {
    std::vector<Step> steps;
    std::size_t at = 0;
    bool in_call = false;
    Instant since{};
    std::map<int, std::uint64_t> entered;  // By group.
    std::map<int, std::uint64_t> sent;     // By peer.
    std::map<int, std::uint64_t> begun;    // Recvs, by peer.
    std::map<int, std::uint64_t> arrived;  // Messages, by peer.
    std::map<int, std::uint64_t> wanted;   // By peer: recvs there that it has heard of.
    std::map<std::pair<int, int>, std::uint64_t> heard;   // By group and rank: entered there.
    std::map<std::pair<int, int>, std::uint64_t> passed;  // By group and neighbour: the word.
    Device device;
    std::map<std::pair<int, int>, std::uint64_t> submitted;  // By group and rank: heard of there.
    std::map<int, std::vector<int>> made;  // By group: of other ranks than the others have.
    bool spins = false;
    Instant acted{};  // The program has done something.

    // Not of one that IsAtEnd.
    const Step& Current() const { return steps[at]; }
    bool IsAtEnd() const { return at == steps.size(); }
    // Its device has not begun the operation that it is in.
    bool IsQueued() const;
  };

  Rank& Of(int rank) { return ranks[static_cast<std::size_t>(rank)]; }
  const Rank& Of(int rank) const { return ranks[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(ranks.size()); }
  const std::vector<int>& MembersOf(int group) const {
    return groups[static_cast<std::size_t>(group)];
  }
  // As `rank` has made it.
  const std::vector<int>& MadeBy(int rank, int group) const {
    const auto made = Of(rank).made.find(group);
    return made == Of(rank).made.end() ? MembersOf(group) : made->second;
  }
  // Both have made it, and of different ranks: nothing of it comes from one to the other.
  bool AreOfOtherRanks(int one, int other, int group) const;
  static std::string NameOf(int group) { return StrCat("g", group); }
  static int NumberOf(const std::string& group) { return std::stoi(group.substr(1)); }
  // By the rank's own list.
  int PlaceIn(int group, int rank) const;
  // Of a rank in a call: ranks that it has not heard of in it, as a communicator would tell.
  std::vector<int> MissingOf(int rank) const;

  std::vector<std::vector<int>> groups;  // 0: all ranks.
  std::vector<Rank> ranks;
};

}  // namespace resilient::store::sim
