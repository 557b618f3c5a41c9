#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <resilient/communicator.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "torch_plugin/csrc/context.h"

namespace resilient::plugin {

class WorkImpl;

// How far the operations behind one Work are. Holds nothing of torch or Python, so the completion
// closures, which die on the communicator's thread, may own it.
//
// Owner: its Work and the completions. Thread: thread-safe.
class Progress : public std::enable_shared_from_this<Progress> {
 public:
  Progress(SessionContext& context, std::size_t parts);

  // Before the first Submit. `work` is kept alive by the ledger under `id`.
  void Attach(WorkImpl* work, std::uint64_t id);

  // From now on the end goes through the Finisher. False when it has come already.
  bool RequireFinisher();

  // One operation ended; the first failure is the outcome of all. Any thread.
  void Complete(const Status& status);

  // True when all operations ended within `slice`.
  bool WaitFor(std::chrono::nanoseconds slice) const;

  bool done() const;
  Status status() const;  // OK until done.

 private:
  friend class WorkImpl;
  void FinishOnCallbackThread();

  const std::shared_ptr<Ledger> ledger_;
  const std::shared_ptr<Finisher> finisher_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::size_t pending_;             // Guarded by mutex_.
  WorkImpl* work_ = nullptr;        // Guarded by mutex_; valid until Retire(id_).
  std::uint64_t id_ = 0;            // Guarded by mutex_.
  bool requires_finisher_ = false;  // Guarded by mutex_.
  bool ended_ = false;              // Guarded by mutex_. pending_ reached 0.
  bool done_ = false;               // Guarded by mutex_. Results are in place, waiters may go.
  Status status_;                   // Guarded by mutex_.
};

// What one c10d call started.
struct WorkSpec {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::string group;
  Operation operation;              // The first one, for messages; its pointers are not used.
  std::vector<at::Tensor> held;     // Memory that the operations use.
  std::vector<at::Tensor> outputs;  // Value of the future.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // At the end: (to, from).
};

// The Work of ResilientBackend. wait() blocks the calling thread only, without the interpreter's
// lock, and is interruptible; its future is made at the first getFuture and carries the same error.
//
// Owner: the user, and the session's Ledger while it is in flight. Thread: thread-safe. Lifetime:
// released by the user's threads only; holds its session weakly.
class WorkImpl final : public c10d::Work {
 public:
  WorkImpl(const std::shared_ptr<SessionContext>& context, int rank, WorkSpec spec,
           std::size_t parts);
  ~WorkImpl() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  // kNoTimeout: as long as the peers live. Otherwise TIMEOUT on this rank only; the operation goes
  // on.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override;

  const std::shared_ptr<Progress>& progress() const { return progress_; }
  void set_sequence(std::uint64_t sequence) { sequence_.store(sequence); }

 private:
  friend class Progress;
  Status WaitUntilDone(std::chrono::milliseconds timeout);
  Status Outcome() const;  // With group, sequence number and operation.
  Status CopyBack();
  void CompleteFuture(c10::ivalue::Future& future);

  const std::weak_ptr<SessionContext> context_;
  const std::shared_ptr<Host> host_;
  const std::shared_ptr<Progress> progress_;
  const WorkSpec spec_;
  std::atomic<std::uint64_t> sequence_{0};
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // Guarded by progress_->mutex_.
};

}  // namespace resilient::plugin
