#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace resilient::recovery {

// An operation that a thread of the program is blocked in.
struct BlockedIn {
  std::string group;
  bool point_to_point = false;
  std::uint64_t seq = 0;  // 0: the collective that runs.
};

// The threads of the program that are blocked in an operation of one session. Nothing is kept of a
// thread that is not: who else may still submit one is seen by looking at all threads of the
// process (ThreadCensus), never concluded from who has submitted before. Owner: SessionImpl.
// Thread: thread-safe.
class Callers {
 public:
  // The calling thread is none of the program's, for its life: where it is blocked does not count.
  static void ExemptThisThread();
  // The calling thread is blocked, until Unblock. They may be nested.
  void Block(BlockedIn in);
  void Unblock();

  // Blocked threads, and what the census says of the others.
  struct Snapshot {
    bool all = false;  // No other thread may act before an operation in flight has ended.
    std::vector<BlockedIn> blocked;
    std::vector<int> threads = {};  // The kernel's ids of the blocked ones, ascending.
    std::int64_t in_flight = 0;     // Operations of this generation that have not ended.
    std::uint64_t token = 0;        // Census::token.
    std::string may_act = {};       // Census::may_act.
  };
  // Fills `blocked` and `threads`.
  Snapshot Look() const;

 private:
  mutable std::mutex mutex_;
  // By the kernel's id of the thread; the last one is what it is blocked in, as a handler of a
  // signal may have interrupted the others. Guarded by mutex_.
  std::map<int, std::vector<BlockedIn>> blocked_;
};

}  // namespace resilient::recovery
