#include "runtime/comm/nccl_scratch.h"

#include <utility>

#include "runtime/comm/nccl_events.h"

namespace resilient {
namespace {

constexpr char kScratchThread[] = "res-nccl-mem";

}  // namespace

NcclScratch::NcclScratch(const CudaApi& cuda, int device, std::shared_ptr<const Doorbell> doorbell)
    : cuda_(cuda),
      thread_(kScratchThread, [cuda, device, doorbell = std::move(doorbell), state = state_] {
        LeaveCapturesAlone(cuda);
        state->result = cuda.SetDevice(device);
        if (state->result == CudaResult::kSuccess)
          state->result = cuda.Malloc(&state->memory, kBytes);
        state->ready.store(true, std::memory_order_release);
        doorbell->Ring();
      }) {}

bool NcclScratch::IsReady() const { return state_->ready.load(std::memory_order_acquire); }

void NcclScratch::Free() {
  thread_.Join();
  if (state_->memory != nullptr) (void)cuda_.Free(std::exchange(state_->memory, nullptr));
}

}  // namespace resilient
