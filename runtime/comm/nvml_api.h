#pragma once

#include <vector>

#include <resilient/device.h>

namespace resilient {

// As in NVML's binary interface, declared by ourselves: its header is not there where the library
// is built.
struct NvmlDeviceOpaque;
using NvmlDevice = NvmlDeviceOpaque*;
inline constexpr int kNvmlSuccess = 0;
inline constexpr unsigned kNvmlUuidBytes = 96;
inline constexpr unsigned kNvmlNameBytes = 96;

// NOLINTBEGIN(readability-identifier-naming): they are called as functions, by the names of C.

// The functions of NVML that are used, as a table that tests fill in. Those of MIG may be missing:
// older drivers have none. Thread: immutable, the functions are thread-safe.
struct NvmlApi {
  int (*Init)() = nullptr;
  int (*Shutdown)() = nullptr;
  int (*DeviceGetCount)(unsigned* count) = nullptr;
  int (*DeviceGetHandleByIndex)(unsigned index, NvmlDevice* device) = nullptr;
  int (*DeviceGetUUID)(NvmlDevice device, char* uuid, unsigned bytes) = nullptr;
  int (*DeviceGetName)(NvmlDevice device, char* name, unsigned bytes) = nullptr;
  int (*DeviceGetMigMode)(NvmlDevice device, unsigned* current, unsigned* pending) = nullptr;
  int (*DeviceGetMaxMigDeviceCount)(NvmlDevice device, unsigned* count) = nullptr;
  int (*DeviceGetMigDeviceHandleByIndex)(NvmlDevice device, unsigned index,
                                         NvmlDevice* instance) = nullptr;
};

// NOLINTEND(readability-identifier-naming)

// All GPUs, or none when some function that is needed is missing or fails.
std::vector<Gpu> ListGpus(const NvmlApi& nvml);

}  // namespace resilient
