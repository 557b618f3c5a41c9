#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <resilient/status.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace resilient::plugin {

// Unfinished and not yet released operations of one session. Reaching it means that a program
// submits without ever waiting.
inline constexpr std::size_t kMaxWorks = 65'536;

// Keeps every Work, and so its tensors, until a thread of the user's can release it. The thread
// that completes operations must not drop a last reference: a tensor may own a Python object, and
// releasing that while the interpreter shuts down ends the process. So it only moves the Work from
// one list to the other, and whoever submits, waits or closes next releases it.
//
// Owner: SessionContext, and the Progress of each Work, because a callback of a Work may destroy
// the session. Thread: thread-safe.
class Ledger {
 public:
  // The id for Retire; kResourceExhausted at kMaxWorks.
  Result<std::uint64_t> Add(c10::intrusive_ptr<c10d::Work> work);

  // As Add for a Work whose operations run already, so that it must be kept. At most one a thread
  // that waits passes the limit by this.
  std::uint64_t AddRunning(c10::intrusive_ptr<c10d::Work> work);

  // Nothing will touch the memory of that Work any more. Releases nothing. Any thread.
  void Retire(std::uint64_t id);

  // Releases what is retired, on the calling thread: one of the user's.
  void Drain();

  // Drain, and from now on Retire releases at once: the session's threads are gone.
  void Close();

  // Those that are unfinished, in no order.
  std::vector<c10::intrusive_ptr<c10d::Work>> InFlight() const;

  std::size_t size() const;  // Unfinished and unreleased; for tests.

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  std::uint64_t AddLocked(WorkPtr work);

  std::atomic<bool> any_retired_{false};
  mutable std::mutex mutex_;
  bool closed_ = false;                                   // Guarded by mutex_.
  std::uint64_t next_id_ = 1;                             // Guarded by mutex_.
  std::unordered_map<std::uint64_t, WorkPtr> in_flight_;  // Guarded by mutex_.
  std::vector<WorkPtr> retired_;                          // Guarded by mutex_.
};

}  // namespace resilient::plugin
