#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "runtime/base/thread.h"
#include "runtime/comm/group_port.h"
#include "runtime/comm/nccl_api.h"
#include "runtime/comm/nccl_release.h"

namespace resilient {

// The pinned buffers of one group, which are used again: small ones, and such as take a whole
// piece. cudaHostAlloc and cudaFreeHost may wait for the device, and with it for a kernel that
// hangs: the first has a thread of its own, the second is called where the communicator ends.
//
// Owner: StagedGroup, then its NcclRelease. Thread: caller-synchronised.
class StagedMemory final : public OwnMemory {
 public:
  static constexpr std::size_t kSmallBytes = std::size_t{64} << 10;

  StagedMemory(const CudaApi& cuda, int device, std::size_t piece_bytes,
               std::shared_ptr<const Doorbell> doorbell);
  StagedMemory(const StagedMemory&) = delete;
  StagedMemory& operator=(const StagedMemory&) = delete;

  // Null: none is free, and one is being allocated, which rings; or that has failed.
  std::byte* Take(std::size_t bytes);
  void Give(std::byte* buffer);
  std::size_t taken() const { return taken_; }
  // Of the last allocation that has ended.
  CudaResult result() const { return result_; }

  // Waits for the allocation that is under way and frees all.
  void Free() override;

 private:
  struct Buffer {
    std::byte* memory = nullptr;
    std::size_t bytes = 0;
    bool taken = false;
  };
  struct Allocation {
    CudaResult result = CudaResult::kSuccess;
    void* memory = nullptr;
    std::size_t bytes = 0;
    std::atomic<bool> ready{false};  // The others are not written any more.
  };
  void Allocate(std::size_t bytes);
  void NoteAllocated();

  const CudaApi cuda_;
  const int device_;
  const std::size_t piece_bytes_;
  const std::shared_ptr<const Doorbell> doorbell_;
  std::vector<Buffer> buffers_;
  std::size_t taken_ = 0;
  CudaResult result_ = CudaResult::kSuccess;
  std::shared_ptr<Allocation> allocation_;  // Under way; null: none.
  Thread thread_;                           // Its.
};

}  // namespace resilient
