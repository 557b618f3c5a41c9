#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace resilient::recovery {

// An operation that a thread of the program is blocked in.
struct BlockedIn {
  std::string group;
  bool point_to_point = false;
  std::uint64_t seq = 0;  // 0: the collective that runs.
};

// The threads of the program that submit operations to one session, and which of them are blocked.
// A rank counts as blocked only when all of them are: any other may still do what its peers wait
// for. A thread that ends is forgotten. Owner: SessionImpl. Thread: thread-safe.
class Callers {
 public:
  Callers();

  // The calling thread is none of the program's, for its life: what it submits does not count.
  static void ExemptThisThread();
  // The calling thread submits operations. But for its first time one comparison.
  void Note();
  // The calling thread is blocked, until Unblock.
  void Block(BlockedIn in);
  void Unblock();

  struct Snapshot {
    bool all = false;  // There are threads, and all are blocked.
    std::vector<BlockedIn> blocked;
  };
  Snapshot Look() const;

  // Of one process's Callers: opaque, public for the threads' own records.
  struct Book;

 private:
  const std::shared_ptr<Book> book_;
};

}  // namespace resilient::recovery
