#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include <resilient/communicator.h>

#include "runtime/base/thread.h"
#include "runtime/comm/group_port.h"
#include "runtime/comm/nccl_api.h"
#include "runtime/comm/nccl_scratch.h"

namespace resilient {

// The event behind an operation on its stream. `recorded`: false when the launch was not seen to
// end, and nothing marks the place in the stream yet.
struct NcclMark {
  CudaEventHandle event = nullptr;
  CudaStreamHandle stream = nullptr;
  bool recorded = false;
};

// The end of one NCCL communicator, on a thread of its own: ncclCommAbort waits for the device, for
// NCCL's own threads and for the peers on the host, so that it may never return, and the one that
// hangs must not keep the next generation's from running. After it the thread waits until what was
// launched has left the device: from then on nobody touches the memory.
//
// Owner: NcclGroup. Thread: caller-synchronised. Lifetime: a thread that hangs is let go by Abandon
// and owns what it uses.
class NcclRelease {
 public:
  enum class Kind { kAbort, kDestroy };
  struct Work {
    Kind kind = Kind::kAbort;
    int device = 0;
    NcclCommHandle comm = nullptr;
    std::vector<NcclMark> marks;           // What may still run; waited for and destroyed.
    std::vector<CudaEventHandle> events;   // What is over; destroyed.
    std::shared_ptr<NcclScratch> scratch;  // May be null. Freed; nobody else uses it.
    std::string name;                      // Of the group, for the log.
  };

  NcclRelease(const NcclApi& nccl, const CudaApi& cuda, Work work,
              std::shared_ptr<const Doorbell> doorbell);
  ~NcclRelease();  // Joins, but for an abandoned thread.
  NcclRelease(const NcclRelease&) = delete;
  NcclRelease& operator=(const NcclRelease&) = delete;

  // Rings the doorbell when it becomes true.
  bool IsFinished() const;

  // Lets a thread go that may hang for ever. `kept` is destroyed when it comes back: what these
  // hold may be memory that the device still uses.
  void Abandon(std::vector<Completion> kept);

 private:
  struct Shared {
    std::atomic<bool> finished{false};
    std::vector<Completion> kept;  // Touched by the owner's thread, destroyed by the last holder.
  };
  const std::shared_ptr<Shared> shared_;
  Thread thread_;
};

}  // namespace resilient
