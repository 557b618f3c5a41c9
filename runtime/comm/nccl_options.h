#pragma once

#include <resilient/communicator.h>
#include <resilient/nccl_options.h>
#include <resilient/status.h>

#include "runtime/comm/nccl_api.h"

namespace resilient {

// As NCCL takes it, in the oldest layout that has what is set: libraries that are older than that
// were refused, and none reads more of it. Its texts are those of `options`, which outlive it.
NcclConfig ConfigOf(const NcclOptions& options);

// kSetting where these libraries do not have what the group asks for. With libraries of one version
// the same on all its ranks.
Status CheckLibrariesHave(const GroupSpec& spec, int nccl_version, const CudaApi& cuda);

}  // namespace resilient
