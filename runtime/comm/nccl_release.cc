#include "runtime/comm/nccl_release.h"

#include <utility>

#include "runtime/base/log.h"

namespace resilient {
namespace {

constexpr char kThreadName[] = "res-nccl-end";

void EndCommunicator(const NcclApi& nccl, const NcclRelease::Work& work) {
  if (work.comm == nullptr) return;
  const bool abort = work.kind == NcclRelease::Kind::kAbort;
  // The handle is dead after either, whatever it returns.
  const NcclResult result = abort ? nccl.CommAbort(work.comm) : nccl.CommDestroy(work.comm);
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return;
  RESILIENT_LOG(kWarn, abort ? "ncclCommAbort" : "ncclCommDestroy", " of group ", work.name,
                " says: ", nccl.GetErrorString(result));
}

// An error of the device (it was lost) ends the wait too: nothing runs on it any more.
void AwaitMark(const CudaApi& cuda, const NcclMark& mark) {
  if (mark.event == nullptr) return;
  if (mark.recorded || cuda.EventRecord(mark.event, mark.stream) == CudaResult::kSuccess)
    (void)cuda.EventSynchronize(mark.event);
  (void)cuda.EventDestroy(mark.event);
}

void Run(const NcclApi& nccl, const CudaApi& cuda, const NcclRelease::Work& work) {
  (void)cuda.SetDevice(work.device);  // If that fails the device is lost, and so is what follows.
  EndCommunicator(nccl, work);
  for (const NcclMark& mark : work.marks) AwaitMark(cuda, mark);
  for (const CudaEventHandle event : work.events) (void)cuda.EventDestroy(event);
  if (work.scratch != nullptr) work.scratch->Free();
}

}  // namespace

NcclRelease::NcclRelease(const NcclApi& nccl, const CudaApi& cuda, Work work,
                         std::shared_ptr<const Doorbell> doorbell)
    : shared_(std::make_shared<Shared>()),
      thread_(kThreadName, [nccl, cuda, work = std::move(work), doorbell = std::move(doorbell),
                            shared = shared_] {
        Run(nccl, cuda, work);
        shared->finished.store(true, std::memory_order_release);
        doorbell->Ring();
      }) {}

NcclRelease::~NcclRelease() { thread_.Join(); }

bool NcclRelease::IsFinished() const { return shared_->finished.load(std::memory_order_acquire); }

void NcclRelease::Abandon(std::vector<Completion> kept) {
  shared_->kept = std::move(kept);
  thread_.Detach();
}

}  // namespace resilient
