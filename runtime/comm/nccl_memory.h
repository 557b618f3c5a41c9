#pragma once

#include <memory>

#include <resilient/nccl_memory.h>

#include "runtime/comm/nccl_library.h"

namespace resilient {

// LoadNcclMemory of a library that is loaded.
Result<std::shared_ptr<NcclMemory>> MakeNcclMemory(const NcclLibrary& library);

}  // namespace resilient
