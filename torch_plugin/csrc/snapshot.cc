#include "torch_plugin/csrc/snapshot.h"

#include <cstdint>
#include <cstring>
#include <optional>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

namespace resilient::plugin {
namespace {

at::Tensor EmptyBytes(std::int64_t size) { return at::empty({size}, at::kByte); }

std::int64_t BytesOf(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

// The tensors of an old snapshot, each handed out once, in order.
class Memory {
 public:
  explicit Memory(const Snapshot* reused) : reused_(reused) {}

  at::Tensor Take(std::size_t entry, std::size_t index, std::int64_t size) const {
    const bool there = reused_ != nullptr && entry < reused_->entries.size() &&
                       index < reused_->entries[entry].bytes.size();
    if (there && reused_->entries[entry].bytes[index].numel() == size) {
      return reused_->entries[entry].bytes[index];
    }
    return EmptyBytes(size);
  }

 private:
  const Snapshot* const reused_;
};

// Writes and reads numbers and texts, one behind the other. Both ends are the same machine type.
void PutNumber(std::string& out, std::uint64_t number) {
  char bytes[sizeof number];
  std::memcpy(bytes, &number, sizeof number);
  out.append(bytes, sizeof number);
}

void PutText(std::string& out, std::string_view text) {
  PutNumber(out, text.size());
  out.append(text);
}

class Reader {
 public:
  explicit Reader(std::string_view text) : rest_(text) {}
  bool done() const { return rest_.empty(); }

  std::optional<std::uint64_t> Number() {
    std::uint64_t number = 0;
    if (rest_.size() < sizeof number) return std::nullopt;
    std::memcpy(&number, rest_.data(), sizeof number);
    rest_.remove_prefix(sizeof number);
    return number;
  }

  std::optional<std::string_view> Text() {
    const std::optional<std::uint64_t> size = Number();
    if (!size || *size > rest_.size()) return std::nullopt;
    const std::string_view text = rest_.substr(0, *size);
    rest_.remove_prefix(*size);
    return text;
  }

 private:
  std::string_view rest_;
};

void BroadcastTensor(const ProcessGroup& world, const at::Tensor& tensor, int source) {
  c10d::BroadcastOptions options;
  options.rootRank = source;
  std::vector<at::Tensor> tensors = {tensor};
  world->broadcast(tensors, options)->wait();
}

// Names and sizes, so that a receiver knows what comes.
std::string HeaderOf(const Snapshot& snapshot) {
  std::string header;
  for (const Snapshot::Entry& entry : snapshot.entries) {
    PutText(header, entry.name);
    PutNumber(header, entry.bytes.size());
    for (const at::Tensor& bytes : entry.bytes) {
      PutNumber(header, static_cast<std::uint64_t>(bytes.numel()));
    }
  }
  return header;
}

// With memory for what the header names.
Snapshot SnapshotFor(std::string_view header) {
  Snapshot snapshot;
  Reader reader(header);
  while (!reader.done()) {
    Snapshot::Entry entry{.name = std::string(reader.Text().value()), .bytes = {}};
    for (std::uint64_t left = reader.Number().value(); left > 0; --left) {
      entry.bytes.push_back(EmptyBytes(static_cast<std::int64_t>(reader.Number().value())));
    }
    snapshot.entries.push_back(std::move(entry));
  }
  return snapshot;
}

}  // namespace

at::Tensor TextTensor(std::string_view text) {
  at::Tensor bytes = EmptyBytes(static_cast<std::int64_t>(text.size()));
  if (!text.empty()) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

std::string_view TensorText(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()),
          static_cast<std::size_t>(bytes.numel())};
}

Snapshot TakeSnapshot(const StateValues& values, const Snapshot* reused) {
  const at::NoGradGuard no_grad;
  const Memory memory(reused);
  Snapshot snapshot;
  snapshot.entries.reserve(values.size());
  for (const StateValue& value : values) {
    Snapshot::Entry entry{.name = value.name, .bytes = {}};
    for (const at::Tensor& tensor : value.read()) {
      const at::Tensor bytes =
          memory.Take(snapshot.entries.size(), entry.bytes.size(), BytesOf(tensor));
      if (bytes.numel() > 0) {
        bytes.view(tensor.scalar_type()).view(tensor.sizes()).copy_(tensor.detach());
      }
      entry.bytes.push_back(bytes);
    }
    snapshot.entries.push_back(std::move(entry));
  }
  return snapshot;
}

Status LoadSnapshot(const StateValues& values, const Snapshot& snapshot) {
  const at::NoGradGuard no_grad;
  bool same = values.size() == snapshot.entries.size();
  for (std::size_t i = 0; same && i < values.size(); ++i) {
    same = values[i].name == snapshot.entries[i].name;
  }
  if (!same) {
    return {StatusCode::kInvalidArgument,
            "the commit is of other values than this State: all ranks add the same names, in the "
            "same order, before the first commit"};
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    RESILIENT_RETURN_IF_ERROR(values[i].load(snapshot.entries[i].bytes));
  }
  return Status::Ok();
}

Snapshot BroadcastSnapshot(const ProcessGroup& world, const Snapshot& snapshot, int source) {
  const bool mine = world->getRank() == source;
  const std::string header = mine ? HeaderOf(snapshot) : std::string();
  const at::Tensor size = at::full({1}, static_cast<std::int64_t>(header.size()), at::kLong);
  BroadcastTensor(world, size, source);
  const at::Tensor names = mine ? TextTensor(header) : EmptyBytes(size.item<std::int64_t>());
  if (names.numel() > 0) BroadcastTensor(world, names, source);
  Snapshot received = mine ? snapshot : SnapshotFor(TensorText(names));
  for (const Snapshot::Entry& entry : received.entries) {
    for (const at::Tensor& bytes : entry.bytes) {
      if (bytes.numel() > 0) BroadcastTensor(world, bytes, source);
    }
  }
  return received;
}

std::string PackSnapshot(const Snapshot& snapshot) {
  std::string packed;
  for (const Snapshot::Entry& entry : snapshot.entries) {
    PutText(packed, entry.name);
    PutNumber(packed, entry.bytes.size());
    for (const at::Tensor& bytes : entry.bytes) PutText(packed, TensorText(bytes));
  }
  return packed;
}

Result<Snapshot> UnpackSnapshot(std::string_view packed) {
  const Status malformed(StatusCode::kInvalidArgument,
                         "the per-rank part of the commit was not written by a program like this");
  Snapshot snapshot;
  Reader reader(packed);
  while (!reader.done()) {
    const std::optional<std::string_view> name = reader.Text();
    const std::optional<std::uint64_t> count = name ? reader.Number() : std::nullopt;
    if (!count) return malformed;
    Snapshot::Entry entry{.name = std::string(*name), .bytes = {}};
    while (entry.bytes.size() < *count) {
      const std::optional<std::string_view> text = reader.Text();
      if (!text) return malformed;
      entry.bytes.push_back(TextTensor(*text));
    }
    snapshot.entries.push_back(std::move(entry));
  }
  return snapshot;
}

}  // namespace resilient::plugin
