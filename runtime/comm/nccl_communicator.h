#pragma once

#include <memory>
#include <string>

#include <resilient/clock.h>
#include <resilient/transports.h>

#include "runtime/comm/control_waits.h"
#include "runtime/comm/nccl_api.h"
#include "runtime/comm/nccl_identity.h"

namespace resilient {

// Options of the NCCL communicator.
struct NcclFabricOptions {
  NcclApi nccl;
  CudaApi cuda;
  int device = 0;         // The CUDA device of all its communicators.
  NcclIdentity identity;  // What this rank says of itself; the id is made for each attempt.
  // Of one attempt, once all ranks have come: NCCL itself waits for ever, and tells nobody. A hold,
  // and time in which this process stood still, do not count. Zero: none.
  Duration connect_timeout = std::chrono::seconds(60);
  // What Leave gives NCCL to let go once no peer awaits anything of this rank; then it is aborted.
  Duration flush_timeout = std::chrono::seconds(1);
  // How long an error of NCCL's, which names no rank, waits for the fence that does.
  Duration verdict_wait = std::chrono::seconds(3);
  std::string name = "res-nccl";  // Thread name.
  // The staged transport's: what goes through one buffer at once. The same on all ranks.
  std::size_t piece_bytes = std::size_t{4} << 20;
};

// A group of the CPU transport over which the ranks of a communicator talk is called like it, with
// this behind.
inline constexpr char kControlSuffix[] = "/control";

// The NCCL transport of one device: one thread makes all calls into NCCL, and one more the end of
// what ends together. The control groups are made by `control`, the CPU transport of the session,
// which like `events` outlives the factory; GroupMember::endpoint is that transport's. What differs
// from the CPU is said at MakeCudaFabric.
std::unique_ptr<CommunicatorFactory> MakeNcclFabric(const NcclFabricOptions& options,
                                                    CommunicatorFactory& control,
                                                    std::shared_ptr<ControlWaits> waits,
                                                    const Clock& clock, CommunicatorEvents& events);

}  // namespace resilient
