#pragma once

#include <memory>

#include <resilient/clock.h>
#include <resilient/communicator.h>

#include "runtime/comm/nccl_communicator.h"
#include "runtime/comm/staged_calls.h"

namespace resilient {

// The way through memory of the host, for one device: operations on it are cut into pieces, which
// the CPU transport runs in pinned buffers while those before and behind them are copied. One
// thread makes all calls into CUDA. Of `options` nothing of NCCL's is used. Else as MakeNcclFabric.
std::unique_ptr<CommunicatorFactory> MakeStagedFabric(const NcclFabricOptions& options,
                                                      CommunicatorFactory& control,
                                                      std::shared_ptr<ControlWaits> waits,
                                                      std::shared_ptr<StagedCalls> calls,
                                                      const Clock& clock,
                                                      CommunicatorEvents& events);

// What a rank says of itself that goes this way.
inline constexpr char kStagedWay[] = "memory of the host";

}  // namespace resilient
