#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include <resilient/device.h>

#include "runtime/base/dynamic_library.h"
#include "runtime/base/numbers.h"
#include "runtime/comm/nvml_api.h"

namespace resilient {
namespace {

using Environment = std::vector<std::pair<std::string, std::string>>;
constexpr unsigned kGpusMax = 1024;
constexpr unsigned kInstancesMax = 64;

// It stays loaded, as what torch loads does.
NvmlApi LoadNvml() {
  NvmlApi nvml;
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) return nvml;
  FindFunction(library, "nvmlInit_v2", &nvml.Init);
  FindFunction(library, "nvmlShutdown", &nvml.Shutdown);
  FindFunction(library, "nvmlDeviceGetCount_v2", &nvml.DeviceGetCount);
  FindFunction(library, "nvmlDeviceGetHandleByIndex_v2", &nvml.DeviceGetHandleByIndex);
  FindFunction(library, "nvmlDeviceGetUUID", &nvml.DeviceGetUUID);
  FindFunction(library, "nvmlDeviceGetName", &nvml.DeviceGetName);
  FindFunction(library, "nvmlDeviceGetMigMode", &nvml.DeviceGetMigMode);
  FindFunction(library, "nvmlDeviceGetMaxMigDeviceCount", &nvml.DeviceGetMaxMigDeviceCount);
  FindFunction(library, "nvmlDeviceGetMigDeviceHandleByIndex",
               &nvml.DeviceGetMigDeviceHandleByIndex);
  return nvml;
}

std::optional<std::string> UuidOf(const NvmlApi& nvml, NvmlDevice device) {
  std::array<char, kNvmlUuidBytes> uuid{};
  if (nvml.DeviceGetUUID(device, uuid.data(), kNvmlUuidBytes) != kNvmlSuccess) return {};
  uuid.back() = '\0';
  return std::string(uuid.data());
}

void ReadInstances(const NvmlApi& nvml, NvmlDevice device, Gpu* gpu) {
  if (!nvml.DeviceGetMigMode || !nvml.DeviceGetMaxMigDeviceCount ||
      !nvml.DeviceGetMigDeviceHandleByIndex) {
    return;
  }
  unsigned current = 0;
  unsigned pending = 0;
  if (nvml.DeviceGetMigMode(device, &current, &pending) != kNvmlSuccess || current == 0) return;
  gpu->mig = true;
  unsigned count = 0;
  if (nvml.DeviceGetMaxMigDeviceCount(device, &count) != kNvmlSuccess) return;
  gpu->instances.reserve(std::min(count, kInstancesMax));
  for (unsigned i = 0; i < std::min(count, kInstancesMax); ++i) {
    NvmlDevice instance = nullptr;
    // Not all that could be there are.
    if (nvml.DeviceGetMigDeviceHandleByIndex(device, i, &instance) != kNvmlSuccess) continue;
    if (std::optional<std::string> uuid = UuidOf(nvml, instance)) {
      gpu->instances.push_back(*std::move(uuid));
    }
  }
}

std::optional<Gpu> ReadGpu(const NvmlApi& nvml, unsigned index) {
  NvmlDevice device = nullptr;
  if (nvml.DeviceGetHandleByIndex(index, &device) != kNvmlSuccess) return {};
  const std::optional<std::string> uuid = UuidOf(nvml, device);
  if (!uuid) return {};
  Gpu gpu;
  gpu.uuid = *uuid;
  std::array<char, kNvmlNameBytes> name{};
  if (nvml.DeviceGetName(device, name.data(), kNvmlNameBytes) == kNvmlSuccess) {
    name.back() = '\0';
    gpu.name = name.data();
  }
  ReadInstances(nvml, device, &gpu);
  return gpu;
}

std::optional<std::string> Value(const Environment& environment, std::string_view name) {
  for (const auto& [key, value] : environment) {
    if (key == name) return value;
  }
  return {};
}

// What an entry of CUDA_VISIBLE_DEVICES that begins a UUID stands for; nullopt: for nothing, or for
// several.
std::optional<std::string> ByUuid(const std::vector<Gpu>& gpus, std::string_view entry) {
  std::vector<std::string> found;
  for (const Gpu& gpu : gpus) {
    if (!gpu.mig && gpu.uuid.starts_with(entry)) found.push_back(gpu.uuid);
    for (const std::string& instance : gpu.instances) {
      if (instance.starts_with(entry)) found.push_back(instance);
    }
  }
  if (found.size() != 1) return {};
  return found.front();
}

// By number. CUDA counts the fastest first unless it is told otherwise, NVML by place on the bus:
// the two agree for sure only where all are of one kind. Which instance of a split GPU CUDA shows
// depends on the driver.
std::string ByNumber(const std::vector<Gpu>& gpus, std::size_t number, bool bus_order) {
  const auto differs = [&gpus](const Gpu& gpu) { return gpu.mig || gpu.name != gpus.front().name; };
  const bool alike = std::none_of(gpus.begin(), gpus.end(), differs);
  const Gpu& gpu = gpus[number];
  return gpu.mig || !(alike || bus_order) ? std::string() : gpu.uuid;
}

}  // namespace

std::vector<Gpu> ListGpus() { return ListGpus(LoadNvml()); }

std::vector<Gpu> ListGpus(const NvmlApi& nvml) {
  std::vector<Gpu> gpus;
  if (!nvml.Init || !nvml.Shutdown || !nvml.DeviceGetCount || !nvml.DeviceGetHandleByIndex ||
      !nvml.DeviceGetUUID || !nvml.DeviceGetName || nvml.Init() != kNvmlSuccess) {
    return gpus;
  }
  unsigned count = 0;
  if (nvml.DeviceGetCount(&count) != kNvmlSuccess || count > kGpusMax) count = 0;
  gpus.reserve(count);
  for (unsigned i = 0; i < count; ++i) {
    std::optional<Gpu> gpu = ReadGpu(nvml, i);
    if (!gpu) {
      // One that has fallen off the bus: ordinals mean nothing any more.
      gpus.clear();
      break;
    }
    gpus.push_back(*std::move(gpu));
  }
  nvml.Shutdown();
  return gpus;
}

std::vector<std::string> VisibleGpus(const std::vector<Gpu>& gpus, const Environment& environment) {
  const bool bus_order = Value(environment, "CUDA_DEVICE_ORDER").value_or("") == "PCI_BUS_ID";
  const std::optional<std::string> chosen = Value(environment, "CUDA_VISIBLE_DEVICES");
  std::vector<std::string> visible;
  if (!chosen) {
    visible.reserve(gpus.size());
    for (std::size_t i = 0; i < gpus.size(); ++i) visible.push_back(ByNumber(gpus, i, bus_order));
    return visible;
  }
  // The first entry that is none hides those behind it.
  for (std::string_view rest = *chosen; !rest.empty();) {
    std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(entry.size() + 1, rest.size()));
    while (entry.starts_with(' ')) entry.remove_prefix(1);
    while (entry.ends_with(' ')) entry.remove_suffix(1);
    if (const std::optional<int> number = ParseNumber<int>(entry)) {
      if (*number < 0 || static_cast<std::size_t>(*number) >= gpus.size()) break;
      visible.push_back(ByNumber(gpus, static_cast<std::size_t>(*number), bus_order));
    } else if (entry.starts_with("GPU-") || entry.starts_with("MIG-")) {
      const std::optional<std::string> uuid = ByUuid(gpus, entry);
      if (!uuid) break;
      visible.push_back(*uuid);
    } else {
      break;
    }
  }
  return visible;
}

DeviceClaim ClaimOf(int ordinal, const std::vector<Gpu>& gpus, const Environment& environment) {
  const std::vector<std::string> visible = VisibleGpus(gpus, environment);
  DeviceClaim claim;
  claim.ordinal = ordinal;
  claim.visible = static_cast<int>(visible.size());
  claim.visible_devices = Value(environment, "CUDA_VISIBLE_DEVICES").value_or("");
  claim.local_rank = ParseNumber<int>(Value(environment, "LOCAL_RANK").value_or("")).value_or(-1);
  if (ordinal >= 0 && static_cast<std::size_t>(ordinal) < visible.size()) {
    claim.uuid = visible[static_cast<std::size_t>(ordinal)];
  }
  return claim;
}

}  // namespace resilient
