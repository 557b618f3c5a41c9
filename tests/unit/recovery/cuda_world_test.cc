// Goal: a world whose operations are on devices heals as one on hosts does, with the same causes.
// Method: threads as ranks, real sessions, the CUDA fabric over the fake NCCL; a membership hub in
// the process plays the service (world_test.cc). Every result is checked, and what the fake has
// noticed fails the test.
#include <array>
#include <barrier>
#include <future>
#include <latch>

#include "tests/unit/recovery/cuda_world.h"

namespace resilient::recovery {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CudaWorldTest : public CudaWorld {
 protected:
  CudaWorldTest() { cuda_.verdict_wait = kTestBound; }

  Rank Start(MembershipHub& hub, int rank) {
    auto opened = Open(hub, rank);
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    return opened.ok() ? *opened : Rank{};
  }
  Ranks StartAll(MembershipHub& hub) {
    Ranks ranks;
    OnRanks(kAllRanks, [&](int rank) { ranks[static_cast<std::size_t>(rank)] = Start(hub, rank); });
    return ranks;
  }

  // On device `rank`: the fake takes it for that rank's.
  static Operation SumOp(double* value, int rank) {
    Operation op;
    op.kind = OpKind::kAllReduce;
    op.dtype = DataType::kFloat64;
    op.reduce = ReduceOp::kSum;
    op.data = value;
    op.count = 1;
    op.device = rank;
    return op;
  }
  static Result<double> Sum(Group& group, int rank, double value) {
    Outcome outcome;
    const auto seq = group.Submit(SumOp(&value, rank), outcome.Callback());
    const Status status = seq.ok() ? outcome.Await() : seq.status();
    if (!status.ok()) return status;
    return value;
  }
  static void ExpectSum(Group& group, int rank) {
    const Result<double> sum = Sum(group, rank, rank + 1);
    ASSERT_TRUE(sum.ok()) << "rank " << rank << ": " << sum.status().ToString();
    EXPECT_EQ(*sum, 6);
  }
  static void ExpectSums(Ranks& ranks) {
    OnRanks(kAllRanks,
            [&](int rank) { ExpectSum(*ranks[static_cast<std::size_t>(rank)].world, rank); });
  }
  // So many times one rank aborts, and all rebuild.
  static void RebuildInTurn(Ranks& ranks, int times) {
    std::barrier summed(kWorldSize);
    OnRanks(kAllRanks, [&](int rank) {
      Rank& self = ranks[static_cast<std::size_t>(rank)];
      for (int i = 0; i < times; ++i) {
        ExpectSum(*self.world, rank);
        summed.arrive_and_wait();
        if (rank == i % kWorldSize) self.world->Abort("it is its turn");
        while (self.session->failure().ok()) std::this_thread::yield();
        ASSERT_TRUE(self.session->Rebuild({}).ok());
      }
      ExpectSum(*self.world, rank);
    });
  }
  // All go on in the next generation, `newcomer` as another process.
  static constexpr int kNobody = -1;
  void RebuildWith(MembershipHub& hub, Ranks& ranks, int newcomer) {
    OnRanks(kAllRanks, [&](int rank) {
      Rank& self = ranks[static_cast<std::size_t>(rank)];
      if (rank == newcomer) {
        self = Start(hub, rank);
      } else {
        const Status status = self.session->Rebuild({});
        ASSERT_TRUE(status.ok()) << status.ToString();
      }
      ExpectSum(*self.world, rank);
    });
  }
  bool WaitForKernels(int rank, int count) {
    return fake_.WaitFor([&](const NcclCounts& counts) {
      const auto begun = counts.kernels_begun.find(rank);
      return begun != counts.kernels_begun.end() && begun->second >= count;
    });
  }
};

TEST_F(CudaWorldTest, HostAndDevice_AreServedByOneGroup) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  OnRanks(kAllRanks, [&](int rank) {
    Group& world = *ranks[static_cast<std::size_t>(rank)].world;
    for (int i = 0; i < 20; ++i) {
      ExpectSum(world, rank);
      double value = rank + 1;
      Operation on_host = SumOp(&value, kHost);
      Outcome outcome;
      ASSERT_TRUE(world.Submit(on_host, outcome.Callback()).ok());
      EXPECT_TRUE(outcome.Await().ok());
      EXPECT_EQ(value, 6);
    }
  });
}

TEST_F(CudaWorldTest, KilledRank_EndsWhatIsOnTheDevice_AndTheNextGenerationRuns) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  std::latch waiting(3);
  std::thread killer([&] {
    waiting.wait();
    hub.Kill(2);
  });
  OnRanks({0, 1, 2}, [&](int rank) {
    Rank& self = ranks[static_cast<std::size_t>(rank)];
    ExpectSum(*self.world, rank);
    if (rank == 2) {
      waiting.count_down();
      return;
    }
    double value = 1;
    Outcome outcome;
    ASSERT_TRUE(self.world->Submit(SumOp(&value, rank), outcome.Callback()).ok());
    EXPECT_TRUE(WaitForKernels(rank, 2));
    waiting.count_down();
    const Status status = outcome.Await();
    EXPECT_EQ(status.code(), StatusCode::kRankLost) << status.ToString();
    EXPECT_EQ(status.detail().rank, 2);
    EXPECT_EQ(status.detail().group, "world");
    EXPECT_EQ(Sum(*self.world, rank, 1).status().code(), StatusCode::kRankLost);
  });
  killer.join();
  ranks[2] = {};
  RebuildWith(hub, ranks, 2);
  for (int i = 0; i < 4; ++i) ExpectSums(ranks);
  for (const Rank& rank : ranks) EXPECT_EQ(rank.session->membership().generation, 2u);
}

// The device may still write into what the program would restore.
TEST_F(CudaWorldTest, AbortThatHangs_TheNextGenerationWaitsForTheMemory) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  double value = 1;
  Outcome outcome;
  ASSERT_TRUE(ranks[0].world->Submit(SumOp(&value, 0), outcome.Callback()).ok());
  ASSERT_TRUE(WaitForKernels(0, 2));
  fake_.Change(0, [](NcclScript& script) { script.hang_abort = true; });
  hub.Kill(2);
  EXPECT_EQ(outcome.Await().code(), StatusCode::kRankLost) << "told at once";
  ranks[2] = {};
  std::thread next([&] { RebuildWith(hub, ranks, 2); });
  while (ranks[1].session->membership().state != SessionState::kJoining) std::this_thread::yield();
  EXPECT_EQ(ranks[0].session->membership().state, SessionState::kAborting);
  EXPECT_EQ(hub.generation(), 1u);
  fake_.Change(0, [](NcclScript& script) { script.hang_abort = false; });
  next.join();
  EXPECT_EQ(hub.generation(), 2u);
}

// NCCL notices first, and names nobody: what the user hears is who.
TEST_F(CudaWorldTest, ErrorOfNccl_WaitsForTheVerdict) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  std::array<Outcome, 2> outcomes;
  std::array<double, 2> values = {1, 2};
  for (const int rank : {0, 1}) {
    const auto at = static_cast<std::size_t>(rank);
    ASSERT_TRUE(ranks[at].world->Submit(SumOp(&values[at], rank), outcomes[at].Callback()).ok());
    ASSERT_TRUE(WaitForKernels(rank, 2));
  }
  for (const int rank : {0, 1}) {
    fake_.Change(rank, [](NcclScript& script) { script.async_error = NcclResult::kRemoteError; });
  }
  hub.Kill(2);
  for (Outcome& outcome : outcomes) EXPECT_EQ(outcome.Await().code(), StatusCode::kRankLost);
  for (const int rank : {0, 1})
    fake_.Change(rank, [](NcclScript& script) { script.async_error = NcclResult::kSuccess; });
}

TEST_F(CudaWorldTest, ErrorOfNccl_WithoutAVerdict_EndsTheGenerationForAll) {
  cuda_.verdict_wait = Millis(50);
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  fake_.Change(1, [](NcclScript& script) { script.async_error = NcclResult::kSystemError; });
  OnRanks(kAllRanks, [&](int rank) {
    Rank& self = ranks[static_cast<std::size_t>(rank)];
    while (self.session->failure().ok()) std::this_thread::yield();
    EXPECT_EQ(self.session->failure().code(), StatusCode::kCommFailed);
    EXPECT_THAT(self.session->failure().message(),
                AllOf(HasSubstr("rank 1 (device 1)"), HasSubstr("unhandled system error")));
  });
  fake_.Change(1, [](NcclScript& script) { script.async_error = NcclResult::kSuccess; });
  RebuildWith(hub, ranks, kNobody);
}

TEST_F(CudaWorldTest, DeviceLost_FencesTheOthers_AndIsNotRebuilt) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  double value = 1;
  Outcome outcome;
  ASSERT_TRUE(ranks[1].world->Submit(SumOp(&value, 1), outcome.Callback()).ok());
  ASSERT_TRUE(WaitForKernels(1, 2));
  fake_.Change(1, [](NcclScript& script) { script.lose_device = true; });
  EXPECT_EQ(outcome.Await().code(), StatusCode::kDeviceLost);
  OnRanks(kAllRanks, [&](int rank) {
    Session& session = *ranks[static_cast<std::size_t>(rank)].session;
    while (session.failure().ok()) std::this_thread::yield();
    EXPECT_EQ(session.failure().code(), StatusCode::kDeviceLost);
    EXPECT_EQ(session.failure().detail().rank, 1);
  });
  while (ranks[1].session->membership().state != SessionState::kFailed) std::this_thread::yield();
  EXPECT_EQ(ranks[1].session->Rebuild({}).code(), StatusCode::kDeviceLost);
  // The process ends, and one with a device that works takes its seat.
  ranks[1] = {};
  hub.Kill(1);
  fake_.Change(1, [](NcclScript& script) { script.lose_device = false; });
  RebuildWith(hub, ranks, 1);
}

// What the service says of a device that begins nothing: the process is as one whose device is
// lost, and the others go on.
TEST_F(CudaWorldTest, DeviceThatHangs_IsNotRebuilt_AndTheOthersHeal) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  std::promise<void> ended;
  CudaStreamHandle stream = nullptr;
  ASSERT_EQ(FakeNccl::cuda().StreamCreateWithFlags(&stream, kCudaStreamNonBlocking),
            CudaResult::kSuccess);
  ASSERT_EQ(fake_.LaunchHostFunction(
                stream, [kernel = ended.get_future().share()] { kernel.wait_for(kTestBound); }),
            CudaResult::kSuccess);
  std::array<Outcome, 2> outcomes;
  std::array<double, 2> values = {1, 2};
  Operation behind = SumOp(&values[1], 1);
  behind.stream = stream;
  ASSERT_TRUE(ranks[1].world->Submit(behind, outcomes[1].Callback()).ok());
  ASSERT_TRUE(ranks[0].world->Submit(SumOp(&values[0], 0), outcomes[0].Callback()).ok());
  ASSERT_TRUE(WaitForKernels(0, 2));
  hub.Judge(StatusCode::kDeviceStalled, 1);
  for (Outcome& outcome : outcomes) EXPECT_EQ(outcome.Await().code(), StatusCode::kDeviceStalled);
  while (ranks[1].session->membership().state != SessionState::kFailed) std::this_thread::yield();
  EXPECT_EQ(ranks[1].session->Rebuild({}).code(), StatusCode::kDeviceStalled) << "at once";
  ended.set_value();  // As by the end of the process.
  ranks[1] = {};
  hub.Kill(1);
  RebuildWith(hub, ranks, 1);
  EXPECT_EQ(FakeNccl::cuda().StreamDestroy(stream), CudaResult::kSuccess);
}

// By the thread that submits, before the communicator knows the operation.
TEST_F(CudaWorldTest, DeviceLostBeforeAnOperation_FencesTheOthers) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  fake_.Change(1, [](NcclScript& script) { script.lose_device = true; });
  EXPECT_EQ(Sum(*ranks[1].world, 1, 1).status().code(), StatusCode::kDeviceLost);
  EXPECT_EQ(ranks[1].session->Rebuild({}).code(), StatusCode::kDeviceLost) << "at once";
  OnRanks(kAllRanks, [&](int rank) {
    Session& session = *ranks[static_cast<std::size_t>(rank)].session;
    EXPECT_EQ(session.AwaitFailure(Deadline::After(clock_.Now(), kTestBound)).code(),
              StatusCode::kDeviceLost);
    EXPECT_EQ(session.failure().detail().rank, 1);
  });
  ranks = {};
  fake_.Change(1, [](NcclScript& script) { script.lose_device = false; });
}

// What the program has done to its capture is its own: nothing is to be rebuilt.
TEST_F(CudaWorldTest, SpoiltCapture_IsNoFailureOfTheWorld) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  CudaApi cuda = FakeNccl::cuda();
  CudaStreamHandle stream = nullptr;
  ASSERT_EQ(cuda.StreamCreateWithFlags(&stream, kCudaStreamNonBlocking), CudaResult::kSuccess);
  ASSERT_EQ(fake_.BeginCapture(stream), CudaResult::kSuccess);
  fake_.SpoilCapture(stream);
  double value = 1;
  Operation op = SumOp(&value, 0);
  op.stream = stream;
  Outcome outcome;
  const Status refused = ranks[0].world->Submit(op, outcome.Callback()).status();
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition) << refused.ToString();
  EXPECT_THAT(refused.message(), HasSubstr("capture again"));
  EXPECT_TRUE(ranks[0].session->Rebuild({}).ok()) << "at once";
  CudaGraphHandle graph = nullptr;
  EXPECT_EQ(fake_.EndCapture(stream, &graph), CudaResult::kStreamCaptureInvalidated);
  ExpectSums(ranks);
  for (const Rank& rank : ranks) EXPECT_EQ(rank.session->membership().generation, 1u);
  EXPECT_EQ(cuda.StreamDestroy(stream), CudaResult::kSuccess);
}

TEST_F(CudaWorldTest, Mismatch_IsRaisedOnEveryRank_AndHeals) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  OnRanks(kAllRanks, [&](int rank) {
    Rank& self = ranks[static_cast<std::size_t>(rank)];
    double values[2] = {1, 1};
    Operation op = SumOp(values, rank);
    if (rank == 1) op.count = 2;
    Outcome outcome;
    const auto seq = self.world->Submit(op, outcome.Callback());
    EXPECT_EQ((seq.ok() ? outcome.Await() : seq.status()).code(), StatusCode::kMismatch);
    while (self.session->failure().ok()) std::this_thread::yield();
    ASSERT_TRUE(self.session->Rebuild({}).ok());
    ExpectSum(*self.world, rank);
  });
  EXPECT_THAT(fake_.TakeMisuse(), ::testing::Each(HasSubstr("is in another collective")));
}

TEST_F(CudaWorldTest, TwoRanksOnOneGpu_AreRefusedOnEveryRank_BeforeNccl) {
  shared_gpu_ = true;
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  OnRanks(kAllRanks, [&](int rank) {
    Rank& self = ranks[static_cast<std::size_t>(rank)];
    const Status status = Sum(*self.world, rank, 1).status();
    EXPECT_EQ(status.code(), StatusCode::kDuplicateDevice) << status.ToString();
    EXPECT_THAT(status.message(), AllOf(HasSubstr("ranks 0, 1, 2 on host"),
                                        HasSubstr("RESILIENT_ALLOW_SHARED_GPU=1")));
    // The world goes on, but for that.
    EXPECT_TRUE(self.session->failure().ok());
    EXPECT_EQ(Sum(*self.world, rank, 1).status().code(), StatusCode::kDuplicateDevice);
    double value = rank + 1;
    Outcome outcome;
    ASSERT_TRUE(self.world->Submit(SumOp(&value, kHost), outcome.Callback()).ok());
    EXPECT_TRUE(outcome.Await().ok());
    EXPECT_EQ(value, 6);
  });
  EXPECT_EQ(fake_.Counts().aborts_begun, 0);
}

// Through memory of the host.
class SharedGpuWorldTest : public CudaWorldTest {
 protected:
  SharedGpuWorldTest() {
    shared_gpu_ = true;
    shared_gpu_allowed_.fill(SharedGpu::kThroughHost);
  }
  ~SharedGpuWorldTest() override { EXPECT_EQ(fake_.Counts().unique_ids, 0) << "NCCL is not asked"; }
};

TEST_F(SharedGpuWorldTest, KilledRank_EndsWhatWaits_AndTheNextGenerationRuns) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  double value = 1;
  Outcome outcome;
  ASSERT_TRUE(ranks[0].world->Submit(SumOp(&value, 0), outcome.Callback()).ok());
  hub.Kill(2);
  const Status status = outcome.Await();
  EXPECT_EQ(status.code(), StatusCode::kRankLost) << status.ToString();
  EXPECT_EQ(status.detail().rank, 2);
  ranks[2] = {};
  RebuildWith(hub, ranks, 2);
  for (int i = 0; i < 4; ++i) ExpectSums(ranks);
  for (const Rank& rank : ranks) EXPECT_EQ(rank.session->membership().generation, 2u);
}

TEST_F(SharedGpuWorldTest, Mismatch_IsRaisedOnEveryRank_AndHeals) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  OnRanks(kAllRanks, [&](int rank) {
    Rank& self = ranks[static_cast<std::size_t>(rank)];
    double values[2] = {1, 1};
    Operation op = SumOp(values, rank);
    if (rank == 1) op.count = 2;
    Outcome outcome;
    const auto seq = self.world->Submit(op, outcome.Callback());
    EXPECT_EQ((seq.ok() ? outcome.Await() : seq.status()).code(), StatusCode::kMismatch);
    while (self.session->failure().ok()) std::this_thread::yield();
    EXPECT_THAT(self.session->failure().message(), HasSubstr("world/cuda"));
    ASSERT_TRUE(self.session->Rebuild({}).ok());
    ExpectSum(*self.world, rank);
  });
}

TEST_F(SharedGpuWorldTest, DeviceLost_FencesTheOthers) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  fake_.Change(1, [](NcclScript& script) { script.lose_device = true; });
  double value = 1;
  EXPECT_EQ(Sum(*ranks[1].world, 1, value).status().code(), StatusCode::kDeviceLost);
  OnRanks(kAllRanks, [&](int rank) {
    Session& session = *ranks[static_cast<std::size_t>(rank)].session;
    while (session.failure().ok()) std::this_thread::yield();
    EXPECT_EQ(session.failure().code(), StatusCode::kDeviceLost);
    EXPECT_EQ(session.failure().detail().rank, 1);
  });
  ranks = {};
  fake_.Change(1, [](NcclScript& script) { script.lose_device = false; });
}

TEST_F(SharedGpuWorldTest, OneRankThatIsNotLet_IsToldOnEveryRank) {
  shared_gpu_allowed_[1] = SharedGpu::kRefused;
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  OnRanks(kAllRanks, [&](int rank) {
    Rank& self = ranks[static_cast<std::size_t>(rank)];
    const Status status = Sum(*self.world, rank, 1).status();
    EXPECT_EQ(status.code(), StatusCode::kSetting) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("set RESILIENT_ALLOW_SHARED_GPU alike on all ranks"));
    EXPECT_TRUE(self.session->failure().ok());
  });
}

TEST_F(SharedGpuWorldTest, TwentyRebuilds_LeaveNothing) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  RebuildInTurn(ranks, 20);
  EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.pinned == kWorldSize; }));
}

TEST_F(CudaWorldTest, StreamsGoOnBehindAnOperation_WithoutTheHost) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  ExpectSums(ranks);
  CudaApi cuda = FakeNccl::cuda();
  CudaStreamHandle stream = nullptr;
  ASSERT_EQ(cuda.StreamCreateWithFlags(&stream, kCudaStreamNonBlocking), CudaResult::kSuccess);
  CudaEventHandle reached = nullptr;
  ASSERT_EQ(cuda.EventCreateWithFlags(&reached, kCudaEventDisableTiming), CudaResult::kSuccess);
  const auto mark = std::make_shared<LaunchMark>();
  std::array<double, kWorldSize> values = {1, 2, 3};
  std::array<Outcome, kWorldSize> outcomes;
  Operation op = SumOp(&values[0], 0);
  op.mark = mark;
  op.stream = stream;
  ASSERT_TRUE(ranks[0].world->Submit(op, outcomes[0].Callback()).ok());
  ASSERT_TRUE(mark->WaitFor(kTestBound)) << "launched, though the others have not come";
  ASSERT_TRUE(mark->Join(stream).ok());
  ASSERT_EQ(cuda.EventRecord(reached, stream), CudaResult::kSuccess);
  EXPECT_EQ(cuda.EventQuery(reached), CudaResult::kNotReady);
  for (const int rank : {1, 2}) {
    const auto at = static_cast<std::size_t>(rank);
    ASSERT_TRUE(ranks[at].world->Submit(SumOp(&values[at], rank), outcomes[at].Callback()).ok());
  }
  EXPECT_EQ(cuda.EventSynchronize(reached), CudaResult::kSuccess);
  EXPECT_EQ(values[0], 6) << "what is behind it sees what it has written";
  for (Outcome& outcome : outcomes) EXPECT_TRUE(outcome.Await().ok());
  EXPECT_TRUE(mark->Join(stream).ok()) << "at once, as it has ended";
  EXPECT_EQ(cuda.EventDestroy(reached), CudaResult::kSuccess);
  EXPECT_EQ(cuda.StreamDestroy(stream), CudaResult::kSuccess);
}

TEST_F(CudaWorldTest, NcclOptions_AreKeptOverARebuild) {
  nccl_ = {.max_ctas = 4, .net_name = "Socket"};
  const std::string of_world = "max_ctas=4 net_name=Socket";
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  std::array<std::shared_ptr<Group>, kWorldSize> pair;
  OnRanks(kAllRanks, [&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    ExpectSum(*ranks[at].world, rank);
    auto made = ranks[at].session->CreateGroup("all", kAllRanks, {.is_high_priority_stream = true});
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    pair[at] = *made;
    ExpectSum(*pair[at], rank);
    const Status wrong =
        ranks[at].session->CreateGroup("wrong", kAllRanks, {.max_ctas = 0}).status();
    EXPECT_EQ(wrong.code(), StatusCode::kSetting);
  });
  EXPECT_THAT(fake_.Counts().configs,
              ::testing::ElementsAre(of_world, of_world, of_world, "", "", ""));
  EXPECT_EQ(fake_.Counts().priorities.size(), 3u);
  ranks[0].world->Abort("it is tried");
  OnRanks(kAllRanks, [&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    while (ranks[at].session->failure().ok()) std::this_thread::yield();
    ASSERT_TRUE(ranks[at].session->Rebuild({}).ok());
    ExpectSum(*ranks[at].world, rank);
    ExpectSum(*pair[at], rank);
  });
  EXPECT_THAT(fake_.Counts().configs,
              ::testing::ElementsAre(of_world, of_world, of_world, "", "", "", of_world, of_world,
                                     of_world, "", "", ""));
  EXPECT_EQ(fake_.Counts().priorities.size(), 6u);
}

TEST_F(CudaWorldTest, FiftyRebuilds_LeaveNothing) {
  MembershipHub hub(kWorldSize);
  Ranks ranks = StartAll(hub);
  RebuildInTurn(ranks, 50);
  EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.communicators == 3; }));
}

}  // namespace
}  // namespace resilient::recovery
