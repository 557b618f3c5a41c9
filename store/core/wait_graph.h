#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace resilient::store {

// One call in which a thread of a rank is blocked. Thread: value type.
struct BlockedCall {
  std::string group;
  std::uint64_t seq = 0;
  std::string what;          // "all_reduce(float32[4], sum) at train.py:7"
  std::vector<int> missing;  // Ranks (of the world) that have not entered it. Empty: data moves.
  bool any = false;          // One of them is enough: a recv from any rank.
};

// A rank whose main thread is blocked, with the calls of all its threads that are.
struct BlockedRank {
  int rank = -1;
  std::vector<BlockedCall> calls;
};

// "Rank `from`, in `call`, waits for rank `to`."
struct WaitEdge {
  int from = -1;
  int to = -1;
  BlockedCall call;
};

// A circle of ranks that wait for each other, of which none can go on whatever the other ranks do;
// empty: there is none. It begins at its lowest rank, and is the same for the same input in any
// order. Who is not among `blocked` is expected to come.
//
// By reduction of the wait-for graph (Holt, "Some deadlock properties of computer systems", ACM
// Computing Surveys 4(3), 1972): a rank goes on once one of its calls does, a call once all missing
// ranks may still come, or one of them where one is enough. Those that are left over are
// deadlocked. A report is as old as its way here: ask twice, and believe what was said both times.
// Pure. Time: linear in the missing ranks of all calls.
std::vector<WaitEdge> FindCircle(const std::vector<BlockedRank>& blocked);

}  // namespace resilient::store
