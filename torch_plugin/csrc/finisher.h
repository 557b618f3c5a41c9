#pragma once

#include <functional>
#include <memory>

#include <resilient/status.h>

namespace resilient::plugin {

// The threads "res-callback": complete futures and copy results back into tensors that were not
// contiguous. Completing a future runs its callbacks, which under Python wait for the interpreter's
// lock; the communicator's thread serves all groups of the session and must never wait for that
// (a thread that computes with the lock held would stop everybody's collectives). Operations that
// nobody asked a future of do not pass through here. One thread, started at first use; another when
// a task finds all of them busy, as a callback may wait for an operation that ends here as well:
// eight at most, and one for each CallbackQueue.
//
// Owner: SessionContext. Thread: thread-safe. Lifetime: Stop runs what is queued, then joins; when
// a callback itself destroys the session, the thread ends by itself after it.
class Finisher {
 public:
  Finisher();
  ~Finisher();
  Finisher(const Finisher&) = delete;
  Finisher& operator=(const Finisher&) = delete;

  // kResourceExhausted when no thread can be made. REQUIRES: a thread of the user's.
  Status Start();

  // So many more threads, or fewer, may be needed at once. What runs already goes on.
  void ChangeLimit(int by);

  // Runs `task` on one of the threads; on the calling thread when none runs. At most one
  // task a Work, so the Ledger's limit bounds the queue.
  void Post(std::function<void()> task);

  // Idempotent. In a forked child, where the thread does not exist, it is only forgotten.
  void Stop(bool in_forked_child);

 private:
  struct Shared;

  std::shared_ptr<Shared> shared_;  // With the thread, which may outlive this object.
};

}  // namespace resilient::plugin
