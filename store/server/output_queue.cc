#include "store/server/output_queue.h"

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"

namespace resilient::store {

void OutputQueue::Append(std::shared_ptr<const std::string> shared) {
  if (shared->size() < kSharedBytesMin) {
    tail() += *shared;
    return;
  }
  parts_.push_back({std::move(shared), 0, {}});
}

std::size_t OutputQueue::bytes() const {
  std::size_t bytes = front_.size();
  for (const Part& part : parts_) bytes += part.shared->size() - part.taken + part.behind.size();
  return bytes;
}

std::size_t OutputQueue::memory_bytes() const {
  std::size_t bytes = front_.size();
  for (const Part& part : parts_) {
    const auto holders = static_cast<std::size_t>(part.shared.use_count());
    bytes += part.shared->size() / holders + part.behind.size();
  }
  return bytes;
}

void OutputQueue::JoinStep(std::size_t most) {
  if (front_.empty() || parts_.empty()) return;
  std::string own = std::exchange(front_, {});
  own += TakeStep(most);
  front_.insert(0, own);
}

std::string_view OutputQueue::next_shared() const {
  RESILIENT_CHECK(front_.empty() && !parts_.empty());
  const Part& part = parts_.front();
  return std::string_view(*part.shared).substr(part.taken);
}

void OutputQueue::DropShared(std::size_t bytes) {
  RESILIENT_CHECK(bytes <= next_shared().size());
  Part& part = parts_.front();
  part.taken += bytes;
  if (part.taken < part.shared->size()) return;
  front_ = std::move(part.behind);
  parts_.pop_front();
}

std::string OutputQueue::TakeStep(std::size_t most) {
  std::string step(next_shared().substr(0, most));
  DropShared(step.size());
  return step;
}

}  // namespace resilient::store
