#include "runtime/comm/nccl_communicator.h"

#include <utility>

#include "runtime/comm/fabric.h"
#include "runtime/comm/nccl_events.h"
#include "runtime/comm/nccl_group.h"
#include "runtime/comm/nccl_launch.h"
#include "runtime/comm/nccl_loop.h"

namespace resilient {

std::unique_ptr<CommunicatorFactory> MakeNcclFabric(const NcclFabricOptions& options,
                                                    CommunicatorFactory& control,
                                                    std::shared_ptr<ControlWaits> waits,
                                                    const Clock& clock,
                                                    CommunicatorEvents& events) {
  auto requests = std::make_unique<FabricRequests>();
  auto pool = std::make_shared<NcclEvents>(options.cuda, options.device);
  const auto make = [](std::shared_ptr<GroupPort> port, NcclContext& context) {
    return std::make_unique<NcclGroup>(std::move(port), context);
  };
  auto loop = std::make_unique<NcclLoop>(options, control, std::move(waits), pool, *requests, clock,
                                         events, make);
  const auto admit = [abilities = AbilitiesOf(options.nccl, options.cuda, options.device), pool,
                      cuda = options.cuda](SubmittedOp& op) {
    RESILIENT_RETURN_IF_ERROR(CheckNcclSupports(op.op, abilities));
    const auto stream = static_cast<CudaStreamHandle>(op.op.stream);
    RESILIENT_RETURN_IF_ERROR(CheckNotCaptured(cuda, op.op));
    const CudaResult marked = pool->Mark(stream, &op.ready);
    if (marked == CudaResult::kSuccess) return Status::Ok();
    return CudaStatus(cuda, marked, "cudaEventRecord", Describe(op.op), {});
  };
  return MakeFabric({.endpoint = control.endpoint(),
                     .thread_name = options.name,
                     .requests = std::move(requests),
                     .loop = std::move(loop),
                     .admission = admit,
                     .observer = nullptr},
                    clock);
}

}  // namespace resilient
