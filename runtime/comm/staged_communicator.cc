#include "runtime/comm/staged_communicator.h"

#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/nccl_loop.h"
#include "runtime/comm/staged_group.h"

namespace resilient {

std::unique_ptr<CommunicatorFactory> MakeStagedFabric(const NcclFabricOptions& options,
                                                      CommunicatorFactory& control,
                                                      std::shared_ptr<ControlWaits> waits,
                                                      std::shared_ptr<StagedCalls> calls,
                                                      const Clock& clock,
                                                      CommunicatorEvents& events) {
  auto make = [calls = std::move(calls)](std::shared_ptr<GroupPort> port, NcclContext& context) {
    return std::make_unique<StagedGroup>(std::move(port), context, calls);
  };
  const auto check = [](const GroupSpec&, const SubmittedOp& submitted) {
    const Operation& op = submitted.op;
    if (submitted.capture != 0)
      return Status(StatusCode::kUnimplemented,
                    StrCat(Describe(op),
                           " cannot be captured in a CUDA graph: it goes through memory of the "
                           "host, as ranks share a GPU; call it outside of the capture"));
    // The rest of a message comes behind its beginning: from whom is to be known before.
    if (op.kind != OpKind::kRecv || op.peer != kAnyPeer) return Status::Ok();
    return Status(StatusCode::kUnimplemented,
                  StrCat(Describe(op),
                         " does not run through memory of the host: there messages are received "
                         "only from a rank that is named; use the CPU communicator for it"));
  };
  return MakeDeviceFabric(options, control, std::move(waits), clock, events, std::move(make),
                          check);
}

}  // namespace resilient
