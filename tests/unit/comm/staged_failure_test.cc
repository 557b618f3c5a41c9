// Goal: whatever fails on the way through memory of the host, every operation completes once with
// the cause, an abort returns at once, and memory is let go when the device is done with it.
// Method: ranks of one process over the fake's CUDA, which is told what goes wrong and when.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/comm/staged_world.h"

namespace resilient::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class StagedFailure : public StagedWorldTest {
 protected:
  // What has failed borrows its memory until then: the device may not have read it yet.
  ~StagedFailure() override {
    world_.reset();
    environment_.reset();
  }
  void Change(int rank, const std::function<void(NcclScript&)>& change) {
    fake().Change(rank, change);
  }
  static Status Lost() { return Status(StatusCode::kRankLost, "rank 1 was lost"); }

  // Memory of what has failed is borrowed until then.
  void AwaitQuiet() {
    for (const auto& rank : world_->group) EXPECT_TRUE(Eventually([&] { return rank->IsQuiet(); }));
  }

  std::vector<float> data_ = {1, 2};
};

TEST_F(StagedFailure, Abort_InTheMiddleOfThePieces_IsToldAtOnce_QuietWhenTheDeviceIsDone) {
  World& world = Start(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(100 * kEach, 1));
  Change(1, [](NcclScript& script) { script.hold_copies = true; });
  const Pending first = Pending::Of(world.at(0), AllReduceOp(data[0]));
  const Pending second = Pending::Of(world.at(1), AllReduceOp(data[1]));
  const Pending behind = Pending::Of(world.at(1), AllReduceOp(data_));
  // Rank 0 waits with all of its buffers, and rank 1 has copies in its queue.
  ASSERT_TRUE(environment_->fake.WaitFor(
      [](const NcclCounts& counts) { return counts.copies == 4 && counts.pinned == 8; }));
  for (const int rank : {0, 1}) world.at(rank).Abort(Lost());
  world.at(0).Abort(Status(StatusCode::kCancelled, "too late"));
  for (const Pending& one : {first, second, behind})
    EXPECT_EQ(one.Wait().code(), StatusCode::kRankLost);
  EXPECT_TRUE(Eventually([&] { return world.at(0).IsQuiet(); }));
  EXPECT_FALSE(world.at(1).IsQuiet()) << "its copies may still read";
  EXPECT_EQ(Pending::Try(world.at(1), AllReduceOp(data_)).Wait().code(), StatusCode::kRankLost);
  Change(1, [](NcclScript& script) { script.hold_copies = false; });
  EXPECT_TRUE(Eventually([&] { return world.at(1).IsQuiet(); }));
}

TEST_F(StagedFailure, AbortCell_EndsTheGroup) {
  World& world = Start(2);
  const auto cell = std::make_shared<AbortCell>();
  const auto group = world.CreateAll("celled", 1, cell);
  const Pending waiting = Pending::Of(*group[0], AllReduceOp(data_));
  cell->Set(Lost());
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kRankLost);
  EXPECT_TRUE(Eventually([&] { return group[0]->IsQuiet(); }));
}

TEST_F(StagedFailure, SizesThatDiffer_AreAMismatch_NamingThePieceAndTheOperation) {
  World& world = Start(2);
  std::vector<std::vector<float>> data = {std::vector<float>(kEach), std::vector<float>(2 * kEach)};
  const std::vector<Status> outcomes = world.RunAll([&](int rank) {
    Operation op = AllReduceOp(data[static_cast<std::size_t>(rank)]);
    op.call_site = "train.py:7 step";
    return op;
  });
  for (const Status& status : outcomes) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_THAT(
        status.message(),
        AllOf(HasSubstr("train.py:7 step (piece 2 of 3 of all_reduce(float32[128], sum) #1)"),
              HasSubstr("piece 2 of 2 of all_reduce(float32[64], sum) #1")));
  }
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(world.log(rank).WaitFor([](EventLog& log) { return log.mismatches.size() == 1; }));
  }
  AwaitQuiet();
}

// All but the root know their own part alone.
TEST_F(StagedFailure, GatherAgainstScatter_IsAMismatch) {
  World& world = Start(2);
  std::vector<std::vector<float>> parts(2, std::vector<float>(3));
  const std::vector<Status> outcomes = world.RunAll([&](int rank) {
    Operation op = BroadcastOp(data_, 1);
    op.kind = rank == 0 ? OpKind::kGather : OpKind::kScatter;
    if (rank == 1) {
      for (auto& part : parts) op.inputs.push_back({part.data(), 2});
    }
    return op;
  });
  for (const Status& status : outcomes) EXPECT_EQ(status.code(), StatusCode::kMismatch);
  AwaitQuiet();
}

TEST_F(StagedFailure, MessageOfAnotherSize_IsAMismatch) {
  World& world = Start(2);
  std::vector<float> sent(2 * kEach);
  std::vector<float> received(kEach);
  const Pending sending = Pending::Of(world.at(0), SendOp(sent, 1, 0));
  const Pending receiving = Pending::Of(world.at(1), RecvOp(received, 0, 0));
  EXPECT_EQ(receiving.Wait().code(), StatusCode::kMismatch);
  AwaitQuiet();
}

TEST_F(StagedFailure, LostDevice_IsToldToTheSession_AndThePeersWaitForItsVerdict) {
  World& world = Start(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(10 * kEach, 1));
  const Pending waiting = Pending::Of(world.at(1), AllReduceOp(data[1]));
  Change(0, [](NcclScript& script) { script.lose_device = true; });
  const Pending lost = Pending::Try(world.at(0), AllReduceOp(data[0]));
  EXPECT_EQ(lost.Wait().code(), StatusCode::kDeviceLost);
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) {
    return !log.stalls.empty() && log.stalls.front().code() == StatusCode::kDeviceLost;
  }));
  EXPECT_FALSE(waiting.IsDone());
  EXPECT_EQ(world.log(1).LostCount(0), 0) << "the links are kept for the fence";
  for (const int rank : {1, 0}) world.at(rank).Abort(Lost());
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kRankLost);
  AwaitQuiet();
  Change(0, [](NcclScript& script) { script.lose_device = false; });
}

// By the group's own thread: what was submitted waits for its copies.
TEST_F(StagedFailure, LostDevice_WithCopiesUnderWay_IsToldToTheSession) {
  World& world = Start(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(10 * kEach, 1));
  Change(0, [](NcclScript& script) { script.hold_copies = true; });
  const Pending waiting = Pending::Of(world.at(1), AllReduceOp(data[1]));
  const Pending lost = Pending::Of(world.at(0), AllReduceOp(data[0]));
  Change(0, [](NcclScript& script) { script.lose_device = true; });
  EXPECT_EQ(lost.Wait().code(), StatusCode::kDeviceLost);
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) {
    return !log.stalls.empty() && log.stalls.front().code() == StatusCode::kDeviceLost;
  }));
  for (const int rank : {1, 0}) world.at(rank).Abort(Lost());
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kRankLost);
  AwaitQuiet();
  Change(0, [](NcclScript& script) { script = {}; });
}

TEST_F(StagedFailure, NoPinnedMemory_EndsTheGroup) {
  World& world = Start(2);
  Change(0, [](NcclScript& script) { script.refuse_memory = true; });
  const Status status = Pending::Try(world.at(0), AllReduceOp(data_)).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  EXPECT_THAT(
      status.message(),
      HasSubstr("cudaHostAlloc failed on rank 0 (device 0) of group 'world', generation 1"));
}

TEST_F(StagedFailure, PinnedMemoryThatHangs_HoldsUpNoAbort) {
  World& world = Start(2);
  Change(0, [](NcclScript& script) { script.hang_memory = true; });
  const Pending waiting = Pending::Of(world.at(0), AllReduceOp(data_));
  const Pending other = Pending::Of(world.at(1), AllReduceOp(data_));
  world.at(0).Abort(Lost());
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kRankLost);
  world.at(1).Abort(Lost());
  EXPECT_FALSE(other.Wait().ok());
  Change(0, [](NcclScript& script) { script.hang_memory = false; });
  AwaitQuiet();
}

TEST_F(StagedFailure, RankThatLeaves_IsToldToWhoNeedsIt_AfterItsPart) {
  World& world = Start(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(10 * kEach, 1));
  const Pending first = Pending::Of(world.at(0), AllReduceOp(data[0]));
  const Pending second = Pending::Of(world.at(1), AllReduceOp(data[1]));
  EXPECT_TRUE(first.Wait().ok());
  world.at(0).Leave();
  EXPECT_TRUE(second.Wait().ok());
  const Status status = Pending::Try(world.at(1), AllReduceOp(data[1])).Wait();
  EXPECT_EQ(status.code(), StatusCode::kLeft);
  AwaitQuiet();
  EXPECT_EQ(Pending::Try(world.at(0), AllReduceOp(data[0])).Wait().code(), StatusCode::kCancelled);
}

TEST_F(StagedFailure, LateRank_IsNamedAtTheTimeout) {
  World& world = Start(2);
  ExpectAllOk(world.RunAll([](int) { return BarrierOp(); }));
  const Status status =
      Pending::Of(world.at(0), Bounded(AllReduceOp(data_), Millis(200), {})).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("has not ended within its timeout"),
                                      HasSubstr("rank 1 (node1, pid 1001)")));
}

TEST_F(StagedFailure, DeviceThatIsLate_EndsAtTheTimeout) {
  World& world = Start(1);
  Change(0, [](NcclScript& script) { script.hold_copies = true; });
  const Status status =
      Pending::Of(world.at(0), Bounded(AllReduceOp(data_), Millis(100), {})).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  Change(0, [](NcclScript& script) { script.hold_copies = false; });
  EXPECT_THAT(data_, ElementsAre(1, 2));
}

TEST_F(StagedFailure, Close_WithACopyThatHangs_ComesBack) {
  World& world = Start(2);
  Change(0, [](NcclScript& script) { script.hold_copies = true; });
  const Pending waiting = Pending::Of(world.at(0), AllReduceOp(data_));
  world.fabrics[0]->Close(Deadline::After(world.clock.Now(), Millis(100)));
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kCancelled);
  Change(0, [](NcclScript& script) { script.hold_copies = false; });
}

// One rank goes through NCCL, the other through memory of the host.
class MixedEnvironment final : public FakeEnvironment {
 public:
  MixedEnvironment() : FakeEnvironment({}) {
    options().nccl = FakeNccl::nccl();
    options().identity.nccl_version = 23007;
  }

 private:
  std::unique_ptr<CommunicatorFactory> MakeOn(CommunicatorFactory& control,
                                              NcclFabricOptions options, const Clock& clock,
                                              CommunicatorEvents& events) override {
    auto waits = std::make_shared<ControlWaits>();
    if (options.device == 0)
      return MakeNcclFabric(options, control, std::move(waits), clock, events);
    options.identity.way = kStagedWay;
    return MakeStagedFabric(options, control, std::move(waits), std::make_shared<StagedCalls>(),
                            clock, events);
  }
};

TEST(StagedSettings, RanksThatGoDifferentWays_AreToldOnBoth) {
  World world(Transport{.name = "mixed",
                        .make = nullptr,
                        .environment = [] { return std::make_shared<MixedEnvironment>(); }},
              2);
  std::vector<std::vector<float>> data = {{1}, {2}};
  for (const Status& status :
       world.RunAll([&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); })) {
    EXPECT_EQ(status.code(), StatusCode::kSetting);
    EXPECT_EQ(status.message(),
              "the ranks of group 'world' have different ways between devices: rank 0 (node0, pid "
              "1000) NCCL; rank 1 (node1, pid 1001) memory of the host. Fix: set "
              "RESILIENT_ALLOW_SHARED_GPU alike on all ranks: 1 is the way through memory of the "
              "host");
  }
}

}  // namespace
}  // namespace resilient::testing
