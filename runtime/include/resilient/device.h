#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace resilient {

// The GPU that a rank says it uses when it joins: what the store needs to tell that two ranks use
// the same one, and to say how to mend that. Thread: value type.
struct DeviceClaim {
  std::string uuid;  // "GPU-..." or of a MIG instance "MIG-..."; empty: not known, no claim.
  std::string host;  // Within which the UUID counts; empty: the boot that the process runs on.
  int ordinal = -1;  // cuda:N in that process; -1: not known.
  int visible = 0;   // How many GPUs CUDA shows to that process; 0: none, or nobody can tell.
  std::string visible_devices;  // CUDA_VISIBLE_DEVICES; empty: not set.
  int local_rank = -1;          // LOCAL_RANK; -1: not set.

  friend bool operator==(const DeviceClaim&, const DeviceClaim&) = default;
};

// A GPU of this host. Thread: value type.
struct Gpu {
  std::string uuid;
  std::string name;
  bool mig = false;                    // Split: CUDA shows its instances and not itself.
  std::vector<std::string> instances;  // UUIDs of these.
};

// The GPUs of this host in NVML's order; none where there is no driver. Never touches CUDA: no
// context is made, and a process that forks later is none the worse for it.
std::vector<Gpu> ListGpus();

// UUIDs of the devices that CUDA shows to a process with this environment, by their ordinals; an
// empty one where that cannot be told for sure. Pure.
std::vector<std::string> VisibleGpus(
    const std::vector<Gpu>& gpus,
    const std::vector<std::pair<std::string, std::string>>& environment);

// The claim of a process with this environment that uses cuda:`ordinal` (-1: not known) of `gpus`.
// Its uuid is empty where that is not known for sure. Pure.
DeviceClaim ClaimOf(int ordinal, const std::vector<Gpu>& gpus,
                    const std::vector<std::pair<std::string, std::string>>& environment);

// Whether ranks may use one GPU; equal on all ranks of a group, but that the first and the last may
// meet.
enum class SharedGpu : std::uint8_t {
  kRefused,
  kThroughHost,  // Everything on devices goes through memory of the host, and NCCL is not loaded.
  kThroughNccl   // NCCL is asked all the same: for those of its settings that let it.
};

}  // namespace resilient
