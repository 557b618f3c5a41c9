#pragma once

#include <memory>

#include <c10/core/Allocator.h>
#include <resilient/status.h>
#include <resilient/transports.h>

namespace resilient::plugin {

// An allocator of torch's own kind for others' functions, here for memory that NCCL allocates: what
// torch.cuda.MemPool takes. One for the process, for good, as is the memory of a pool. It is made
// by torch's library for CUDA, so that we are linked to none. kSetting where NCCL has no memory to
// give, or this torch was built without CUDA.
Result<std::shared_ptr<c10::Allocator>> NcclAllocator(const CudaFabricOptions& options);

}  // namespace resilient::plugin
