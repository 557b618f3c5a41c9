#pragma once

#include <resilient/operation.h>
#include <resilient/status.h>

#include "runtime/comm/nccl_api.h"

namespace resilient {

// How an operation is said in NCCL. Which calls an operation becomes depends only on what all ranks
// know alike: a choice by the layout of local memory would put ranks into different calls.

// kUnimplemented for what does not run over NCCL; the text says why. REQUIRES: ValidateOperation.
Status CheckNcclSupports(const Operation& op);

// Enqueues `op` on its stream. kInProgress: it is under way, and nothing may be called on `comm`
// but CommGetAsyncError until that says how it went. REQUIRES: CheckNcclSupports.
NcclResult LaunchNccl(const NcclApi& nccl, NcclCommHandle comm, int rank, const Operation& op);

}  // namespace resilient
