#pragma once

#include <memory>

#include <resilient/communicator.h>

#include "runtime/comm/nccl_library.h"

namespace resilient::testing {

// What tests need of the CUDA runtime beyond the table of the library. Thread: value type.
struct CudaCopies {
  CudaResult (*GetDeviceCount)(int* count) = nullptr;
  CudaResult (*Memcpy)(void* to, const void* from, std::size_t bytes, int kind) = nullptr;
  CudaResult (*StreamSynchronize)(CudaStreamHandle stream) = nullptr;
};

// Of the library that has `cuda`; what is missing is null.
CudaCopies FindCudaCopies(const CudaApi& cuda);

// `inner`, which serves memory of a device, for operations on memory of the host: each runs on a
// copy there, which is fetched before its completion. So suites that were written for the host run
// on a real device. What `inner` will refuse is handed on as it is.
std::shared_ptr<Communicator> OnDeviceCopies(std::shared_ptr<Communicator> inner,
                                             const CudaApi& cuda, const CudaCopies& copies);

}  // namespace resilient::testing
