#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <resilient/communicator.h>
#include <resilient/session.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torch_plugin/csrc/backend_options.h"
#include "torch_plugin/csrc/channels.h"
#include "torch_plugin/csrc/context.h"
#include "torch_plugin/csrc/hooks.h"
#include "torch_plugin/csrc/op_log.h"
#include "torch_plugin/csrc/plan.h"
#include "torch_plugin/csrc/work.h"

namespace resilient::plugin {

// One process group as c10d sees it: turns tensors into Operations of a resilient Group. One object
// serves all devices, because c10d keeps one object for each custom backend: tensors on the CPU and
// on CUDA devices. The operations have c10d's older names, to which all supported torch
// versions forward.
//
// A call whose options say asyncOp=false may be done when it returns; then it returns null, as
// torch allows, or raises. With a completion hook it returns a Work that has ended: torch's flight
// recorder takes an operation without one for unfinished.
//
// Where the world is resized and rank and size are constants, that of the world's group gives way
// to another one: from then on every operation of it raises, and says what to use; it tells the
// peers nothing more.
//
// Owner: c10d::ProcessGroup. Thread: thread-safe. Lifetime: keeps its session alive; the destructor
// says goodbye to the group's peers.
class ResilientBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  // `ranks`: global ranks in group order; empty: the world, which has the session's NcclOptions.
  // `name` is unique among open groups.
  static Result<c10::intrusive_ptr<ResilientBackend>> Create(
      std::shared_ptr<SessionContext> context, const std::string& name, int rank, int size,
      std::vector<int> ranks, std::chrono::milliseconds timeout, NcclOptions nccl = {},
      GroupParts parts = {});

  ResilientBackend(std::shared_ptr<SessionContext> context, std::shared_ptr<Channels> channels,
                   c10::intrusive_ptr<BackendOptions> options, GroupParts parts);
  ~ResilientBackend() override;
  // Nobody owns it any more; the destructor waits for a parent that knows it as its last split.
  void release_resources() override;

  const std::string getBackendName() const override { return "resilient"; }
  // A copy: torch before 2.14 writes name and timeout of a split's child into what it gets here.
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<BackendOptions>(*options_);
  }
  // NcclAllocator; the first call loads NCCL. Raises SETTING where there is none.
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  // Bounds what is started from now on; see TimePolicy.
  void setTimeout(std::chrono::milliseconds timeout) override;
  // Comes on top of the timeout of all that is started from now on, until the first of it has
  // ended; what runs keeps its own. For this rank only.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
#else
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout);
#endif
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override {
    return last_sequence_.load() + last_on_device_.load();
  }
  c10d::ErrorType getError() override;
  void abort() override;
  // The same, for a reason that all ranks are told.
  void Abort(const std::string& why);
  void shutdown() override;
  void enableCollectivesTiming() override {}  // Every Work has its duration.
#ifdef C10D_BACKEND_HAS_HOOKS                 // From torch 2.14 on.
  // Runs once for each failure, or abort(), that ends a generation while it is registered, on the
  // thread "res-hooks", behind the fence, also when it is taken out once the failure is known.
  // Nobody waits for it.
  void registerAbortHook(std::int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(std::int64_t id) override;
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(std::int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(std::int64_t id) override;
#endif
  std::vector<LoggedOperation> logged_operations() const { return log_->Snapshot(); }

  // A group of some ranks of this one, in that order, each by its rank here; null on the others. It
  // is what new_group would make, and nobody waits for anybody: its links are made by its first
  // operations. The name in `options` is that of no group of this generation. INVALID_ARGUMENT,
  // kFailedPrecondition where this group is of no use any more, or a failure that waits for its
  // acknowledgement. Where `options` are none of ours it has this group's NcclOptions. Told by
  // `store`, calls for several devices of one group make one.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  // Older versions copy our options in Python, which cannot, and tell other backends to split ours.
  bool supportsSplitting() const override { return true; }
#endif
  // Raises SETTING: who is to become a member of a world says so at its init.
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& options, const int& rank,
                                    const int& size) override;

  // Whether rank and size can change in place: decided by what this version of torch declares
  // (docs/decisions/0019).
  static constexpr bool kCanFollow =
      !std::is_const_v<decltype(rank_)> && !std::is_const_v<decltype(size_)>;
  // Whether they are those that its group has by now.
  bool IsPresent() const;
  // Takes those. For the thread that has rebuilt the world, before it starts an operation.
  // REQUIRES: of the world's group; kCanFollow, where they have changed.
  void FollowGroup();
  // Makes another one with those, of the same group and session, with options, hooks and log of
  // this one, and `make`s of it the process group in whose favour this one gives way; the one that
  // it has given way to if that is so already. For the same thread. REQUIRES: of the world's group.
  using WorldPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
  using WorldMaker = std::function<WorldPtr(const c10::intrusive_ptr<ResilientBackend>&)>;
  WorldPtr GiveWay(const WorldMaker& make);
  // What has been given way to; null: nothing.
  WorldPtr given_way_to() const;

  // What a thread starts between the two is one Work more, which ends when all of it has ended. Its
  // result is empty. The operations themselves start at once, but for sends and receives on a
  // device: endCoalescing submits them together. Where that is refused, it raises and they fail.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  // Exchanges the sizes before it returns; the sums are taken in rank order.
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions& options) override;
#endif
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  // On a device, where the call or the group names one or the group has run a collective on one
  // since the program has begun in this generation, which is so on all ranks or none; else on the
  // host. Its Work is waited for on the host in any case.
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  // Rank 0 waits for the others until the timeout and raises an error that names who has not come;
  // the others wait for its verdict. Nobody is fenced, and a rank that comes late gets the verdict.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  // A Work before its operations are submitted.
  struct Prepared {
    const char* name = "";
    Channel channel;
    std::vector<Operation> operations;
    c10::intrusive_ptr<WorkImpl> work;
    std::shared_ptr<void> loan;  // Of their memory, for the completions. Null: of the CPU's.
  };

  // What was started since startCoalescing.
  struct Batch {
    std::thread::id thread;
    std::uint64_t epoch = 0;
    std::shared_ptr<Progress> progress;
    Operation first;
    Channel channel;  // Of the first.
    std::uint64_t last_sequence = 0;
    std::vector<std::shared_ptr<Progress>> parts;
    std::vector<Prepared> held;  // Not submitted yet.
  };

  // The device of the last collective on one.
  struct DeviceUse {
    std::uint64_t epoch = 0;
    int device = kHost;
  };

  // What a split has made last.
  struct Split {
    c10::weak_intrusive_ptr<c10d::Store> store;
    c10::weak_intrusive_ptr<Backend> child;
  };

  // The plan of every operation begins here. Raises behind GiveWay.
  Plan Begin(c10d::OpType type, const char* title) const;
  void RequirePresent() const;
  void ListRanks();  // The world's, in the options, and the own one in the log.
  const at::Tensor& Only(Plan& plan, const Tensors& tensors);
  // The parts of a list with an input for each rank; this rank's has the size of `into`.
  std::vector<Part> InputForEach(Plan& plan, const std::vector<Tensors>& inputs,
                                 const at::Tensor& into);
  Operation& PlanGather(Plan& plan, OpKind kind, const at::Tensor& output, const at::Tensor& input);
  Operation& PlanGatherToList(Plan& plan, OpKind kind, const Tensors& outputs,
                              const at::Tensor& input);
  void PlanReduceScatter(Plan& plan, const at::Tensor& output, const at::Tensor& input,
                         const c10d::ReduceOp& reduce);
  void PlanExchange(Plan& plan, at::ScalarType type, std::vector<Part> sent,
                    std::vector<Part> received);
  void RequirePeer(Plan& plan, int peer, int tag);
  // Of every rank, in rank order. Blocks.
  at::Tensor SparseShapes(const at::Tensor& tensor);

  // Gives its operations the bounds that the policy of the world has for this group.
  void BoundInTime(Plan& plan) const;
  // `waits`: the caller waits for the end at once.
  WorkPtr Launch(Plan plan, bool waits);
  // Messages are on the group's own channel wherever they start: their peers match them by tag.
  Channel ChannelOf(const Plan& plan);
  // What a failure that was raised asks for under RESILIENT_HEAL=auto.
  void HealIfDue();
  // A failure of what the program has gone on behind, which it has not been told.
  void RaiseLate();
  Result<c10::intrusive_ptr<ResilientBackend>> MakeSplit(const std::vector<int>& ranks,
                                                         const Options& options);
  [[noreturn]] void Raise(const Status& status) const;
  WorkPtr RunHere(Plan plan);
  // As a part of `whole` if there is one.
  c10::intrusive_ptr<WorkImpl> Start(Plan plan, const std::shared_ptr<Progress>& whole);
  static std::shared_ptr<LaunchMark> MarkOf(Operation& operation, const Prepared& prepared);
  Status AwaitCaptured(WorkImpl& work, const LaunchMark* mark);
  Prepared Prepare(Plan plan, const std::shared_ptr<Progress>& whole);
  Completion CompletionOf(const Prepared& prepared, std::uint64_t log_id) const;
  void NoteSequence(const Channel& channel, const Operation& outline, std::uint64_t log_id,
                    std::uint64_t sequence);
  // Null, with the plan as it was: the thread has no batch.
  WorkPtr LaunchInBatch(Plan& plan);
  Prepared HoldBack(Plan plan, const std::shared_ptr<Progress>& whole);
  Result<std::uint64_t> SubmitHeld(std::vector<Prepared> held);  // The last one's number.
  std::optional<Batch> TakeBatchLocked();
  void Forget(const Batch& batch);
  // Where a barrier runs.
  std::optional<c10::Device> BarrierDevice(const c10d::BarrierOptions& options) const;
  WorkSpec SpecOf(Plan plan);

  std::uint32_t NextMonitoredTag();
  c10::intrusive_ptr<WorkImpl> StartMonitored(OpKind kind, const at::Tensor& message, int peer,
                                              std::uint32_t tag);
  void AwaitOthers(std::uint32_t tag, std::chrono::milliseconds timeout, bool wait_all_ranks);
  void AwaitVerdict(std::uint32_t tag, std::chrono::milliseconds timeout);
  std::string MissingText(const std::vector<int>& missing, std::chrono::milliseconds timeout,
                          bool all) const;

  const std::shared_ptr<SessionContext> context_;
  const std::shared_ptr<Channels> channels_;
  const std::shared_ptr<Group> group_;  // Of the channel of what the program starts.
  const std::shared_ptr<Host> host_;
  const c10::intrusive_ptr<BackendOptions> options_;
  const GroupParts parts_;
  std::shared_ptr<OpLog> log_ = std::make_shared<OpLog>();  // Constant once it is used.
  std::atomic<std::uint64_t> last_sequence_{0};
  std::atomic<std::uint64_t> last_on_device_{0};  // They count apart.
  std::atomic<bool> has_batch_{false};
  std::atomic<std::uint64_t> aborted_in_{0};  // The generation in which abort() was called last.
  std::atomic<bool> gave_way_{false};
  mutable std::mutex mutex_;
  WorldPtr next_world_;                   // Guarded by mutex_. With gave_way_.
  std::optional<Batch> batch_;            // Guarded by mutex_.
  DeviceUse device_use_;                  // Guarded by mutex_.
  std::optional<Split> last_split_;       // Guarded by mutex_.
  std::uint64_t monitored_epoch_ = 0;     // Guarded by mutex_.
  std::uint32_t monitored_barriers_ = 0;  // Guarded by mutex_. Since then.
};

// Whether the caller waits at once. Not all options of every torch version say so.
template <typename CallOptions>
bool Waits(const CallOptions& options) {
  if constexpr (requires { options.asyncOp; }) {
    return !options.asyncOp;
  } else {
    return false;
  }
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
// The hook as our table takes it, without torch's types, which older versions do not have.
inline CompletionHooks::Hook OnCompletion(c10d::CompletionHook hook) {
  return [hook = std::move(hook)](std::uint64_t key, float milliseconds) {
    hook({.completionKey = key, .duration_ms = milliseconds});
  };
}
#endif

}  // namespace resilient::plugin
