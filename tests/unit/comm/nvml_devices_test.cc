// Goal: which GPU an ordinal is, by NVML and the environment, and nothing where that is not sure.
// Method: a table of functions over a small machine that the test makes up; the real library, where
// there is one, must not be needed.
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/comm/nvml_api.h"

namespace resilient {
namespace {

using Environment = std::vector<std::pair<std::string, std::string>>;
using Uuids = std::vector<std::string>;

// What the functions of the table find; they have no argument of their own for it.
struct Machine {
  std::vector<Gpu> gpus;
  int fails_at = -1;
  int opened = 0;
};
Machine* machine = nullptr;

// Handles: 1 + 100 * gpu, and for its instances that + 1 + number.
NvmlDevice Handle(std::size_t number) { return reinterpret_cast<NvmlDevice>(number); }
std::size_t Number(NvmlDevice device) { return reinterpret_cast<std::size_t>(device) - 1; }
Gpu& GpuOf(NvmlDevice device) { return machine->gpus[Number(device) / 100]; }

int Put(const std::string& text, char* out, unsigned bytes) {
  if (text.size() + 1 > bytes) return 7;
  std::memcpy(out, text.c_str(), text.size() + 1);
  return kNvmlSuccess;
}

NvmlApi FakeNvml() {
  NvmlApi nvml;
  nvml.Init = [] {
    ++machine->opened;
    return kNvmlSuccess;
  };
  nvml.Shutdown = [] {
    --machine->opened;
    return kNvmlSuccess;
  };
  nvml.DeviceGetCount = [](unsigned* count) {
    *count = static_cast<unsigned>(machine->gpus.size());
    return kNvmlSuccess;
  };
  nvml.DeviceGetHandleByIndex = [](unsigned index, NvmlDevice* device) {
    if (static_cast<int>(index) == machine->fails_at) return 15;
    *device = Handle(1 + std::size_t{100} * index);
    return kNvmlSuccess;
  };
  nvml.DeviceGetUUID = [](NvmlDevice device, char* uuid, unsigned bytes) {
    const std::size_t instance = Number(device) % 100;
    const Gpu& gpu = GpuOf(device);
    return Put(instance == 0 ? gpu.uuid : gpu.instances[instance - 1], uuid, bytes);
  };
  nvml.DeviceGetName = [](NvmlDevice device, char* name, unsigned bytes) {
    return Put(GpuOf(device).name, name, bytes);
  };
  nvml.DeviceGetMigMode = [](NvmlDevice device, unsigned* current, unsigned* pending) {
    *current = *pending = GpuOf(device).mig ? 1 : 0;
    return kNvmlSuccess;
  };
  nvml.DeviceGetMaxMigDeviceCount = [](NvmlDevice /*device*/, unsigned* count) {
    *count = 7;
    return kNvmlSuccess;
  };
  nvml.DeviceGetMigDeviceHandleByIndex = [](NvmlDevice device, unsigned index,
                                            NvmlDevice* instance) {
    if (index >= GpuOf(device).instances.size()) return 6;
    *instance = Handle(Number(device) + 2 + index);
    return kNvmlSuccess;
  };
  return nvml;
}

Gpu Whole(std::string uuid, std::string name = "H100") {
  Gpu gpu;
  gpu.uuid = std::move(uuid);
  gpu.name = std::move(name);
  return gpu;
}

Gpu Split(std::string uuid, Uuids instances) {
  Gpu gpu = Whole(std::move(uuid));
  gpu.mig = true;
  gpu.instances = std::move(instances);
  return gpu;
}

class NvmlDevices : public ::testing::Test {
 protected:
  NvmlDevices() { machine = &machine_; }
  ~NvmlDevices() override {
    EXPECT_EQ(machine_.opened, 0);
    machine = nullptr;
  }
  Machine machine_;
};

TEST_F(NvmlDevices, List_HasGpusAndTheirInstances) {
  machine_.gpus = {Whole("GPU-a", "A100"), Split("GPU-b", {"MIG-1", "MIG-2"})};
  const std::vector<Gpu> gpus = ListGpus(FakeNvml());
  ASSERT_EQ(gpus.size(), 2U);
  EXPECT_EQ(gpus[0].uuid, "GPU-a");
  EXPECT_EQ(gpus[0].name, "A100");
  EXPECT_FALSE(gpus[0].mig);
  EXPECT_TRUE(gpus[1].mig);
  EXPECT_EQ(gpus[1].instances, (Uuids{"MIG-1", "MIG-2"}));
}

TEST_F(NvmlDevices, DriverWithoutMig_HasWholeGpus) {
  machine_.gpus = {Whole("GPU-a")};
  NvmlApi nvml = FakeNvml();
  nvml.DeviceGetMigMode = nullptr;
  EXPECT_EQ(ListGpus(nvml).size(), 1U);
}

TEST_F(NvmlDevices, WithoutADriver_ThereAreNone) {
  EXPECT_TRUE(ListGpus(NvmlApi()).empty());
  NvmlApi nvml = FakeNvml();
  nvml.Init = [] { return 9; };
  EXPECT_TRUE(ListGpus(nvml).empty());
}

TEST_F(NvmlDevices, GpuThatFails_MakesOrdinalsUnknown) {
  machine_.gpus = {Whole("GPU-a"), Whole("GPU-b")};
  machine_.fails_at = 0;
  EXPECT_TRUE(ListGpus(FakeNvml()).empty());
}

const std::vector<Gpu> kAlike = {Whole("GPU-a1"), Whole("GPU-a2"), Whole("GPU-b3")};

TEST(VisibleGpus, Variable_ChoosesAndOrders) {
  const auto visible = [](const std::string& value) {
    return VisibleGpus(kAlike, {{"CUDA_VISIBLE_DEVICES", value}});
  };
  EXPECT_EQ(VisibleGpus(kAlike, {}), (Uuids{"GPU-a1", "GPU-a2", "GPU-b3"}));
  EXPECT_EQ(visible("2,0"), (Uuids{"GPU-b3", "GPU-a1"}));
  EXPECT_EQ(visible("GPU-b, 1"), (Uuids{"GPU-b3", "GPU-a2"}));
  EXPECT_EQ(visible(""), Uuids());
  EXPECT_EQ(visible("1,-1,0"), (Uuids{"GPU-a2"}));
  EXPECT_EQ(visible("1,7,0"), (Uuids{"GPU-a2"}));
  EXPECT_EQ(visible("1,nonsense,0"), (Uuids{"GPU-a2"}));
  EXPECT_EQ(visible("GPU-a"), Uuids());  // Which of the two?
}

TEST(VisibleGpus, DifferentKinds_AreCountedAlikeOnlyByTheirPlaceOnTheBus) {
  const std::vector<Gpu> gpus = {Whole("GPU-a", "T4"), Whole("GPU-b", "H100")};
  EXPECT_EQ(VisibleGpus(gpus, {}), (Uuids{"", ""}));
  EXPECT_EQ(VisibleGpus(gpus, {{"CUDA_VISIBLE_DEVICES", "1"}}), (Uuids{""}));
  EXPECT_EQ(VisibleGpus(gpus, {{"CUDA_VISIBLE_DEVICES", "GPU-b"}}), (Uuids{"GPU-b"}));
  EXPECT_EQ(VisibleGpus(gpus, {{"CUDA_DEVICE_ORDER", "PCI_BUS_ID"}}), (Uuids{"GPU-a", "GPU-b"}));
}

TEST(VisibleGpus, Instances_AreKnownByTheirUuidOnly) {
  const std::vector<Gpu> gpus = {Split("GPU-a", {"MIG-1", "MIG-2"})};
  EXPECT_EQ(VisibleGpus(gpus, {{"CUDA_VISIBLE_DEVICES", "MIG-2"}}), (Uuids{"MIG-2"}));
  EXPECT_EQ(VisibleGpus(gpus, {{"CUDA_VISIBLE_DEVICES", "0"}}), (Uuids{""}));
  EXPECT_EQ(VisibleGpus(gpus, {{"CUDA_VISIBLE_DEVICES", "GPU-a"}}), Uuids());
}

TEST(ClaimOf, SaysWhatTheRemedyNeeds) {
  const DeviceClaim claim =
      ClaimOf(1, kAlike, {{"CUDA_VISIBLE_DEVICES", "0,2"}, {"LOCAL_RANK", "1"}});
  EXPECT_EQ(claim.uuid, "GPU-b3");
  EXPECT_EQ(claim.ordinal, 1);
  EXPECT_EQ(claim.visible, 2);
  EXPECT_EQ(claim.visible_devices, "0,2");
  EXPECT_EQ(claim.local_rank, 1);
  EXPECT_EQ(claim.host, "");
}

TEST(ClaimOf, UnknownOrdinal_ClaimsNothing) {
  for (const int ordinal : {-1, 3}) {
    const DeviceClaim claim = ClaimOf(ordinal, kAlike, {});
    EXPECT_EQ(claim.uuid, "");
    EXPECT_EQ(claim.visible, 3);
    EXPECT_EQ(claim.local_rank, -1);
  }
}

}  // namespace
}  // namespace resilient
