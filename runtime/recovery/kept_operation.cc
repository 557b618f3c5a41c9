#include "runtime/recovery/kept_operation.h"

#include <cstring>
#include <utility>

namespace resilient::recovery {
namespace {

void* ScratchFor(std::size_t size, std::vector<Buffer>* scratch) {
  return scratch->emplace_back(size).data();
}

}  // namespace

Buffer::Buffer(const void* from, std::size_t size) : Buffer(size) {
  if (size > 0) std::memcpy(data(), from, size);
}

KeptOperation::KeptOperation(Operation operation, Completion done, int rank)
    : operation_(std::move(operation)), done_(std::move(done)), rank_(rank) {
  const std::size_t element = SizeOf(operation_.dtype);
  if (HasInput() && operation_.data != nullptr) {
    input_ = Buffer(operation_.data, operation_.count * element);
  }
  if (!HasInputs()) return;
  for (const Part& part : operation_.inputs) {
    inputs_.emplace_back(part.data, part.data == nullptr ? 0 : part.count * element);
  }
}

bool KeptOperation::HasInput() const {
  switch (operation_.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kAllGather:
    case OpKind::kGather:
      return true;
    case OpKind::kBroadcast:
      return operation_.root == rank_;
    case OpKind::kBarrier:
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kScatter:
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
      return false;
  }
  return false;
}

bool KeptOperation::HasInputs() const {
  return operation_.kind == OpKind::kReduceScatter || operation_.kind == OpKind::kAllToAll ||
         (operation_.kind == OpKind::kScatter && operation_.root == rank_);
}

std::size_t KeptOperation::bytes() const {
  std::size_t sum = input_.size();
  for (const Buffer& input : inputs_) sum += input.size();
  return sum;
}

bool KeptOperation::Synchronises() const {
  switch (operation_.kind) {
    case OpKind::kBarrier:
      return true;
    case OpKind::kAllReduce:
    case OpKind::kAllGather:
      return operation_.count > 0;
    case OpKind::kReduceScatter:  // Of parts that may be empty, as those of the next.
    case OpKind::kAllToAll:
    case OpKind::kBroadcast:
    case OpKind::kReduce:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kSend:
    case OpKind::kRecv:
      return false;
  }
  return false;
}

Operation KeptOperation::Again() const {
  const bool in_place = operation_.kind == OpKind::kAllReduce ||
                        (operation_.kind == OpKind::kReduce && operation_.root == rank_);
  if (in_place && input_.size() > 0) std::memcpy(operation_.data, input_.data(), input_.size());
  if (operation_.kind == OpKind::kReduceScatter) {
    // Its output may be the memory of its own part.
    const auto own = static_cast<std::size_t>(rank_);
    if (own < inputs_.size() && operation_.inputs[own].data == operation_.data &&
        inputs_[own].size() > 0) {
      std::memcpy(operation_.data, inputs_[own].data(), inputs_[own].size());
    }
  }
  return operation_;
}

Operation KeptOperation::IntoScratch(std::vector<Buffer>* scratch) const {
  Operation again = operation_;
  const std::size_t element = SizeOf(again.dtype);
  again.sender = nullptr;
  // all_reduce and reduce write where they read, and the copy may be needed once more.
  const bool reads_data = again.kind == OpKind::kAllGather || again.kind == OpKind::kGather ||
                          (again.kind == OpKind::kBroadcast && HasInput());
  if (reads_data) {
    again.data = input_.data();
  } else if (again.data != nullptr) {
    again.data = ScratchFor(again.count * element, scratch);
    if (HasInput() && input_.size() > 0) std::memcpy(again.data, input_.data(), input_.size());
  }
  for (std::size_t index = 0; index < inputs_.size(); ++index) {
    again.inputs[index].data = inputs_[index].data();
  }
  for (Part& part : again.outputs) {
    if (part.data != nullptr) part.data = ScratchFor(part.count * element, scratch);
  }
  return again;
}

Completion KeptOperation::TakeDone() {
  if (std::exchange(ended_, true)) return nullptr;
  return std::exchange(done_, nullptr);
}

}  // namespace resilient::recovery
