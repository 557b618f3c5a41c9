#include "runtime/comm/nccl_identity.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <span>

#include "runtime/base/device_sharing.h"
#include "runtime/base/log.h"
#include "runtime/comm/checksum.h"
#include "runtime/comm/mismatch.h"
#include "runtime/comm/nccl_library.h"
#include "runtime/comm/nccl_meeting.h"

namespace resilient {
namespace {

// What chooses algorithms, protocols, channels and transports: ranks that differ in it set up
// different connections and wait for each other.
constexpr std::array kShared = {
    "NCCL_ALGO",           "NCCL_BUFFSIZE",      "NCCL_COLLNET_ENABLE", "NCCL_CUMEM_ENABLE",
    "NCCL_LL128_BUFFSIZE", "NCCL_LL_BUFFSIZE",   "NCCL_MAX_CTAS",       "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",       "NCCL_MIN_NCHANNELS", "NCCL_MNNVL_ENABLE",   "NCCL_NET",
    "NCCL_NVLS_ENABLE",    "NCCL_P2P_DISABLE",   "NCCL_P2P_LEVEL",      "NCCL_PROTO",
    "NCCL_PXN_DISABLE",    "NCCL_SHM_DISABLE",   "NCCL_SOCKET_FAMILY"};
constexpr std::size_t kSettingsMax = 160;
constexpr std::size_t kOptionsMax = 320;
constexpr std::size_t kTextMax = 48;
// Of this form of an identity; another one is of another version of this library.
constexpr std::string_view kForm = "nccl-identity-2";
constexpr char kEnd = '\n';

std::string Short(const std::string& text, std::size_t most) {
  if (text.size() <= most) return text;
  return StrCat(text.substr(0, most - 20), "~", ChecksumOf(std::as_bytes(std::span(text))));
}

// Lines from the front of a text. Thread: confined.
class Lines {
 public:
  explicit Lines(std::string_view text) : rest_(text) {}
  std::string Text() {
    const std::size_t end = rest_.find(kEnd);
    complete_ = complete_ && end != std::string_view::npos;
    std::string line(rest_.substr(0, end));
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 1);
    return line;
  }
  int Number() {
    const std::string line = Text();
    int number = 0;
    const auto read = std::from_chars(line.data(), line.data() + line.size(), number);
    complete_ = complete_ && read.ec == std::errc() && read.ptr == line.data() + line.size();
    return number;
  }
  bool complete() const { return complete_; }

 private:
  std::string_view rest_;
  bool complete_ = true;
};

Status Differ(const GroupSpec& spec, std::string_view what, const std::vector<std::string>& each,
              std::string_view fix) {
  std::map<std::string, std::vector<int>> ranks;
  for (std::size_t rank = 0; rank < each.size(); ++rank)
    ranks[each[rank]].push_back(static_cast<int>(rank));
  if (ranks.size() < 2) return Status::Ok();
  std::string text = StrCat("the ranks of group '", spec.name, "' have different ", what, ":");
  for (const auto& [value, who] : ranks) {
    const GroupMember& first = spec.members[static_cast<std::size_t>(who.front())];
    text += StrCat(value == ranks.begin()->first ? " " : "; ", NameOf(first),
                   who.size() > 1 ? StrCat(" and ", who.size() - 1, " more") : std::string(), " ",
                   value.empty() ? std::string("none") : value);
  }
  return Status(StatusCode::kSetting, StrCat(text, ". Fix: ", fix),
                {.generation = spec.generation, .group = spec.name});
}

}  // namespace

std::string NcclSettings(const std::vector<std::pair<std::string, std::string>>& environment) {
  std::map<std::string, std::string> found;
  for (const auto& [name, value] : environment) {
    if (std::find(kShared.begin(), kShared.end(), name) != kShared.end()) found[name] = value;
  }
  std::string text;
  for (const auto& [name, value] : found) text += StrCat(text.empty() ? "" : " ", name, "=", value);
  std::replace(text.begin(), text.end(), kEnd, ' ');
  return text;
}

std::string EncodeIdentity(const NcclIdentity& identity) {
  const DeviceClaim& device = identity.device;
  std::string text(identity.id.bytes.begin(), identity.id.bytes.end());
  for (const std::string& line :
       {std::string(kForm), StrCat(identity.nccl_version), Short(identity.boot_id, kTextMax),
        Short(identity.settings, kSettingsMax), Short(identity.options, kOptionsMax), identity.way,
        Short(device.uuid, kTextMax), Short(device.host, kTextMax), StrCat(device.ordinal),
        StrCat(device.visible), Short(device.visible_devices, kTextMax),
        StrCat(device.local_rank)}) {
    text += line;
    text += kEnd;
  }
  return text;
}

std::optional<NcclIdentity> DecodeIdentity(std::string_view text) {
  NcclIdentity identity;
  if (text.size() < identity.id.bytes.size()) return std::nullopt;
  std::copy_n(text.begin(), identity.id.bytes.size(), identity.id.bytes.begin());
  Lines lines(text.substr(identity.id.bytes.size()));
  if (lines.Text() != kForm) return std::nullopt;
  identity.nccl_version = lines.Number();
  identity.boot_id = lines.Text();
  identity.settings = lines.Text();
  identity.options = lines.Text();
  identity.way = lines.Text();
  identity.device.uuid = lines.Text();
  identity.device.host = lines.Text();
  identity.device.ordinal = lines.Number();
  identity.device.visible = lines.Number();
  identity.device.visible_devices = lines.Text();
  identity.device.local_rank = lines.Number();
  if (!lines.complete()) return std::nullopt;
  return identity;
}

Status CompareIdentities(const GroupSpec& spec, const std::vector<NcclIdentity>& identities) {
  std::vector<DeviceHolder> holders;
  std::vector<std::string> versions;
  std::vector<std::string> settings;
  std::vector<std::string> options;
  std::vector<std::string> ways;
  for (std::size_t rank = 0; rank < identities.size(); ++rank) {
    const NcclIdentity& one = identities[rank];
    const GroupMember& member = spec.members[rank];
    versions.push_back(NcclVersionText(one.nccl_version));
    settings.push_back(one.settings);
    options.push_back(one.options);
    ways.push_back(one.way);
    holders.push_back({.rank = member.global_rank,
                       .process = {.host = member.host, .boot_id = one.boot_id, .pid = member.pid},
                       .device = &one.device});
  }
  RESILIENT_RETURN_IF_ERROR(
      Differ(spec, "ways between devices", ways,
             "set RESILIENT_ALLOW_SHARED_GPU alike on all ranks: 1 is the way "
             "through memory of the host"));
  std::sort(holders.begin(), holders.end(),
            [](const DeviceHolder& a, const DeviceHolder& b) { return a.rank < b.rank; });
  if (const std::optional<Status> shared = SharedDevice(holders)) return *shared;
  RESILIENT_RETURN_IF_ERROR(Differ(spec, "versions of NCCL", versions,
                                   "install one version on all hosts, or name one library by "
                                   "RESILIENT_NCCL_LIBRARY"));
  RESILIENT_RETURN_IF_ERROR(
      Differ(spec, "settings of NCCL", settings, "set them alike on all hosts"));
  return Differ(spec, "options of NCCL", options, "make the group with the same on all ranks");
}

Result<std::vector<NcclIdentity>> IdentitiesOf(const NcclMeeting& meeting, const GroupSpec& spec) {
  std::vector<NcclIdentity> identities;
  for (std::size_t rank = 0; rank < spec.members.size(); ++rank) {
    auto identity = DecodeIdentity(meeting.HeardFrom(static_cast<int>(rank)));
    if (!identity) {
      return Status(
          StatusCode::kProtocol,
          StrCat(NameOf(spec.members[rank]), " says of itself what rank ",
                 spec.members[static_cast<std::size_t>(spec.rank)].global_rank, " of group '",
                 spec.name, "' does not understand; install one version of resilient on all hosts"),
          DetailOf(spec, spec.rank, 0));
    }
    identities.push_back(*std::move(identity));
  }
  RESILIENT_RETURN_IF_ERROR(CompareIdentities(spec, identities));
  return identities;
}

}  // namespace resilient
