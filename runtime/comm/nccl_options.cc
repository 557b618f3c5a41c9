#include "runtime/comm/nccl_options.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>

#include "runtime/base/log.h"
#include "runtime/comm/nccl_library.h"

namespace resilient {
namespace {

constexpr int kAlways = 21801;  // Older than all that is loaded.
constexpr int kAny = std::numeric_limits<int>::max();
constexpr int kChannelsMax = 64;  // Of NCCL itself.
constexpr std::size_t kNcclTextMax = 64;

struct Number {
  const char* name;
  std::optional<int> NcclOptions::*option;
  int NcclConfig::*field;
  int least;
  int most;
  int since;  // The first version of NCCL that has it.
};
constexpr std::array kNumberOptions = {
    Number{"cga_cluster_size", &NcclOptions::cga_cluster_size, &NcclConfig::cga_cluster_size, 0, 8,
           kAlways},
    Number{"min_ctas", &NcclOptions::min_ctas, &NcclConfig::min_ctas, 1, kChannelsMax, kAlways},
    Number{"max_ctas", &NcclOptions::max_ctas, &NcclConfig::max_ctas, 1, kChannelsMax, kAlways},
    Number{"traffic_class", &NcclOptions::traffic_class, &NcclConfig::traffic_class, 0, kAny,
           22600},
    Number{"collnet_enable", &NcclOptions::collnet_enable, &NcclConfig::collnet_enable, 0, 1,
           22700},
    Number{"cta_policy", &NcclOptions::cta_policy, &NcclConfig::cta_policy, 0, 1, 22700},
    Number{"nvls_ctas", &NcclOptions::nvls_ctas, &NcclConfig::nvls_ctas, 1, kChannelsMax, 22700},
    Number{"nchannels_per_net_peer", &NcclOptions::nchannels_per_net_peer,
           &NcclConfig::nchannels_per_net_peer, 1, kChannelsMax, 22800},
    Number{"nvlink_centric_sched", &NcclOptions::nvlink_centric_sched,
           &NcclConfig::nvlink_centric_sched, 0, 1, 22800},
    Number{"max_p2p_peers", &NcclOptions::max_p2p_peers, &NcclConfig::max_p2p_peers, 1, kAny,
           23000},
};

struct Text {
  const char* name;
  std::string NcclOptions::*option;
  const char* NcclConfig::*field;
  int since;
};
constexpr std::array kTexts = {
    Text{"net_name", &NcclOptions::net_name, &NcclConfig::net_name, kAlways},
    Text{"comm_name", &NcclOptions::comm_name, &NcclConfig::comm_name, 22700},
};

// How much of the layout a library of that version has at least.
std::size_t SizeAt(int version) {
  if (version < 22700) return offsetof(NcclConfig, comm_name);
  if (version < 22800) return offsetof(NcclConfig, nchannels_per_net_peer);
  if (version < 23000) return offsetof(NcclConfig, graph_usage_mode);
  return sizeof(NcclConfig);
}

// Calls `see(row, what is set)` for each of both tables that is set.
template <typename See>
void ForEachSet(const NcclOptions& options, const See& see) {
  for (const Number& row : kNumberOptions) {
    if (const auto& value = options.*row.option) see(row, *value);
  }
  for (const Text& row : kTexts) {
    if (const auto& value = options.*row.option; !value.empty()) see(row, value);
  }
}

Status Wrong(std::string_view name, std::string_view value, std::string_view why) {
  return Status(StatusCode::kSetting, StrCat("NcclOptions: ", name, "=", value, ": ", why));
}

Status CheckText(const Text& row, const std::string& value) {
  const auto is_plain = [](char one) { return one > ' ' && one <= '~'; };
  if (value.size() <= kNcclTextMax && std::all_of(value.begin(), value.end(), is_plain))
    return Status::Ok();
  return Wrong(
      row.name, value.substr(0, kNcclTextMax),
      StrCat("it is a name of up to ", kNcclTextMax, " characters of ASCII without spaces"));
}

Status CheckNumber(const Number& row, int value) {
  if (value >= row.least && value <= row.most) return Status::Ok();
  return Wrong(row.name, StrCat(value),
               row.most == kAny ? StrCat("it is ", row.least, " or more")
                                : StrCat("it is ", row.least, " to ", row.most));
}

}  // namespace

Status CheckNcclOptions(const NcclOptions& options) {
  // What copy engines do no abort ends.
  if (options.cta_policy.value_or(0) > 1) {
    return Wrong("cta_policy", StrCat(*options.cta_policy),
                 "0 (default) and 1 (efficiency) can be had; a communicator that leaves its work "
                 "to copy engines (zero) cannot be aborted, so no failure could be recovered from");
  }
  for (const Number& row : kNumberOptions) {
    if (const auto& value = options.*row.option)
      RESILIENT_RETURN_IF_ERROR(CheckNumber(row, *value));
  }
  for (const Text& row : kTexts) RESILIENT_RETURN_IF_ERROR(CheckText(row, options.*row.option));
  if (options.min_ctas.value_or(1) > options.max_ctas.value_or(kChannelsMax)) {
    return Wrong("min_ctas", StrCat(*options.min_ctas),
                 StrCat("it is more than max_ctas, ", *options.max_ctas));
  }
  return Status::Ok();
}

std::string ToString(const NcclOptions& options) {
  std::string text = options.is_high_priority_stream ? "is_high_priority_stream=1" : "";
  ForEachSet(options, [&text](const auto& row, const auto& value) {
    text += StrCat(text.empty() ? "" : " ", row.name, "=", value);
  });
  return text;
}

NcclConfig ConfigOf(const NcclOptions& options) {
  NcclConfig config;
  unsigned int since = kAlways;
  for (const Number& row : kNumberOptions) {
    const auto& value = options.*row.option;
    if (!value) continue;
    config.*row.field = *value;
    since = std::max(since, static_cast<unsigned int>(row.since));
  }
  for (const Text& row : kTexts) {
    const std::string& value = options.*row.option;
    if (value.empty()) continue;
    config.*row.field = value.c_str();
    since = std::max(since, static_cast<unsigned int>(row.since));
  }
  // NCCL compares them before it puts its own in the place of what is not set.
  if (options.min_ctas && !options.max_ctas) config.max_ctas = kChannelsMax;
  config.version = since;
  config.size = SizeAt(static_cast<int>(since));
  return config;
}

Status CheckLibrariesHave(const GroupSpec& spec, int nccl_version, const CudaApi& cuda) {
  std::string lacks;
  ForEachSet(spec.nccl, [&](const auto& row, const auto& value) {
    if (row.since <= nccl_version || !lacks.empty()) return;
    lacks = StrCat(row.name, "=", value, ", which NCCL has from ", NcclVersionText(row.since),
                   " on; this is ", NcclVersionText(nccl_version));
  });
  const bool prioritises =
      cuda.StreamCreateWithPriority != nullptr && cuda.DeviceGetStreamPriorityRange != nullptr;
  if (lacks.empty() && spec.nccl.is_high_priority_stream && !prioritises)
    lacks = "is_high_priority_stream, and this CUDA runtime has no streams with a priority";
  if (lacks.empty()) return Status::Ok();
  return Status(StatusCode::kSetting, StrCat("group '", spec.name, "' asks for ", lacks),
                {.generation = spec.generation, .group = spec.name});
}

}  // namespace resilient
