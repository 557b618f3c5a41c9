#pragma once

namespace torch {
class Library;
}

namespace resilient::testing {

// Puts a kernel that calculates on the CPU, on the same memory, in the place of each that the wheel
// has for CUDA. What changes tensors in place runs in the order of the current stream; what makes
// new ones waits for the stream first. What has no kernel for the CPU (cuDNN's) still fails.
void AddKernelsOnHost(torch::Library& library);

}  // namespace resilient::testing
