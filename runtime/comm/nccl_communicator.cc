#include "runtime/comm/nccl_communicator.h"

#include <utility>

#include "runtime/comm/nccl_group.h"
#include "runtime/comm/nccl_launch.h"
#include "runtime/comm/nccl_loop.h"

namespace resilient {

std::unique_ptr<CommunicatorFactory> MakeNcclFabric(const NcclFabricOptions& options,
                                                    CommunicatorFactory& control,
                                                    std::shared_ptr<ControlWaits> waits,
                                                    const Clock& clock,
                                                    CommunicatorEvents& events) {
  auto make = [](std::shared_ptr<GroupPort> port, NcclContext& context) {
    return std::make_unique<NcclGroup>(std::move(port), context);
  };
  auto check = [abilities = AbilitiesOf(options.nccl, options.cuda, options.device)](
                   const Operation& op) { return CheckNcclSupports(op, abilities); };
  return MakeDeviceFabric(options, control, std::move(waits), clock, events, std::move(make),
                          std::move(check));
}

}  // namespace resilient
