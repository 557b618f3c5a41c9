#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <resilient/status.h>

namespace resilient::plugin {

class SessionContext;

// The callbacks of the futures of one communicator. They run one after another, in the order in
// which then() and add_done_callback() were called: the program's order, which is the same on all
// ranks. The order in which operations complete is not. None runs within the call that adds it, so
// the thread that runs it says nothing about how far the operation was. What a callback starts has
// a communicator of its own (Channels), whose order is that of this queue (docs/decisions/0025).
//
// A callback hangs on a future that this queue completes at its turn, so torch runs it, and hands
// its result and its exception on.
//
// Owner: Channels, and the futures that Python holds. Thread: thread-safe. Lifetime: entries whose
// future never completes end with the queue; at the end of the interpreter none runs any more.
class CallbackQueue : public std::enable_shared_from_this<CallbackQueue> {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  // `name`: of the communicator. `depth`: 0 for operations that the program itself starts, 1 for
  // those of callbacks of these, and so on.
  CallbackQueue(const std::shared_ptr<SessionContext>& context, std::string name, int depth);
  ~CallbackQueue();
  CallbackQueue(const CallbackQueue&) = delete;
  CallbackQueue& operator=(const CallbackQueue&) = delete;

  // A future on the devices of `future` for Add to complete. Callbacks are put on it before that.
  static FuturePtr TurnAfter(const c10::ivalue::Future& future);

  // Completes `turn` when `future` has completed and the callbacks of all turns that were added
  // before have run: on a thread of the Finisher, with the thread-local state of the calling
  // thread. kResourceExhausted, with nothing added, when no thread can be made.
  Status Add(FuturePtr future, FuturePtr turn);

  const std::string& name() const { return name_; }
  int depth() const { return depth_; }

  // Marks that the calling thread runs a callback of `queue`. Owner: the stack. Thread: confined.
  class Running {
   public:
    explicit Running(const std::shared_ptr<CallbackQueue>& queue);
    ~Running();
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

    // The innermost of the calling thread; null: it runs none.
    static const Running* Innermost();
    const CallbackQueue& queue() const { return *queue_; }
    // The generation in which the callback was added (Session::epoch).
    std::uint64_t epoch() const { return epoch_; }

   private:
    const std::shared_ptr<CallbackQueue> queue_;
    const std::uint64_t epoch_;
    const Running* const outer_;
  };

 private:
  struct Entry {
    FuturePtr future;
    FuturePtr turn;
    at::ThreadLocalState state;
    std::uint64_t epoch = 0;
  };

  void RunWhenCompleted(c10::ivalue::Future& future);
  void RunCompleted();
  void Run(const Entry& entry);

  const std::weak_ptr<SessionContext> context_;
  const std::string name_;
  const int depth_;
  std::mutex mutex_;
  std::deque<Entry> entries_;  // Guarded by mutex_. The front stays until its callbacks have run.
  std::uint64_t epoch_ = 0;    // Guarded by mutex_. Of the entry that runs.
};

}  // namespace resilient::plugin
