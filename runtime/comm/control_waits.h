#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <resilient/clock.h>
#include <resilient/waiting.h>

namespace resilient {

// Which ranks the control groups wait for, as the CPU transport tells it: for the communicator that
// stands on one, whose operations wait for the same ranks. Owner: shared by the CUDA fabric and its
// loops. Thread: thread-safe.
class ControlWaits {
 public:
  void Note(const std::string& group, std::uint64_t generation, std::vector<int> missing,
            Instant now) {
    const std::lock_guard lock(mutex_);
    told_[{group, generation}] = {std::move(missing), now};
  }
  // Ranks of the world; empty: nothing has been told within kWaitingLife.
  std::vector<int> Missing(const std::string& group, std::uint64_t generation, Instant now) const {
    const std::lock_guard lock(mutex_);
    const auto told = told_.find({group, generation});
    const bool fresh = told != told_.end() && now - told->second.second < kWaitingLife;
    return fresh ? told->second.first : std::vector<int>{};
  }
  void Forget(const std::string& group, std::uint64_t generation) {
    const std::lock_guard lock(mutex_);
    told_.erase({group, generation});
  }

 private:
  mutable std::mutex mutex_;
  // By group and generation. Guarded by mutex_.
  std::map<std::pair<std::string, std::uint64_t>, std::pair<std::vector<int>, Instant>> told_;
};

}  // namespace resilient
