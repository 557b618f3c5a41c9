#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/comm/nccl_communicator.h"
#include "tests/support/fake_nccl.h"
#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {

// The transport of a device of one rank, with the CPU transport on which it stands. Thread: as
// these.
class DeviceRank final : public CommunicatorFactory {
 public:
  using Maker = std::function<std::unique_ptr<CommunicatorFactory>(CommunicatorFactory& host)>;

  DeviceRank(std::unique_ptr<CommunicatorFactory> host, const Maker& make)
      : host_(std::move(host)), device_(make(*host_)) {}

  std::string endpoint() const override { return host_->endpoint(); }
  std::shared_ptr<Communicator> Create(GroupSpec spec, std::shared_ptr<AbortCell> abort) override {
    return device_->Create(std::move(spec), std::move(abort));
  }
  void Hold(Instant until) override { device_->Hold(until); }
  void Close(Deadline deadline) override {
    device_->Close(deadline);
    host_->Close(deadline);
  }

 private:
  const std::unique_ptr<CommunicatorFactory> host_;
  const std::unique_ptr<CommunicatorFactory> device_;
};

// Where ranks run on the fake, one device each: device number = rank, by which the fake takes its
// scripts.
class FakeEnvironment : public Environment {
 public:
  Result<std::unique_ptr<CommunicatorFactory>> Make(const Clock& clock,
                                                    CommunicatorEvents& events) override {
    NcclFabricOptions options = options_;
    options.device = next_device_++;
    options.identity.boot_id = "boot";
    auto host = MakeCpuFabric({}, clock, events);
    if (!host.ok()) return host.status();
    return std::unique_ptr<CommunicatorFactory>(std::make_unique<DeviceRank>(
        std::move(host).value(),
        [&](CommunicatorFactory& control) { return MakeOn(control, options, clock, events); }));
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

 protected:
  explicit FakeEnvironment(NcclFabricOptions options) : options_(std::move(options)) {
    options_.cuda = FakeNccl::cuda();
  }

  virtual std::unique_ptr<CommunicatorFactory> MakeOn(CommunicatorFactory& control,
                                                      NcclFabricOptions options, const Clock& clock,
                                                      CommunicatorEvents& events) = 0;

  // What is misused or left over in the fake fails the test. Returns what there was.
  NcclCounts CheckNothingIsLeft() {
    streams_.clear();
    // What a hanging thread has kept goes when that comes back.
    EXPECT_TRUE(fake.WaitFor(
        [](const NcclCounts& counts) { return counts.events == 0 && counts.pinned == 0; }));
    NcclCounts counts = fake.Counts();
    EXPECT_THAT(counts.misuse, ::testing::IsEmpty());
    EXPECT_EQ(counts.communicators, 0);
    EXPECT_EQ(counts.events, 0);
    EXPECT_EQ(counts.allocations, 0);
    EXPECT_EQ(counts.reductions, 0);
    EXPECT_EQ(counts.graphs, 0);
    EXPECT_EQ(counts.user_objects, 0);
    return counts;
  }

 private:
  NcclFabricOptions options_;
  int next_device_ = 0;
  std::vector<std::shared_ptr<CudaStream>> streams_;
};

}  // namespace resilient::testing
