// Goal: NcclCommunicator does what communicator.h says, as far as NCCL can.
// Method: ranks of one process over a fake NCCL and CUDA in host memory, with one stream thread a
// device; every wait has a bound.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/comm/nccl_group.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/nccl_world.h"

namespace resilient::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <typename T>
std::vector<T> ReduceOnThree(World& world, DataType type, ReduceOp reduce) {
  std::vector<std::vector<T>> data = {{1, 8}, {3, 2}, {5, 5}};
  ExpectAllOk(world.RunAll([&](int rank) {
    Operation op = MakeOp(OpKind::kAllReduce, type, data[static_cast<std::size_t>(rank)]);
    op.reduce = reduce;
    return op;
  }));
  EXPECT_EQ(data[0], data[1]);
  EXPECT_EQ(data[0], data[2]);
  return data[0];
}

TEST_F(NcclTest, AllReduce_GivesTheSameToAllRanks) {
  World& world = Start(3);
  EXPECT_THAT(ReduceOnThree<float>(world, DataType::kFloat32, ReduceOp::kSum), ElementsAre(9, 15));
  EXPECT_THAT(ReduceOnThree<float>(world, DataType::kFloat32, ReduceOp::kAvg), ElementsAre(3, 5));
  EXPECT_THAT(ReduceOnThree<double>(world, DataType::kFloat64, ReduceOp::kSum), ElementsAre(9, 15));
  EXPECT_THAT(ReduceOnThree<std::int32_t>(world, DataType::kInt32, ReduceOp::kMax),
              ElementsAre(5, 8));
  EXPECT_THAT(ReduceOnThree<std::int64_t>(world, DataType::kInt64, ReduceOp::kMin),
              ElementsAre(1, 2));
}

TEST_F(NcclTest, Broadcast_CarriesAnyType) {
  World& world = Start(2);
  std::vector<std::vector<std::uint16_t>> data = {{0, 0, 0}, {7, 8, 65535}};
  ExpectAllOk(world.RunAll([&](int rank) {
    Operation op =
        MakeOp(OpKind::kBroadcast, DataType::kUInt16, data[static_cast<std::size_t>(rank)]);
    op.root = 1;
    return op;
  }));
  EXPECT_THAT(data[0], ElementsAre(7, 8, 65535));
}

TEST_F(NcclTest, Reduce_GivesTheResultToItsRootOnly) {
  World& world = Start(2);
  std::vector<std::vector<float>> data = {{1, 2}, {10, 20}};
  ExpectAllOk(world.RunAll([&](int rank) {
    Operation op = AllReduceOp(data[static_cast<std::size_t>(rank)]);
    op.kind = OpKind::kReduce;
    op.root = 1;
    return op;
  }));
  EXPECT_THAT(data[0], ElementsAre(1, 2));
  EXPECT_THAT(data[1], ElementsAre(11, 22));
}

TEST_F(NcclTest, AllGather_TakesUnequalPartsAnywhereInMemory) {
  World& world = Start(3);
  std::vector<std::vector<float>> data = {{1}, {2, 3}, {}};
  std::vector<std::vector<std::vector<float>>> outputs(
      3, std::vector<std::vector<float>>{{0}, {0, 0}, {}});
  ExpectAllOk(world.RunAll([&](int rank) {
    const auto own = static_cast<std::size_t>(rank);
    return AllGatherOp(data[own], outputs[own]);
  }));
  EXPECT_THAT(outputs, Each(ElementsAre(ElementsAre(1), ElementsAre(2, 3), ElementsAre())));
}

TEST_F(NcclTest, ReduceScatter_GivesEachRankItsSum) {
  World& world = Start(2);
  std::vector<std::vector<std::vector<float>>> inputs = {{{1}, {2, 3}}, {{10}, {20, 30}}};
  std::vector<std::vector<float>> data = {{0}, {0, 0}};
  ExpectAllOk(world.RunAll([&](int rank) {
    const auto own = static_cast<std::size_t>(rank);
    Operation op = AllReduceOp(data[own]);
    op.kind = OpKind::kReduceScatter;
    for (std::vector<float>& input : inputs[own])
      op.inputs.push_back({.data = input.data(), .count = input.size()});
    return op;
  }));
  EXPECT_THAT(data[0], ElementsAre(11));
  EXPECT_THAT(data[1], ElementsAre(22, 33));
  EXPECT_THAT(inputs[0], ElementsAre(ElementsAre(1), ElementsAre(2, 3))) << "inputs are only read";
}

TEST_F(NcclTest, OneRank_IsAGroupToo) {
  World& world = Start(1);
  std::vector<float> data = {4};
  ExpectAllOk(world.RunAll([&](int) { return AllReduceOp(data); }));
  EXPECT_THAT(data, ElementsAre(4));
}

TEST_F(NcclTest, Submitted_BeforeItIsConnected_RunsWhenItIs) {
  Change(1, [](NcclScript& script) { script.hang_init = true; });
  World& world = Start(2);
  std::vector<std::vector<float>> data = {{1}, {2}};
  const Pending first = Pending::Of(world.at(0), AllReduceOp(data[0]));
  const Pending second = Pending::Of(world.at(1), AllReduceOp(data[1]));
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.communicators == 2; }));
  EXPECT_FALSE(first.IsDone());
  EXPECT_TRUE(fake_.Counts().kernels_begun.empty()) << "nobody runs in a world that is half built";
  Change(1, [](NcclScript& script) { script.hang_init = false; });
  ExpectAllOk({first.Wait(), second.Wait()});
  EXPECT_THAT(data, Each(ElementsAre(3)));
  for (int rank : {0, 1}) {
    EXPECT_TRUE(world.log(rank).WaitFor([](EventLog& log) {
      return log.connected[{"world", 1}] == 1;
    }));
  }
}

TEST_F(NcclTest, Operation_WaitsForWhatIsBeforeItOnItsStream) {
  World& world = Start(1);
  CudaApi cuda = FakeNccl::cuda();
  CudaStreamHandle stream = NewStream();
  CudaStreamHandle other = NewStream();
  CudaEventHandle produced = nullptr;
  ASSERT_EQ(cuda.EventCreateWithFlags(&produced, kCudaEventDisableTiming), CudaResult::kSuccess);
  Change(0, [](NcclScript& script) { script.hold_kernels = true; });
  std::vector<float> before = {0};
  std::vector<float> behind = {5};
  Operation op = AllReduceOp(before);
  op.mark = std::make_shared<LaunchMark>();
  const auto side = world.CreateAll("side");
  const Pending producer = Pending::Of(*side[0], op);
  ASSERT_TRUE(WaitForKernels(0, 1));
  ASSERT_TRUE(op.mark->WaitFor(kBound) && op.mark->Join(other).ok());
  ASSERT_EQ(cuda.EventRecord(produced, other), CudaResult::kSuccess);
  ASSERT_EQ(cuda.StreamWaitEvent(stream, produced, 0), CudaResult::kSuccess);
  op = AllReduceOp(behind);
  op.stream = stream;
  const Pending consumer = Pending::Of(world.at(0), op);
  // Its event is recorded, and it has not begun: the stream is still behind the producer.
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.events == 1 + 2 * 3; }));
  EXPECT_EQ(fake_.Counts().kernels_begun[0], 1);
  EXPECT_FALSE(consumer.IsDone());
  Change(0, [](NcclScript& script) { script.hold_kernels = false; });
  ExpectAllOk({producer.Wait(), consumer.Wait()});
  EXPECT_EQ(cuda.EventDestroy(produced), CudaResult::kSuccess);
}

TEST_F(NcclTest, ManyOperations_RunInOrderAndNoMoreThanTheLimitAreLaunched) {
  constexpr int kOperations = 300;
  constexpr int kLaunchedMax = 128;
  World& world = Start(2);
  Change(0, [](NcclScript& script) { script.hold_kernels = true; });
  std::vector<std::vector<std::vector<float>>> data(2);
  for (auto& of_rank : data) {
    for (int i = 0; i < kOperations; ++i) of_rank.push_back({static_cast<float>(i)});
  }
  std::mutex mutex;
  std::vector<int> order;
  std::vector<Pending> pending;
  for (int i = 0; i < kOperations; ++i) {
    const auto index = static_cast<std::size_t>(i);
    const Result<std::uint64_t> seq =
        world.at(0).Submit(AllReduceOp(data[0][index]), [&, i](const Status& status) {
          EXPECT_TRUE(status.ok()) << status.ToString();
          std::lock_guard lock(mutex);
          order.push_back(i);
        });
    ASSERT_TRUE(seq.ok());
    EXPECT_EQ(*seq, static_cast<std::uint64_t>(i) + 1);
    pending.push_back(Pending::Of(world.at(1), AllReduceOp(data[1][index])));
  }
  // For each rank one of what came before each, and start and end of each launch.
  constexpr int kEvents = 2 * (kOperations + 2 * kLaunchedMax);
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.events == kEvents; }));
  EXPECT_FALSE(world.at(0).IsQuiet());
  Change(0, [](NcclScript& script) { script.hold_kernels = false; });
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  ASSERT_TRUE(Eventually([&] { return world.at(0).IsQuiet(); }));
  EXPECT_EQ(fake_.Counts().events, kEvents) << "events are used again";
  std::lock_guard lock(mutex);
  EXPECT_EQ(order.size(), static_cast<std::size_t>(kOperations));
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  for (int i = 0; i < kOperations; ++i)
    EXPECT_THAT(data[0][static_cast<std::size_t>(i)], ElementsAre(2.0F * static_cast<float>(i)));
}

TEST_F(NcclTest, Groups_DoNotWaitForEachOther) {
  World& world = Start(2);
  const auto side = world.CreateAll("side");
  std::vector<float> alone = {1};
  Operation op = AllReduceOp(alone);
  op.stream = NewStream();
  const Pending waiting = Pending::Of(*side[0], op);  // Rank 1 does not come.
  std::vector<std::vector<float>> data = {{1}, {2}};
  ExpectAllOk(
      world.RunAll([&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); }));
  EXPECT_FALSE(waiting.IsDone());
  std::vector<float> late = {4};
  const Pending other = Pending::Of(*side[1], AllReduceOp(late));
  ExpectAllOk({waiting.Wait(), other.Wait()});
  EXPECT_THAT(alone, ElementsAre(5));
}

TEST_F(NcclTest, Leave_WhenIdle_FlushesInsteadOfAborting) {
  World& world = Start(2);
  std::vector<std::vector<float>> data = {{1}, {2}};
  ExpectAllOk(
      world.RunAll([&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); }));
  world.at(0).Leave();
  EXPECT_EQ(Pending::Try(world.at(0), AllReduceOp(data[0])).Wait().code(), StatusCode::kCancelled);
  world.group.clear();
  EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.destroyed == 2; }));
  EXPECT_EQ(fake_.Counts().aborts_begun, 0);
}

// The program has been told that it may go on behind it.
TEST_F(NcclTest, Leave_WaitsForWhatWasLaunched) {
  World& world = Start(2);
  std::vector<std::vector<float>> data = {{1}, {2}};
  const Pending first = Pending::Of(world.at(0), AllReduceOp(data[0]));
  ASSERT_TRUE(WaitForKernels(0, 1));
  world.at(0).Leave();
  const Pending second = Pending::Of(world.at(1), AllReduceOp(data[1]));
  ExpectAllOk({first.Wait(), second.Wait()});
  EXPECT_THAT(data, Each(ElementsAre(3)));
}

TEST_F(NcclTest, Leave_WaitsForAPeerThatIsLate_AndTellsOfIt) {
  World& world = Start(2, kBound, Millis(20));
  std::vector<std::vector<float>> data = {{1}, {2}};
  const Pending first = Pending::Of(world.at(0), AllReduceOp(data[0]));
  ASSERT_TRUE(WaitForKernels(0, 1));
  world.at(0).Leave();
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) {
    const auto& told = log.waiting["world"];
    return !told.empty() && !told.back().empty() && told.back().front().missing == std::vector{1};
  }));
  EXPECT_FALSE(first.IsDone());
  EXPECT_TRUE(world.at(0).HoldsDevice());
  const Pending second = Pending::Of(world.at(1), AllReduceOp(data[1]));
  ExpectAllOk({first.Wait(), second.Wait()});
  EXPECT_THAT(data, Each(ElementsAre(3)));
  EXPECT_TRUE(Eventually([&] { return !world.at(0).HoldsDevice(); }));
}

// More than are launched at once, and before it is connected.
TEST_F(NcclTest, Leave_RunsAllThatWasSubmitted) {
  constexpr std::size_t kOperations = 2 * NcclGroup::kMaxLaunched;
  World& world = Start(2);
  std::vector<std::vector<float>> data(2 * kOperations, {1});
  std::vector<Pending> pending;
  for (int rank : {0, 1}) {
    for (std::size_t i = 0; i < kOperations; ++i) {
      auto& one = data[static_cast<std::size_t>(rank) * kOperations + i];
      pending.push_back(Pending::Of(world.at(rank), AllReduceOp(one)));
    }
    world.at(rank).Leave();
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  EXPECT_THAT(data, Each(ElementsAre(2)));
}

TEST_F(NcclTest, Leave_WithOperationsThatDoNotEnd_AnAbortEndsThem) {
  World& world = Start(2);
  std::vector<float> data = {1};
  const Pending waiting = Pending::Of(world.at(0), AllReduceOp(data));
  ASSERT_TRUE(WaitForKernels(0, 1));
  world.at(0).Leave();
  world.at(0).Abort(Status(StatusCode::kRankLost, "rank 1"));
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kRankLost);
  EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.aborts_ended == 1; }));
  EXPECT_FALSE(world.at(0).HoldsDevice());
}

TEST_F(NcclTest, Leave_OfAllWhileOneNeedsAnother_IsThat) {
  World& world = Start(2);
  std::vector<float> data = {1};
  const Pending waiting = Pending::Of(world.at(0), AllReduceOp(data));
  ASSERT_TRUE(WaitForKernels(0, 1));
  world.at(0).Leave();
  world.at(1).Leave();
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kLeft);
}

TEST_F(NcclTest, Leave_WhenThePeersDoNotTakeWhatWasSent_AbortsAfterItsTime) {
  Change(0, [](NcclScript& script) { script.hang_destroy = true; });
  World& world = Start(2, kBound, Millis(20));
  ASSERT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.connected[{"world", 1}] == 1; }));
  world.at(0).Leave();
  EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.aborts_ended == 1; }));
  EXPECT_EQ(fake_.Counts().destroyed, 0);
}

TEST_F(NcclTest, CloseOfAGroupWhoseFlushDoesNotEnd_WaitsForItsAbort) {
  Change(0, [](NcclScript& script) { script.hang_destroy = true; });
  World& world = Start(2);
  ASSERT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.connected[{"world", 1}] == 1; }));
  world.fabrics[0]->Close(Deadline::After(world.clock.Now(), Millis(500)));
  EXPECT_EQ(fake_.Counts().aborts_ended, 1) << "an abort that comes back is not left behind";
}

TEST_F(NcclTest, ClosedFabric_RefusesTheRest) {
  World& world = Start(2);
  std::vector<float> data = {1};
  const Pending waiting = Pending::Of(world.at(0), AllReduceOp(data));
  world.fabrics[0]->Close(Deadline::After(world.clock.Now(), kBound));
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kCancelled);
  EXPECT_EQ(Pending::Try(world.at(0), AllReduceOp(data)).Wait().code(), StatusCode::kCancelled);
  const auto late = world.Create(0, world.Spec("late", 0));
  EXPECT_EQ(Pending::Try(*late, AllReduceOp(data)).Wait().code(), StatusCode::kCancelled);
}

TEST_F(NcclTest, SameNameTwice_IsRefused_AndTheNextAttemptIsNot) {
  World& world = Start(1);
  std::vector<float> data = {1};
  const auto twice = world.Create(0, world.Spec("world", 0));
  const Status refused = Pending::Try(*twice, AllReduceOp(data)).Wait();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("group world exists already in generation 1"));
  GroupSpec spec = world.Spec("world", 0);
  spec.attempt = 1;
  const auto again = world.Create(0, spec);
  EXPECT_TRUE(Pending::Of(*again, AllReduceOp(data)).Wait().ok());
}

TEST_F(NcclTest, ForkedChild_IsRefusedAndMayDropEverything) {
  if (kThreadSanitized) GTEST_SKIP() << "ThreadSanitizer does not follow a fork with threads";
  World& world = Start(1);
  std::vector<float> data = {1};
  ASSERT_TRUE(Pending::Of(world.at(0), AllReduceOp(data)).Wait().ok());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool refused =
        world.at(0).Submit(AllReduceOp(data), nullptr).status().code() == StatusCode::kForked;
    world.at(0).Abort(Status(StatusCode::kCancelled, "in the child"));
    world.group.clear();
    world.fabrics.clear();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_TRUE(Pending::Of(world.at(0), AllReduceOp(data)).Wait().ok());
}

}  // namespace
}  // namespace resilient::testing
