#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <resilient/status.h>
#include <resilient/torch.h>

namespace resilient::plugin {

// How one named value of a State is read and brought back. What is read are tensors that may be the
// value itself; what is brought back are tensors on the CPU, as many as were read, in the dtype and
// shape that they had then, and with their requires_grad. Owner: a State. Thread:
// caller-synchronised.
struct StateValue {
  std::string name;
  std::function<std::vector<at::Tensor>()> read;
  // Copies what it keeps. kSetting, with the name and what to do, when it does not fit.
  std::function<Status(const std::vector<at::Tensor>& kept)> load;
};
using StateValues = std::vector<StateValue>;

// Host copies of named values: for each its tensors, contiguous. Thread: value type; copies share
// the memory.
struct Snapshot {
  struct Entry {
    std::string name;
    std::vector<at::Tensor> tensors;
  };
  std::vector<Entry> entries;
};

// A snapshot of the values. `reused`: an old one whose memory may be taken over.
Snapshot TakeSnapshot(const StateValues& values, const Snapshot* reused);

// kSetting when the snapshot is of other values, or one does not fit; then some may be loaded.
Status LoadSnapshot(const StateValues& values, const Snapshot& snapshot);

// The source's snapshot on every rank of the world.
Snapshot BroadcastSnapshot(const ProcessGroup& world, const Snapshot& snapshot, int source);

// What each rank says, by rank. Every rank of the world calls it. `most_bytes`: of each; longer
// ones are cut. The same on all ranks, as is whether it is called.
std::vector<std::string> GatherTexts(const ProcessGroup& world, const std::string& text,
                                     std::size_t most_bytes);

// As one value of a store. Unpack: kInvalidArgument for what Pack has not made.
std::string PackSnapshot(const Snapshot& snapshot);
Result<Snapshot> UnpackSnapshot(std::string_view packed);

// Whether they have one dtype and one shape.
bool SameForm(const at::Tensor& a, const at::Tensor& b);

// A copy of the text, and the text of such a tensor.
at::Tensor TextTensor(std::string_view text);
std::string_view TensorText(const at::Tensor& tensor);

}  // namespace resilient::plugin
