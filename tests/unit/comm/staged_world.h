#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "runtime/comm/staged_communicator.h"
#include "tests/support/fake_nccl.h"
#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {

// The transport through memory of the host of one rank, with the CPU transport on which it stands.
// Thread: as these.
class StagedRank final : public CommunicatorFactory {
 public:
  StagedRank(std::unique_ptr<CommunicatorFactory> host, const NcclFabricOptions& options,
             const Clock& clock, CommunicatorEvents& events)
      : host_(std::move(host)),
        staged_(MakeStagedFabric(options, *host_, std::make_shared<ControlWaits>(),
                                 std::make_shared<StagedCalls>(), clock, events)) {}

  std::string endpoint() const override { return host_->endpoint(); }
  std::shared_ptr<Communicator> Create(GroupSpec spec, std::shared_ptr<AbortCell> abort) override {
    return staged_->Create(std::move(spec), std::move(abort));
  }
  void Hold(Instant until) override { staged_->Hold(until); }
  void Close(Deadline deadline) override {
    staged_->Close(deadline);
    host_->Close(deadline);
  }

 private:
  const std::unique_ptr<CommunicatorFactory> host_;
  const std::unique_ptr<CommunicatorFactory> staged_;
};

// Where ranks run on the fake's CUDA, and its NCCL is called by nobody. What is misused or left
// over at its end fails the test.
class StagedEnvironment final : public Environment {
 public:
  explicit StagedEnvironment(std::size_t piece_bytes = NcclFabricOptions().piece_bytes) {
    options_.piece_bytes = piece_bytes;
    options_.cuda = FakeNccl::cuda();
  }
  ~StagedEnvironment() override {
    streams_.clear();
    // What a hanging thread has kept goes when that comes back.
    EXPECT_TRUE(fake.WaitFor(
        [](const NcclCounts& counts) { return counts.events == 0 && counts.pinned == 0; }));
    const NcclCounts counts = fake.Counts();
    EXPECT_THAT(counts.misuse, ::testing::IsEmpty());
    EXPECT_EQ(counts.unique_ids, 0);
  }

  // The device's number is the rank, by which the fake takes its scripts: that ranks share one is
  // nothing to this transport.
  Result<std::unique_ptr<CommunicatorFactory>> Make(const Clock& clock,
                                                    CommunicatorEvents& events) override {
    NcclFabricOptions options = options_;
    options.device = next_device_++;
    options.identity.boot_id = "boot";
    options.identity.way = kStagedWay;
    auto host = MakeCpuFabric({}, clock, events);
    if (!host.ok()) return host.status();
    return std::unique_ptr<CommunicatorFactory>(
        std::make_unique<StagedRank>(std::move(host).value(), options, clock, events));
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

}  // namespace resilient::testing
