#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace resilient::recovery {

// Which threads of this process have submitted operations, by the kernel's ids. Kept is who
// submitted the latest kSubmittersKept times that the submitting thread changed. Calls that race
// may be kept in either order, until the next one of each of them.
//
// Owner: the observer. Thread: thread-safe, without a lock. In a forked child the parent's threads
// are still listed: they are no threads of the child, and match none.
class Submitters {
 public:
  // The calling thread submits an operation. Two loads, where it submitted the last one as well.
  void Note();

  // Each one once, the latest first.
  std::vector<int> Latest() const;

 private:
  static constexpr std::size_t kSubmittersKept = 64;

  std::array<std::atomic<int>, kSubmittersKept> changes_{};  // A ring. 0: nothing yet.
  std::atomic<std::uint64_t> count_{0};                      // Of all changes.
};

}  // namespace resilient::recovery
