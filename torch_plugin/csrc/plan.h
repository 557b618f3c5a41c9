#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <resilient/operation.h>
#include <resilient/status.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "torch_plugin/csrc/channels.h"
#include "torch_plugin/csrc/host.h"
#include "torch_plugin/csrc/time_policy.h"

namespace at {
struct RecordFunction;
}

namespace resilient::plugin {

// What one call of c10d becomes: operations in order of submission, the memory that they use, and
// what is done with it at the end. All of it is checked before anything is submitted, so a call
// that is refused has had no effect. The methods raise through the host.
//
// Owner: the method of the backend that was called. Thread: one.
class Plan {
 public:
  // `title` is a literal, "resilient:all_reduce": the name that torch's profiler shows.
  Plan(Host& host, c10d::OpType type, const char* title)
      : host_(host), type_(type), title_(title) {}

  // Dense memory in place of `tensor`, or the tensor itself: only read; only written; both. What
  // is written goes back into the tensor at the end.
  at::Tensor Input(const at::Tensor& tensor);
  at::Tensor Output(const at::Tensor& tensor);
  at::Tensor InOut(const at::Tensor& tensor);

  // An operation with `memory` as its data. The reference is valid until the next Add.
  Operation& Add(OpKind kind, const at::Tensor& memory);
  Operation& AddBare(OpKind kind, at::ScalarType type);
  // The same for an operation that reduces; refuses what `reduce` is not defined for.
  Operation& AddReduction(OpKind kind, const at::Tensor& memory, const c10d::ReduceOp& reduce);

  // Where the operations run that have no memory; otherwise where their memory is.
  void RunOn(c10::Device device);

  void RequireOwnPlaces(const at::Tensor& tensor);  // Of an output: expanded ones have none.
  void RequireSameType(const at::Tensor& one, const at::Tensor& other);
  void RequireRoot(std::int64_t root, int size);
  [[noreturn]] void Refuse(const std::string& why) { Refuse(StatusCode::kInvalidArgument, why); }
  [[noreturn]] void Refuse(StatusCode code, const std::string& why);

  // The value of the Work's future and result; what is written is added by itself.
  void AddResult(const at::Tensor& tensor) { outputs_.push_back(tensor); }
  // Runs after the copies, on the callback thread. What it uses is released with the Work.
  void AtEnd(std::function<void()> finish) { finish_ = std::move(finish); }
  // Gives the operations their device, and its stream that is the caller's now.
  void Place();
  // kHost: on none. Behind Place.
  int device() const { return operations_.front().device; }
  bool IsMessage() const {
    return operations_.size() == 1 && IsPointToPoint(operations_.front().kind);
  }
  bool IsMessageOnDevice() const { return device() != kHost && IsMessage(); }
  // On a device, whose results are those of the operations themselves: who waits may go on there.
  bool EndsInStream() const {
    return device() != kHost && copies_.empty() && !finish_ &&
           operations_.front().kind != OpKind::kBarrier;
  }
  // Begins what the profiler shows, if it watches.
  void Profile(at::RecordFunction& profiled) const;
  // Without a result of its own, so that the caller may run it on his thread.
  bool IsOnePiece() const { return operations_.size() == 1 && copies_.empty() && !finish_; }

  c10d::OpType type() const { return type_; }
  const char* title() const { return title_; }
  const char* name() const { return title_ + std::string_view("resilient:").size(); }

 private:
  friend class ResilientBackend;

  Host& host_;
  const c10d::OpType type_;
  const char* const title_;
  std::optional<c10::Device> device_;  // Of all its tensors.
  std::vector<Operation> operations_;
  std::vector<at::Tensor> held_;
  std::vector<at::Tensor> outputs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // (to, from)
  std::function<void()> finish_;
  Channel channel_;                // Once it is launched.
  TimeoutExtension::Lease lease_;  // Of the Work, likewise.
};

// `elements` of `memory` from `offset` on, in the units that Plan::Add counts in.
Part PartOf(const at::Tensor& memory, std::int64_t offset, std::int64_t elements);
inline Part PartOf(const at::Tensor& memory) { return PartOf(memory, 0, memory.numel()); }

// "1024 elements of float32", for messages.
std::string Describe(const at::Tensor& tensor);

}  // namespace resilient::plugin
