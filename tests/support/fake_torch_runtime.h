#pragma once

#include <string>

#include "runtime/comm/nccl_api.h"

namespace resilient::testing {

// The functions of libresilient_fake_nccl.so beside this module: by dlsym, as torch has brought
// the names of the real ones into the process. Thread: value type.
struct FakeRuntime {
  std::string path;
  CudaApi cuda;
  CudaResult (*get_device)(int* device) = nullptr;
  CudaResult (*launch_host_func)(CudaStreamHandle stream, void (*function)(void*),
                                 void* data) = nullptr;
  CudaResult (*stream_query)(CudaStreamHandle stream) = nullptr;
  CudaResult (*stream_synchronize)(CudaStreamHandle stream) = nullptr;
  CudaResult (*device_synchronize)() = nullptr;
  CudaResult (*begin_capture)(CudaStreamHandle stream, int mode) = nullptr;
  CudaResult (*end_capture)(CudaStreamHandle stream, CudaGraphHandle* graph) = nullptr;
  CudaResult (*graph_launch)(CudaGraphHandle graph, CudaStreamHandle stream) = nullptr;
  CudaResult (*graph_destroy)(CudaGraphHandle graph) = nullptr;
  int (*change)(const char* script) = nullptr;
  const char* (*counts)() = nullptr;
  int (*wait)(const char* name, int at_least) = nullptr;
};

// Loads the library at the first call, for good.
const FakeRuntime& Runtime();

// Throws what is no success.
void Check(CudaResult result);

}  // namespace resilient::testing
