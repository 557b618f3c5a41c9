#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "runtime/comm/nccl_communicator.h"
#include "tests/support/fake_nccl.h"
#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {

// The NCCL transport of one rank, with the CPU transport over which its ranks talk. Thread: as
// these.
class NcclRank final : public CommunicatorFactory {
 public:
  NcclRank(std::unique_ptr<CommunicatorFactory> host, const NcclFabricOptions& options,
           const Clock& clock, CommunicatorEvents& events)
      : host_(std::move(host)),
        nccl_(MakeNcclFabric(options, *host_, std::make_shared<ControlWaits>(), clock, events)) {}

  std::string endpoint() const override { return host_->endpoint(); }
  std::shared_ptr<Communicator> Create(GroupSpec spec, std::shared_ptr<AbortCell> abort) override {
    return nccl_->Create(std::move(spec), std::move(abort));
  }
  void Hold(Instant until) override { nccl_->Hold(until); }
  void Close(Deadline deadline) override {
    nccl_->Close(deadline);
    host_->Close(deadline);
  }

 private:
  const std::unique_ptr<CommunicatorFactory> host_;
  const std::unique_ptr<CommunicatorFactory> nccl_;
};

// Where ranks run on the fake, one device each: device number = rank. What is misused or left over
// in the fake at its end fails the test.
class NcclEnvironment final : public Environment {
 public:
  explicit NcclEnvironment(NcclFabricOptions options = {}) : options_(std::move(options)) {
    options_.nccl = FakeNccl::nccl();
    options_.cuda = FakeNccl::cuda();
  }
  ~NcclEnvironment() override {
    streams_.clear();
    // What a hanging thread has kept goes when that comes back.
    EXPECT_TRUE(fake.WaitFor([](const NcclCounts& counts) { return counts.events == 0; }));
    const NcclCounts counts = fake.Counts();
    EXPECT_THAT(counts.misuse, ::testing::IsEmpty());
    EXPECT_EQ(counts.communicators, 0);
    EXPECT_EQ(counts.events, 0);
    EXPECT_EQ(counts.allocations, 0);
    EXPECT_EQ(counts.reductions, 0);
  }

  Result<std::unique_ptr<CommunicatorFactory>> Make(const Clock& clock,
                                                    CommunicatorEvents& events) override {
    NcclFabricOptions options = options_;
    options.device = next_device_++;
    options.identity.nccl_version = 23007;
    options.identity.boot_id = "boot";
    options.identity.device.uuid = StrCat("GPU-", options.device);
    auto host = MakeCpuFabric({}, clock, events);
    if (!host.ok()) return host.status();
    return std::unique_ptr<CommunicatorFactory>(
        std::make_unique<NcclRank>(std::move(host).value(), options, clock, events));
  }
  ExecutionStream NewStream() override {
    CudaStreamHandle stream = nullptr;
    EXPECT_EQ(FakeNccl::cuda().StreamCreateWithFlags(&stream, kCudaStreamNonBlocking),
              CudaResult::kSuccess);
    streams_.emplace_back(stream,
                          [](CudaStreamHandle one) { FakeNccl::cuda().StreamDestroy(one); });
    return stream;
  }
  NcclFabricOptions& options() { return options_; }  // Of the fabrics to come.

  FakeNccl fake;

 private:
  NcclFabricOptions options_;
  int next_device_ = 0;
  std::vector<std::shared_ptr<CudaStream>> streams_;
};

class NcclTest : public ::testing::Test {
 protected:
  World& Start(int ranks, Duration connect_timeout = kBound,
               Duration flush_timeout = Millis(1000)) {
    environment_->options().verdict_wait = verdict_wait_;
    environment_->options().connect_timeout = connect_timeout;
    environment_->options().flush_timeout = flush_timeout;
    world_ = std::make_unique<World>(
        Transport{.name = "nccl", .make = nullptr, .environment = [this] { return environment_; }},
        ranks);
    return *world_;
  }
  World& world() { return *world_; }

  // A stream of the fake, until the end of the test.
  CudaStreamHandle NewStream() { return static_cast<CudaStreamHandle>(environment_->NewStream()); }

  void Change(int rank, const std::function<void(NcclScript&)>& change) {
    fake_.Change(rank, change);
  }
  bool WaitForKernels(int rank, int count) {
    return fake_.WaitFor([&](const NcclCounts& counts) {
      const auto begun = counts.kernels_begun.find(rank);
      return begun != counts.kernels_begun.end() && begun->second >= count;
    });
  }
  bool WaitForAborts(int count) {
    return fake_.WaitFor([&](const NcclCounts& counts) { return counts.aborts_ended == count; });
  }

  const std::shared_ptr<NcclEnvironment> environment_ = std::make_shared<NcclEnvironment>();
  FakeNccl& fake_ = environment_->fake;
  Duration verdict_wait_ = Millis(50);  // Of Start.
  std::unique_ptr<World> world_;
};

}  // namespace resilient::testing
