// Trains a small network on several processes, from C++ and without Python, and survives the loss
// of any of them at any time:
//
//   resilient-run --nproc 4 --no-python ./cpp_train [STEPS]
//
// or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set for each process.
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include <resilient/torch.h>
#include <torch/torch.h>

namespace {

constexpr int kBatch = 32;
constexpr int kFeatures = 16;
constexpr int kClasses = 4;

// A whole line at once: the processes may share a terminal.
void Say(const std::string& line) { std::cout << line + "\n" << std::flush; }

struct Net : torch::nn::Module {
  Net() {
    hidden = register_module("hidden", torch::nn::Linear(kFeatures, 64));
    norm = register_module("norm", torch::nn::BatchNorm1d(64));
    out = register_module("out", torch::nn::Linear(64, kClasses));
  }
  torch::Tensor forward(const torch::Tensor& x) { return out(torch::relu(norm(hidden(x)))); }
  torch::nn::Linear hidden{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear out{nullptr};
};

// The sum over the ranks, divided by their number: gradients, and what batch norm has counted.
void Average(const resilient::ProcessGroup& world, const torch::Tensor& tensor) {
  std::vector<torch::Tensor> tensors = {tensor};
  world->allreduce(tensors)->wait();
  tensor.div_(world->getSize());
}

// One step on this rank's batch, which is drawn from the random numbers that the State brings back.
double Step(const resilient::ProcessGroup& world, Net& model, torch::optim::Optimizer& optimizer) {
  const torch::Tensor samples = torch::randn({kBatch, kFeatures});
  const torch::Tensor labels = samples.slice(1, 0, kClasses).argmax(1);
  optimizer.zero_grad();
  const torch::Tensor loss = torch::nn::functional::cross_entropy(model.forward(samples), labels);
  loss.backward();
  for (const torch::Tensor& parameter : model.parameters()) Average(world, parameter.grad());
  for (const torch::Tensor& buffer : model.buffers()) {
    if (buffer.is_floating_point()) Average(world, buffer);
  }
  optimizer.step();
  return loss.item<double>();
}

// FNV-1a over the bytes of all parameters and buffers: equal only where every bit is.
std::string Digest(const Net& model) {
  std::uint64_t hash = 14695981039346656037U;
  std::vector<torch::Tensor> tensors = model.parameters();
  const std::vector<torch::Tensor> buffers = model.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  for (const torch::Tensor& tensor : tensors) {
    const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
    for (std::size_t i = 0; i < tensor.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
  }
  std::ostringstream text;
  text << std::hex << hash;
  return text.str();
}

void Train(std::int64_t steps) {
  const resilient::ProcessGroup world = resilient::init_process_group();
  torch::manual_seed(0);  // The same parameters on all ranks.
  Net model;
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::manual_seed(100 + world->getRank());  // Other samples on each.
  std::int64_t step = 0;
  double loss = 0;

  resilient::State state(world);
  state.add("model", model).add("optimizer", optimizer).add("step", step);
  // Runs again from the newest commit, on every rank, whenever a rank was lost and replaced.
  resilient::elastic(state, [&](resilient::State& committed) {
    Say("rank " + std::to_string(world->getRank()) + " goes on at step " + std::to_string(step));
    while (step < steps) {
      const double loss = Step(world, model, optimizer);
      ++step;
      committed.commit();
      if (world->getRank() == 0 && step % 50 == 0) {
        Say("step " + std::to_string(step) + " loss " + std::to_string(loss));
      }
    }
  });
  Say("parameters " + Digest(model));
  resilient::destroy_process_group(world);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    torch::set_num_threads(1);
    Train(argc > 1 ? std::atoll(argv[1]) : 1000);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;  // Begins with [resilient:CODE] where it is of ours.
    return 1;
  }
  return 0;
}
