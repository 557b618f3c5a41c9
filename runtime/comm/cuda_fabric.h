#pragma once

#include <functional>
#include <memory>

#include <resilient/device.h>
#include <resilient/transports.h>

#include "runtime/comm/nccl_library.h"

namespace resilient {

// Where a CUDA fabric has what it needs from. Thread: value type.
struct CudaSources {
  // Once, at the first operation on a device; the second where everything goes through the host.
  std::function<Result<NcclLibrary>()> load;
  std::function<Result<CudaApi>()> load_cuda;
  std::function<DeviceClaim(int device)> claim;  // What this rank says of a device that it uses.
};

// MakeCudaFabric with `sources` in place of what the process and its host have.
Result<std::unique_ptr<CommunicatorFactory>> MakeCudaFabric(CpuFabricOptions cpu,
                                                            CudaFabricOptions cuda,
                                                            CudaSources sources, const Clock& clock,
                                                            CommunicatorEvents& events);

}  // namespace resilient
