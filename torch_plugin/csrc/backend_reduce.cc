#include <utility>

#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/backend.h"

namespace resilient::plugin {

using c10d::OpType;
using WorkPtr = ResilientBackend::WorkPtr;

WorkPtr ResilientBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors.front().defined() && tensors.front().is_sparse()) {
    return allreduce_sparse(tensors, options);
  }
  Plan plan = Begin(OpType::ALLREDUCE, "resilient:all_reduce");
  plan.AddReduction(OpKind::kAllReduce, plan.InOut(Only(plan, tensors)), options.reduceOp);
  return Launch(std::move(plan), Waits(options));
}

WorkPtr ResilientBackend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  Plan plan = Begin(OpType::ALLREDUCE_COALESCED, "resilient:all_reduce_coalesced");
  if (tensors.empty()) plan.Refuse("it has no tensors");
  for (const at::Tensor& tensor : tensors) {
    plan.AddReduction(OpKind::kAllReduce, plan.InOut(tensor), options.reduceOp);
  }
  return Launch(std::move(plan), Waits(options));
}

WorkPtr ResilientBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  Plan plan = Begin(OpType::REDUCE, "resilient:reduce");
  plan.RequireRoot(options.rootRank, getSize());
  const at::Tensor& tensor = Only(plan, tensors);
  const bool is_root = options.rootRank == getRank();
  const at::Tensor memory = is_root ? plan.InOut(tensor) : plan.Input(tensor);
  if (!is_root) plan.AddResult(tensor);
  plan.AddReduction(OpKind::kReduce, memory, options.reduceOp).root =
      static_cast<int>(options.rootRank);
  return Launch(std::move(plan), Waits(options));
}

WorkPtr ResilientBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  Plan plan = Begin(OpType::REDUCE_SCATTER, "resilient:reduce_scatter");
  const at::Tensor into = plan.Output(Only(plan, outputs));
  std::vector<Part> parts = InputForEach(plan, inputs, into);
  plan.AddReduction(OpKind::kReduceScatter, into, options.reduceOp).inputs = std::move(parts);
  return Launch(std::move(plan), Waits(options));
}

void ResilientBackend::PlanReduceScatter(Plan& plan, const at::Tensor& output,
                                         const at::Tensor& input, const c10d::ReduceOp& reduce) {
  const at::Tensor from = plan.Input(input);
  const at::Tensor into = plan.Output(output);
  plan.RequireSameType(into, from);
  if (from.numel() != into.numel() * getSize()) {
    plan.Refuse(c10::str("an output of ", Describe(into), " needs an input of ",
                         into.numel() * getSize(), "; it has ", from.numel()));
  }
  Operation& operation = plan.AddReduction(OpKind::kReduceScatter, into, reduce);
  operation.one_block = true;
  for (int peer = 0; peer < getSize(); ++peer) {
    operation.inputs.push_back(PartOf(from, peer * into.numel(), into.numel()));
  }
}

WorkPtr ResilientBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  Plan plan = Begin(OpType::_REDUCE_SCATTER_BASE, "resilient:_reduce_scatter_base");
  PlanReduceScatter(plan, output, input, options.reduceOp);
  return Launch(std::move(plan), Waits(options));
}

WorkPtr ResilientBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  Plan plan = Begin(OpType::COALESCED, "resilient:reduce_scatter_tensor_coalesced");
  if (outputs.empty() || outputs.size() != inputs.size()) {
    plan.Refuse(c10::str(inputs.size(), " inputs and ", outputs.size(), " outputs do not match"));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    PlanReduceScatter(plan, outputs[i], inputs[i], options.reduceOp);
  }
  return Launch(std::move(plan), Waits(options));
}

}  // namespace resilient::plugin
