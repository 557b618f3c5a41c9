#include "runtime/comm/staged_communicator.h"

#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/fabric.h"
#include "runtime/comm/nccl_events.h"
#include "runtime/comm/nccl_group.h"
#include "runtime/comm/nccl_loop.h"
#include "runtime/comm/staged_group.h"

namespace resilient {

std::unique_ptr<CommunicatorFactory> MakeStagedFabric(const NcclFabricOptions& options,
                                                      CommunicatorFactory& control,
                                                      std::shared_ptr<ControlWaits> waits,
                                                      std::shared_ptr<StagedCalls> calls,
                                                      const Clock& clock,
                                                      CommunicatorEvents& events) {
  auto requests = std::make_unique<FabricRequests>();
  auto pool = std::make_shared<NcclEvents>(options.cuda, options.device);
  const auto make = [calls = std::move(calls)](std::shared_ptr<GroupPort> port,
                                               NcclContext& context) {
    return std::make_unique<StagedGroup>(std::move(port), context, calls);
  };
  auto loop = std::make_unique<NcclLoop>(options, control, std::move(waits), pool, *requests, clock,
                                         events, make);
  const auto admit = [pool, cuda = options.cuda](SubmittedOp& op) {
    // The rest of a message comes behind its beginning: from whom is to be known before.
    if (op.op.kind == OpKind::kRecv && op.op.peer == kAnyPeer) {
      return Status(StatusCode::kUnimplemented,
                    StrCat(Describe(op.op),
                           " does not run through memory of the host: there messages are received "
                           "only from a rank that is named; use the CPU communicator for it"));
    }
    RESILIENT_RETURN_IF_ERROR(CheckNotCaptured(cuda, op.op));
    const CudaResult marked = pool->Mark(static_cast<CudaStreamHandle>(op.op.stream), &op.ready);
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
