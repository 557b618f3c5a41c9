#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/base/thread.h"
#include "runtime/comm/group_port.h"
#include "runtime/comm/nccl_api.h"

namespace resilient {

// Marks a place in a stream, which is waited for. `recorded`: false when nothing marks it there yet
// (a launch was not seen to end); then it is the end of what the stream has by the release.
struct NcclMark {
  CudaEventHandle event = nullptr;
  bool recorded = false;
  CudaStreamHandle stream = nullptr;
};

// What a communicator has allocated, and gives back when nothing of it runs any more. Owner: the
// communicator, then its NcclRelease. Thread: caller-synchronised.
class OwnMemory {
 public:
  virtual ~OwnMemory() = default;
  // May block for ever, as what it calls may wait for the device, which is that of the calling
  // thread. Once, the last call.
  virtual void Free() = 0;
};

// The end of NCCL communicators of one device, on a thread of its own: ncclCommAbort waits for the
// device, for NCCL's own threads and for the peers on the host, so that it may never return, and
// the one that hangs must not keep the next generation's from running. Those that are aborted
// together are aborted as one group. After it the thread waits until what was launched has left the
// device: from then on nobody touches the memory.
//
// Owner: shared by the groups that end. Thread: caller-synchronised. Lifetime: a thread that hangs
// is let go by Abandon and owns what it uses.
class NcclRelease {
 public:
  enum class Kind { kAbort, kDestroy };
  struct Work {
    Kind kind = Kind::kAbort;
    NcclCommHandle comm = nullptr;
    CudaStreamHandle stream = nullptr;         // Its own; null: none was made. Destroyed.
    std::vector<NcclMark> marks;               // What may still run; waited for.
    std::shared_ptr<OwnMemory> scratch;        // May be null. Freed; nobody else uses it.
    std::string name;                          // Of the group, for the log.
    CudaStreamHandle second_stream = nullptr;  // As `stream`.
    // Graphs hold it, and its end waits for theirs: alone in its release, it may take any time.
    bool in_graphs = false;
  };

  NcclRelease(const NcclApi& nccl, const CudaApi& cuda, int device, std::vector<Work> works,
              std::shared_ptr<const Doorbell> doorbell);
  ~NcclRelease();  // Joins, but for an abandoned thread.
  NcclRelease(const NcclRelease&) = delete;
  NcclRelease& operator=(const NcclRelease&) = delete;

  // Rings the doorbell when it becomes true.
  bool IsFinished() const;

  // Lets the thread go if it has not come back, for it may never. `kept` is destroyed when it does:
  // what it holds may be memory that the device still uses.
  void Abandon(std::shared_ptr<void> kept);

 private:
  struct Shared {
    std::atomic<bool> finished{false};
    std::mutex mutex;
    std::vector<std::shared_ptr<void>> kept;  // Guarded by mutex.
  };
  const std::shared_ptr<Shared> shared_;
  bool abandoned_ = false;
  Thread thread_;
};

}  // namespace resilient
