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
// value itself; what is brought back is flat bytes on the CPU, as many as were read. Owner: a
// State. Thread: caller-synchronised.
struct StateValue {
  std::string name;
  std::function<std::vector<at::Tensor>()> read;
  // Copies what it keeps. kInvalidArgument when it does not fit.
  std::function<Status(const std::vector<at::Tensor>& bytes)> load;
};
using StateValues = std::vector<StateValue>;

// Host copies of named values: for each its tensors, as flat bytes. Thread: value type; copies
// share the memory.
struct Snapshot {
  struct Entry {
    std::string name;
    std::vector<at::Tensor> bytes;
  };
  std::vector<Entry> entries;
};

// A snapshot of the values. `reused`: an old one whose memory may be taken over.
Snapshot TakeSnapshot(const StateValues& values, const Snapshot* reused);

// kInvalidArgument when the snapshot is of other values; then some may be loaded.
Status LoadSnapshot(const StateValues& values, const Snapshot& snapshot);

// The source's snapshot on every rank of the world.
Snapshot BroadcastSnapshot(const ProcessGroup& world, const Snapshot& snapshot, int source);

// As one value of a store. Unpack: kInvalidArgument for what Pack has not made.
std::string PackSnapshot(const Snapshot& snapshot);
Result<Snapshot> UnpackSnapshot(std::string_view packed);

// Tensors and bytes: a copy of the text, and the bytes of a snapshot's tensor as text.
at::Tensor TextTensor(std::string_view text);
std::string_view TensorText(const at::Tensor& bytes);

}  // namespace resilient::plugin
