#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <resilient/transports.h>

namespace resilient {

// Called at each step of a rank's collectives, before it is taken: over shared memory before a
// round is published and before the others' are waited for, over TCP before a message is queued and
// when one has come whole. Steps count from 1 in each communicator. Runs on the thread that runs
// the collective, under no lock: a test may abort, block or kill there. Null in production.
using StepObserver = std::function<void(const GroupSpec& group, std::uint64_t step)>;

// MakeCpuFabric with an observer of all its communicators.
Result<std::unique_ptr<CommunicatorFactory>> MakeObservedCpuFabric(CpuFabricOptions options,
                                                                   const Clock& clock,
                                                                   CommunicatorEvents& events,
                                                                   StepObserver observer);

}  // namespace resilient
