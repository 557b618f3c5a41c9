#pragma once

#include <ATen/core/Tensor.h>

namespace resilient::testing {

// The same memory as a tensor of the other device. Autograd does not see through it.
at::Tensor OnFake(const at::Tensor& tensor, c10::Device device);
at::Tensor OnHost(const at::Tensor& tensor);

// Copies when the stream gets there.
void EnqueueCopy(const c10::Stream& stream, const at::Tensor& to, const at::Tensor& from);

// From now on kernels of CUDA tensors run on the CPU, in the order of the current stream: those
// that make, copy and fill tensors, and what else calculates. Again: nothing.
void InstallKernels();

}  // namespace resilient::testing
