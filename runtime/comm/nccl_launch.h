#pragma once

#include <vector>

#include <resilient/operation.h>
#include <resilient/status.h>

#include "runtime/comm/nccl_api.h"
#include "runtime/comm/nccl_reduction.h"

namespace resilient {

// How an operation is said in NCCL. Which calls an operation becomes depends only on what all ranks
// know alike: a choice by the layout of local memory would put ranks into different calls.

// kUnimplemented for what does not run over NCCL among `ranks`; the text says why. REQUIRES:
// ValidateOperation.
Status CheckNcclSupports(const Operation& op, int ranks, const NcclAbilities& abilities);

// Where and with what an operation is launched. Thread: value type.
struct NcclLaunch {
  const NcclApi& nccl;
  NcclCommHandle comm = nullptr;
  CudaStreamHandle stream = nullptr;
  int rank = 0;
  int ranks = 1;
  NcclReduceOp premul_sum = NcclReduceOp::kSum;  // Made for it, where it is a kPremulSum.
  void* scratch = nullptr;                       // Of NcclScratch, for a barrier.
};

// Enqueues `op` on the stream of `launch`. kInProgress: it is under way, and nothing may be called
// on the communicator but CommGetAsyncError until that says how it went. REQUIRES:
// CheckNcclSupports.
NcclResult LaunchNccl(const NcclLaunch& launch, const Operation& op);

// The same for sends and receives that are under way together.
NcclResult LaunchNcclBatch(const NcclLaunch& launch, const std::vector<const Operation*>& ops);

}  // namespace resilient
