#include "tests/support/fake_torch_runtime.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace resilient::testing {
namespace {

std::string PathOfLibrary() {
  Dl_info here;
  TORCH_CHECK(dladdr(reinterpret_cast<const void*>(&Runtime), &here) != 0);
  const std::string own = here.dli_fname;
  return own.substr(0, own.rfind('/') + 1) + "libresilient_fake_nccl.so";
}

template <typename Function>
void Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  TORCH_CHECK(*function != nullptr, "the fake has no function ", name);
}

FakeRuntime Load() {
  FakeRuntime runtime;
  runtime.path = PathOfLibrary();
  void* library = dlopen(runtime.path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  TORCH_CHECK(library != nullptr, dlerror());
#define RESILIENT_FIND(function) Find(library, "cuda" #function, &runtime.cuda.function);
  RESILIENT_CUDA_FUNCTIONS(RESILIENT_FIND)
  RESILIENT_CUDA_OVERLOADED_FUNCTIONS(RESILIENT_FIND)
#undef RESILIENT_FIND
  Find(library, "cudaGetDevice", &runtime.get_device);
  Find(library, "cudaLaunchHostFunc", &runtime.launch_host_func);
  Find(library, "cudaStreamQuery", &runtime.stream_query);
  Find(library, "cudaStreamSynchronize", &runtime.stream_synchronize);
  Find(library, "cudaDeviceSynchronize", &runtime.device_synchronize);
  Find(library, "cudaStreamBeginCapture", &runtime.begin_capture);
  Find(library, "cudaStreamEndCapture", &runtime.end_capture);
  Find(library, "cudaGraphLaunch", &runtime.graph_launch);
  Find(library, "cudaGraphDestroy", &runtime.graph_destroy);
  Find(library, "resilient_fake_change", &runtime.change);
  Find(library, "resilient_fake_counts", &runtime.counts);
  Find(library, "resilient_fake_wait", &runtime.wait);
  return runtime;
}

}  // namespace

const FakeRuntime& Runtime() {
  static const auto* const kRuntime = new FakeRuntime(Load());
  return *kRuntime;
}

void Check(CudaResult result) {
  TORCH_CHECK(result == CudaResult::kSuccess, "CUDA error: ", Runtime().cuda.GetErrorName(result));
}

}  // namespace resilient::testing
