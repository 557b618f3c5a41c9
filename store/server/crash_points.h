#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace resilient::store {

// For tests: ends the process as kill -9 would, at the n-th of the points that it passes on the way
// of a change to the disk. Owner: the serve command. Thread: thread-safe.
class CrashPoints {
 public:
  static constexpr int kExitCode = 137;  // As a shell reports SIGKILL.

  // 0: never.
  explicit CrashPoints(std::uint64_t at = 0) : at_(at) {}

  void Pass() {
    if (at_ != 0 && passed_.fetch_add(1) + 1 == at_) _exit(kExitCode);
  }

 private:
  const std::uint64_t at_;
  std::atomic<std::uint64_t> passed_ = 0;
};

}  // namespace resilient::store
