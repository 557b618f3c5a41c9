#include "runtime/comm/nccl_release.h"

#include <optional>
#include <utility>

#include "runtime/base/exit_watch.h"
#include "runtime/base/log.h"
#include "runtime/comm/nccl_events.h"

namespace resilient {
namespace {

constexpr char kReleaseThread[] = "res-nccl-end";

void Warn(const NcclApi& nccl, NcclResult result, const char* call, const std::string& group) {
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return;
  RESILIENT_LOG(kWarn, call, " of group ", group, " says: ", nccl.GetErrorString(result));
}

// The handles are dead after it, whatever it returns.
void EndCommunicators(const NcclApi& nccl, const std::vector<NcclRelease::Work>& works) {
  // First those that others wait for: to destroy one may wait for a peer.
  std::vector<const NcclRelease::Work*> aborted;
  for (const NcclRelease::Work& work : works) {
    if (work.comm != nullptr && work.kind == NcclRelease::Kind::kAbort) aborted.push_back(&work);
  }
  const bool group = aborted.size() > 1 && nccl.GroupStart() == NcclResult::kSuccess;
  for (const NcclRelease::Work* work : aborted)
    Warn(nccl, nccl.CommAbort(work->comm), "ncclCommAbort", work->name);
  if (group) Warn(nccl, nccl.GroupEnd(), "ncclGroupEnd", aborted.front()->name);
  for (const NcclRelease::Work& work : works) {
    if (work.comm != nullptr && work.kind == NcclRelease::Kind::kDestroy)
      Warn(nccl, nccl.CommDestroy(work.comm), "ncclCommDestroy", work.name);
  }
}

// An error of the device (it was lost) ends the wait too: nothing runs on it any more.
void AwaitMarks(const CudaApi& cuda, const NcclRelease::Work& work) {
  for (const NcclMark& mark : work.marks) {
    if (mark.event == nullptr) continue;
    if (mark.recorded || cuda.EventRecord(mark.event, mark.stream) == CudaResult::kSuccess)
      (void)cuda.EventSynchronize(mark.event);
  }
}

void Run(const NcclApi& nccl, const CudaApi& cuda, int device,
         const std::vector<NcclRelease::Work>& works) {
  std::optional<DriverCall> call;
  if (!works.front().in_graphs) {
    call.emplace(StrCat("the abort of the NCCL communicator of group '", works.front().name,
                        "' on device ", device));
  }
  LeaveCapturesAlone(cuda);
  (void)cuda.SetDevice(device);  // If that fails the device is lost, and so is what follows.
  EndCommunicators(nccl, works);
  for (const NcclRelease::Work& work : works) {
    AwaitMarks(cuda, work);
    if (work.scratch != nullptr) work.scratch->Free();
    for (const CudaStreamHandle stream : {work.stream, work.second_stream}) {
      if (stream != nullptr) (void)cuda.StreamDestroy(stream);
    }
  }
}

}  // namespace

NcclRelease::NcclRelease(const NcclApi& nccl, const CudaApi& cuda, int device,
                         std::vector<Work> works, std::shared_ptr<const Doorbell> doorbell)
    : shared_(std::make_shared<Shared>()),
      thread_(kReleaseThread, [nccl, cuda, device, works = std::move(works),
                               doorbell = std::move(doorbell), shared = shared_] {
        Run(nccl, cuda, device, works);
        shared->finished.store(true, std::memory_order_release);
        doorbell->Ring();
      }) {}

NcclRelease::~NcclRelease() {
  if (!abandoned_) thread_.Join();
}

bool NcclRelease::IsFinished() const { return shared_->finished.load(std::memory_order_acquire); }

void NcclRelease::Abandon(std::shared_ptr<void> kept) {
  if (kept != nullptr) {
    const std::lock_guard lock(shared_->mutex);
    shared_->kept.push_back(std::move(kept));
  }
  if (std::exchange(abandoned_, true)) return;
  thread_.Detach();
}

}  // namespace resilient
