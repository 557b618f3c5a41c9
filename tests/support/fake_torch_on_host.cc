#include "tests/support/fake_torch_on_host.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fake_torch_guard.h"
#include "tests/support/fake_torch_tensors.h"

namespace resilient::testing {
namespace {

using c10::FunctionSchema;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// What has a kernel of its own here, or what the wheel's own does without a GPU.
const std::set<std::string>& Excepted() {
  static const auto* const kNames = new std::set<std::string>{
      "aten::empty", "aten::empty_strided", "aten::copy_",       "aten::record_stream",
      "aten::set_",  "aten::_to_copy",      "aten::_pin_memory", "aten::is_pinned"};
  return *kNames;
}

// Calls `change` for each tensor in `value` and puts what it returns in its place.
template <typename Change>
IValue Changed(const IValue& value, const Change& change) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    for (at::Tensor& tensor : tensors) tensor = change(tensor);
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> one : value.toOptionalTensorVector()) {
      if (one && one->defined()) one = change(*one);
      list.push_back(one);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
  return value;
}

bool Writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// The argument that is written and returned as this; nullopt: a new tensor.
std::optional<std::size_t> ArgumentOf(const FunctionSchema& schema, const c10::Argument& returned) {
  if (returned.alias_info() == nullptr) return std::nullopt;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->beforeSets() == returned.alias_info()->beforeSets()) return i;
  }
  return std::nullopt;
}

// A result for whoever gave the tensor for it, which may have no room for it.
void PutInto(const at::Tensor& target, const at::Tensor& made) {
  if (target.sizes() == made.sizes()) {
    OnHost(target).copy_(made);
    return;
  }
  const at::Tensor fake = OnFake(made.contiguous(), target.device());
  c10::TensorImpl* impl = target.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(fake.storage());
  impl->set_sizes_and_strides(fake.sizes(), fake.strides());
}

void CallOnHost(const OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

// All that it makes is known already: it runs when the stream gets there, as on a GPU.
void CallInOrder(const OperatorHandle& op, const c10::Stream& stream, Stack arguments) {
  Enqueue(stream, [op, arguments = std::move(arguments)]() mutable {
    try {
      CallOnHost(op, &arguments);
    } catch (const std::exception& error) {
      std::cerr << op.schema().name() << " on a fake device: " << error.what() << std::endl;
      std::abort();  // As a device that has failed: there is nobody to tell.
    }
  });
}

bool HasOut(const FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     [](const c10::Argument& one) { return one.is_out(); }) ||
         schema.name() == "aten::resize_";
}

std::optional<c10::Device> FirstDevice(const Stack& arguments) {
  std::optional<c10::Device> device;
  for (const IValue& value : arguments) {
    Changed(value, [&](const at::Tensor& tensor) {
      if (!device && tensor.is_cuda()) device = tensor.device();
      return tensor;
    });
  }
  return device;
}

void RunOnHost(const OperatorHandle& op, Stack* stack) {
  const FunctionSchema& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  const Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  stack->resize(stack->size() - count);
  const c10::Device device = FirstDevice(arguments).value_or(FakeDevice(-1));
  const c10::Stream stream = CurrentStream(device);
  Stack on_host;
  for (std::size_t i = 0; i < count; ++i) {
    const bool fresh = schema.arguments()[i].is_out();
    on_host.push_back(Changed(arguments[i], [&](const at::Tensor& tensor) {
      return fresh ? at::empty({0}, tensor.options().device(at::kCPU)) : OnHost(tensor);
    }));
  }
  const auto& returns = schema.returns();
  const bool in_place = !HasOut(schema) && std::all_of(returns.begin(), returns.end(), Writes);
  Stack results = on_host;
  if (in_place) {
    CallInOrder(op, stream, std::move(on_host));
  } else {
    Synchronize(stream);
    CallOnHost(op, &results);
  }
  for (std::size_t i = 0; i < returns.size(); ++i) {
    const auto of = ArgumentOf(schema, returns[i]);
    if (!of) {
      stack->push_back(
          Changed(results[i], [&](const at::Tensor& made) { return OnFake(made, device); }));
      continue;
    }
    if (!in_place) PutInto(arguments[*of].toTensor(), results[i].toTensor());
    stack->push_back(arguments[*of]);
  }
}

bool IsForHost(const OperatorHandle& op) {
  if (!op.hasSchema() || !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) return false;
  const FunctionSchema& schema = op.schema();
  if (schema.name().rfind("aten::", 0) != 0 || Excepted().count(schema.name()) != 0) return false;
  const auto is_view = [](const c10::Argument& one) {
    return one.alias_info() != nullptr && !one.alias_info()->isWrite();
  };
  const auto is_tensor = [](const c10::Argument& one) {
    return one.type()->str().find("Tensor") != std::string::npos;
  };
  return std::none_of(schema.returns().begin(), schema.returns().end(), is_view) &&
         std::any_of(schema.arguments().begin(), schema.arguments().end(), is_tensor);
}

}  // namespace

void AddKernelsOnHost(torch::Library& library) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !IsForHost(*op)) continue;
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    library.impl((name.name + overload).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&RunOnHost>());
  }
}

}  // namespace resilient::testing
