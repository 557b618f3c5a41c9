#pragma once

#include <cstddef>
#include <memory>

#include <resilient/status.h>
#include <resilient/transports.h>

namespace resilient {

// Memory of CUDA devices as NCCL allocates it: fit for all that NCCL can do with memory that it
// knows, in pieces of the size that the device gives out. To free it waits for the device.
//
// Owner: whoever allocates, by shared_ptr. Thread: thread-safe.
class NcclMemory {
 public:
  virtual ~NcclMemory() = default;
  // kSetting where the library has given no memory, with what it says.
  virtual Result<void*> Allocate(int device, std::size_t bytes) = 0;
  // Of Allocate on that device.
  virtual Status Free(int device, void* memory) = 0;
};

// From the libraries that `options` name. kSetting where there is no NCCL or no CUDA, or where this
// NCCL allocates none. Loads them for the life of the process.
Result<std::shared_ptr<NcclMemory>> LoadNcclMemory(const CudaFabricOptions& options);

}  // namespace resilient
