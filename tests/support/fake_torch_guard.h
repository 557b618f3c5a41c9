#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>

#include "runtime/comm/nccl_types.h"

namespace resilient::testing {

constexpr c10::DeviceIndex kFakeDevices = 8;

// From now on torch's guards, streams and events of CUDA devices are those of the fake, in the
// whole process and for good. Again: nothing.
void InstallGuard();

c10::Device FakeDevice(c10::DeviceIndex index);  // -1: the current one.
c10::Stream CurrentStream(c10::Device device);
c10::Stream NewStream(c10::Device device);
CudaStreamHandle HandleOf(const c10::Stream& stream);

// Runs `function` in the stream's order, on a thread of the fake's.
void Enqueue(const c10::Stream& stream, std::function<void()> function);
void Synchronize(const c10::Stream& stream);

// Makes the device the thread's current one until its end. Thread: of one thread.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace resilient::testing
