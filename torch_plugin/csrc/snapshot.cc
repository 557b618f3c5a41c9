#include "torch_plugin/csrc/snapshot.h"

#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <optional>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>

namespace resilient::plugin {
namespace {

at::Tensor EmptyBytes(std::int64_t size) { return at::empty({size}, at::kByte); }

// Of memory of its own, whatever the layout of `like`, and in no mode of the program's.
at::Tensor EmptyLike(const at::Tensor& like) { return at::empty(like.sizes(), like.scalar_type()); }

// A flat view of a contiguous tensor that is not empty.
at::Tensor FlatBytes(const at::Tensor& tensor) {
  return tensor.detach().view({-1}).view(at::kByte);
}

// The tensors of an old snapshot, each handed out once, in order.
class Memory {
 public:
  explicit Memory(const Snapshot* reused) : reused_(reused) {}

  at::Tensor Take(std::size_t entry, std::size_t index, const at::Tensor& like) const {
    const bool there = reused_ != nullptr && entry < reused_->entries.size() &&
                       index < reused_->entries[entry].tensors.size();
    if (there && SameForm(reused_->entries[entry].tensors[index], like))
      return reused_->entries[entry].tensors[index];
    return EmptyLike(like);
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

void PutForm(std::string& out, const at::Tensor& tensor) {
  PutNumber(out, static_cast<std::uint64_t>(tensor.scalar_type()));
  PutNumber(out, tensor.requires_grad() ? 1 : 0);
  PutNumber(out, static_cast<std::uint64_t>(tensor.dim()));
  for (const std::int64_t size : tensor.sizes()) PutNumber(out, static_cast<std::uint64_t>(size));
}

// A tensor of the form that was put; nothing where none was.
std::optional<at::Tensor> TakeForm(Reader& reader) {
  const std::optional<std::uint64_t> type = reader.Number();
  const std::optional<std::uint64_t> trained = type ? reader.Number() : std::nullopt;
  const std::optional<std::uint64_t> dims = trained ? reader.Number() : std::nullopt;
  if (!dims || *type >= static_cast<std::uint64_t>(at::ScalarType::Undefined)) return std::nullopt;
  std::vector<std::int64_t> sizes;
  while (sizes.size() < *dims) {
    const std::optional<std::uint64_t> size = reader.Number();
    if (!size) return std::nullopt;
    sizes.push_back(static_cast<std::int64_t>(*size));
  }
  return at::empty(sizes, static_cast<at::ScalarType>(*type)).requires_grad_(*trained != 0);
}

void BroadcastTensor(const ProcessGroup& world, const at::Tensor& tensor, int source) {
  c10d::BroadcastOptions options;
  options.rootRank = source;
  std::vector<at::Tensor> tensors = {tensor};
  world->broadcast(tensors, options)->wait();
}

// Names and forms, so that a receiver knows what comes.
std::string HeaderOf(const Snapshot& snapshot) {
  std::string header;
  for (const Snapshot::Entry& entry : snapshot.entries) {
    PutText(header, entry.name);
    PutNumber(header, entry.tensors.size());
    for (const at::Tensor& tensor : entry.tensors) PutForm(header, tensor);
  }
  return header;
}

// With memory for what the header names.
Snapshot SnapshotFor(std::string_view header) {
  Snapshot snapshot;
  Reader reader(header);
  while (!reader.done()) {
    Snapshot::Entry entry{.name = std::string(reader.Text().value()), .tensors = {}};
    for (std::uint64_t left = reader.Number().value(); left > 0; --left)
      entry.tensors.push_back(TakeForm(reader).value());
    snapshot.entries.push_back(std::move(entry));
  }
  return snapshot;
}

Status LoadValue(const StateValue& value, const std::vector<at::Tensor>& kept) {
  try {
    return value.load(kept);
  } catch (const std::exception& error) {  // Of torch, for what the object does not take.
    const std::string_view what = error.what();
    return {StatusCode::kSetting,
            c10::str("the value '", value.name,
                     "' does not take its state of the commit: ", what.substr(0, what.find('\n')),
                     ". Make it, before elastic or sync() on every start, such that it does")};
  }
}

}  // namespace

bool SameForm(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes();
}

at::Tensor TextTensor(std::string_view text) {
  at::Tensor bytes = EmptyBytes(static_cast<std::int64_t>(text.size()));
  if (!text.empty()) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

std::string_view TensorText(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

Snapshot TakeSnapshot(const StateValues& values, const Snapshot* reused) {
  // What is kept belongs to no mode of the program's: a tensor made in inference mode could not be
  // written to outside of it.
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const Memory memory(reused);
  Snapshot snapshot;
  snapshot.entries.reserve(values.size());
  for (const StateValue& value : values) {
    Snapshot::Entry entry{.name = value.name, .tensors = {}};
    for (const at::Tensor& tensor : value.read()) {
      const at::Tensor kept = memory.Take(snapshot.entries.size(), entry.tensors.size(), tensor);
      if (kept.numel() > 0) kept.copy_(tensor.detach());
      kept.requires_grad_(tensor.requires_grad());
      entry.tensors.push_back(kept);
    }
    snapshot.entries.push_back(std::move(entry));
  }
  return snapshot;
}

Status LoadSnapshot(const StateValues& values, const Snapshot& snapshot) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  std::map<std::string_view, const Snapshot::Entry*> entries;
  for (const Snapshot::Entry& entry : snapshot.entries) entries[entry.name] = &entry;
  for (const StateValue& value : values) {
    const auto found = entries.find(value.name);
    if (found == entries.end()) {
      return {StatusCode::kSetting, c10::str("the value '", value.name,
                                             "' is not in the commit: all ranks add the same names "
                                             "before the first commit")};
    }
    RESILIENT_RETURN_IF_ERROR(LoadValue(value, found->second->tensors));
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
    for (const at::Tensor& tensor : entry.tensors) {
      if (tensor.numel() > 0) BroadcastTensor(world, FlatBytes(tensor), source);
    }
  }
  return received;
}

std::vector<std::string> GatherTexts(const ProcessGroup& world, const std::string& text,
                                     std::size_t most_bytes) {
  const c10::InferenceMode normal(false);
  const auto size = static_cast<std::int64_t>(most_bytes);
  at::Tensor mine = at::zeros({size}, at::kByte);
  const std::string cut = text.substr(0, most_bytes);
  std::memcpy(mine.mutable_data_ptr(), cut.data(), cut.size());
  std::vector<std::vector<at::Tensor>> all(1);
  for (int rank = 0; rank < world->getSize(); ++rank) all[0].push_back(EmptyBytes(size));
  std::vector<at::Tensor> input = {mine};
  world->allgather(all, input)->wait();
  std::vector<std::string> texts;
  texts.reserve(all[0].size());
  for (const at::Tensor& one : all[0]) {
    const std::string_view padded = TensorText(one);
    texts.emplace_back(padded.substr(0, padded.find('\0')));
  }
  return texts;
}

std::string PackSnapshot(const Snapshot& snapshot) {
  std::string packed;
  for (const Snapshot::Entry& entry : snapshot.entries) {
    PutText(packed, entry.name);
    PutNumber(packed, entry.tensors.size());
    for (const at::Tensor& tensor : entry.tensors) {
      PutForm(packed, tensor);
      PutText(packed, TensorText(tensor));
    }
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
    Snapshot::Entry entry{.name = std::string(*name), .tensors = {}};
    while (entry.tensors.size() < *count) {
      const std::optional<at::Tensor> tensor = TakeForm(reader);
      const std::optional<std::string_view> text = tensor ? reader.Text() : std::nullopt;
      if (!text || text->size() != tensor->nbytes()) return malformed;
      if (!text->empty()) std::memcpy(tensor->mutable_data_ptr(), text->data(), text->size());
      entry.tensors.push_back(*tensor);
    }
    snapshot.entries.push_back(std::move(entry));
  }
  return snapshot;
}

}  // namespace resilient::plugin
