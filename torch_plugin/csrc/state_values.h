#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "torch_plugin/csrc/snapshot.h"

namespace resilient::plugin {

// Adaptors for what State::add takes. What they refer to must outlive them.
//
// A value comes back in the form that it had in the commit: where the program has changed the dtype
// or shape of a tensor since, or the replacement has not changed it yet, the tensor of the commit
// replaces the data; a module keeps its shapes; an optimizer loses the parameter groups that were
// added after the commit. What cannot be given its form is kSetting.

StateValue TensorValue(const std::string& name, const at::Tensor& tensor);
StateValue NumberValue(const std::string& name, std::int64_t& number);
StateValue NumberValue(const std::string& name, double& number);
StateValue ModuleValue(const std::string& name, torch::nn::Module& module);
StateValue OptimizerValue(const std::string& name, torch::optim::Optimizer& optimizer);
// Of the default generator of the CPU.
StateValue RandomNumbersValue(const std::string& name);

}  // namespace resilient::plugin
