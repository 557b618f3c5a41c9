#include "tests/support/fake_nccl_config.h"

#include <array>
#include <cstddef>
#include <map>

#include "runtime/base/log.h"

namespace resilient::testing {
namespace {

// The sizes of ncclConfig_t in the versions that have changed it.
const std::map<unsigned int, std::size_t>& Sizes() {
  static const auto* const kSizes = new std::map<unsigned int, std::size_t>{
      {21801, 48}, {22600, 48}, {22700, 72}, {22800, 80}, {23000, 96}};
  return *kSizes;
}

struct Number {
  const char* name;
  int NcclConfig::*field;
  unsigned int since;
};
constexpr std::array kNumbers = {
    Number{"cga_cluster_size", &NcclConfig::cga_cluster_size, 21801},
    Number{"min_ctas", &NcclConfig::min_ctas, 21801},
    Number{"max_ctas", &NcclConfig::max_ctas, 21801},
    Number{"split_share", &NcclConfig::split_share, 21801},
    Number{"traffic_class", &NcclConfig::traffic_class, 22500},
    Number{"collnet_enable", &NcclConfig::collnet_enable, 22700},
    Number{"cta_policy", &NcclConfig::cta_policy, 22700},
    Number{"shrink_share", &NcclConfig::shrink_share, 22700},
    Number{"nvls_ctas", &NcclConfig::nvls_ctas, 22700},
    Number{"nchannels_per_net_peer", &NcclConfig::nchannels_per_net_peer, 22800},
    Number{"nvlink_centric_sched", &NcclConfig::nvlink_centric_sched, 22800},
    Number{"graph_usage_mode", &NcclConfig::graph_usage_mode, 22900},
    Number{"rma_contexts", &NcclConfig::rma_contexts, 22900},
    Number{"max_p2p_peers", &NcclConfig::max_p2p_peers, 23000},
};

}  // namespace

std::optional<std::string> ReadConfig(const NcclConfig& config) {
  const auto size = Sizes().find(config.version);
  const bool known = size != Sizes().end() && size->second == config.size;
  if (!known || config.magic != 0xcafebeef || config.blocking != 0) return std::nullopt;
  if (config.min_ctas > config.max_ctas) return std::nullopt;  // Also where one of them is not set.
  std::string text;
  const auto add = [&text](const char* name, const auto& value) {
    text += StrCat(text.empty() ? "" : " ", name, "=", value);
  };
  for (const Number& number : kNumbers) {
    const int value = config.*number.field;
    if (number.since <= config.version && value != NcclConfig::kUndefined) add(number.name, value);
  }
  if (config.net_name != nullptr) add("net_name", config.net_name);
  if (config.version >= 22700 && config.comm_name != nullptr) add("comm_name", config.comm_name);
  return text;
}

}  // namespace resilient::testing
