#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <resilient/clock.h>
#include <resilient/operation.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "torch_plugin/csrc/callback_queue.h"
#include "torch_plugin/csrc/context.h"
#include "torch_plugin/csrc/hooks.h"

namespace resilient::plugin {

class WorkImpl;

// How far the operations behind one Work are. Holds nothing of torch or Python, so the completion
// closures, which die on the communicator's thread, may own it.
//
// Owner: its Work and the completions. Thread: thread-safe.
class Progress : public std::enable_shared_from_this<Progress> {
 public:
  // `hooks` are run when all parts have ended well and the results are in place.
  Progress(SessionContext& context, std::size_t parts,
           std::shared_ptr<const CompletionHooks> hooks);

  // Puts `work` into the ledger until the operations have ended, and has the Finisher called if it
  // needs it. Before the first Submit; kResourceExhausted when too many are in flight.
  Status Enlist(const c10::intrusive_ptr<WorkImpl>& work);

  // The same when they run already: always, unless they have ended.
  void EnlistRunning(const c10::intrusive_ptr<WorkImpl>& work);

  // Nothing was submitted after all, because of `why`.
  void Discard(const Status& why);

  // `whole` has one part more, which ends when this does. Before the first Submit.
  void JoinTo(const std::shared_ptr<Progress>& whole);

  // Additions to the group's timeout that end when the operations have. Before the first Submit.
  void Hold(TimeoutExtension::Lease lease);

  // The operations have ended, and nobody will call Complete for them.
  void EndLeases();

  // One operation ended; the first failure is the outcome of all. Any thread.
  void Complete(const Status& status);

  // True when all operations ended within `slice`.
  bool WaitFor(std::chrono::nanoseconds slice) const;

  // All operations are on `device`, and what they leave there is the result: who waits may go on
  // in a stream of it. The mark is for the last one. Before the first Submit.
  std::shared_ptr<LaunchMark> GoOnBehind(int device, std::uint64_t epoch);
  // Nobody may after all: the last operation will never be launched.
  void AwaitEnd() { device_.store(kHost); }
  // Of GoOnBehind; kHost: the end has to be waited for.
  int device() const { return device_.load(); }
  // True when the last operation was launched within `slice`, or all have ended. REQUIRES:
  // device() != kHost.
  bool WaitForLaunch(Duration slice) const;
  // The calling thread's current stream of device() goes on behind the operations. REQUIRES:
  // WaitForLaunch has returned true.
  Status Join();
  // Somebody has gone on so.
  bool joined() const { return joined_.load(); }

  // Nothing is submitted yet: it waits for the end of its batch.
  void HoldBack() { held_back_.store(true); }
  void LetGo() { held_back_.store(false); }
  bool held_back() const { return held_back_.load(); }

  // What keeps the Work in the ledger behind a failure, while the device may still touch its
  // memory; for the completions to own. Before the first Submit, once.
  std::shared_ptr<void> Lend();

  bool done() const;
  Status status() const;                                 // OK until done.
  Duration duration() const;                             // From the making to the end, or to now.
  std::uint64_t completion_key() const { return key_; }  // Of no other in this process, ever.

 private:
  friend class WorkImpl;
  void RetireLocked();
  void EndLoan();
  void EndLeasesLocked();
  void FinishOnCallbackThread();
  void RunHooks(const Status& outcome) const;

  const SystemClock clock_{};
  const Instant started_ = clock_.Now();
  LaunchMark mark_;
  std::atomic<int> device_{kHost};
  std::atomic<std::uint64_t> epoch_{0};  // Of the session, for who goes on in a stream.
  std::atomic<bool> joined_{false};
  std::atomic<bool> held_back_{false};
  const std::shared_ptr<Ledger> ledger_;
  const std::shared_ptr<Finisher> finisher_;
  const std::shared_ptr<LateFailure> late_failure_;
  const std::shared_ptr<const CompletionHooks> hooks_;
  const std::uint64_t key_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::size_t pending_;                          // Guarded by mutex_.
  WorkImpl* work_ = nullptr;                     // Guarded by mutex_; valid until Retire(id_).
  std::uint64_t id_ = 0;                         // Guarded by mutex_.
  std::shared_ptr<Progress> whole_;              // Guarded by mutex_. What this is a part of.
  std::vector<TimeoutExtension::Lease> leases_;  // Guarded by mutex_.
  Instant ended_at_{};                           // Guarded by mutex_. Of pending_ == 0.
  bool requires_finisher_ = false;               // Guarded by mutex_.
  bool lent_ = false;                            // Guarded by mutex_.
  bool retires_behind_loan_ = false;             // Guarded by mutex_.
  bool ended_ = false;                           // Guarded by mutex_. pending_ reached 0.
  bool done_ = false;  // Guarded by mutex_. Results are in place, waiters may go.
  Status status_;      // Guarded by mutex_.
};

// What one c10d call started.
struct WorkSpec {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  const char* title = "";  // For torch's profiler.
  std::string group;
  Operation operation;                                    // Outline of the first one, for messages.
  std::vector<at::Tensor> held;                           // Memory that the operations use.
  std::vector<at::Tensor> outputs;                        // Value of the future.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // At the end: (to, from).
  std::function<void()> finish;                           // After the copies; may be empty.
  std::shared_ptr<CallbackQueue> callbacks;      // Of its future. Null: a message's have no order.
  std::vector<std::shared_ptr<Progress>> parts;  // Of a batch, instead of its own.
  bool nothing = false;  // A batch without operations: no failure is one of it.
};

// The Work of ResilientBackend. wait() blocks the calling thread only, without the interpreter's
// lock, and is interruptible; its future is made at the first getFuture and carries the same error.
//
// Operations on a device: wait() returns once they are launched, and the caller's current stream
// goes on behind them; a failure that comes later is raised by what is called next. With a bound,
// where results are put in place on the host's order, and at a barrier it waits for the end as on
// the CPU. It has ended, and so has the future, when the communicator has seen that on the host.
//
// Owner: the user, and the session's Ledger while it is in flight. Thread: thread-safe. Lifetime:
// released by the user's threads only; holds its session weakly.
class WorkImpl final : public c10d::Work {
 public:
  WorkImpl(const std::shared_ptr<SessionContext>& context, int rank, WorkSpec spec,
           std::shared_ptr<Progress> progress);
  ~WorkImpl() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override;
  // kNoTimeout: as long as the peers live. Otherwise TIMEOUT on this rank only; the operation goes
  // on.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // wait(), where there is a stream.
  void synchronize() override;
  void blockCurrentStream() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;  // Milliseconds.
  std::uint64_t getSequencenumber() const override;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  std::uint64_t getCompletionKey() const override { return progress_->completion_key(); }
#endif

  // The queue of its future's callbacks; null: a message's have no order.
  const std::shared_ptr<CallbackQueue>& callbacks() const { return spec_.callbacks; }

  // Waits for the end, for callers that go on after a failure. kTimeout at the deadline.
  Status WaitUntil(Deadline deadline);

  // Whether a wait() has returned before the end.
  bool joined() const;

  // Until the operation of `mark`, one of its own, is in the device's queue or has ended. Without
  // the host's lock.
  Status AwaitLaunch(const LaunchMark& mark);

  // Whether something remains to do when the operations have ended.
  bool NeedsFinisher() const;

  const std::shared_ptr<Progress>& progress() const { return progress_; }
  void set_sequence(std::uint64_t sequence) { sequence_.store(sequence); }
  int* source() { return &source_; }  // Written by a recv from any rank before it completes.

 private:
  friend class Progress;
  template <typename Reached>
  Status WaitWhileNot(const Reached& reached, Deadline deadline);
  std::vector<std::shared_ptr<Progress>> Parts() const;
  bool GoesOnInStream() const;
  bool IsCaptured() const;
  Status JoinStream();
  Status CheckSubmitted() const;
  Status Outcome() const;  // With group, sequence number and operation.
  Status Finish();         // What remains to do after the operations: on the callback thread.
  void EndProfiling();
  void CompleteFuture(c10::ivalue::Future& future);
  template <typename Body>
  void AsCaller(const Body& body);

  const std::weak_ptr<SessionContext> context_;
  const std::shared_ptr<Host> host_;
  const std::shared_ptr<Progress> progress_;
  const WorkSpec spec_;
  std::atomic<std::uint64_t> sequence_{0};
  int source_ = -1;                                 // Constant once done.
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // Guarded by progress_->mutex_.
  // Inference mode, grad mode and the like of the call that began it, for what is left to another
  // thread. Taken where there is something of the kind: with the Work, or with its future. Set
  // before the Finisher is asked for, and constant then.
  std::optional<at::ThreadLocalState> callers_state_;
};

// Waits for the end of all from which a wait() let the program go on before: what it has computed
// since is worth keeping only if they went well. The outcome of the first of those that run by now
// and do not; what has failed before the session's failure() says. Blocks.
Status AwaitJoined(SessionContext& context);

}  // namespace resilient::plugin
