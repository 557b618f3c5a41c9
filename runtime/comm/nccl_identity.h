#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <resilient/communicator.h>
#include <resilient/device.h>
#include <resilient/status.h>

#include "runtime/comm/nccl_api.h"
#include "runtime/comm/nccl_meeting.h"

namespace resilient {

// What one rank says of itself before the ranks of a communicator are connected. Where it differs
// from rank to rank they would wait for each other, or NCCL fails in words of its own. Thread:
// value type.
struct NcclIdentity {
  NcclUniqueId id{};         // Of this attempt; rank 0's counts.
  int nccl_version = 0;      // 23007 for 2.30.7.
  std::string boot_id;       // Of the host; UUIDs count within it.
  std::string settings;      // "NCCL_ALGO=Ring NCCL_PROTO=Simple": those that must be equal.
  std::string options;       // Of the group: "max_ctas=16", as NcclOptions are said.
  std::string way = "NCCL";  // Or "memory of the host": which transport it is.
  DeviceClaim device;        // Without a uuid: it does not say, or ranks may share.
};

// Those variables of `environment` that must have one value on all ranks of a group, in order of
// their names.
std::string NcclSettings(const std::vector<std::pair<std::string, std::string>>& environment);

// At most kMeetingBytes; long texts are cut, to their beginning and a sum over all.
std::string EncodeIdentity(const NcclIdentity& identity);
// nullopt: it is none.
std::optional<NcclIdentity> DecodeIdentity(std::string_view text);

// kSetting where ranks go different ways, kDuplicateDevice where two ranks use one GPU, kSetting
// where versions, settings or options differ, in words that are the same on all ranks. `identities`
// by group rank. Pure.
Status CompareIdentities(const GroupSpec& spec, const std::vector<NcclIdentity>& identities);

// What the ranks have said at `meeting`, by group rank: the outcome of CompareIdentities, or
// kProtocol for what none of ours says. REQUIRES: it is over, and has ended well.
Result<std::vector<NcclIdentity>> IdentitiesOf(const NcclMeeting& meeting, const GroupSpec& spec);

}  // namespace resilient
