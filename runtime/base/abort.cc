#include <resilient/abort.h>

#include <utility>

#include "runtime/base/check.h"

namespace resilient {

bool AbortCell::Set(Status cause) {
  RESILIENT_CHECK(!cause.ok());
  std::vector<std::function<void()>> listeners;
  {
    std::lock_guard lock(mutex_);
    if (set_.load(std::memory_order_relaxed)) return false;
    cause_ = std::move(cause);
    set_.store(true, std::memory_order_seq_cst);  // Before what the listeners touch: see IsSet.
    listeners.swap(listeners_);
  }
  // Outside the lock: a listener takes the lock of the waiter that it wakes.
  for (const auto& listener : listeners) listener();
  return true;
}

Status AbortCell::cause() const {
  std::lock_guard lock(mutex_);
  return cause_;
}

void AbortCell::Listen(std::function<void()> listener) {
  {
    std::lock_guard lock(mutex_);
    if (!set_.load(std::memory_order_relaxed)) {
      listeners_.push_back(std::move(listener));
      return;
    }
  }
  listener();
}

}  // namespace resilient
