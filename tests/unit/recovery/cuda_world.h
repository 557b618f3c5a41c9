#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <resilient/session.h>

#include "runtime/base/log.h"
#include "runtime/comm/cuda_fabric.h"
#include "tests/support/fake_nccl.h"
#include "tests/unit/recovery/membership_hub.h"

namespace resilient::recovery {

using resilient::testing::FakeNccl;
using resilient::testing::NcclCounts;
using resilient::testing::NcclScript;

constexpr int kWorldSize = 3;
inline const std::vector<int> kAllRanks = {0, 1, 2};

struct Rank {
  std::shared_ptr<Session> session;
  std::shared_ptr<Group> world;
};
using Ranks = std::array<Rank, kWorldSize>;

// A world of sessions whose operations are on devices of the fake, one device each (its number is
// the rank, by which the fake takes its scripts), with threads as ranks. What the fake has noticed,
// and what is left in it, fails the test.
class CudaWorld : public ::testing::Test {
 protected:
  ~CudaWorld() override {
    ExpectNothingIsLeft();
    EXPECT_THAT(fake_.TakeMisuse(), ::testing::IsEmpty());
  }

  void ExpectNothingIsLeft() {
    EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) {
      return counts.communicators == 0 && counts.events == 0 && counts.allocations == 0 &&
             counts.pinned == 0;
    }));
  }

  CudaSources SourcesOf(int rank) {
    return {.load =
                [] {
                  return NcclLibrary{
                      .nccl = FakeNccl::nccl(), .cuda = FakeNccl::cuda(), .nccl_version = 23007};
                },
            .load_cuda = [] { return FakeNccl::cuda(); },
            .claim =
                [this, rank](int device) {
                  return DeviceClaim{.uuid = StrCat("GPU-", shared_gpu_ ? 0 : rank),
                                     .host = "",
                                     .ordinal = device,
                                     .visible = kWorldSize,
                                     .visible_devices = "",
                                     .local_rank = rank};
                }};
  }

  // A process takes the seat: the error of its init or of its world's group.
  Result<Rank> Open(MembershipHub& hub, int rank) {
    SessionOptions options;
    options.rank = rank;
    options.world_size = kWorldSize;
    options.nccl = nccl_;
    options.interrupt = GiveUpAtTestBound();
    CudaFabricOptions cuda = cuda_;
    cuda.shared_gpu = shared_gpu_allowed_[static_cast<std::size_t>(rank)];
    auto session = OpenSession(
        options, hub.NewLine(),
        [&](CommunicatorEvents& events) {
          return MakeCudaFabric({}, cuda, SourcesOf(rank), clock_, events);
        },
        clock_);
    if (!session.ok()) return session.status();
    const Status init = (*session)->Init();
    if (!init.ok()) return init;
    auto world = (*session)->CreateGroup(kWorldGroup, kAllRanks);
    if (!world.ok()) return world.status();
    return Rank{*session, *world};
  }

  static void OnRanks(const std::vector<int>& ranks, const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (const int rank : ranks) threads.emplace_back([&body, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  FakeNccl fake_;
  SystemClock clock_;
  bool shared_gpu_ = false;
  std::array<SharedGpu, kWorldSize> shared_gpu_allowed_{};
  NcclOptions nccl_;        // Of the world.
  CudaFabricOptions cuda_;  // Of all ranks, but for shared_gpu.
};

}  // namespace resilient::recovery
