#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include <resilient/waiting.h>

namespace resilient {

// Which operation of the program's each one is a piece of that a group of the CPU transport runs in
// the place of a device. For what is told of a wait, which who compares it with the calls of the
// program wants by its numbers. Owner: shared by the CUDA fabric and its loops. Thread:
// thread-safe.
class StagedCalls {
 public:
  struct Call {
    std::uint64_t seq = 0;
    std::string what;
    std::string call_site;
  };

  void Begin(const std::string& group, std::uint64_t generation, bool point_to_point,
             std::uint64_t piece, std::shared_ptr<const Call> call) {
    const std::lock_guard lock(mutex_);
    calls_[{group, generation, point_to_point, piece}] = std::move(call);
  }
  void End(const std::string& group, std::uint64_t generation, bool point_to_point,
           std::uint64_t piece) {
    const std::lock_guard lock(mutex_);
    calls_.erase({group, generation, point_to_point, piece});
  }
  // What is told of pieces becomes what is to be told of their operations, each once.
  void Translate(const std::string& group, std::uint64_t generation,
                 std::vector<WaitingOperation>* waiting) const {
    const std::lock_guard lock(mutex_);
    if (calls_.empty()) return;
    const Call* last = nullptr;
    std::erase_if(*waiting, [&](WaitingOperation& one) {
      const auto found = calls_.find({group, generation, one.point_to_point, one.seq});
      if (found == calls_.end()) return false;
      const bool told = found->second.get() == last;
      last = found->second.get();
      one.seq = last->seq;
      one.behind = 0;  // Of pieces.
      one.what = last->what;
      one.call_site = last->call_site;
      return told;
    });
  }

 private:
  using Key = std::tuple<std::string, std::uint64_t, bool, std::uint64_t>;
  mutable std::mutex mutex_;
  std::map<Key, std::shared_ptr<const Call>> calls_;  // Guarded by mutex_.
};

}  // namespace resilient
