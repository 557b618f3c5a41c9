#include "torch_plugin/csrc/backend.h"

#include <numeric>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Result<c10::intrusive_ptr<ResilientBackend>> ResilientBackend::Create(
    std::shared_ptr<SessionContext> context, const std::string& name, int rank, int size,
    std::vector<int> ranks, std::chrono::milliseconds timeout) {
  const bool world = ranks.empty();
  if (world) {
    ranks.resize(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  if (rank < 0 || rank >= size || ranks.size() != static_cast<std::size_t>(size)) {
    return Status(StatusCode::kInvalidArgument,
                  c10::str("group '", name, "': rank ", rank, " of ", size, " with ", ranks.size(),
                           " members is not possible"));
  }
  auto options = c10::make_intrusive<Options>("resilient", timeout);
  options->group_name = name;
  options->global_ranks_in_group.assign(ranks.begin(), ranks.end());
  auto group = context->session().CreateGroup(world ? kWorldGroup : name, std::move(ranks));
  if (!group.ok()) return group.status();
  if ((*group)->rank() != rank || (*group)->size() != size) {
    (*group)->Close();
    return Status(StatusCode::kInvalidArgument,
                  c10::str("group '", name, "': this process is rank ", (*group)->rank(), " of ",
                           (*group)->size(), ", not rank ", rank, " of ", size));
  }
  return c10::make_intrusive<ResilientBackend>(std::move(context), std::move(group).value(),
                                               std::move(options));
}

ResilientBackend::ResilientBackend(std::shared_ptr<SessionContext> context,
                                   std::shared_ptr<Group> group,
                                   c10::intrusive_ptr<Options> options)
    : Backend(group->rank(), group->size()),
      context_(std::move(context)),
      group_(std::move(group)),
      host_(context_->host()),
      options_(std::move(options)) {}

ResilientBackend::~ResilientBackend() { group_->Close(); }

void ResilientBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
}

c10d::ErrorType ResilientBackend::getError() {
  const StatusCode code = context_->session().failure().code();
  if (code == StatusCode::kOk) return c10d::ErrorType::SUCCESS;
  if (code == StatusCode::kCommStalled) return c10d::ErrorType::TIMEOUT;
  const bool by_a_peer =
      code == StatusCode::kRankLost || code == StatusCode::kLeft || code == StatusCode::kMismatch;
  return by_a_peer ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR;
}

void ResilientBackend::abort() {
  group_->Abort(c10::str("abort() was called on group '", group_->name(), "' by rank ",
                         context_->session().membership().rank));
}

void ResilientBackend::shutdown() {
  group_->Close();
  context_->ledger()->Drain();
}

void ResilientBackend::Refuse(StatusCode code, std::string text) {
  host_->Throw(Status(code, std::move(text)));
}

const at::Tensor& ResilientBackend::Only(const std::vector<at::Tensor>& tensors, const char* what) {
  if (tensors.size() != 1) {
    Refuse(StatusCode::kInvalidArgument,
           c10::str(what, " takes one tensor a call, not ", tensors.size()));
  }
  return tensors.front();
}

at::Tensor ResilientBackend::Input(Plan& plan, const at::Tensor& tensor, const char* what) {
  Check(*host_, CheckTensor(tensor, what));
  plan.held.push_back(tensor.detach().contiguous());
  return plan.held.back();
}

at::Tensor ResilientBackend::InOut(Plan& plan, const at::Tensor& tensor, const char* what) {
  at::Tensor memory = Input(plan, tensor, what);
  if (!tensor.is_contiguous()) plan.copies.emplace_back(tensor, memory);
  plan.outputs.push_back(tensor);
  return memory;
}

namespace {

Operation OnMemory(OpKind kind, const at::Tensor& tensor) {
  Operation operation;
  operation.kind = kind;
  operation.dtype = ToDataType(tensor.scalar_type()).value();  // Checked by CheckTensor.
  operation.data = tensor.mutable_data_ptr();
  operation.count = static_cast<std::size_t>(tensor.numel());
  return operation;
}

}  // namespace

void ResilientBackend::PlanAllReduce(Plan& plan, const at::Tensor& tensor,
                                     const c10d::ReduceOp& reduce) {
  const ReduceOp op = ValueOrThrow(*host_, ToReduceOp(reduce));
  Operation operation = OnMemory(OpKind::kAllReduce, InOut(plan, tensor, "all_reduce"));
  operation.reduce = op;
  plan.operations.push_back(std::move(operation));
}

void ResilientBackend::PlanGather(Plan& plan, const at::Tensor& output, const at::Tensor& input) {
  const at::Tensor from = Input(plan, input, "all_gather_into_tensor");
  const at::Tensor into = InOut(plan, output, "all_gather_into_tensor");
  if (from.scalar_type() != into.scalar_type() || into.numel() != from.numel() * getSize()) {
    Refuse(StatusCode::kInvalidArgument,
           c10::str("all_gather_into_tensor: an input of ", from.numel(), " elements of ",
                    from.scalar_type(), " needs an output of ", from.numel() * getSize(),
                    " of the same dtype; it has ", into.numel(), " of ", into.scalar_type()));
  }
  Operation operation = OnMemory(OpKind::kAllGather, from);
  auto* bytes = static_cast<std::uint8_t*>(into.mutable_data_ptr());
  for (int peer = 0; peer < getSize(); ++peer) {
    operation.outputs.push_back(
        {.data = bytes + static_cast<std::size_t>(peer) * from.nbytes(), .count = operation.count});
  }
  plan.operations.push_back(std::move(operation));
}

WorkPtr ResilientBackend::Launch(Plan plan) {
  context_->ledger()->Drain();
  const std::string call_site = host_->CallSite();
  WorkSpec spec;
  spec.type = plan.type;
  spec.group = group_->name();
  spec.operation = plan.operations.front();
  spec.held = std::move(plan.held);
  spec.outputs = std::move(plan.outputs);
  spec.copies = std::move(plan.copies);
  const bool copies = !spec.copies.empty();
  if (copies) Check(*host_, context_->finisher()->Start());
  auto work =
      c10::make_intrusive<WorkImpl>(context_, getRank(), std::move(spec), plan.operations.size());
  const std::shared_ptr<Progress> progress = work->progress();
  if (copies) progress->RequireFinisher();
  const std::uint64_t id = ValueOrThrow(*host_, context_->ledger()->Add(work));
  progress->Attach(work.get(), id);
  bool any_started = false;
  for (Operation& operation : plan.operations) {
    operation.call_site = call_site;
    const auto sequence = group_->Submit(
        std::move(operation), [progress](const Status& status) { progress->Complete(status); });
    if (sequence.ok()) {
      if (plan.type != OpType::SEND && plan.type != OpType::RECV) last_sequence_.store(*sequence);
      work->set_sequence(*sequence);
      any_started = true;
    } else if (any_started) {
      progress->Complete(sequence.status());  // Told when the Work is waited for.
    } else {
      context_->ledger()->Retire(id);
      context_->ledger()->Drain();
      host_->Throw(sequence.status());
    }
  }
  return work;
}

WorkPtr ResilientBackend::broadcast(std::vector<at::Tensor>& tensors,
                                    const c10d::BroadcastOptions& options) {
  Plan plan(OpType::BROADCAST);
  if (options.rootRank < 0 || options.rootRank >= getSize()) {
    Refuse(StatusCode::kInvalidArgument, c10::str("broadcast: root ", options.rootRank,
                                                  " is not a rank of a group of ", getSize()));
  }
  const at::Tensor memory = InOut(plan, Only(tensors, "broadcast"), "broadcast");
  Operation operation = OnMemory(OpKind::kBroadcast, memory);
  operation.root = static_cast<int>(options.rootRank);
  plan.operations.push_back(std::move(operation));
  return Launch(std::move(plan));
}

WorkPtr ResilientBackend::allreduce(std::vector<at::Tensor>& tensors,
                                    const c10d::AllreduceOptions& options) {
  Plan plan(OpType::ALLREDUCE);
  PlanAllReduce(plan, Only(tensors, "all_reduce"), options.reduceOp);
  return Launch(std::move(plan));
}

WorkPtr ResilientBackend::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  Plan plan(OpType::ALLREDUCE_COALESCED);
  if (tensors.empty()) Refuse(StatusCode::kInvalidArgument, "all_reduce_coalesced: no tensors");
  for (const at::Tensor& tensor : tensors) PlanAllReduce(plan, tensor, options.reduceOp);
  return Launch(std::move(plan));
}

WorkPtr ResilientBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                    std::vector<at::Tensor>& inputs,
                                    const c10d::AllgatherOptions& /*options*/) {
  Plan plan(OpType::ALLGATHER);
  const at::Tensor from = Input(plan, Only(inputs, "all_gather"), "all_gather");
  if (outputs.size() != 1 || outputs.front().size() != static_cast<std::size_t>(getSize())) {
    Refuse(StatusCode::kInvalidArgument,
           c10::str("all_gather: a list of ", getSize(), " output tensors is needed, not of ",
                    outputs.empty() ? 0 : outputs.front().size()));
  }
  Operation operation = OnMemory(OpKind::kAllGather, from);
  for (const at::Tensor& output : outputs.front()) {
    const at::Tensor into = InOut(plan, output, "all_gather");
    if (into.scalar_type() != from.scalar_type() || into.numel() != from.numel()) {
      Refuse(StatusCode::kInvalidArgument,
             c10::str("all_gather: every output must have ", from.numel(), " elements of ",
                      from.scalar_type(), " like the input; one has ", into.numel(), " of ",
                      into.scalar_type()));
    }
    operation.outputs.push_back({.data = into.mutable_data_ptr(), .count = operation.count});
  }
  plan.operations.push_back(std::move(operation));
  return Launch(std::move(plan));
}

WorkPtr ResilientBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& /*options*/) {
  Plan plan(OpType::_ALLGATHER_BASE);
  PlanGather(plan, output, input);
  return Launch(std::move(plan));
}

WorkPtr ResilientBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& /*options*/) {
  Plan plan(OpType::COALESCED);  // torch 2.11 has no name of its own for it.
  if (outputs.empty() || outputs.size() != inputs.size()) {
    Refuse(StatusCode::kInvalidArgument,
           c10::str("all_gather_into_tensor_coalesced: ", inputs.size(), " inputs and ",
                    outputs.size(), " outputs do not match"));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) PlanGather(plan, outputs[i], inputs[i]);
  return Launch(std::move(plan));
}

WorkPtr ResilientBackend::PointToPoint(std::vector<at::Tensor>& tensors, OpKind kind, int peer,
                                       int tag) {
  const bool sends = kind == OpKind::kSend;
  const char* what = sends ? "send" : "recv";
  if (peer < 0 || peer >= getSize() || peer == getRank() || tag < 0) {
    Refuse(StatusCode::kInvalidArgument,
           c10::str(what, ": peer ", peer, " with tag ", tag, " is not possible for rank ",
                    getRank(), " of a group of ", getSize(), "; a tag is not negative"));
  }
  Plan plan(sends ? OpType::SEND : OpType::RECV);
  const at::Tensor& tensor = Only(tensors, what);
  const at::Tensor memory = sends ? Input(plan, tensor, what) : InOut(plan, tensor, what);
  if (sends) plan.outputs.push_back(tensor);
  Operation operation = OnMemory(kind, memory);
  operation.peer = peer;
  operation.tag = static_cast<std::uint32_t>(tag);
  plan.operations.push_back(std::move(operation));
  return Launch(std::move(plan));
}

WorkPtr ResilientBackend::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  return PointToPoint(tensors, OpKind::kSend, destination, tag);
}

WorkPtr ResilientBackend::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  return PointToPoint(tensors, OpKind::kRecv, source, tag);
}

WorkPtr ResilientBackend::barrier(const c10d::BarrierOptions& /*options*/) {
  Plan plan(OpType::BARRIER);
  plan.operations.emplace_back();
  return Launch(std::move(plan));
}

}  // namespace resilient::plugin
