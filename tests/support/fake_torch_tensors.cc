#include "tests/support/fake_torch_tensors.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "tests/support/fake_torch_guard.h"
#include "tests/support/fake_torch_on_host.h"

namespace resilient::testing {
namespace {

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Pinned = std::optional<bool>;

at::Tensor Alias(const at::Tensor& tensor, c10::Device device) {
  // The memory lives as long as either.
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([keep = tensor](void*) {})
      .options(tensor.options().device(device))
      .target_device(device)
      .make_tensor();
}

at::Tensor Empty(at::IntArrayRef size, Dtype dtype, Layout, Device device, Pinned,
                 std::optional<at::MemoryFormat> format) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  return OnFake(at::empty(size, options, format), FakeDevice(device ? device->index() : -1));
}

at::Tensor EmptyStrided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Layout,
                        Device device, Pinned) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  return OnFake(at::empty_strided(size, stride, options),
                FakeDevice(device ? device->index() : -1));
}

at::Tensor& Copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const c10::Stream stream = CurrentStream(to.is_cuda() ? to.device() : from.device());
  EnqueueCopy(stream, to, from.expand_as(to));
  // As CUDA: what touches the host is waited for, unless it was said otherwise.
  if (!non_blocking && to.device() != from.device()) Synchronize(stream);
  return to;
}

// Torch's own wants pinned memory for what is not waited for.
at::Tensor ToCopy(const at::Tensor& from, Dtype dtype, Layout, Device device, Pinned,
                  bool non_blocking, std::optional<at::MemoryFormat> format) {
  const auto options = from.options().dtype(dtype.value_or(from.scalar_type()));
  const at::Tensor to =
      at::empty_like(from, options.device(device.value_or(from.device())), format);
  to.copy_(from, non_blocking);
  return to;
}

void RecordStream(at::Tensor&, at::Stream) {}

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}  // That a kernel of torch's is replaced.
};

}  // namespace

at::Tensor OnFake(const at::Tensor& tensor, c10::Device device) { return Alias(tensor, device); }

at::Tensor OnHost(const at::Tensor& tensor) {
  return tensor.is_cuda() ? Alias(tensor, c10::Device(c10::kCPU)) : tensor;
}

void EnqueueCopy(const c10::Stream& stream, const at::Tensor& to, const at::Tensor& from) {
  Enqueue(stream, [to = OnHost(to), from = OnHost(from)]() mutable {
    const at::NoGradGuard no_grad;
    to.copy_(from);
  });
}

void InstallKernels() {
  static torch::Library* library = nullptr;
  if (library != nullptr) return;
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("empty.memory_format", TORCH_FN(Empty));
  library->impl("empty_strided", TORCH_FN(EmptyStrided));
  library->impl("copy_", TORCH_FN(Copy));
  library->impl("_to_copy", TORCH_FN(ToCopy));
  library->impl("record_stream", TORCH_FN(RecordStream));
  AddKernelsOnHost(*library);
}

}  // namespace resilient::testing
