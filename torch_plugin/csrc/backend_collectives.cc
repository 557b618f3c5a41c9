#include <algorithm>
#include <numeric>
#include <utility>

#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/backend.h"
#include "torch_plugin/csrc/device_stream.h"

namespace resilient::plugin {

using c10d::OpType;
using WorkPtr = ResilientBackend::WorkPtr;

namespace {

// The rows of `memory` for each rank; `side` is "input" or "output".
std::vector<Part> SplitRows(Plan& plan, const at::Tensor& memory,
                            const std::vector<std::int64_t>& splits, int size, const char* side) {
  const std::int64_t rows = memory.dim() == 0 ? 1 : memory.size(0);
  std::vector<std::int64_t> counts = splits;
  if (counts.empty()) {
    if (rows % size != 0) {
      plan.Refuse(c10::str("the ", rows, " rows of the ", side, " do not split evenly over ", size,
                           " ranks: pass ", side, "_split_sizes"));
    }
    counts.assign(static_cast<std::size_t>(size), rows / size);
  }
  const bool negative = std::any_of(counts.begin(), counts.end(), [](auto n) { return n < 0; });
  if (counts.size() != static_cast<std::size_t>(size) || negative ||
      std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) != rows) {
    plan.Refuse(c10::str(side, "_split_sizes [", c10::Join(", ", counts), "] are not those of ",
                         rows, " rows over ", size, " ranks"));
  }
  const std::int64_t row = rows == 0 ? 0 : memory.numel() / rows;
  std::vector<Part> parts;
  std::int64_t offset = 0;
  for (const std::int64_t count : counts) {
    parts.push_back(PartOf(memory, offset * row, count * row));
    offset += count;
  }
  return parts;
}

}  // namespace

WorkPtr ResilientBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Plan plan = Begin(OpType::BROADCAST, "resilient:broadcast");
  plan.RequireRoot(options.rootRank, getSize());
  plan.Add(OpKind::kBroadcast, plan.InOut(Only(plan, tensors))).root =
      static_cast<int>(options.rootRank);
  return Launch(std::move(plan), Waits(options));
}

Operation& ResilientBackend::PlanGatherToList(Plan& plan, OpKind kind, const Tensors& outputs,
                                              const at::Tensor& input) {
  if (outputs.size() != static_cast<std::size_t>(getSize())) {
    plan.Refuse(
        c10::str("it needs a list of ", getSize(), " output tensors, not of ", outputs.size()));
  }
  const at::Tensor from = plan.Input(input);
  std::vector<Part> parts;
  for (const at::Tensor& output : outputs) {
    const at::Tensor into = plan.Output(output);
    plan.RequireSameType(into, from);
    parts.push_back(PartOf(into));
  }
  const at::Tensor& own = outputs[static_cast<std::size_t>(getRank())];
  if (own.numel() != from.numel()) {
    plan.Refuse(c10::str("the input has ", Describe(from), ", this rank's output ", own.numel()));
  }
  Operation& operation = plan.Add(kind, from);
  operation.outputs = std::move(parts);
  return operation;
}

Operation& ResilientBackend::PlanGather(Plan& plan, OpKind kind, const at::Tensor& output,
                                        const at::Tensor& input) {
  const at::Tensor from = plan.Input(input);
  const at::Tensor into = plan.Output(output);
  plan.RequireSameType(into, from);
  if (into.numel() != from.numel() * getSize()) {
    plan.Refuse(c10::str("an input of ", Describe(from), " needs an output of ",
                         from.numel() * getSize(), "; it has ", into.numel()));
  }
  Operation& operation = plan.Add(kind, from);
  operation.one_block = kind == OpKind::kAllGather;
  for (int peer = 0; peer < getSize(); ++peer) {
    operation.outputs.push_back(PartOf(into, peer * from.numel(), from.numel()));
  }
  return operation;
}

WorkPtr ResilientBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  Plan plan = Begin(OpType::ALLGATHER, "resilient:all_gather");
  const at::Tensor& input = Only(plan, inputs);
  if (outputs.size() != 1) plan.Refuse(c10::str("it has ", outputs.size(), " lists of outputs"));
  PlanGatherToList(plan, OpKind::kAllGather, outputs.front(), input);
  return Launch(std::move(plan), Waits(options));
}

WorkPtr ResilientBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  Plan plan = Begin(OpType::_ALLGATHER_BASE, "resilient:_all_gather_base");
  PlanGather(plan, OpKind::kAllGather, output, input);
  return Launch(std::move(plan), Waits(options));
}

// `outputs[r][i]` is what rank r has as `inputs[i]`.
WorkPtr ResilientBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  Plan plan = Begin(OpType::ALLGATHER_COALESCED, "resilient:all_gather_coalesced");
  if (inputs.empty() || outputs.size() != static_cast<std::size_t>(getSize())) {
    plan.Refuse(c10::str("it needs inputs and a list of outputs for each of the ", getSize(),
                         " ranks; it has ", inputs.size(), " inputs and ", outputs.size(),
                         " lists"));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors column;
    for (const Tensors& list : outputs) {
      if (list.size() != inputs.size()) {
        plan.Refuse(
            c10::str("a list has ", list.size(), " outputs for ", inputs.size(), " inputs"));
      }
      column.push_back(list[i]);
    }
    PlanGatherToList(plan, OpKind::kAllGather, column, inputs[i]);
  }
  return Launch(std::move(plan), Waits(options));
}

WorkPtr ResilientBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  // torch 2.11 has no type of its own for it.
  Plan plan = Begin(OpType::COALESCED, "resilient:all_gather_into_tensor_coalesced");
  if (outputs.empty() || outputs.size() != inputs.size()) {
    plan.Refuse(c10::str(inputs.size(), " inputs and ", outputs.size(), " outputs do not match"));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i)
    PlanGather(plan, OpKind::kAllGather, outputs[i], inputs[i]);
  return Launch(std::move(plan), Waits(options));
}

WorkPtr ResilientBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  Plan plan = Begin(OpType::GATHER, "resilient:gather");
  plan.RequireRoot(options.rootRank, getSize());
  const at::Tensor& input = Only(plan, inputs);
  const int root = static_cast<int>(options.rootRank);
  if (root == getRank()) {
    if (outputs.size() != 1) plan.Refuse("the root needs one list of outputs");
    PlanGatherToList(plan, OpKind::kGather, outputs.front(), input).root = root;
  } else {
    if (!outputs.empty() && !outputs.front().empty()) plan.Refuse("only the root has outputs");
    plan.Add(OpKind::kGather, plan.Input(input)).root = root;
  }
  return Launch(std::move(plan), Waits(options));
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
WorkPtr ResilientBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                             const c10d::GatherOptions& options) {
  Plan plan = Begin(OpType::GATHER, "resilient:gather_into_tensor");
  plan.RequireRoot(options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  if (root == getRank()) {
    PlanGather(plan, OpKind::kGather, output, input).root = root;
  } else {
    plan.Add(OpKind::kGather, plan.Input(input)).root = root;
  }
  return Launch(std::move(plan), Waits(options));
}
#endif

std::vector<Part> ResilientBackend::InputForEach(Plan& plan, const std::vector<Tensors>& inputs,
                                                 const at::Tensor& into) {
  const auto size = static_cast<std::size_t>(getSize());
  if (inputs.size() != 1 || inputs.front().size() != size) {
    plan.Refuse(c10::str("this rank needs a list of ", size, " input tensors, not of ",
                         inputs.empty() ? 0 : inputs.front().size()));
  }
  std::vector<Part> parts;
  parts.reserve(size);
  for (const at::Tensor& input : inputs.front()) {
    const at::Tensor from = plan.Input(input);
    plan.RequireSameType(into, from);
    parts.push_back(PartOf(from));
  }
  const at::Tensor& own = inputs.front()[static_cast<std::size_t>(getRank())];
  if (own.numel() != into.numel()) {
    plan.Refuse(c10::str("the output has ", Describe(into), ", this rank's input ", own.numel()));
  }
  return parts;
}

WorkPtr ResilientBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ScatterOptions& options) {
  Plan plan = Begin(OpType::SCATTER, "resilient:scatter");
  plan.RequireRoot(options.rootRank, getSize());
  const bool is_root = options.rootRank == getRank();
  const at::Tensor into = plan.Output(Only(plan, outputs));
  std::vector<Part> parts;
  if (is_root) {
    parts = InputForEach(plan, inputs, into);
  } else if (!inputs.empty() && !inputs.front().empty()) {
    plan.Refuse("only the root has inputs");
  }
  Operation& operation = plan.Add(OpKind::kScatter, into);
  operation.root = static_cast<int>(options.rootRank);
  operation.inputs = std::move(parts);
  return Launch(std::move(plan), Waits(options));
}

WorkPtr ResilientBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  Plan plan = Begin(OpType::ALLTOALL, "resilient:all_to_all");
  const auto size = static_cast<std::size_t>(getSize());
  if (inputs.size() != size || outputs.size() != size) {
    plan.Refuse(c10::str("it needs lists of ", size, " tensors, not of ", inputs.size(),
                         " inputs and ", outputs.size(), " outputs"));
  }
  std::vector<Part> sent;
  std::vector<Part> received;
  for (std::size_t peer = 0; peer < size; ++peer) {
    const at::Tensor from = plan.Input(inputs[peer]);
    const at::Tensor into = plan.Output(outputs[peer]);
    plan.RequireSameType(from, inputs.front());
    plan.RequireSameType(into, inputs.front());
    sent.push_back(PartOf(from));
    received.push_back(PartOf(into));
  }
  PlanExchange(plan, inputs.front().scalar_type(), std::move(sent), std::move(received));
  return Launch(std::move(plan), Waits(options));
}

WorkPtr ResilientBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<std::int64_t>& output_splits,
                                        std::vector<std::int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  Plan plan = Begin(OpType::ALLTOALL_BASE, "resilient:all_to_all");
  const at::Tensor from = plan.Input(input);
  const at::Tensor into = plan.Output(output);
  plan.RequireSameType(into, from);
  std::vector<Part> sent = SplitRows(plan, from, input_splits, getSize(), "input");
  std::vector<Part> received = SplitRows(plan, into, output_splits, getSize(), "output");
  PlanExchange(plan, from.scalar_type(), std::move(sent), std::move(received));
  return Launch(std::move(plan), Waits(options));
}

void ResilientBackend::PlanExchange(Plan& plan, at::ScalarType type, std::vector<Part> sent,
                                    std::vector<Part> received) {
  const auto own = static_cast<std::size_t>(getRank());
  if (sent[own].count != received[own].count) {
    plan.Refuse(c10::str("this rank sends itself ", sent[own].count, " elements and expects ",
                         received[own].count));
  }
  Operation& operation = plan.AddBare(OpKind::kAllToAll, type);
  operation.inputs = std::move(sent);
  operation.outputs = std::move(received);
}

std::optional<c10::Device> ResilientBackend::BarrierDevice(
    const c10d::BarrierOptions& options) const {
  if (options.device && options.device->is_cuda()) {
    return options.device->has_index() ? *options.device : ToDevice(CurrentDevice());
  }
  // torch's Python side names a device wherever the process has one.
  if (!options.device && !options.device_ids.empty() && HasDevice()) {
    return ToDevice(static_cast<int>(options.device_ids.front()));
  }
  if (context_->options().session.replay) return std::nullopt;  // Devices are refused with it.
  if (const auto bound = getBoundDeviceId(); bound && bound->is_cuda()) return bound;
  const std::uint64_t epoch = context_->session().epoch();
  const std::lock_guard lock(mutex_);
  if (device_use_.device == kHost || device_use_.epoch != epoch) return std::nullopt;
  return ToDevice(device_use_.device);
}

WorkPtr ResilientBackend::barrier(const c10d::BarrierOptions& options) {
  HealIfDue();  // What ran before that is forgotten on all ranks.
  Plan plan = Begin(OpType::BARRIER, "resilient:barrier");
  if (const auto device = BarrierDevice(options)) plan.RunOn(*device);
  plan.AddBare(OpKind::kBarrier, at::kByte);
  return Launch(std::move(plan), Waits(options));
}

}  // namespace resilient::plugin
