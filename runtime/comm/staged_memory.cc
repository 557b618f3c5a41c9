#include "runtime/comm/staged_memory.h"

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/comm/nccl_events.h"

namespace resilient {
namespace {

constexpr char kStagedMemoryThread[] = "res-staged-mem";

}  // namespace

StagedMemory::StagedMemory(const CudaApi& cuda, int device, std::size_t piece_bytes,
                           std::shared_ptr<const Doorbell> doorbell)
    : cuda_(cuda), device_(device), piece_bytes_(piece_bytes), doorbell_(std::move(doorbell)) {}

std::byte* StagedMemory::Take(std::size_t bytes) {
  NoteAllocated();
  if (result_ != CudaResult::kSuccess) return nullptr;
  Buffer* found = nullptr;
  for (Buffer& one : buffers_) {
    if (one.taken || one.bytes < bytes) continue;
    if (found == nullptr || one.bytes < found->bytes) found = &one;
  }
  if (found == nullptr) {
    if (allocation_ == nullptr) Allocate(bytes);
    return nullptr;
  }
  found->taken = true;
  ++taken_;
  return found->memory;
}

void StagedMemory::Give(std::byte* buffer) {
  const auto found = std::find_if(buffers_.begin(), buffers_.end(),
                                  [buffer](const Buffer& one) { return one.memory == buffer; });
  RESILIENT_CHECK(found != buffers_.end() && found->taken);
  found->taken = false;
  --taken_;
}

void StagedMemory::Allocate(std::size_t bytes) {
  allocation_ = std::make_shared<Allocation>();
  allocation_->bytes = bytes <= kSmallBytes ? kSmallBytes : std::max(bytes, piece_bytes_);
  thread_ = Thread(kStagedMemoryThread,
                   [cuda = cuda_, device = device_, doorbell = doorbell_, made = allocation_] {
                     LeaveCapturesAlone(cuda);
                     made->result = cuda.SetDevice(device);
                     if (made->result == CudaResult::kSuccess)
                       made->result = cuda.HostAlloc(&made->memory, made->bytes, 0);
                     made->ready.store(true, std::memory_order_release);
                     doorbell->Ring();
                   });
}

void StagedMemory::NoteAllocated() {
  if (allocation_ == nullptr || !allocation_->ready.load(std::memory_order_acquire)) return;
  thread_.Join();
  const std::shared_ptr<Allocation> made = std::exchange(allocation_, nullptr);
  result_ = made->result;
  if (made->memory == nullptr) return;
  buffers_.push_back({.memory = static_cast<std::byte*>(made->memory), .bytes = made->bytes});
}

void StagedMemory::Free() {
  if (allocation_ != nullptr) {
    thread_.Join();
    NoteAllocated();
  }
  for (const Buffer& one : buffers_) (void)cuda_.FreeHost(one.memory);
  buffers_.clear();
}

}  // namespace resilient
