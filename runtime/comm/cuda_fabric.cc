#include <utility>

#include <resilient/communicator.h>

namespace resilient {

Result<std::unique_ptr<CommunicatorFactory>> MakeCudaFabric(CpuFabricOptions cpu,
                                                            CudaFabricOptions /*cuda*/,
                                                            const Clock& clock,
                                                            CommunicatorEvents& events) {
  return MakeCpuFabric(std::move(cpu), clock, events);
}

}  // namespace resilient
