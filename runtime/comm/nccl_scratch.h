#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "runtime/base/thread.h"
#include "runtime/comm/group_port.h"
#include "runtime/comm/nccl_api.h"
#include "runtime/comm/nccl_release.h"

namespace resilient {

// The device memory that one communicator needs for itself: what its barriers reduce. cudaMalloc
// and cudaFree may wait for the device, and with it for a kernel that hangs: the first has a thread
// of its own, the second is made where the communicator ends.
//
// Owner: NcclGroup, then its NcclRelease. Thread: caller-synchronised.
class NcclScratch final : public OwnMemory {
 public:
  // Bytes that a barrier reduces. What they are is nothing to anybody.
  static constexpr std::size_t kBytes = 1;

  // Begins to allocate; rings when that has ended.
  NcclScratch(const CudaApi& cuda, int device, std::shared_ptr<const Doorbell> doorbell);
  NcclScratch(const NcclScratch&) = delete;
  NcclScratch& operator=(const NcclScratch&) = delete;

  // False while it is not known whether there is memory. Does not block.
  bool IsReady() const;
  // REQUIRES: IsReady.
  CudaResult result() const { return state_->result; }
  void* memory() const { return state_->memory; }

  // Waits for the allocation and frees what came of it.
  void Free() override;

 private:
  struct State {
    CudaResult result = CudaResult::kSuccess;
    void* memory = nullptr;
    std::atomic<bool> ready{false};  // The others are not written any more.
  };
  const CudaApi cuda_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  Thread thread_;
};

}  // namespace resilient
