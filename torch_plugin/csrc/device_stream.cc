#include "torch_plugin/csrc/device_stream.h"

#include <dlfcn.h>

#include <atomic>

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace resilient::plugin {
namespace {

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

c10::Stream StreamOf(int device) {
  return c10::impl::VirtualGuardImpl(kCuda).getStream(ToDevice(device));
}

// c10::cuda::CUDAStream::stream() of the library that has made the stream; null: there is none.
// The class is a c10::Stream and nothing else, and a method takes its object first.
using StreamMethod = ExecutionStream (*)(const void* stream);
StreamMethod FindStreamMethod() {
  void* library = ::dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  return reinterpret_cast<StreamMethod>(::dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv"));
}

// Templates, so that what a version of torch does not declare is not looked up there: the streams'
// method is native_handle() in 2.15 and stream_handle() behind it.
template <typename Stream, typename Guard>
Result<ExecutionStream> HandleOf(const Stream& stream, const Guard& guard) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else if constexpr (requires { stream.stream_handle(); }) {
    return stream.stream_handle();
  } else if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    return guard.getStreamNativeHandle(stream);
  } else {
    static std::atomic<StreamMethod> found{nullptr};
    if (found.load() == nullptr) found.store(FindStreamMethod());
    if (const StreamMethod method = found.load()) return method(&stream);
    return Status(StatusCode::kUnimplemented,
                  "this version of torch does not tell which CUDA stream is the current one: "
                  "tensors on CUDA devices need another, torch 2.15 for example");
  }
}

}  // namespace

bool HasDevice() {
  return c10::impl::hasDeviceGuardImpl(kCuda) &&
         c10::impl::VirtualGuardImpl(kCuda).deviceCount() > 0;
}

int CurrentDevice() { return c10::impl::VirtualGuardImpl(kCuda).getDevice().index(); }

Result<ExecutionStream> CurrentStream(int device) {
  return HandleOf(StreamOf(device), c10::impl::VirtualGuardImpl(kCuda));
}

void SynchronizeCurrentStream(int device) {
  c10::impl::VirtualGuardImpl(kCuda).synchronizeStream(StreamOf(device));
}

c10::Device ToDevice(int device) {
  if (device == kHost) return c10::Device(c10::DeviceType::CPU);
  return c10::Device(kCuda, static_cast<c10::DeviceIndex>(device));
}

int FromDevice(c10::Device device) { return device.is_cuda() ? device.index() : kHost; }

}  // namespace resilient::plugin
