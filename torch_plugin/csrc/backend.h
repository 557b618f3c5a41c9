#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <resilient/communicator.h>
#include <resilient/session.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "torch_plugin/csrc/context.h"
#include "torch_plugin/csrc/work.h"

namespace resilient::plugin {

// One process group as c10d sees it: turns tensors into Operations of a resilient Group. One object
// serves all devices, because c10d keeps one object for each custom backend; tensors that are not
// on the CPU are refused. The operations have c10d's older names, to which all supported torch
// versions forward.
//
// Owner: c10d::ProcessGroup. Thread: thread-safe. Lifetime: keeps its session alive; the destructor
// says goodbye to the group's peers.
class ResilientBackend final : public c10d::Backend {
 public:
  // `ranks`: global ranks in group order; empty: the world. `name` is unique among open groups.
  static Result<c10::intrusive_ptr<ResilientBackend>> Create(
      std::shared_ptr<SessionContext> context, const std::string& name, int rank, int size,
      std::vector<int> ranks, std::chrono::milliseconds timeout);

  ResilientBackend(std::shared_ptr<SessionContext> context, std::shared_ptr<Group> group,
                   c10::intrusive_ptr<Options> options);
  ~ResilientBackend() override;

  const std::string getBackendName() const override { return "resilient"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  // Kept for getBackendOptions; live peers are waited for whatever it says.
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return last_sequence_.load(); }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  // What a call becomes: operations in order of submission, the memory they use, what to copy
  // where at the end.
  struct Plan {
    explicit Plan(c10d::OpType op_type) : type(op_type) {}
    c10d::OpType type;
    std::vector<Operation> operations;
    std::vector<at::Tensor> held;
    std::vector<at::Tensor> outputs;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (to, from)
  };

  // A contiguous stand-in for `tensor`; the tensor itself where it can be. Adds what `plan` needs.
  at::Tensor Input(Plan& plan, const at::Tensor& tensor, const char* what);
  at::Tensor InOut(Plan& plan, const at::Tensor& tensor, const char* what);
  void PlanAllReduce(Plan& plan, const at::Tensor& tensor, const c10d::ReduceOp& reduce);
  void PlanGather(Plan& plan, const at::Tensor& output, const at::Tensor& input);
  c10::intrusive_ptr<c10d::Work> PointToPoint(std::vector<at::Tensor>& tensors, OpKind kind,
                                              int peer, int tag);
  c10::intrusive_ptr<c10d::Work> Launch(Plan plan);
  const at::Tensor& Only(const std::vector<at::Tensor>& tensors, const char* what);
  [[noreturn]] void Refuse(StatusCode code, std::string text);

  const std::shared_ptr<SessionContext> context_;
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Host> host_;
  const c10::intrusive_ptr<Options> options_;
  std::atomic<std::uint64_t> last_sequence_{0};
};

}  // namespace resilient::plugin
