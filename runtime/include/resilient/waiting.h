#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <resilient/clock.h>

namespace resilient {

// An operation that waits is told to the membership service after this time, and again each time it
// has passed.
inline constexpr Duration kWaitTellAfter = std::chrono::seconds(1);
// What is not told again within this time is void: of a communicator to its session, and of a
// session to the membership service.
inline constexpr Duration kWaitingLife = Millis(2500);
// Of one group; the oldest are told.
inline constexpr std::size_t kWaitingOperationsMax = 64;

// An operation of this rank that has been in flight for kWaitTellAfter. Thread: value type.
struct WaitingOperation {
  std::uint64_t seq = 0;        // As Submit returned it.
  bool point_to_point = false;  // Else a collective: the two count apart.
  std::string
      what;  // As Describe: "all_reduce(float32[4], sum)", "recv(float32[4], from 2, tag 7)"
  std::string call_site;  // Operation's; may be empty.
  Duration age{};         // Since it was submitted.
  // Ranks of the world that are not known to have entered it, ascending: of a recv its sender, of a
  // send that nobody takes its receiver; while the links are being made those that this rank has
  // none to yet. Empty: all have entered, data moves or should.
  std::vector<int> missing;
  bool any = false;  // One of `missing` is enough: a recv from any rank.
};

}  // namespace resilient
