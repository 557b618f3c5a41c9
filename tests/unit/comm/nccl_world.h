#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "tests/unit/comm/device_world.h"

namespace resilient::testing {

// Where ranks run on the fake's NCCL.
class NcclEnvironment final : public FakeEnvironment {
 public:
  explicit NcclEnvironment(NcclFabricOptions options = {}) : FakeEnvironment(std::move(options)) {
    this->options().nccl = FakeNccl::nccl();
  }
  ~NcclEnvironment() override { CheckNothingIsLeft(); }

 private:
  std::unique_ptr<CommunicatorFactory> MakeOn(CommunicatorFactory& control,
                                              NcclFabricOptions options, const Clock& clock,
                                              CommunicatorEvents& events) override {
    options.identity.nccl_version = 23007;
    options.identity.device.uuid = StrCat("GPU-", options.device);
    return MakeNcclFabric(options, control, std::make_shared<ControlWaits>(), clock, events);
  }
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
  // Where the calls meet over sockets, what differs shows later than the kernels begin.
  std::vector<std::string> AwaitMisuse() {
    EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return !counts.misuse.empty(); }));
    return fake_.TakeMisuse();
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
