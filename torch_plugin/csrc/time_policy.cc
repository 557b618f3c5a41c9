#include "torch_plugin/csrc/time_policy.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace resilient::plugin {

using std::chrono::milliseconds;

static_assert(kTorchDefaultTimeout == kBackendDefaultTimeout);

void TimePolicy::Bound(Operation& operation, milliseconds group_timeout,
                       milliseconds extension) const {
  const bool inherits = group_timeout == kTorchDefaultTimeout;
  const milliseconds timeout = inherits ? world_timeout : group_timeout;
  if (strict) operation.timeout = Saturated(timeout + extension);
  operation.stall = timeout == kTorchDefaultTimeout ? op_deadline : Saturated(timeout + extension);
}

TimeoutExtension::Lease::Lease(Lease&& other) noexcept
    : extension_(std::move(other.extension_)), total_(other.total_), owned_(other.owned_) {}

TimeoutExtension::Lease& TimeoutExtension::Lease::operator=(Lease&& other) noexcept {
  Release(false);
  extension_ = std::move(other.extension_);
  total_ = other.total_;
  owned_ = other.owned_;
  return *this;
}

void TimeoutExtension::Lease::Release(bool ended) {
  const std::shared_ptr<TimeoutExtension> extension = std::move(extension_);
  if (extension == nullptr) return;
  const std::lock_guard lock(extension->mutex_);
  extension->owned_ -= owned_;
  if (!ended) return;
  extension->active_ -= owned_;
  extension->any_.store(extension->active_ > milliseconds::zero(), std::memory_order_relaxed);
}

void TimeoutExtension::Add(milliseconds timeout) {
  if (timeout <= milliseconds::zero()) return;
  const std::lock_guard lock(mutex_);
  active_ += std::min(timeout, kExtensionMax - active_);
  any_.store(true, std::memory_order_relaxed);
}

TimeoutExtension::Lease TimeoutExtension::Take() {
  Lease lease;
  if (!any_.load(std::memory_order_relaxed)) return lease;
  const std::lock_guard lock(mutex_);
  lease.total_ = active_;
  lease.owned_ = active_ - owned_;
  if (lease.owned_ > milliseconds::zero()) lease.extension_ = shared_from_this();
  owned_ = active_;
  return lease;
}

}  // namespace resilient::plugin
