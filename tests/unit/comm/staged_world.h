#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "runtime/comm/staged_communicator.h"
#include "tests/unit/comm/device_world.h"

namespace resilient::testing {

// Where ranks run on the fake's CUDA, and its NCCL is called by nobody. That ranks share a device
// is nothing to this transport.
class StagedEnvironment final : public FakeEnvironment {
 public:
  explicit StagedEnvironment(std::size_t piece_bytes = NcclFabricOptions().piece_bytes)
      : FakeEnvironment({}) {
    options().piece_bytes = piece_bytes;
  }
  ~StagedEnvironment() override { EXPECT_EQ(CheckNothingIsLeft().unique_ids, 0); }

 private:
  std::unique_ptr<CommunicatorFactory> MakeOn(CommunicatorFactory& control,
                                              NcclFabricOptions options, const Clock& clock,
                                              CommunicatorEvents& events) override {
    options.identity.way = kStagedWay;
    return MakeStagedFabric(options, control, std::make_shared<ControlWaits>(),
                            std::make_shared<StagedCalls>(), clock, events);
  }
};

// Pieces so small that a few elements take several.
inline constexpr std::size_t kPieceBytes = 256;
inline constexpr std::size_t kEach = kPieceBytes / sizeof(float);

class StagedWorldTest : public ::testing::Test {
 protected:
  World& Start(int ranks, std::size_t piece_bytes = kPieceBytes) {
    environment_ = std::make_shared<StagedEnvironment>(piece_bytes);
    world_ = std::make_unique<World>(
        Transport{
            .name = "staged", .make = nullptr, .environment = [this] { return environment_; }},
        ranks);
    return *world_;
  }
  FakeNccl& fake() { return environment_->fake; }

  std::shared_ptr<StagedEnvironment> environment_;
  std::unique_ptr<World> world_;
};

}  // namespace resilient::testing
