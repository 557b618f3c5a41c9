#include "tests/support/fake_torch_guard.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <memory>
#include <utility>

#include "tests/support/fake_torch_runtime.h"

namespace resilient::testing {
namespace {

constexpr std::size_t kStreamsInPool = 4;  // Of a device: each costs a thread.

int CurrentDevice() {
  int device = 0;
  Check(Runtime().get_device(&device));
  return device;
}

c10::Stream StreamOf(c10::Device device, CudaStreamHandle handle) {
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(handle));
}

// Ids of streams are their handles; null is the default stream, as in torch's own.
c10::StreamId& CurrentStreamId(c10::Device device) {
  thread_local std::array<c10::StreamId, kFakeDevices> ids{};
  return ids.at(static_cast<std::size_t>(device.index()));
}

// Owner: the registry of torch, never destroyed. Thread: thread-safe; what is current is the
// thread's.
class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return FakeDevice(-1); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_cuda() && device.index() < kFakeDevices);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) Runtime().cuda.SetDevice(device.index());
  }
  c10::Stream getStream(c10::Device device) const override { return CurrentStream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return StreamOf(FakeDevice(device.index()), nullptr);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static auto* const kPool =
        new std::array<std::atomic<CudaStreamHandle>, kFakeDevices * kStreamsInPool>{};
    static std::atomic<std::size_t> next{0};
    device = FakeDevice(device.index());
    const std::size_t number = next++ % kStreamsInPool;
    auto& at = (*kPool)[static_cast<std::size_t>(device.index()) * kStreamsInPool + number];
    CudaStreamHandle none = nullptr;
    // Two threads may both make one: the loser's serves it alone.
    if (at == nullptr) {
      const c10::Stream made = NewStream(device);
      return at.compare_exchange_strong(none, HandleOf(made)) ? made : StreamOf(device, none);
    }
    return StreamOf(device, at);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return NewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, stream.device(),
                       std::exchange(CurrentStreamId(stream.device()), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return HandleOf(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    const OnDevice guard(stream.device());
    const CudaResult result = Runtime().stream_query(HandleOf(stream));
    if (result != CudaResult::kNotReady) Check(result);
    return result == CudaResult::kSuccess;
  }
  void synchronizeStream(const c10::Stream& stream) const override { Synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    const OnDevice guard(FakeDevice(index));
    Check(Runtime().device_synchronize());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    const OnDevice guard(stream.device());
    auto handle = static_cast<CudaEventHandle>(*event);
    if (handle == nullptr) {
      Check(Runtime().cuda.EventCreateWithFlags(&handle, kCudaEventDisableTiming));
      *event = handle;
    }
    Check(Runtime().cuda.EventRecord(handle, HandleOf(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const OnDevice guard(stream.device());
    Check(Runtime().cuda.StreamWaitEvent(HandleOf(stream), static_cast<CudaEventHandle>(event), 0));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const CudaResult result = Runtime().cuda.EventQuery(static_cast<CudaEventHandle>(event));
    if (result != CudaResult::kNotReady) Check(result);
    return result == CudaResult::kSuccess;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr)
      Check(Runtime().cuda.EventSynchronize(static_cast<CudaEventHandle>(event)));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) Runtime().cuda.EventDestroy(static_cast<CudaEventHandle>(event));
  }
  // No allocator takes the memory back before its tensors are gone.
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return kFakeDevices; }
};

}  // namespace

void InstallGuard() {
  static const auto* const kGuard = new FakeGuard;
  // Torch's own is there already: asked for once, so that it does not come after this.
  c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::DeviceType::CUDA)].store(
      kGuard);
}

c10::Device FakeDevice(c10::DeviceIndex index) {
  if (index < 0) index = static_cast<c10::DeviceIndex>(CurrentDevice());
  return c10::Device(c10::DeviceType::CUDA, index);
}

c10::Stream CurrentStream(c10::Device device) {
  device = FakeDevice(device.index());
  return c10::Stream(c10::Stream::UNSAFE, device, CurrentStreamId(device));
}

c10::Stream NewStream(c10::Device device) {
  device = FakeDevice(device.index());
  const OnDevice guard(device);
  CudaStreamHandle handle = nullptr;
  Check(Runtime().cuda.StreamCreateWithFlags(&handle, kCudaStreamNonBlocking));
  return StreamOf(device, handle);
}

CudaStreamHandle HandleOf(const c10::Stream& stream) {
  return reinterpret_cast<CudaStreamHandle>(stream.id());
}

void Enqueue(const c10::Stream& stream, std::function<void()> function) {
  const OnDevice guard(stream.device());
  auto owned = std::make_unique<std::function<void()>>(std::move(function));
  const auto run = [](void* data) {
    const std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(data));
    (*mine)();
  };
  Check(Runtime().launch_host_func(HandleOf(stream), run, owned.release()));
}

void Synchronize(const c10::Stream& stream) {
  const OnDevice guard(stream.device());
  Check(Runtime().stream_synchronize(HandleOf(stream)));
}

OnDevice::OnDevice(c10::Device device) : before_(CurrentDevice()) {
  Check(Runtime().cuda.SetDevice(device.index()));
}

OnDevice::~OnDevice() { Runtime().cuda.SetDevice(before_); }

}  // namespace resilient::testing
