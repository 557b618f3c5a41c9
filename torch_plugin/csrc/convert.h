#pragma once

#include <cstdint>
#include <utility>

#include <ATen/core/Tensor.h>
#include <resilient/communicator.h>
#include <resilient/status.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "torch_plugin/csrc/host.h"

namespace resilient::plugin {

// Which of torch's exception classes a failure is.
enum class ErrorKind : std::uint8_t { kBackend, kStore, kQueueEmpty, kNetwork };

// The one table from codes to kinds (docs/semantics.md section 5).
ErrorKind KindOf(StatusCode code);

// Raises BackendError, StoreError, QueueEmptyError or NetworkError of <resilient/torch.h>.
[[noreturn]] void ThrowNative(const Status& status);

inline void Check(Host& host, const Status& status) {
  if (!status.ok()) host.Throw(status);
}

template <typename T>
T ValueOrThrow(Host& host, Result<T> result) {
  if (!result.ok()) host.Throw(result.status());
  return std::move(result).value();
}

// kUnimplemented, naming what is supported, for anything else.
Result<DataType> ToDataType(at::ScalarType type);
Result<ReduceOp> ToReduceOp(const c10d::ReduceOp& op);

// OK for a dense CPU tensor of a supported dtype; `what` names the operation in the text.
Status CheckTensor(const at::Tensor& tensor, const char* what);

}  // namespace resilient::plugin
