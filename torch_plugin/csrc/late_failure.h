#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include <resilient/status.h>

namespace resilient::plugin {

// The first failure of an operation on a device that ended behind a wait() which had let the
// program go on, and that fenced nobody: the program hears of it by what it calls next. Of one
// epoch of the session: what a fence has ended the session itself says, until it is acknowledged.
//
// Owner: shared by the context and what is in flight. Thread: thread-safe.
class LateFailure {
 public:
  void Note(const Status& status, std::uint64_t epoch) {
    const std::lock_guard lock(mutex_);
    if (!status_.ok() && epoch_ == epoch) return;
    status_ = status;
    epoch_ = epoch;
    any_.store(true);
  }
  bool any() const { return any_.load(std::memory_order_relaxed); }
  // That of `epoch`, once.
  Status Take(std::uint64_t epoch) {
    const std::lock_guard lock(mutex_);
    any_.store(false);
    const Status status = status_;
    status_ = Status::Ok();
    return epoch_ == epoch ? status : Status::Ok();
  }

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::uint64_t epoch_ = 0;  // Guarded by mutex_.
  Status status_;            // Guarded by mutex_.
};

}  // namespace resilient::plugin
