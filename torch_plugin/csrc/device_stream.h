#pragma once

#include <c10/core/Device.h>
#include <resilient/launch_mark.h>
#include <resilient/operation.h>
#include <resilient/status.h>

namespace resilient::plugin {

// CUDA devices as torch's device-independent interface has them, so that the plugin is one binary,
// linked to no CUDA, for hosts with and without. `device` is Operation::device.

// Whether this process has one. May start CUDA's driver.
bool HasDevice();

// Of the calling thread. REQUIRES: HasDevice().
int CurrentDevice();

// The calling thread's current stream of `device`. kUnimplemented where this torch gives nobody the
// stream itself. REQUIRES: a tensor is, or was, on that device.
Result<ExecutionStream> CurrentStream(int device);

// Waits on the host for all that is in that stream. Raises c10::Error.
void SynchronizeCurrentStream(int device);

// kHost: the CPU.
c10::Device ToDevice(int device);
// kHost for the CPU. REQUIRES: the CPU or CUDA, with an index.
int FromDevice(c10::Device device);

}  // namespace resilient::plugin
