// Goal: operations that CUDA graphs hold run by each replay, are watched there, and neither a
// failure nor an end waits for the graphs.
// Method: ranks of one process over the fake, whose graphs are captured and launched by the test;
// its communicators cannot be freed before the graphs that hold kernels of them.

#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/comm/nccl_captures.h"
#include "tests/support/call_faults.h"
#include "tests/unit/comm/nccl_world.h"

namespace resilient::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Duration kNoStall = Duration::zero();

// One rank that captures and replays on a stream of its own.
struct Rank {
  CudaStreamHandle stream = nullptr;
  std::vector<float> data;
  CudaGraphHandle graph = nullptr;
};

class NcclGraphs : public NcclTest {
 protected:
  ~NcclGraphs() override {
    for (Rank& rank : ranks_) DestroyGraph(rank);
  }

  void StartRanks(int count, Duration flush_timeout = Millis(1000)) {
    Start(count, kBound, flush_timeout);
    for (int rank = 0; rank < count; ++rank)
      ranks_.push_back({.stream = NewStream(), .data = {static_cast<float>(rank + 1)}});
  }
  Communicator& at(std::size_t rank) { return world().at(static_cast<int>(rank)); }

  // Of that rank: an operation for its capture.
  Operation Captured(std::size_t rank, Operation op) {
    op.stream = ranks_[rank].stream;
    op.device = static_cast<int>(rank);
    op.mark = std::make_shared<LaunchMark>();
    return op;
  }
  // Captures `op`, and has the stream go on behind it.
  Pending Put(std::size_t rank, Operation op) {
    op = Captured(rank, std::move(op));
    const std::shared_ptr<LaunchMark> mark = op.mark;
    Pending pending = Pending::Of(at(rank), std::move(op));
    EXPECT_TRUE(mark->captured());
    EXPECT_TRUE(mark->WaitFor(kBound));
    EXPECT_TRUE(mark->Join(ranks_[rank].stream).ok());
    return pending;
  }
  void Begin(std::size_t rank) {
    EXPECT_EQ(fake_.BeginCapture(ranks_[rank].stream), CudaResult::kSuccess);
  }
  void End(std::size_t rank) {
    EXPECT_EQ(fake_.EndCapture(ranks_[rank].stream, &ranks_[rank].graph), CudaResult::kSuccess);
  }
  // A graph of one all_reduce on each rank.
  void CaptureSums(Duration stall = kNoStall) {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      Begin(rank);
      const Pending sum = Put(rank, Bounded(AllReduceOp(ranks_[rank].data), {}, stall));
      EXPECT_FALSE(sum.IsDone()) << "before the capture is over";
      End(rank);
      EXPECT_TRUE(sum.Wait().ok());
    }
  }
  // Rank 0 captures `op`, whose launch does not come back.
  Pending CaptureThatHangs(Operation op) {
    Change(0, [](NcclScript& script) { script.hang_launch = true; });
    Begin(0);
    Pending captured = Pending::Of(at(0), Captured(0, std::move(op)));
    EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.launches == 1; }));
    return captured;
  }
  // Its program gives up: the operation has left a stream in the capture.
  void EndHungCapture() {
    (void)fake_.EndCapture(ranks_[0].stream, &ranks_[0].graph);
    DestroyGraph(ranks_[0]);
    EXPECT_THAT(fake_.TakeMisuse(), ElementsAre(HasSubstr("a capture ends without a stream")));
  }
  void Replay(std::size_t rank) {
    EXPECT_EQ(fake_.LaunchGraph(ranks_[rank].graph, ranks_[rank].stream), CudaResult::kSuccess);
  }
  void ReplayAll() {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) Replay(rank);
  }
  void Synchronize() {
    for (const Rank& rank : ranks_)
      EXPECT_EQ(fake_.SynchronizeStream(rank.stream), CudaResult::kSuccess);
  }
  std::vector<float> Results() const {
    std::vector<float> results;
    for (const Rank& rank : ranks_) results.push_back(rank.data[0]);
    return results;
  }
  void DestroyGraph(Rank& rank) {
    if (rank.graph == nullptr) return;
    EXPECT_EQ(fake_.DestroyGraph(std::exchange(rank.graph, nullptr)), CudaResult::kSuccess);
  }
  // What the group on that rank says that it waits for, the first time that it says so now.
  WaitingOperation AwaitWaiting(int rank) {
    const std::size_t before = world().log(rank).WaitingCount("world");
    WaitingOperation told;
    EXPECT_TRUE(world().log(rank).WaitFor([&](EventLog& log) {
      if (log.waiting["world"].size() <= before) return false;
      told = log.waiting["world"].back().front();
      return true;
    }));
    return told;
  }
  bool AwaitStall(int rank, std::string* text) {
    return world().log(rank).WaitFor([text](EventLog& log) {
      if (log.stalls.empty()) return false;
      *text = log.stalls.front().message();
      return true;
    });
  }

  std::vector<Rank> ranks_;
};

TEST_F(NcclGraphs, EachReplay_RunsWhatWasCaptured) {
  StartRanks(2);
  CaptureSums();
  EXPECT_THAT(Results(), ElementsAre(1, 2)) << "a capture runs nothing";
  ReplayAll();
  Synchronize();
  EXPECT_THAT(Results(), ElementsAre(3, 3));
  ReplayAll();
  ReplayAll();
  Synchronize();
  EXPECT_THAT(Results(), ElementsAre(12, 12));
}

TEST_F(NcclGraphs, OperationsBesideThem_RunInOrder) {
  StartRanks(2);
  std::vector<std::vector<float>> data = {{1}, {2}};
  const auto sum = [&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); };
  ExpectAllOk(world().RunAll(sum));
  CaptureSums();
  ReplayAll();
  ExpectAllOk(world().RunAll(sum));
  Synchronize();
  EXPECT_THAT(Results(), ElementsAre(3, 3));
  EXPECT_THAT(data, Each(ElementsAre(6)));
}

TEST_F(NcclGraphs, SeveralOperationsOfAllKinds_AreOneGraph) {
  StartRanks(2);
  std::vector<std::vector<float>> sent = {{5}, {6}};
  std::vector<std::vector<float>> received = {{0}, {0}};
  std::vector<Pending> pending;
  for (std::size_t rank : {0u, 1u}) {
    const int peer = rank == 0 ? 1 : 0;
    Begin(rank);
    Operation scaled = AllReduceOp(ranks_[rank].data, ReduceOp::kPremulSum);
    scaled.factor = 0.5;
    pending.push_back(Put(rank, scaled));
    std::vector<Operation> batch = {Captured(rank, SendOp(sent[rank], peer, 0)),
                                    Captured(rank, RecvOp(received[rank], peer, 0))};
    const std::shared_ptr<LaunchMark> last = batch.back().mark;
    for (const Pending& one : Pending::OfBatch(at(rank), std::move(batch))) pending.push_back(one);
    ASSERT_TRUE(last->WaitFor(kBound) && last->Join(ranks_[rank].stream).ok());
    End(rank);
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  ReplayAll();
  ReplayAll();
  Synchronize();
  EXPECT_THAT(Results(), Each(1.5));
  EXPECT_THAT(received, ElementsAre(ElementsAre(6), ElementsAre(5)));
}

TEST_F(NcclGraphs, EventsOfAGraph_AreUsedAgainWhenItIsGone) {
  StartRanks(1);
  int events = 0;
  for (int i = 0; i < 3; ++i) {
    CaptureSums();
    ReplayAll();
    Synchronize();
    DestroyGraph(ranks_[0]);
    ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.user_objects == 0; }));
    // An operation turns the loop, which sees that the graph is gone before it launches.
    std::vector<float> data = {1};
    EXPECT_TRUE(Pending::Of(at(0), AllReduceOp(data)).Wait().ok());
    if (i == 0) events = fake_.Counts().events;
  }
  EXPECT_EQ(fake_.Counts().events, events);
}

TEST_F(NcclGraphs, FirstBarrierOfAGroup_HasItsMemoryInTheGraph) {
  StartRanks(2);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    Begin(rank);
    Put(rank, BarrierOp());
    End(rank);
  }
  ReplayAll();
  Synchronize();
}

TEST_F(NcclGraphs, MoreThanTheMost_AreRefused) {
  StartRanks(2);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    Begin(rank);
    for (int i = 0; i < 2; ++i) Put(rank, AllReduceOp(ranks_[rank].data));
    End(rank);
  }
  CudaGraphHandle other = nullptr;
  Begin(0);
  const std::vector<Operation> batch(NcclCaptures::kMaxOperations - 1,
                                     Captured(0, SendOp(ranks_[0].data, 1, 0)));
  for (const Pending& one : Pending::TryBatch(at(0), batch)) {
    const Status status = one.Wait();
    ASSERT_EQ(status.code(), StatusCode::kResourceExhausted);
    ASSERT_THAT(status.message(), HasSubstr("have 2 operations of its group, and 65536 are the"));
  }
  EXPECT_EQ(fake_.EndCapture(ranks_[0].stream, &other), CudaResult::kSuccess);
  EXPECT_EQ(fake_.DestroyGraph(other), CudaResult::kSuccess);
  ReplayAll();
  Synchronize();
  EXPECT_THAT(Results(), Each(6));
}

TEST_F(NcclGraphs, WhatEndsOnTheHost_IsRefused) {
  StartRanks(1);
  Begin(0);
  Operation barrier = Captured(0, BarrierOp());
  barrier.ends_on_host = true;
  const Status status = Pending::Try(at(0), barrier).Wait();
  EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("its end is waited for on the host"));
  End(0);
}

TEST_F(NcclGraphs, WhereTheirEndIsNotTold_AreRefused) {
  environment_->options().cuda.GraphRetainUserObject = nullptr;
  StartRanks(1);
  Begin(0);
  const Status status = Pending::Try(at(0), Captured(0, AllReduceOp(ranks_[0].data))).Wait();
  EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("does not tell when a graph is gone"));
  End(0);
  EXPECT_TRUE(Pending::Of(at(0), AllReduceOp(ranks_[0].data)).Wait().ok());
}

TEST_F(NcclGraphs, SecondCaptureAtOnce_FailsAlone) {
  StartRanks(1);
  ranks_.push_back({.stream = NewStream(), .data = {7}});
  Begin(0);
  const Pending first = Put(0, AllReduceOp(ranks_[0].data));
  Begin(1);
  Operation other = Captured(1, AllReduceOp(ranks_[1].data));
  const Status refused = Pending::Of(at(0), other).Wait();
  EXPECT_EQ(refused.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(refused.message(), HasSubstr("another capture"));
  End(1);
  End(0);
  EXPECT_TRUE(first.Wait().ok());
  Replay(0);
  Synchronize();
  EXPECT_THAT(ranks_[0].data, ElementsAre(1));
}

TEST_F(NcclGraphs, AbortInAReplay_EndsItAndWaitsForNoGraph) {
  StartRanks(2);
  CaptureSums();
  Replay(0);  // Rank 1 does not come.
  ASSERT_TRUE(WaitForKernels(0, 1));
  for (std::size_t rank : {0u, 1u}) at(rank).Abort(Status(StatusCode::kRankLost, "rank 1"));
  Synchronize();
  EXPECT_TRUE(Eventually([&] { return at(0).IsQuiet() && at(1).IsQuiet(); }));
  // The next generation runs while the graphs still hold the communicators of this one.
  const auto next = world().CreateAll("world", 2);
  std::vector<std::vector<float>> data = {{1}, {2}};
  const Pending first = Pending::Of(*next[0], AllReduceOp(data[0]));
  const Pending second = Pending::Of(*next[1], AllReduceOp(data[1]));
  EXPECT_TRUE(first.Wait().ok() && second.Wait().ok());
  EXPECT_THAT(data, Each(ElementsAre(3)));
  EXPECT_EQ(fake_.Counts().aborts_ended, 0);
  EXPECT_EQ(fake_.Counts().communicators, 4);
  ReplayAll();  // Of what is over: it leaves at once.
  Synchronize();
  for (Rank& rank : ranks_) DestroyGraph(rank);
  EXPECT_TRUE(WaitForAborts(2));
}

// What the next generation restores is not written any more.
TEST_F(NcclGraphs, AbortBeforeAReplayHasLeft_IsNotQuiet) {
  StartRanks(1);
  CaptureSums();
  std::promise<void> release;
  ASSERT_EQ(fake_.LaunchHostFunction(ranks_[0].stream,
                                     [held = release.get_future().share()] { held.wait(); }),
            CudaResult::kSuccess);
  Replay(0);  // Behind it, in the queue of the device.
  at(0).Abort(Status(StatusCode::kRankLost, "rank 1"));
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.aborts_begun == 1; }));
  EXPECT_FALSE(at(0).IsQuiet());
  release.set_value();
  Synchronize();
  EXPECT_TRUE(Eventually([&] { return at(0).IsQuiet(); }));
}

TEST_F(NcclGraphs, AbortInACapture_EndsWhatItHas) {
  StartRanks(2);
  Begin(0);
  const Pending captured = Put(0, AllReduceOp(ranks_[0].data));
  at(0).Abort(Status(StatusCode::kRankLost, "rank 1"));
  EXPECT_EQ(captured.Wait().code(), StatusCode::kRankLost);
  End(0);
  DestroyGraph(ranks_[0]);
  EXPECT_TRUE(WaitForAborts(1));
}

// Its rank says goodbye in the midst of the launch.
TEST_F(NcclGraphs, LeaveInACapture_IsNoCallBesideTheLaunch) {
  StartRanks(2);
  const Pending captured = CaptureThatHangs(AllReduceOp(ranks_[0].data));
  at(0).Leave();
  EXPECT_EQ(captured.Wait().code(), StatusCode::kCancelled);
  EndHungCapture();
  EXPECT_TRUE(WaitForAborts(1));
}

TEST_F(NcclGraphs, Close_WaitsForNoGraph) {
  StartRanks(2);
  CaptureSums();
  ReplayAll();
  Synchronize();
  world_.reset();
  EXPECT_EQ(fake_.Counts().destroyed, 0);
  for (Rank& rank : ranks_) DestroyGraph(rank);
  EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.communicators == 0; }));
}

// What NCCL would wait for at the end of a communicator is no part of this rank's goodbye.
TEST_F(NcclGraphs, LeaveBesideGraphs_TakesNoFlushTime) {
  StartRanks(2, kBound);
  CaptureSums();
  ReplayAll();
  Synchronize();
  const Instant began = world().clock.Now();
  for (std::size_t rank : {0u, 1u}) at(rank).Leave();
  EXPECT_TRUE(Eventually([&] { return at(0).IsQuiet() && at(1).IsQuiet(); }));
  EXPECT_LT(world().clock.Now() - began, kBound / 2);
  for (Rank& rank : ranks_) DestroyGraph(rank);
  EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.destroyed == 2; }));
}

TEST_F(NcclGraphs, StreamOfThem_HasThePriorityOfTheGroup) {
  Start(1);
  ranks_.push_back({.stream = NewStream(), .data = {1}});
  GroupSpec spec = world().Spec("fast", 0);
  spec.nccl.is_high_priority_stream = true;
  world().group[0] = world().Create(0, spec);
  CaptureSums();
  // One that runs operations, and one that captures them.
  EXPECT_THAT(fake_.Counts().priorities, ElementsAre(-5, -5));
}

TEST_F(NcclGraphs, LaunchThatDoesNotEnd_IsToldAndHasADeadline) {
  StartRanks(2);
  const Pending captured =
      CaptureThatHangs(Bounded(AllReduceOp(ranks_[0].data), Millis(5000), kNoStall));
  EXPECT_THAT(AwaitWaiting(0).what, HasSubstr("all_reduce(float32[1], sum)"));
  std::string text;
  ASSERT_TRUE(AwaitStall(0, &text));
  EXPECT_THAT(text, HasSubstr("all_reduce(float32[1], sum)"));
  EXPECT_FALSE(captured.Wait().ok());
  EndHungCapture();
  EXPECT_TRUE(WaitForAborts(1));
}

TEST_F(NcclGraphs, PeerThatLeavesInALaunch_IsMissed) {
  StartRanks(2);
  const Pending captured = CaptureThatHangs(AllReduceOp(ranks_[0].data));
  world().group[1].reset();
  EXPECT_EQ(captured.Wait().code(), StatusCode::kLeft);
  EndHungCapture();
  // That of rank 1 follows, where NCCL has not said goodbye to rank 0 within its time.
  EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.aborts_ended >= 1; }));
}

// The program, or another of its threads, has done what no capture survives.
TEST_F(NcclGraphs, SpoiltCapture_EndsItsOperationsAlone) {
  StartRanks(1);
  const Pending captured = CaptureThatHangs(AllReduceOp(ranks_[0].data));
  fake_.SpoilCapture(ranks_[0].stream);
  Change(0, [](NcclScript& script) { script.hang_launch = false; });
  const Status status = captured.Wait();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("a capture failed on rank 0"));
  EXPECT_EQ(fake_.EndCapture(ranks_[0].stream, &ranks_[0].graph),
            CudaResult::kStreamCaptureInvalidated);
  EXPECT_EQ(ranks_[0].graph, nullptr);
  std::vector<float> data = {1};
  EXPECT_TRUE(Pending::Of(at(0), AllReduceOp(data)).Wait().ok());
}

// By a kernel of the program's own, as it shows at the next call. The session hears of it: the
// others wait for this rank.
TEST_F(NcclGraphs, DeviceLostInTheLaunch_EndsTheGroupAndIsTold) {
  CallFaults faults;
  environment_->options().cuda = CallFaults::Around(environment_->options().cuda);
  StartRanks(1);
  Begin(0);
  faults.Set({.rank = 0,
              .call = "EventRecordWithFlags",
              .result = static_cast<int>(CudaResult::kLaunchFailure)});
  const Pending captured = Pending::Of(at(0), Captured(0, AllReduceOp(ranks_[0].data)));
  const Status status = captured.Wait();
  EXPECT_EQ(status.code(), StatusCode::kDeviceLost);
  EXPECT_THAT(status.message(), HasSubstr("cudaErrorLaunchFailure"));
  std::string told;
  ASSERT_TRUE(AwaitStall(0, &told));
  EXPECT_EQ(told, status.message());
  End(0);
  std::vector<float> data = {1};
  EXPECT_EQ(Pending::Try(at(0), AllReduceOp(data)).Wait().code(), StatusCode::kDeviceLost);
}

TEST_F(NcclGraphs, WhoIsNotInTheReplay_IsToldAndWaitedFor) {
  StartRanks(2);
  CaptureSums(Millis(500));  // The bound is for what all are in.
  Replay(0);
  for (int i = 0; i < 2; ++i) {
    const WaitingOperation waiting = AwaitWaiting(0);
    EXPECT_THAT(waiting.what, HasSubstr("the replay of all_reduce(float32[1], sum)"));
    EXPECT_THAT(waiting.missing, ElementsAre(1));
  }
  Replay(1);
  Synchronize();
  EXPECT_THAT(Results(), Each(3));
  for (int rank : {0, 1}) {
    EXPECT_TRUE(world().log(rank).WaitFor([](EventLog& log) { return log.stalls.empty(); }));
  }
}

TEST_F(NcclGraphs, NothingMovesInAReplay_IsAStall) {
  StartRanks(2);
  CaptureSums(Millis(500));
  fake_.ChangeAll([](NcclScript& script) { script.hold_kernels = true; });
  ReplayAll();
  std::string text;
  ASSERT_TRUE(AwaitStall(0, &text));
  EXPECT_THAT(text, HasSubstr("all_reduce(float32[1], sum)"));
  for (std::size_t rank : {0u, 1u}) at(rank).Abort(Status(StatusCode::kCommStalled, text));
  Synchronize();
}

// Each is younger than what has gone before, also where it is in the same operation.
TEST_F(NcclGraphs, NextReplay_IsNotTakenForTheLast) {
  StartRanks(2);
  CaptureSums();
  for (int i = 0; i < 2; ++i) {
    const Instant launched = world().clock.Now();
    Replay(0);
    const WaitingOperation waiting = AwaitWaiting(0);
    EXPECT_LE(waiting.age, world().clock.Now() - launched);
    Replay(1);
    Replay(0);  // Queued behind it: there is no moment between them.
    ASSERT_TRUE(WaitForKernels(0, 2 * i + 2));
    Replay(1);
    Synchronize();
  }
}

// A message is between two: the others have no part in it, and may go.
TEST_F(NcclGraphs, ReplayOfAMessage_AsksItsPeerAlone) {
  StartRanks(3);
  std::vector<float> received = {0};
  Begin(0);
  const Pending sent = Put(0, SendOp(ranks_[0].data, 2, 0));
  End(0);
  Begin(2);
  const Pending got = Put(2, RecvOp(received, 0, 0));
  End(2);
  EXPECT_TRUE(sent.Wait().ok() && got.Wait().ok());
  Replay(2);
  EXPECT_THAT(AwaitWaiting(2).missing, ElementsAre(0));
  world().group[1].reset();
  EXPECT_THAT(AwaitWaiting(2).missing, ElementsAre(0));
  Replay(0);
  Synchronize();
  EXPECT_THAT(received, ElementsAre(1));
}

// Both wait for each other's device only: each is in a batch with the other's messages.
TEST_F(NcclGraphs, ReplayOfABatch_KnowsItsPeersByTheirMessages) {
  StartRanks(2);
  std::vector<std::vector<float>> received = {{0}, {0}};
  for (std::size_t rank : {0u, 1u}) {
    const int peer = rank == 0 ? 1 : 0;
    Begin(rank);
    std::vector<Operation> batch = {
        Captured(rank, Bounded(SendOp(ranks_[rank].data, peer, 0), {}, Millis(500))),
        Captured(rank, Bounded(RecvOp(received[rank], peer, 0), {}, Millis(500)))};
    const std::shared_ptr<LaunchMark> last = batch.back().mark;
    (void)Pending::OfBatch(at(rank), std::move(batch));
    ASSERT_TRUE(last->WaitFor(kBound) && last->Join(ranks_[rank].stream).ok());
    End(rank);
  }
  Replay(0);
  EXPECT_THAT(AwaitWaiting(0).missing, ElementsAre(1));
  fake_.ChangeAll([](NcclScript& script) { script.hold_kernels = true; });
  Replay(1);
  std::string text;  // All are in it, and nothing moves.
  ASSERT_TRUE(AwaitStall(1, &text));
  EXPECT_THAT(text, HasSubstr("send"));
  for (std::size_t rank : {0u, 1u}) at(rank).Abort(Status(StatusCode::kCommStalled, text));
  Synchronize();
}

// Who is not in it may have done its part and gone on.
TEST_F(NcclGraphs, ReplayWithARoot_NamesNobody) {
  StartRanks(2);
  for (std::size_t rank : {0u, 1u}) {
    Begin(rank);
    Operation reduce = AllReduceOp(ranks_[rank].data);
    reduce.kind = OpKind::kReduce;
    reduce.root = 0;
    const Pending reduced = Put(rank, reduce);
    End(rank);
    EXPECT_TRUE(reduced.Wait().ok());
  }
  Replay(0);
  EXPECT_THAT(AwaitWaiting(0).missing, IsEmpty());
  Replay(1);
  Synchronize();
  EXPECT_THAT(ranks_[0].data, ElementsAre(3));
}

TEST_F(NcclGraphs, PeerThatLeaves_IsMissedInTheReplay) {
  StartRanks(2);
  CaptureSums();
  Replay(0);
  ASSERT_TRUE(WaitForKernels(0, 1));
  world().group[1].reset();
  std::vector<float> data = {1};
  const Pending behind = Pending::Of(at(0), AllReduceOp(data));
  const Status status = behind.Wait();
  EXPECT_EQ(status.code(), StatusCode::kLeft);
  EXPECT_THAT(status.message(), HasSubstr("rank 1"));
}

}  // namespace
}  // namespace resilient::testing
