#include "torch_plugin/csrc/state_values.h"

#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>
#include <torch/serialize.h>

namespace resilient::plugin {
namespace {

using Tensors = std::vector<at::Tensor>;

std::string FormOf(const at::Tensor& tensor) {
  return c10::str(c10::toString(tensor.scalar_type()), tensor.sizes());
}

Status Misfit(const std::string& name, const std::string& here, const std::string& there) {
  return {StatusCode::kSetting,
          c10::str("the value '", name, "' is ", here, " here and ", there,
                   " in the commit. Make it, before elastic or sync() on every start, such that it "
                   "can take its state of the commit, or give the other one a name of its own")};
}

Status WrongCount(const std::string& name, std::size_t here, std::size_t there) {
  return Misfit(name, c10::str(here, here == 1 ? " tensor" : " tensors"),
                c10::str(there, there == 1 ? " tensor" : " tensors"));
}

// Gives the tensor what was kept, in the dtype and shape that it had. Whoever else holds the tensor
// sees the same.
void Put(const at::Tensor& target, const at::Tensor& kept) {
  // What was made in inference mode can be written to in it only.
  const c10::InferenceMode mode(target.is_inference());
  const at::NoGradGuard no_grad;  // The other guard has a grad mode of its own.
  if (!SameForm(target, kept)) {
    const auto options = target.options().dtype(kept.scalar_type()).requires_grad(false);
    at::Tensor(target).set_data(at::empty(kept.sizes(), options));
  }
  if (kept.numel() > 0) target.copy_(kept.detach());
  if (target.is_leaf() && target.requires_grad() != kept.requires_grad())
    target.requires_grad_(kept.requires_grad());
}

template <typename Number>
StateValue NumberOf(const std::string& name, Number& number, at::ScalarType type) {
  const auto load = [&number, type, name](const Tensors& kept) {
    if (kept.size() != 1) return WrongCount(name, 1, kept.size());
    const at::Tensor& one = kept.front();
    if (one.scalar_type() != type || one.numel() != 1)
      return Misfit(name, c10::str("a ", c10::toString(type)), FormOf(one));
    number = one.item<Number>();
    return Status::Ok();
  };
  return {.name = name,
          .read = [&number, type] { return Tensors{at::full({1}, number, type)}; },
          .load = load};
}

// Parameters, then buffers, with their names.
std::vector<std::pair<std::string, at::Tensor>> TensorsOf(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& each : module.named_parameters()) tensors.emplace_back(each.key(), each.value());
  for (const auto& each : module.named_buffers()) tensors.emplace_back(each.key(), each.value());
  return tensors;
}

}  // namespace

StateValue TensorValue(const std::string& name, const at::Tensor& tensor) {
  const auto load = [tensor, name](const Tensors& kept) {
    if (kept.size() != 1) return WrongCount(name, 1, kept.size());
    Put(tensor, kept.front());
    return Status::Ok();
  };
  return {.name = name, .read = [tensor] { return Tensors{tensor}; }, .load = load};
}

StateValue NumberValue(const std::string& name, std::int64_t& number) {
  return NumberOf(name, number, at::kLong);
}

StateValue NumberValue(const std::string& name, double& number) {
  return NumberOf(name, number, at::kDouble);
}

StateValue ModuleValue(const std::string& name, torch::nn::Module& module) {
  const auto read = [&module] {
    Tensors tensors;
    for (const auto& [key, tensor] : TensorsOf(module)) tensors.push_back(tensor);
    return tensors;
  };
  const auto load = [&module, name](const Tensors& kept) {
    module.zero_grad();  // What a backward that failed has left would be added to by the next one.
    const auto tensors = TensorsOf(module);
    if (tensors.size() != kept.size()) return WrongCount(name, tensors.size(), kept.size());
    // The layers compute with their own sizes: only another dtype can be given to them.
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const auto& [key, tensor] = tensors[i];
      if (tensor.sizes() != kept[i].sizes())
        return Misfit(c10::str(name, ".", key), FormOf(tensor), FormOf(kept[i]));
    }
    for (std::size_t i = 0; i < kept.size(); ++i) Put(tensors[i].second, kept[i]);
    return Status::Ok();
  };
  return {.name = name, .read = read, .load = load};
}

StateValue OptimizerValue(const std::string& name, torch::optim::Optimizer& optimizer) {
  const auto read = [&optimizer] {
    std::ostringstream stream;
    torch::save(optimizer, stream);
    const auto groups = static_cast<std::int64_t>(optimizer.param_groups().size());
    return Tensors{TextTensor(std::move(stream).str()), at::full({1}, groups, at::kLong)};
  };
  const auto load = [&optimizer, name](const Tensors& kept) {
    if (kept.size() != 2) return WrongCount(name, 2, kept.size());
    const auto groups = static_cast<std::size_t>(kept[1].item<std::int64_t>());
    auto& present = optimizer.param_groups();
    if (present.size() < groups) {
      return Misfit(name, c10::str("an optimizer with ", present.size(), " parameter groups"),
                    c10::str("one with ", groups));
    }
    present.erase(present.begin() + static_cast<std::ptrdiff_t>(groups), present.end());
    std::istringstream stream{std::string(TensorText(kept.front()))};
    optimizer.state().clear();  // torch::load leaves what was not saved.
    optimizer.zero_grad();
    torch::load(optimizer, stream);
    return Status::Ok();
  };
  return {.name = name, .read = read, .load = load};
}

StateValue RandomNumbersValue(const std::string& name) {
  const auto read = [] {
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    const std::lock_guard lock(generator.mutex());
    return Tensors{generator.get_state()};
  };
  const auto load = [name](const Tensors& kept) {
    if (kept.size() != 1) return WrongCount(name, 1, kept.size());
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(kept.front());
    return Status::Ok();
  };
  return {.name = name, .read = read, .load = load};
}

}  // namespace resilient::plugin
