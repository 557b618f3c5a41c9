#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#ifdef C10D_BACKEND_HAS_RECONFIGURE  // From torch 2.14 on.

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <resilient/status.h>

#include "torch_plugin/csrc/backend.h"
#include "torch_plugin/csrc/context.h"

namespace resilient::plugin {

// A process group whose members the program chooses itself: what
// init_process_group(..., enable_reconfigure=True) makes, torch's own contract for fault tolerance.
//
// It has no members until reconfigure(uuid, handles) was called on each of them with the same
// arguments. That leaves the members before, joins a session of its own for these, under a job
// named by the uuid, and hands all operations to a ResilientBackend on it; rank and size follow. So
// the store supplies liveness as for any world: when a member dies every operation raises an error
// that names it, and goes on raising until the next reconfigure. Nothing is rebuilt by itself.
//
// A uuid names one set of members. This process's second use of one is refused at once, a use of
// one that others have as soon as the store or the list of members shows it. After a reconfigure
// that raised the group has no members; another, with a fresh uuid, works.
//
// Owner: c10d::ProcessGroup. Thread: thread-safe. Lifetime: keeps the anchor and its present
// session alive; shutdown ends the latter, and the destructor calls it.
class ReconfigurableBackend final : public c10d::Backend {
 public:
  using WorkPtr = ResilientBackend::WorkPtr;
  using Tensors = ResilientBackend::Tensors;

  // `anchor`: the session of this process alone; it keeps the store, and is the pattern of those
  // that follow. rank and size are told as such until the first reconfigure.
  ReconfigurableBackend(std::shared_ptr<SessionContext> anchor, const std::string& name, int rank,
                        int size, std::chrono::milliseconds timeout);
  ~ReconfigurableBackend() override;

  bool supportsReconfigure() const override { return true; }
  // The same at every call: "resilient:RANK:INCARNATION:PID:HOST", with the rank of init.
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  // Handles without an order have the ranks of their processes' init, made dense. Blocks until all
  // members have come, and are linked; the Work has ended then. SETTING for handles or a uuid that
  // cannot be; JOIN_TIMEOUT that names who has not come; the cause when a member dies meanwhile.
  // Without a timeout: the group's.
  WorkPtr reconfigure(const c10d::ReconfigureOptions& options) override;

  // The session of the present members; the anchor without any.
  std::shared_ptr<SessionContext> context() const;
  // That of the present members. Raises without any, and says what to do.
  c10::intrusive_ptr<ResilientBackend> Current() const;

  const std::string getBackendName() const override { return "resilient"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    return Current()->getMemAllocator();
  }
  void setTimeout(std::chrono::milliseconds timeout) override;
  // Also for the operations of members that a later reconfigure brings.
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  // Ends what runs, on all members, and a reconfigure that waits here.
  void abort() override;
  void shutdown() override;
  void enableCollectivesTiming() override {}
#ifdef C10D_BACKEND_HAS_HOOKS
  // As of ResilientBackend, over all sets of members.
  void registerAbortHook(std::int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(std::int64_t id) override;
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(std::int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(std::int64_t id) override;
#endif

  // Raise SETTING: members change by reconfigure only.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& options, const int& rank,
                                    const int& size) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
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
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions& options) override;
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
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  // A handle, taken apart.
  struct Peer {
    int init_rank = -1;
    std::string incarnation;
    std::string pid;
    std::string host;
  };
  // One set of members.
  struct Members {
    std::shared_ptr<SessionContext> context;
    c10::intrusive_ptr<ResilientBackend> backend;
  };

  static Result<Peer> ParseHandle(const std::string& handle);
  static std::string Describe(const std::vector<Peer>& peers);
  // In rank order.
  Result<std::vector<Peer>> PeersOf(const c10d::ReconfigureOptions& options) const;
  Result<int> OwnRank(const std::vector<Peer>& peers) const;

  // What reconfigure does but for its Work.
  Status Reconfigure(const c10d::ReconfigureOptions& options);
  // Marks the uuid as used and that a reconfigure runs; gives what is to be left.
  Result<std::optional<Members>> Begin(std::int64_t uuid);
  Result<Members> Join(std::int64_t uuid, const std::vector<Peer>& peers, int rank,
                       std::chrono::milliseconds timeout);
  Status CheckMembers(std::int64_t uuid, const std::vector<Peer>& peers,
                      const Membership& membership) const;
  static void End(Members& members);

  const std::shared_ptr<SessionContext> anchor_;
  const std::shared_ptr<Host> host_;
  const c10::intrusive_ptr<Options> options_;
  const std::string handle_;
  const GroupParts parts_;
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  bool closed_ = false;
  bool reconfiguring_ = false;
  std::unordered_set<std::int64_t> used_;
  std::shared_ptr<SessionContext> joining_;  // While a reconfigure waits for its members.
  std::optional<Members> members_;
};

}  // namespace resilient::plugin

#endif
