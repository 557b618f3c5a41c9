#include <resilient/launch_mark.h>

#include <thread>

#include "runtime/base/spin.h"

namespace resilient {
namespace {

// 30 to 100 us, as long as the core's pause takes: several launches of small operations.
constexpr unsigned kMarkSpins = 2000;
// Others may want the core after all.
constexpr unsigned kSpinsPerYield = 50;

}  // namespace

void LaunchMark::NoteCaptured() {
  const std::lock_guard lock(mutex_);
  captured_ = true;
}

bool LaunchMark::captured() const {
  const std::lock_guard lock(mutex_);
  return captured_;
}

void LaunchMark::ExpectSoon() { soon_.store(true, std::memory_order_relaxed); }

void LaunchMark::Launch(const Joiner& joiner, void* event) {
  const std::lock_guard lock(mutex_);
  joiner_ = &joiner;
  event_ = event;
  told_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void LaunchMark::End() {
  const std::lock_guard lock(mutex_);
  joiner_ = nullptr;
  event_ = nullptr;
  told_.store(true, std::memory_order_release);
  ended_ = true;
  changed_.notify_all();
}

bool LaunchMark::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

bool LaunchMark::WaitFor(Duration slice) const {
  const auto told = [this] { return told_.load(std::memory_order_acquire); };
  const unsigned spins = soon_.load(std::memory_order_relaxed) ? kMarkSpins : 0;
  for (unsigned i = 0; i < spins && !told(); ++i) {
    if (i % kSpinsPerYield != 0) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, slice, told);
}

// Under the lock: End waits for it, and so the event is still that of this operation.
Status LaunchMark::Join(ExecutionStream stream) const {
  const std::lock_guard lock(mutex_);
  return joiner_ == nullptr ? Status::Ok() : joiner_->Join(event_, stream);
}

}  // namespace resilient
