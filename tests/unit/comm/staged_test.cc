// Goal: operations go through memory of the host in pieces, in the order of the streams, over a
// bounded number of buffers and without NCCL.
// Method: ranks of one process over the fake's CUDA, with small pieces; copies are held to see what
// waits for them.

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/comm/staged_group.h"
#include "tests/unit/comm/staged_world.h"

namespace resilient::testing {
namespace {

std::vector<float> ValuesOf(int rank, std::size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), static_cast<float>(1000 * rank));
  return values;
}

class StagedTest : public StagedWorldTest {
 protected:
  void Hold(int rank, bool hold) {
    fake().Change(rank, [hold](NcclScript& script) { script.hold_copies = hold; });
  }
  CudaStreamHandle NewStream() { return static_cast<CudaStreamHandle>(environment_->NewStream()); }
};

TEST_F(StagedTest, SizesAroundThePieces_AreSummedUp) {
  World& world = Start(3);
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, kEach - 1, kEach, kEach + 1,
                                  7 * kEach, 7 * kEach + 3, std::size_t{5001}}) {
    std::vector<std::vector<float>> data;
    for (int rank = 0; rank < 3; ++rank) data.push_back(ValuesOf(rank, count));
    std::vector<float> expected(count);
    for (std::size_t i = 0; i < count; ++i) expected[i] = data[0][i] + data[1][i] + data[2][i];
    ExpectAllOk(
        world.RunAll([&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); }));
    for (const auto& result : data) EXPECT_EQ(result, expected) << count;
  }
}

TEST_F(StagedTest, LargeOperations_TakeNoMoreThanTheirBuffers) {
  World& world = Start(2, StagedMemory::kSmallBytes);
  std::vector<std::vector<float>> data;
  for (int rank = 0; rank < 2; ++rank) data.push_back(ValuesOf(rank, 500'001));
  for (int i = 0; i < 3; ++i) {
    ExpectAllOk(world.RunAll(
        [&](int rank) { return BroadcastOp(data[static_cast<std::size_t>(rank)], i % 2); }));
  }
  EXPECT_EQ(data[1], data[0]);
  const auto most = static_cast<int>(2 * StagedGroup::kPieces);
  EXPECT_LE(fake().Counts().pinned_most, most);
}

TEST_F(StagedTest, OneOperationBehindAnother_SeesWhatItHasWritten) {
  World& world = Start(2);
  constexpr int kTimes = 20;
  std::vector<std::vector<float>> data(2, std::vector<float>(3 * kEach + 5, 1));
  std::vector<Pending> pending;
  for (int i = 0; i < kTimes; ++i) {
    for (const std::size_t rank : {0u, 1u})
      pending.push_back(Pending::Of(world.at(static_cast<int>(rank)), AllReduceOp(data[rank])));
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  for (const auto& result : data) EXPECT_THAT(result, ::testing::Each(1 << kTimes));
}

TEST_F(StagedTest, CallersStream_IsWaitedFor_AndGoesOnBehind) {
  World& world = Start(2);
  std::vector<float> mine = ValuesOf(0, 2 * kEach);
  std::vector<float> others(2 * kEach, 1);
  std::vector<float> seen;
  CudaStreamHandle stream = NewStream();
  std::atomic<bool> go{false};
  fake().LaunchHostFunction(stream, [&] {
    EXPECT_TRUE(Eventually([&] { return go.load(); }));
    mine.assign(mine.size(), 5);
  });
  Operation op = AllReduceOp(mine);
  op.stream = stream;
  op.mark = std::make_shared<LaunchMark>();
  const Pending first = Pending::Of(world.at(0), op);
  const Pending second = Pending::Of(world.at(1), AllReduceOp(others));
  EXPECT_FALSE(op.mark->WaitFor(Millis(20))) << "launched when the peers' part is there";
  EXPECT_FALSE(second.IsDone());
  go = true;
  ASSERT_TRUE(op.mark->WaitFor(kBound));
  ASSERT_TRUE(op.mark->Join(stream).ok());
  fake().LaunchHostFunction(stream, [&] { seen = mine; });
  EXPECT_EQ(fake().SynchronizeStream(stream), CudaResult::kSuccess);
  ExpectAllOk({first.Wait(), second.Wait()});
  EXPECT_EQ(seen, std::vector<float>(2 * kEach, 6));
  EXPECT_EQ(others, seen);
}

TEST_F(StagedTest, Completion_WaitsForTheLastCopy) {
  World& world = Start(2);
  std::vector<std::vector<float>> data = {{1, 2}, {3, 4}};
  Operation op = BroadcastOp(data[1], 0);
  op.mark = std::make_shared<LaunchMark>();
  Hold(1, true);
  const Pending there = Pending::Of(world.at(1), op);
  const Pending here = Pending::Of(world.at(0), BroadcastOp(data[0], 0));
  ASSERT_TRUE(op.mark->WaitFor(kBound)) << "in the device's queue";
  EXPECT_TRUE(here.Wait().ok());
  EXPECT_FALSE(there.IsDone());
  EXPECT_THAT(data[1], ::testing::ElementsAre(3, 4));
  Hold(1, false);
  EXPECT_TRUE(there.Wait().ok());
  EXPECT_THAT(data[1], ::testing::ElementsAre(1, 2));
}

// Each message needs a buffer of its own: the ranks begin them in different orders.
TEST_F(StagedTest, Batches_LargerThanTheBuffers_InAnyOrder) {
  constexpr int kRanks = 3;
  constexpr std::uint32_t kMessages = 8;
  World& world = Start(kRanks, 4096);
  const std::size_t count = 50'000;
  std::vector<std::vector<float>> sent;
  std::vector<std::vector<float>> received(kRanks * kRanks * kMessages,
                                           std::vector<float>(count, -1));
  for (int rank = 0; rank < kRanks; ++rank) sent.push_back(ValuesOf(rank, count));
  std::vector<Pending> pending;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<Operation> batch;
    for (std::uint32_t message = 0; message < kMessages; ++message) {
      for (int distance = 1; distance < kRanks; ++distance) {
        const int to = (rank + distance) % kRanks;
        const int from = (rank + 2 * distance) % kRanks;
        batch.push_back(SendOp(sent[static_cast<std::size_t>(rank)], to, message));
        auto& place = received[(static_cast<std::size_t>(rank * kRanks + from)) * kMessages +
                               kMessages - 1 - message];
        batch.push_back(RecvOp(place, from, kMessages - 1 - message));
      }
    }
    for (Pending& one : Pending::OfBatch(world.at(rank), std::move(batch))) pending.push_back(one);
  }
  for (const Pending& one : pending) ASSERT_TRUE(one.Wait().ok()) << one.Wait().ToString();
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int from = 0; from < kRanks; ++from) {
      for (std::uint32_t message = 0; from != rank && message < kMessages; ++message) {
        const auto at = static_cast<std::size_t>(rank * kRanks + from) * kMessages + message;
        ASSERT_EQ(received[at], sent[static_cast<std::size_t>(from)]) << at;
      }
    }
  }
}

TEST_F(StagedTest, MessagesWithOneTag_ComeInTheirOrder) {
  World& world = Start(2);
  std::vector<std::vector<float>> sent;
  std::vector<std::vector<float>> received;
  std::vector<Operation> sends;
  std::vector<Operation> recvs;
  for (int i = 0; i < 6; ++i) {
    sent.push_back(ValuesOf(i, 10 * kEach + static_cast<std::size_t>(i)));
    received.emplace_back(sent.back().size());
  }
  for (std::size_t i = 0; i < sent.size(); ++i) {
    sends.push_back(SendOp(sent[i], 1, 7));
    recvs.push_back(RecvOp(received[i], 0, 7));
  }
  const std::vector<Pending> sending = Pending::OfBatch(world.at(0), sends);
  const std::vector<Pending> receiving = Pending::OfBatch(world.at(1), recvs);
  for (const Pending& one : sending) EXPECT_TRUE(one.Wait().ok());
  for (const Pending& one : receiving) EXPECT_TRUE(one.Wait().ok());
  EXPECT_EQ(received, sent);
}

TEST_F(StagedTest, RecvFromAnyRank_IsRefused) {
  World& world = Start(2);
  std::vector<float> data(1);
  const Status status = Pending::Try(world.at(0), RecvOp(data, kAnyPeer, 0)).Wait();
  EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("only from a rank that is named"));
}

TEST_F(StagedTest, TwentyGenerations_LeaveNothing) {
  World& world = Start(2);
  std::vector<std::vector<float>> data;
  for (int rank = 0; rank < 2; ++rank) data.push_back(ValuesOf(rank, 5 * kEach));
  for (std::uint64_t generation = 2; generation < 22; ++generation) {
    const auto group = world.CreateAll("again", generation);
    std::vector<Pending> pending;
    for (const std::size_t rank : {0u, 1u})
      pending.push_back(Pending::Of(*group[rank], AllReduceOp(data[rank])));
    for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
    const Pending alone = Pending::Of(*group[0], AllReduceOp(data[0]));
    for (const auto& one : group) one->Abort(Status(StatusCode::kRankLost, "rank 2 was lost"));
    EXPECT_EQ(alone.Wait().code(), StatusCode::kRankLost);
    for (const auto& one : group) EXPECT_TRUE(Eventually([&] { return one->IsQuiet(); }));
  }
  EXPECT_TRUE(fake().WaitFor([](const NcclCounts& counts) { return counts.pinned == 0; }));
}

TEST(StagedCalls, PiecesThatWait_AreToldAsTheirOperation_Once) {
  StagedCalls calls;
  const auto call = std::make_shared<const StagedCalls::Call>(
      StagedCalls::Call{.seq = 2, .what = "all_reduce(float32[9], sum)", .call_site = "a.py:1"});
  calls.Begin("world/cuda", 1, false, 7, call);
  calls.Begin("world/cuda", 1, false, 8, call);
  const auto told = [](std::uint64_t seq) {
    return WaitingOperation{.seq = seq,
                            .point_to_point = false,
                            .what = "all_reduce(float32[3], sum)",
                            .call_site = "piece",
                            .age = {},
                            .missing = {1}};
  };
  std::vector<WaitingOperation> waiting = {told(7), told(8), told(9)};
  calls.Translate("world/cuda", 1, &waiting);
  ASSERT_EQ(waiting.size(), 2u);
  EXPECT_EQ(waiting[0].seq, 2u);
  EXPECT_EQ(waiting[0].what, call->what);
  EXPECT_EQ(waiting[0].call_site, "a.py:1");
  EXPECT_EQ(waiting[1].seq, 9u) << "none of theirs";
  calls.End("world/cuda", 1, false, 7);
  waiting = {told(7)};
  calls.Translate("world/cuda", 1, &waiting);
  EXPECT_EQ(waiting[0].seq, 7u);
}

}  // namespace
}  // namespace resilient::testing
