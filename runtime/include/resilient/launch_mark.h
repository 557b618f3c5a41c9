#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

#include <resilient/clock.h>
#include <resilient/status.h>

namespace resilient {

// A stream of a device: for CUDA a cudaStream_t, null is the default stream. Opaque here.
using ExecutionStream = void*;

// Where one operation stands in the work of its device: told by the communicator, asked by whoever
// goes on there and does not want to wait on the host.
//
// Owner: shared by the caller and the operation. Thread: thread-safe.
class LaunchMark {
 public:
  // Makes streams wait for an event. Owner: the communicator's fabric. Thread: thread-safe; does
  // not block. Lifetime: until End of every mark that was given it.
  class Joiner {
   public:
    virtual ~Joiner() = default;
    virtual Status Join(void* event, ExecutionStream stream) const = 0;
  };

  // The communicator, before Submit returns: the operation goes into the graph that its caller's
  // stream is captured in.
  void NoteCaptured();
  // Whether it does. Then the caller waits for the launch before anything else is captured; who
  // goes on behind it must have joined it before the capture ends; and its Completion runs when
  // the capture is over, not when the device has done it.
  bool captured() const;

  // The communicator, before Submit returns: the launch is a matter of microseconds, and comes from
  // a thread with a core of its own. Who waits for it does so awake at first.
  void ExpectSoon();

  // The communicator: the operation is in the device's queue, and `event` marks its end there.
  void Launch(const Joiner& joiner, void* event);
  // The communicator: it has ended, well or not, launched or not. `event` may be used again.
  void End();

  // True once it was launched or has ended; false after `slice`.
  bool WaitFor(Duration slice) const;

  // It has ended: its Completion runs, or has run.
  bool ended() const;

  // What is put into `stream` from now on begins when the operation is over; at once where it is
  // already. kDeviceLost, kCommFailed in the device's words. How the operation went its Completion
  // says: a stream goes on behind a failure as well, over undefined memory. REQUIRES: WaitFor has
  // returned true.
  Status Join(ExecutionStream stream) const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::atomic<bool> told_ = false;  // Launched or ended. Written under mutex_.
  std::atomic<bool> soon_ = false;
  // Guarded by mutex_.
  const Joiner* joiner_ = nullptr;  // Null: not launched yet, or ended.
  void* event_ = nullptr;
  bool ended_ = false;
  bool captured_ = false;
};

}  // namespace resilient
