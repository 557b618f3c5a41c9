#include "runtime/comm/nccl_communicator.h"

#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/nccl_captures.h"
#include "runtime/comm/nccl_group.h"
#include "runtime/comm/nccl_launch.h"
#include "runtime/comm/nccl_loop.h"

namespace resilient {
namespace {

Status CheckCapture(const SubmittedOp& op, bool can_capture) {
  if (op.capture == 0) return Status::Ok();
  if (!can_capture)
    return Status(StatusCode::kUnimplemented,
                  StrCat(Describe(op.op),
                         " cannot be captured in a CUDA graph here: this CUDA runtime does not "
                         "tell when a graph is gone (12.3 does), and until then its communicator "
                         "could not be freed; call it outside of the capture"));
  if (op.op.ends_on_host)
    return Status(StatusCode::kUnimplemented,
                  StrCat(Describe(op.op),
                         " cannot be captured in a CUDA graph: its end is waited for on the host "
                         "(a barrier's is, and where the result is copied into a tensor that is "
                         "not contiguous); call it outside of the capture, or with contiguous "
                         "tensors"));
  return Status::Ok();
}

}  // namespace

std::unique_ptr<CommunicatorFactory> MakeNcclFabric(const NcclFabricOptions& options,
                                                    CommunicatorFactory& control,
                                                    std::shared_ptr<ControlWaits> waits,
                                                    const Clock& clock,
                                                    CommunicatorEvents& events) {
  auto make = [](std::shared_ptr<GroupPort> port, NcclContext& context) {
    return std::make_unique<NcclGroup>(std::move(port), context);
  };
  auto check = [abilities = AbilitiesOf(options.nccl, options.cuda, options.device),
                can_capture = CanCapture(options.cuda)](const GroupSpec& group,
                                                        const SubmittedOp& op) {
    RESILIENT_RETURN_IF_ERROR(CheckCapture(op, can_capture));
    return CheckNcclSupports(op.op, static_cast<int>(group.members.size()), abilities);
  };
  return MakeDeviceFabric(options, control, std::move(waits), clock, events, std::move(make),
                          std::move(check));
}

}  // namespace resilient
