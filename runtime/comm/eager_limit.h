#pragma once

#include <cstddef>
#include <memory>

#include <resilient/transports.h>

namespace resilient {

// Bytes of messages that a rank sends to another before their recvs are there; see PointToPoint.
inline constexpr std::size_t kEagerLimitBytes = 64u << 20;

// MakeCpuFabric with another limit, the same on all ranks. Tests announce small messages by it.
Result<std::unique_ptr<CommunicatorFactory>> MakeCpuFabricWithEagerLimit(CpuFabricOptions options,
                                                                         const Clock& clock,
                                                                         CommunicatorEvents& events,
                                                                         std::size_t eager_limit);

}  // namespace resilient
