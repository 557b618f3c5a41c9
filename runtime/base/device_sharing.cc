#include "runtime/base/device_sharing.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "runtime/base/texts.h"

namespace resilient {
namespace {

constexpr std::size_t kNamedMax = 64;
using Holders = std::vector<const DeviceHolder*>;

const std::string& HostOf(const DeviceHolder& holder) {
  const bool own = holder.device == nullptr || holder.device->host.empty();
  return own ? holder.process.boot_id : holder.device->host;
}

// For people.
const std::string& HostName(const DeviceHolder& holder) {
  return holder.device->host.empty() ? holder.process.host : holder.device->host;
}

// Sources differ in case and in the prefix; the digits are the same, and no two devices share them.
std::string Digits(std::string_view uuid) {
  for (const std::string_view prefix : {"GPU-", "MIG-"}) {
    if (uuid.starts_with(prefix)) uuid.remove_prefix(prefix.size());
  }
  std::string digits(uuid);
  for (char& c : digits) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return digits;
}

std::string Ranks(const Holders& sharing) {
  return "ranks " + ListOf(sharing, kNamedMax,
                           [](const DeviceHolder* one) { return std::to_string(one->rank); });
}

std::string Gpus(std::size_t count, const std::string& kind) {
  return std::to_string(count) + " " + kind + (count == 1 ? " GPU" : " GPUs");
}

// True when each of them would find a GPU of its own by its LOCAL_RANK.
bool LocalRanksWouldDo(const Holders& sharing, int processes) {
  std::set<int> local_ranks;
  for (const DeviceHolder* one : sharing) {
    const DeviceClaim& device = *one->device;
    if (device.local_rank < 0 || device.local_rank >= device.visible ||
        device.visible < processes) {
      return false;
    }
    local_ranks.insert(device.local_rank);
  }
  return local_ranks.size() == sharing.size();
}

std::string Remedy(const Holders& sharing, int processes) {
  if (LocalRanksWouldDo(sharing, processes)) {
    std::string text;
    for (const DeviceHolder* one : sharing) {
      const DeviceClaim& device = *one->device;
      if (device.local_rank == device.ordinal || !text.empty()) continue;
      text = "rank " + std::to_string(one->rank) +
             " has LOCAL_RANK=" + std::to_string(device.local_rank) +
             " but its device is cuda:" + std::to_string(device.ordinal) + ": ";
    }
    return text +
           "call torch.cuda.set_device(LOCAL_RANK) before the first CUDA call, or pass "
           "device_id=torch.device(\"cuda\", LOCAL_RANK) to init_process_group";
  }
  const DeviceClaim& device = *sharing.front()->device;
  if (device.visible > 0 && device.visible < processes) {
    const std::string most = std::to_string(device.visible);
    std::string text = "start no more than " + most +
                       " on this host (torchrun --nproc_per_node=" + most +
                       ", resilient-run --nproc " + most + ")";
    if (!device.visible_devices.empty()) {
      text += ", or show each process a GPU of its own (CUDA_VISIBLE_DEVICES)";
    }
    return text;
  }
  return "give each process a GPU of its own: a LOCAL_RANK of its own and "
         "torch.cuda.set_device(LOCAL_RANK), or a CUDA_VISIBLE_DEVICES of its own";
}

Status Verdict(const Holders& sharing, int processes, std::size_t other_gpus) {
  const DeviceHolder& first = *sharing.front();
  const DeviceClaim& device = *first.device;
  std::string text = Ranks(sharing) + " on host " + HostName(first) +
                     (sharing.size() == 2 ? " both" : " all") + " use GPU " +
                     std::to_string(device.ordinal) + " (UUID " + device.uuid +
                     "): " + std::to_string(processes) + " processes, ";
  text += device.visible > 0 ? Gpus(static_cast<std::size_t>(device.visible), "visible")
                             : "an unknown number of visible GPUs";
  text += "; LOCAL_RANK " + ListOf(sharing, kNamedMax, [](const DeviceHolder* one) {
            return one->device->local_rank < 0 ? std::string("unset")
                                               : std::to_string(one->device->local_rank);
          });
  text += "; CUDA_VISIBLE_DEVICES " +
          (device.visible_devices.empty() ? std::string("unset") : device.visible_devices);
  if (other_gpus > 0) {
    text +=
        "; " + Gpus(other_gpus, "more") + (other_gpus == 1 ? " is" : " are") + " shared likewise";
  }
  text += ". Fix: " + Remedy(sharing, processes) +
          "; RESILIENT_ALLOW_SHARED_GPU=1 lets ranks share one";
  FailureDetail detail;
  detail.rank = first.rank;
  detail.host = HostName(first);
  detail.pid = first.process.pid;
  return Status(StatusCode::kDuplicateDevice, std::move(text), std::move(detail));
}

}  // namespace

std::optional<Status> SharedDevice(const std::vector<DeviceHolder>& holders) {
  std::map<std::pair<std::string, std::string>, Holders> users;
  for (const DeviceHolder& holder : holders) {
    if (holder.device == nullptr || holder.device->uuid.empty()) continue;
    users[{HostOf(holder), Digits(holder.device->uuid)}].push_back(&holder);
  }
  const Holders* worst = nullptr;
  std::size_t shared = 0;
  for (const auto& [device, sharing] : users) {
    if (sharing.size() < 2) continue;
    ++shared;
    if (!worst || sharing.front()->rank < worst->front()->rank) worst = &sharing;
  }
  if (!worst) return std::nullopt;
  const std::string& host = HostOf(*worst->front());
  const auto processes = std::count_if(holders.begin(), holders.end(),
                                       [&host](const auto& one) { return HostOf(one) == host; });
  return Verdict(*worst, static_cast<int>(processes), shared - 1);
}

}  // namespace resilient
