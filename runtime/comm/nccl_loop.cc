#include "runtime/comm/nccl_loop.h"

#include <poll.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/nccl_captures.h"
#include "runtime/comm/nccl_group.h"

namespace resilient {

Status NcclLoop::Joiner::Join(void* event, ExecutionStream stream) const {
  const CudaDeviceScope scope(cuda_, device_);
  const CudaResult result = scope.result() != CudaResult::kSuccess
                                ? scope.result()
                                : cuda_.StreamWaitEvent(static_cast<CudaStreamHandle>(stream),
                                                        static_cast<CudaEventHandle>(event), 0);
  if (result == CudaResult::kSuccess) return Status::Ok();
  return CudaStatus(cuda_, result, "cudaStreamWaitEvent", StrCat("a stream of device ", device_),
                    {});
}

void FinishedOps::Add(SubmittedOp op, const Status& status, std::shared_ptr<Completion> kept) {
  if (op.op.mark != nullptr) op.op.mark->End();
  finished_.push_back({.op = std::move(op), .status = status, .kept = std::move(kept)});
}

void FinishedOps::Run(GroupPort& port) {
  telling_.swap(finished_);
  for (Finished& one : telling_) {
    if (one.op.done) one.op.done(one.status);
    if (one.kept != nullptr) *one.kept = std::move(one.op.done);
    one.op = {};
    if (one.kept == nullptr) port.OnCompleted();
  }
  telling_.clear();
}

NcclLoop::NcclLoop(const NcclFabricOptions& options, CommunicatorFactory& control,
                   std::shared_ptr<ControlWaits> waits, std::shared_ptr<NcclEvents> pool,
                   FabricRequests& requests, const Clock& clock, CommunicatorEvents& events,
                   DeviceGroupMaker make)
    : joiner_(options.cuda, options.device),
      context_{.options = options,
               .control = control,
               .waits = std::move(waits),
               .pool = std::move(pool),
               .timed_pool =
                   std::make_shared<NcclEvents>(options.cuda, options.device, kCudaEventDefault),
               .joiner = joiner_,
               .events = events,
               .clock = clock,
               .doorbell = requests.doorbell(),
               .now = clock.Now(),
               .device_clock = {},
               .discarded = {}},
      requests_(requests),
      make_(std::move(make)) {}

void NcclLoop::Run() {
  LeaveCapturesAlone(context_.options.cuda);
  while (true) {
    context_.now = context_.clock.Now();
    TakeRequests();
    for (const auto& group : groups_) group->Step();
    ReleaseEnded();
    for (const auto& group : groups_) group->RunCompletions();
    std::erase_if(groups_, [](const auto& group) { return group->done(); });
    std::erase_if(context_.discarded, [](const auto& one) { return one->IsFinished(); });
    const bool over = groups_.empty() && context_.discarded.empty();
    if (stopping_ && (over || stop_by_.ExpiredAt(context_.now))) break;
    Wait();
  }
  for (const auto& release : context_.discarded) release->Abandon(nullptr);
  const bool quiet = groups_.empty() && context_.discarded.empty();
  groups_.clear();
  context_.discarded.clear();
  // Where something hangs on the device, to destroy an event may hang as well: whoever comes back
  // last does it.
  if (!quiet) return;
  context_.pool->Close();
  context_.timed_pool->Close();
}

void NcclLoop::TakeRequests() {
  FabricRequests::Asked asked = requests_.Take();
  if (asked.stop && !std::exchange(stopping_, true)) {
    stop_by_ = asked.stop_by;
    // What is aborted then has the other half to come back.
    const Duration flush = stop_by_.LeftAt(context_.now) / 2;
    end_by_ = Deadline::After(context_.now, std::min(flush, context_.options.flush_timeout));
  }
  for (auto& port : asked.created) AddGroup(std::move(port));
  if (!stopping_) return;
  for (const auto& group : groups_) {
    group->Leave(SessionClosed());
    if (end_by_.ExpiredAt(context_.now)) group->End(SessionClosed());
  }
}

void NcclLoop::AddGroup(std::shared_ptr<GroupPort> port) {
  const GroupSpec& spec = port->spec();
  const bool twice = std::any_of(groups_.begin(), groups_.end(), [&](const auto& group) {
    const GroupSpec& other = group->spec();
    return other.name == spec.name && other.generation == spec.generation &&
           other.attempt == spec.attempt;
  });
  groups_.push_back(make_(std::move(port), context_));
  if (!twice) return groups_.back()->Start();
  groups_.back()->End(
      Status(StatusCode::kInvalidArgument,
             StrCat("group ", groups_.back()->spec().name, " exists already in generation ",
                    groups_.back()->spec().generation,
                    "; a group that failed is made again under another attempt")));
}

// Those that end in one turn end together: the memory of one cannot be freed while a kernel of
// another one spins on the device.
void NcclLoop::ReleaseEnded() {
  std::vector<NcclRelease::Work> works;
  std::vector<DeviceGroup*> ended;
  const auto release = [this](std::vector<NcclRelease::Work> together) {
    return std::make_shared<NcclRelease>(context_.options.nccl, context_.options.cuda,
                                         context_.options.device, std::move(together),
                                         context_.doorbell);
  };
  for (const auto& group : groups_) {
    auto work = group->TakeRelease();
    if (!work) continue;
    if (work->in_graphs) {  // It ends with them, and the others must not wait for that.
      group->SetRelease(release({*std::move(work)}));
      continue;
    }
    works.push_back(*std::move(work));
    ended.push_back(group.get());
  }
  if (works.empty()) return;
  const auto shared = release(std::move(works));
  for (DeviceGroup* group : ended) group->SetRelease(shared);
}

void NcclLoop::Wait() {
  Instant next = kNever;
  if (stopping_) next = end_by_.ExpiredAt(context_.now) ? stop_by_.when() : end_by_.when();
  for (const auto& group : groups_) next = std::min(next, group->NextTime());
  // Awake all the time: only as long as nobody else wants the core.
  if (next <= context_.now) std::this_thread::yield();
  entries_.assign({{.fd = context_.doorbell->wake().fd(), .events = POLLIN}});
  PollUntil(entries_, context_.clock, Deadline::At(next));
  if (entries_.front().revents != 0) context_.doorbell->wake().Drain();
}

std::string WhereOf(const GroupSpec& spec, int device) {
  return StrCat("rank ", spec.rank, " (device ", device, ") of group '", spec.name,
                "', generation ", spec.generation);
}

std::unique_ptr<CommunicatorFactory> MakeDeviceFabric(const NcclFabricOptions& options,
                                                      CommunicatorFactory& control,
                                                      std::shared_ptr<ControlWaits> waits,
                                                      const Clock& clock,
                                                      CommunicatorEvents& events,
                                                      DeviceGroupMaker make, Admission check) {
  auto requests = std::make_unique<FabricRequests>();
  auto pool = std::make_shared<NcclEvents>(options.cuda, options.device);
  auto loop = std::make_unique<NcclLoop>(options, control, std::move(waits), pool, *requests, clock,
                                         events, std::move(make));
  // All others wait for an operation that is not run here, but for one of a capture.
  const auto failed = [&events, cuda = options.cuda, device = options.device](
                          const GroupSpec& group, const Operation& op, CudaResult result,
                          std::string_view what) {
    const std::string where = StrCat(Describe(op), " on ", WhereOf(group, device));
    const FailureDetail detail = DetailOf(group, group.rank, 0);
    if (IsOfCapture(result)) return CaptureStatus(cuda, result, what, where, detail);
    Status status = CudaStatus(cuda, result, what, where, detail);
    events.OnStalled(group.name, group.generation, status);
    return status;
  };
  const auto admit = [check = std::move(check), pool, cuda = options.cuda, failed](
                         const GroupSpec& group, SubmittedOp& op) {
    const auto stream = static_cast<CudaStreamHandle>(op.op.stream);
    const CudaResult asked = CaptureOf(cuda, stream, &op.capture);
    if (asked != CudaResult::kSuccess) {
      return failed(group, op.op, asked, "cudaStreamIsCapturing");
    }
    RESILIENT_RETURN_IF_ERROR(check(group, op));
    if (op.capture != 0 && op.op.mark != nullptr) op.op.mark->NoteCaptured();
    const CudaResult marked = pool->Mark(stream, &op.ready);
    if (marked == CudaResult::kSuccess) return Status::Ok();
    return failed(group, op.op, marked, "cudaEventRecord");
  };
  return MakeFabric({.endpoint = control.endpoint(),
                     .thread_name = options.name,
                     .requests = std::move(requests),
                     .loop = std::move(loop),
                     .admission = admit,
                     .observer = nullptr,
                     .serves_device = true},
                    clock);
}

}  // namespace resilient
