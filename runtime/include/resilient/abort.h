#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include <resilient/status.h>

namespace resilient {

// The reason why everything of one generation ends: written once, the first writer wins, read by
// every wait. Owner: shared by the Session and the communicators of one generation. Thread:
// thread-safe.
class AbortCell {
 public:
  AbortCell() = default;
  AbortCell(const AbortCell&) = delete;
  AbortCell& operator=(const AbortCell&) = delete;

  // True when this call set the reason. Listeners run on the calling thread, once, outside the
  // lock. REQUIRES: !cause.ok().
  bool Set(Status cause);

  // Sequentially consistent, as Set is: a waiter that first marks itself asleep and then looks here
  // either sees the reason, or its mark is seen by the listener that wakes it, if both touch the
  // mark sequentially consistently. By less the look may pass the mark, and the wake-up be missed.
  bool IsSet() const { return set_.load(std::memory_order_seq_cst); }

  // OK until Set.
  Status cause() const;

  // `listener` runs once when the cell is set; at once if it already is. It must not block: it
  // wakes a waiter.
  void Listen(std::function<void()> listener);

 private:
  std::atomic<bool> set_{false};
  mutable std::mutex mutex_;
  Status cause_;                                  // Guarded by mutex_.
  std::vector<std::function<void()>> listeners_;  // Guarded by mutex_.
};

// Asked by every wait of a caller's thread at least every kInterruptPollInterval: OK to go on
// waiting, else the wait ends with that status (kInterrupted for Ctrl-C). Must be callable from any
// thread; empty = never interrupted.
using InterruptCheck = std::function<Status()>;

constexpr int kInterruptPollMs = 100;

}  // namespace resilient
