// Goal: the suite of every communicator holds on a real GPU, with the real NCCL and on the way
// through memory of the host.
// Method: one rank over NCCL, which refuses two of one process on a device, and up to three that
// share it. The libraries are those of this machine, or those that RESILIENT_TEST_NCCL and
// RESILIENT_TEST_CUDART name, which may be the fake. Without a device all is skipped.

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/log.h"
#include "runtime/comm/nccl_communicator.h"
#include "runtime/comm/nccl_launch.h"
#include "runtime/comm/staged_communicator.h"
#include "tests/unit/comm/conformance.h"
#include "tests/unit/comm/device_copies.h"

namespace resilient::testing {
namespace {

// The libraries of this machine and its first device. Owner: the process. Thread: immutable.
struct Gpu {
  NcclLibrary library;
  CudaCopies copies;
  std::string refusal;  // Why there is none; empty: there is.
};

std::string FromEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

Gpu FindGpu() {
  Gpu gpu;
  const auto library = LoadNcclLibrary({.nccl = FromEnvironment("RESILIENT_TEST_NCCL"),
                                        .cuda_runtime = FromEnvironment("RESILIENT_TEST_CUDART")});
  if (!library.ok()) {
    gpu.refusal = library.status().message();
    return gpu;
  }
  gpu.library = *library;
  gpu.copies = FindCudaCopies(library->cuda);
  int count = 0;
  if (gpu.copies.GetDeviceCount == nullptr || gpu.copies.Memcpy == nullptr ||
      gpu.copies.StreamSynchronize == nullptr) {
    gpu.refusal = "the CUDA runtime lacks what tests need";
  } else if (gpu.copies.GetDeviceCount(&count) != CudaResult::kSuccess || count == 0) {
    gpu.refusal = "it has no device";
  }
  return gpu;
}

const Gpu& TheGpu() {
  static const auto* const kGpu = new Gpu(FindGpu());
  return *kGpu;
}

// Skips all tests where there is none. Owner: GoogleTest.
class NeedsGpu final : public ::testing::Environment {
 public:
  void SetUp() override {
    if (!TheGpu().refusal.empty()) GTEST_SKIP() << "no CUDA device here: " << TheGpu().refusal;
  }
};
[[maybe_unused]] const ::testing::Environment* const kNeedsGpu =
    ::testing::AddGlobalTestEnvironment(new NeedsGpu);  // NOLINT: GoogleTest owns it.

// A transport of one rank over copies of its memory, with the CPU transport on which it stands.
// Owner: a world. Thread: as these.
class GpuRank final : public CommunicatorFactory {
 public:
  GpuRank(std::unique_ptr<CommunicatorFactory> host, const NcclFabricOptions& options,
          const Clock& clock, CommunicatorEvents& events)
      : host_(std::move(host)), device_(Make(*host_, options, clock, events)) {}

  std::string endpoint() const override { return host_->endpoint(); }
  std::shared_ptr<Communicator> Create(GroupSpec spec, std::shared_ptr<AbortCell> abort) override {
    return OnDeviceCopies(device_->Create(std::move(spec), std::move(abort)), TheGpu().library.cuda,
                          TheGpu().copies);
  }
  void Hold(Instant until) override { device_->Hold(until); }
  void Close(Deadline deadline) override {
    device_->Close(deadline);
    host_->Close(deadline);
  }

 private:
  static std::unique_ptr<CommunicatorFactory> Make(CommunicatorFactory& host,
                                                   const NcclFabricOptions& options,
                                                   const Clock& clock, CommunicatorEvents& events) {
    auto waits = std::make_shared<ControlWaits>();
    if (options.identity.way != kStagedWay)
      return MakeNcclFabric(options, host, std::move(waits), clock, events);
    return MakeStagedFabric(options, host, std::move(waits), std::make_shared<StagedCalls>(), clock,
                            events);
  }

  const std::unique_ptr<CommunicatorFactory> host_;
  const std::unique_ptr<CommunicatorFactory> device_;
};

// Owner: a world. Thread: thread-safe.
class GpuEnvironment final : public Environment {
 public:
  explicit GpuEnvironment(bool staged) : staged_(staged) {}
  ~GpuEnvironment() override {
    for (CudaStreamHandle stream : streams_)
      EXPECT_EQ(cuda().StreamDestroy(stream), CudaResult::kSuccess);
  }
  Result<std::unique_ptr<CommunicatorFactory>> Make(const Clock& clock,
                                                    CommunicatorEvents& events) override {
    NcclFabricOptions options;
    options.cuda = cuda();
    if (staged_) {
      options.identity.way = kStagedWay;
    } else {
      options.nccl = TheGpu().library.nccl;
      options.identity.nccl_version = TheGpu().library.nccl_version;
    }
    auto host = MakeCpuFabric({}, clock, events);
    if (!host.ok()) return host.status();
    return std::unique_ptr<CommunicatorFactory>(
        std::make_unique<GpuRank>(std::move(host).value(), options, clock, events));
  }
  ExecutionStream NewStream() override {
    CudaStreamHandle stream = nullptr;
    EXPECT_EQ(cuda().StreamCreateWithFlags(&stream, kCudaStreamNonBlocking), CudaResult::kSuccess);
    streams_.push_back(stream);
    return stream;
  }

 private:
  static const CudaApi& cuda() { return TheGpu().library.cuda; }
  const bool staged_;
  std::vector<CudaStreamHandle> streams_;
};

Transport NcclOnGpu() {
  const auto supports = [](const Operation& op, int ranks) {
    const NcclLibrary& library = TheGpu().library;
    return CheckNcclSupports(op, ranks, AbilitiesOf(library.nccl, library.cuda, 0)).ok();
  };
  return {.name = "gpu",
          .make = nullptr,
          .environment = [] { return std::make_shared<GpuEnvironment>(false); },
          .roots_run_ahead = false,
          .has_tags = false,
          .supports = supports,
          .nan_wins = false};
}

Transport StagedOnGpu() {
  return {.name = "gpuStaged",
          .make = nullptr,
          .environment = [] { return std::make_shared<GpuEnvironment>(true); },
          .roots_run_ahead = false,
          .has_tags = false};
}

}  // namespace

std::vector<ConformanceCase> ConformanceCases() {
  return {{.transport = NcclOnGpu(), .size = 1},
          {.transport = StagedOnGpu(), .size = 2},
          {.transport = StagedOnGpu(), .size = 3}};
}

// Programs are of up to eight ranks.
std::vector<Transport> ProgramTransports() { return {}; }

}  // namespace resilient::testing
