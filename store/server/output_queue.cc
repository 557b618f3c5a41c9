#include "store/server/output_queue.h"

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"

namespace resilient::store {
namespace {

constexpr std::size_t kWorthSharing = 4u << 10;

}  // namespace

void OutputQueue::Append(std::shared_ptr<const std::string> shared) {
  if (shared->size() < kWorthSharing) {
    tail() += *shared;
    return;
  }
  if (!parts_.empty()) behind_bytes_ += parts_.back().behind.size();
  shared_bytes_ += shared->size();
  parts_.push_back({std::move(shared), 0, {}});
}

std::size_t OutputQueue::own_bytes() const {
  return front_.size() + behind_bytes_ + (parts_.empty() ? 0 : parts_.back().behind.size());
}

std::string OutputQueue::TakeShared() {
  RESILIENT_CHECK(front_.empty() && !parts_.empty());
  Part& part = parts_.front();
  const std::size_t step = std::min(kSharedStep, part.shared->size() - part.taken);
  std::string bytes = part.shared->substr(part.taken, step);
  part.taken += step;
  shared_bytes_ -= step;
  if (part.taken == part.shared->size()) {
    front_ = std::move(part.behind);
    if (parts_.size() > 1) behind_bytes_ -= front_.size();
    parts_.pop_front();
  }
  return bytes;
}

}  // namespace resilient::store
