#include "store/server/descriptors.h"

#include <sys/resource.h>

#include <algorithm>

namespace resilient::store {
namespace {

// The descriptor limit, raised to `wanted` or as far as this process may.
std::size_t RaiseDescriptorLimit(rlim_t wanted) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  wanted = std::min(limit.rlim_max, wanted);
  if (limit.rlim_cur < wanted) {
    rlimit raised = limit;
    raised.rlim_cur = wanted;
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  return static_cast<std::size_t>(limit.rlim_cur);
}

}  // namespace

std::size_t MakeRoomForConnections(std::size_t wanted) {
  constexpr std::size_t kReserve = kDescriptorReserve + kAdminReserve;
  const std::size_t descriptors = RaiseDescriptorLimit(wanted + kReserve);
  const std::size_t possible = descriptors > 2 * kReserve ? descriptors - kReserve : kReserve;
  return std::min(possible, wanted);
}

}  // namespace resilient::store
