#include "torch_plugin/csrc/plan.h"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/device_stream.h"

namespace resilient::plugin {
namespace {

// Whether its bytes in memory are its values in order.
bool IsPlain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

std::size_t UnitsOf(at::ScalarType type, std::int64_t elements) {
  const std::size_t count = static_cast<std::size_t>(elements);
  return ToDataType(type) ? count : count * c10::elementSize(type);
}

}  // namespace

at::Tensor Plan::Input(const at::Tensor& tensor) {
  Check(host_, CheckTensor(tensor, name()));
  RunOn(tensor.device());
  at::Tensor memory = tensor.requires_grad() ? tensor.detach() : tensor;
  if (!IsPlain(memory)) memory = memory.detach().resolve_conj().resolve_neg().contiguous();
  held_.push_back(memory);
  return memory;
}

// Torch does not copy into such a tensor either, and would say so only after the operation.
void Plan::RequireOwnPlaces(const at::Tensor& tensor) {
  if (at::has_internal_overlap(tensor) != at::MemOverlap::Yes) return;
  Refuse(c10::str("several elements of a tensor of ", tensor.sizes(), " with strides ",
                  tensor.strides(), " share one place in memory, as those of expand() do, and ",
                  "cannot have values of their own: pass tensor.clone()"));
}

at::Tensor Plan::Output(const at::Tensor& tensor) {
  if (tensor.defined() && IsPlain(tensor)) return InOut(tensor);
  Check(host_, CheckTensor(tensor, name()));
  RequireOwnPlaces(tensor);
  RunOn(tensor.device());
  at::Tensor memory = at::empty_like(tensor, at::MemoryFormat::Contiguous);
  held_.push_back(memory);
  copies_.emplace_back(tensor, memory);
  outputs_.push_back(tensor);
  return memory;
}

at::Tensor Plan::InOut(const at::Tensor& tensor) {
  at::Tensor memory = Input(tensor);
  RequireOwnPlaces(tensor);
  if (!IsPlain(tensor)) copies_.emplace_back(tensor, memory);
  outputs_.push_back(tensor);
  return memory;
}

Operation& Plan::Add(OpKind kind, const at::Tensor& memory) {
  Operation& operation = AddBare(kind, memory.scalar_type());
  const Part part = PartOf(memory);
  operation.data = part.data;
  operation.count = part.count;
  return operation;
}

Operation& Plan::AddBare(OpKind kind, at::ScalarType type) {
  Operation& operation = operations_.emplace_back();
  operation.kind = kind;
  operation.dtype = ToDataType(type).value_or(DataType::kUInt8);
  return operation;
}

Operation& Plan::AddReduction(OpKind kind, const at::Tensor& memory, const c10d::ReduceOp& reduce) {
  const Reduction reduction =
      ValueOrThrow(host_, ToReduction(reduce, memory.scalar_type(), name()));
  Operation& operation = Add(kind, memory);
  operation.reduce = reduction.op;
  operation.factor = reduction.factor;
  return operation;
}

void Plan::RunOn(c10::Device device) {
  if (!device_) device_ = device;
  if (FromDevice(*device_) == FromDevice(device)) return;
  Refuse(c10::str("the tensors of a call are on one device, not on ", device_->str(), " and ",
                  device.str()));
}

void Plan::Place() {
  const int device = device_ ? FromDevice(*device_) : kHost;
  if (device == kHost) return;
  const ExecutionStream stream = ValueOrThrow(host_, CurrentStream(device));
  for (Operation& operation : operations_) {
    operation.device = device;
    operation.stream = stream;
  }
}

void Plan::Profile(at::RecordFunction& profiled) const {
  if (!profiled.isActive()) return;
  const std::vector<c10::IValue> inputs(held_.begin(), held_.end());
  profiled.before(title_, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
}

void Plan::RequireSameType(const at::Tensor& one, const at::Tensor& other) {
  if (one.scalar_type() == other.scalar_type()) return;
  Refuse(c10::str("the tensors of a call have one dtype, not ", one.scalar_type(), " and ",
                  other.scalar_type()));
}

void Plan::RequireRoot(std::int64_t root, int size) {
  if (root >= 0 && root < size) return;
  Refuse(c10::str("root ", root, " is not a rank of a group of ", size));
}

void Plan::Refuse(StatusCode code, const std::string& why) {
  host_.Throw(Status(code, c10::str(name(), ": ", why)));
}

Part PartOf(const at::Tensor& memory, std::int64_t offset, std::int64_t elements) {
  Part part;
  part.count = UnitsOf(memory.scalar_type(), elements);
  if (part.count == 0) return part;
  part.data = static_cast<std::byte*>(memory.mutable_data_ptr()) +
              static_cast<std::size_t>(offset) * memory.element_size();
  return part;
}

std::string Describe(const at::Tensor& tensor) {
  return c10::str(tensor.numel(), " elements of ", tensor.scalar_type());
}

}  // namespace resilient::plugin
