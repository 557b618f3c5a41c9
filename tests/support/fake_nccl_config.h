#pragma once

#include <optional>
#include <string>

#include "runtime/comm/nccl_types.h"

namespace resilient::testing {

// What NCCL 2.30 reads of a configuration: "max_ctas=4 net_name=Socket", what is not set left out.
// nullopt for one that it refuses or that is of no use to who must be able to abort: that is not
// initialised, blocks, or is larger or smaller than its version says.
std::optional<std::string> ReadConfig(const NcclConfig& config);

}  // namespace resilient::testing
