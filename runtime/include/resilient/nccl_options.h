#pragma once

#include <optional>
#include <string>

#include <resilient/status.h>

namespace resilient {

// What a group asks of its communicators of NCCL, by the names of ProcessGroupNCCL.Options in
// Python. What is not set is left to NCCL and its environment. The same on all ranks of a group:
// where they differ, and where their NCCL does not have what they ask for, the group fails with
// kSetting on all of them as it connects. Without meaning for memory of the host. Kept for the life
// of the group, over all generations. Thread: value type.
struct NcclOptions {
  // Its operations run on a stream of the highest priority that the device has.
  bool is_high_priority_stream = false;
  std::optional<int> cga_cluster_size = std::nullopt;  // 0 to 8.
  std::optional<int> min_ctas = std::nullopt;          // 1 to 64, as the next.
  std::optional<int> max_ctas = std::nullopt;
  std::string net_name = {};                                 // "Socket", "IB", or a plugin's.
  std::optional<int> traffic_class = std::nullopt;           // From NCCL 2.26 on.
  std::string comm_name = {};                                // From 2.27 on, as all that follow.
  std::optional<int> collnet_enable = std::nullopt;          // 0 or 1.
  std::optional<int> cta_policy = std::nullopt;              // 0: default, 1: efficiency.
  std::optional<int> nvls_ctas = std::nullopt;               // 1 to 64.
  std::optional<int> nchannels_per_net_peer = std::nullopt;  // 1 to 64; from 2.28 on.
  std::optional<int> nvlink_centric_sched = std::nullopt;    // 0 or 1; from 2.28 on.
  std::optional<int> max_p2p_peers = std::nullopt;           // From 1; from 2.30 on.

  friend bool operator==(const NcclOptions&, const NcclOptions&) = default;
};

// kSetting for what NCCL would refuse, and for what no group can be recovered with.
Status CheckNcclOptions(const NcclOptions& options);

// "is_high_priority_stream=1 max_ctas=16 net_name=Socket"; empty: nothing is set.
std::string ToString(const NcclOptions& options);

}  // namespace resilient
