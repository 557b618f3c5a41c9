#include <resilient/launch_mark.h>

namespace resilient {

void LaunchMark::NoteCaptured() {
  const std::lock_guard lock(mutex_);
  captured_ = true;
}

bool LaunchMark::captured() const {
  const std::lock_guard lock(mutex_);
  return captured_;
}

void LaunchMark::Launch(const Joiner& joiner, void* event) {
  const std::lock_guard lock(mutex_);
  joiner_ = &joiner;
  event_ = event;
  told_ = true;
  changed_.notify_all();
}

void LaunchMark::End() {
  const std::lock_guard lock(mutex_);
  joiner_ = nullptr;
  event_ = nullptr;
  told_ = true;
  ended_ = true;
  changed_.notify_all();
}

bool LaunchMark::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

bool LaunchMark::WaitFor(Duration slice) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, slice, [this] { return told_; });
}

// Under the lock: End waits for it, and so the event is still that of this operation.
Status LaunchMark::Join(ExecutionStream stream) const {
  const std::lock_guard lock(mutex_);
  return joiner_ == nullptr ? Status::Ok() : joiner_->Join(event_, stream);
}

}  // namespace resilient
