#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <resilient/clock.h>
#include <resilient/communicator.h>
#include <resilient/status.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "torch_plugin/csrc/host.h"

namespace resilient::plugin {

// Which of torch's exception classes a failure is.
enum class ErrorKind : std::uint8_t { kBackend, kStore, kQueueEmpty, kNetwork };

// The one table from codes to kinds (docs/semantics.md section 5).
ErrorKind KindOf(StatusCode code);

// Whether `elastic` tries again after this first cause; the others are bugs of the program or its
// start.
bool RetriedByElastic(StatusCode code);

// Whether a generation ends with this cause: all of its ranks meet it, however late.
bool EndsGeneration(StatusCode code);

// An exception such as "connection reset", or the answer of the store, may reach the program before
// the fence that explains it: they come on other connections.
inline constexpr Duration kFenceGrace = std::chrono::seconds(1);

// Raises BackendError, StoreError, QueueEmptyError or NetworkError of <resilient/torch_errors.h>.
[[noreturn]] void ThrowNative(const Status& status);

inline void Check(Host& host, const Status& status) {
  if (!status.ok()) host.Throw(status);
}

template <typename T>
T ValueOrThrow(Host& host, Result<T> result) {
  if (!result.ok()) host.Throw(result.status());
  return std::move(result).value();
}

// Null for a dtype whose elements are only moved, as bytes: quantised ones, rare kinds of float8.
std::optional<DataType> ToDataType(at::ScalarType type);

// How elements are combined. Thread: value type.
struct Reduction {
  ReduceOp op = ReduceOp::kNone;
  double factor = 1.0;  // Of kPremulSum.
};
// kInvalidArgument or kUnimplemented when `op` is not defined for elements of `type`; `what` names
// the operation in the text.
Result<Reduction> ToReduction(const c10d::ReduceOp& op, at::ScalarType type, const char* what);

// OK for a dense tensor on the CPU or on a CUDA device.
Status CheckTensor(const at::Tensor& tensor, const char* what);

}  // namespace resilient::plugin
