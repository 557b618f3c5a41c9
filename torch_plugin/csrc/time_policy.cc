#include "torch_plugin/csrc/time_policy.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace resilient::plugin {

static_assert(kTorchDefaultTimeout == kBackendDefaultTimeout);

void TimePolicy::Bound(Operation& operation, std::chrono::milliseconds group_timeout) const {
  const bool inherits = group_timeout == kTorchDefaultTimeout;
  const std::chrono::milliseconds timeout = inherits ? world_timeout : group_timeout;
  if (strict) operation.timeout = timeout;
  operation.stall = timeout == kTorchDefaultTimeout ? op_deadline : Duration(timeout);
}

}  // namespace resilient::plugin
