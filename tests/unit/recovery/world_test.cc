// Goal: whole worlds heal: threads as ranks, real sessions, the real CPU fabric over loopback.
// Method: a membership hub in the process plays the service; "killing" a rank means that the hub
// gives it up and fences, as a service does when a process dies. Every collective's result is
// checked, and threads meet at latches, never after a time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <latch>
#include <map>
#include <thread>

#include <resilient/session.h>
#include <resilient/transports.h>

#include "tests/unit/recovery/membership_hub.h"

namespace resilient::recovery {
namespace {

using ::testing::HasSubstr;

constexpr int kWorldSize = 4;
const std::vector<int> kAllRanks = {0, 1, 2, 3};

// One rank: a session and the world's group.
struct Rank {
  std::shared_ptr<Session> session;
  std::shared_ptr<Group> world;
};

class WorldTest : public ::testing::Test {
 protected:
  Rank Start(MembershipHub& hub, int rank) {
    Result<Rank> started = TryStart(hub, rank);
    EXPECT_TRUE(started.ok()) << started.status().ToString();
    return started.ok() ? *started : Rank();
  }

  Result<Rank> TryStart(MembershipHub& hub, int rank) {
    SessionOptions options;
    options.rank = rank;
    options.world_size = kWorldSize;
    options.interrupt = GiveUpAtTestBound();
    auto session = OpenSession(
        options, hub.NewLine(),
        [this](CommunicatorEvents& events) { return MakeCpuFabric({}, clock_, events); }, clock_);
    RESILIENT_RETURN_IF_ERROR(session.status());
    RESILIENT_RETURN_IF_ERROR((*session)->Init());
    auto world = (*session)->CreateGroup(kWorldGroup, kAllRanks);
    RESILIENT_RETURN_IF_ERROR(world.status());
    return Rank{*session, *world};
  }

  static Operation SumOp(double* values, std::size_t count = 1) {
    Operation op;
    op.kind = OpKind::kAllReduce;
    op.dtype = DataType::kFloat64;
    op.reduce = ReduceOp::kSum;
    op.data = values;
    op.count = count;
    return op;
  }

  // Sums `value` over the group; the sum or why not.
  static Result<double> Sum(Group& group, double value) {
    Outcome outcome;
    auto seq = group.Submit(SumOp(&value), outcome.Callback());
    const Status status = seq.ok() ? outcome.Await() : seq.status();
    if (!status.ok()) return status;
    return value;
  }

  // Runs `body(rank)` on a thread for each rank.
  static void OnRanks(const std::vector<int>& ranks, const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (const int rank : ranks) threads.emplace_back([&body, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  std::array<Rank, kWorldSize> StartAll(MembershipHub& hub) {
    std::array<Rank, kWorldSize> ranks;
    OnRanks(kAllRanks, [&](int rank) { ranks[static_cast<std::size_t>(rank)] = Start(hub, rank); });
    return ranks;
  }

  static void ExpectSum(Group& group, int rank, double expected) {
    const Result<double> sum = Sum(group, rank + 1);
    ASSERT_TRUE(sum.ok()) << "rank " << rank << ": " << sum.status().ToString();
    EXPECT_EQ(*sum, expected);
  }

  static StatusCode CodeOf(const Result<double>& result) { return result.status().code(); }

  SystemClock clock_;
};

TEST_F(WorldTest, KilledRank_SurvivorsRaiseUntilRebuildAndGoOnWithTheNewcomer) {
  MembershipHub hub(kWorldSize);
  auto ranks = StartAll(hub);
  std::latch waiting(kWorldSize);
  std::thread killer([&] {
    waiting.wait();
    hub.Kill(2);
  });
  OnRanks(kAllRanks, [&](int rank) {
    Rank& self = ranks[static_cast<std::size_t>(rank)];
    ExpectSum(*self.world, rank, 10);
    if (rank == 2) {
      waiting.count_down();
      return;
    }
    auto pair =
        self.session->CreateGroup("pair", rank == 3 ? std::vector{2, 3} : std::vector{0, 1});
    ASSERT_TRUE(pair.ok());

    // In flight at the fence: rank 2 does not take part.
    double value = 1;
    Outcome outcome;
    ASSERT_TRUE(self.world->Submit(SumOp(&value), outcome.Callback()).ok());
    waiting.count_down();
    const Status status = outcome.Await();
    EXPECT_EQ(status.code(), StatusCode::kRankLost);
    EXPECT_EQ(status.detail().rank, 2);
    EXPECT_EQ(status.detail().seq, 2u);
    EXPECT_THAT(status.message(), HasSubstr("all_reduce(float64[1], sum)"));

    // Sticky, on every group and thread.
    EXPECT_EQ(CodeOf(Sum(*self.world, 1)), StatusCode::kRankLost);
    std::thread other([&] { EXPECT_EQ(CodeOf(Sum(**pair, 1)), StatusCode::kRankLost); });
    other.join();
    EXPECT_EQ(self.session->failure().code(), StatusCode::kRankLost);
  });
  killer.join();
  ranks[2] = {};

  OnRanks(kAllRanks, [&](int rank) {
    Rank& self = ranks[static_cast<std::size_t>(rank)];
    if (rank == 2) {
      self = Start(hub, rank);
    } else {
      const Status status = self.session->Rebuild({});
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
    EXPECT_EQ(self.session->membership().generation, 2u);
    for (int i = 0; i < 10; ++i) ExpectSum(*self.world, rank, 10);
    auto pair =
        self.session->CreateGroup("pair2", rank < 2 ? std::vector{0, 1} : std::vector{2, 3});
    ASSERT_TRUE(pair.ok());
    ExpectSum(**pair, rank, rank < 2 ? 3 : 7);
    if (rank != 2) {
      const Incident incident = *self.session->last_incident();
      EXPECT_EQ(incident.generation, 1u);
      EXPECT_LE(incident.known_unix_s, incident.aborted_unix_s);
      EXPECT_LE(incident.aborted_unix_s, incident.joined_unix_s);
      EXPECT_LE(incident.joined_unix_s, incident.rebuilt_unix_s);
      EXPECT_LE(incident.rebuilt_unix_s, incident.running_unix_s);
    }
  });
}

TEST_F(WorldTest, RanksKilledAtAnyMoment_EverySumIsRight) {
  constexpr int kKills = 20;
  MembershipHub hub(kWorldSize);
  std::atomic<bool> stop{false};
  std::atomic<int> sums{0};
  // A rank sums until all see the stop flag of one of them, or it is given up itself.
  const auto train = [&](int rank) {
    Result<Rank> started = TryStart(hub, rank);
    if (started.status().code() == StatusCode::kStaleGeneration) return;  // Killed in its init.
    ASSERT_TRUE(started.ok()) << started.status().ToString();
    Rank self = *started;
    for (;;) {
      const bool stopping = stop;
      const Result<double> sum = Sum(*self.world, rank + 1 + (stopping ? 1000 : 0));
      if (sum.ok()) {
        ++sums;
        EXPECT_EQ(static_cast<int>(*sum) % 1000, 10);
        if (*sum >= 1000) return;
        continue;
      }
      if (CodeOf(sum) == StatusCode::kStaleGeneration) return;
      ASSERT_EQ(CodeOf(sum), StatusCode::kRankLost) << sum.status().ToString();
      const Status status = self.session->Rebuild({});
      if (status.code() == StatusCode::kStaleGeneration) return;
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  };
  std::vector<std::thread> threads(kWorldSize);
  for (const int rank : kAllRanks) {
    threads[static_cast<std::size_t>(rank)] = std::thread([&train, rank] { train(rank); });
  }
  const Deadline bound = Deadline::After(clock_.Now(), 4 * kTestBound);
  for (int kill = 0; kill < kKills; ++kill) {
    // Somewhere in the middle: some sums after the last kill, or right on top of it.
    const int goal = sums + (kill % 3 == 0 ? 0 : 20);
    while (hub.generation() == 0 || sums < goal) {
      ASSERT_FALSE(bound.ExpiredAt(clock_.Now()));
      std::this_thread::yield();
    }
    const int victim = kill % kWorldSize;
    hub.Kill(victim);
    threads[static_cast<std::size_t>(victim)].join();
    threads[static_cast<std::size_t>(victim)] = std::thread([&train, victim] { train(victim); });
  }
  const int goal = sums + 20;
  while (sums < goal) {
    ASSERT_FALSE(bound.ExpiredAt(clock_.Now()));
    std::this_thread::yield();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(hub.generation(), 5u);
}

TEST_F(WorldTest, Mismatch_RaisesOnEveryRankAndHeals) {
  MembershipHub hub(kWorldSize);
  auto ranks = StartAll(hub);
  // A mismatch ends the operation before it as well, on a rank that still is in it.
  std::latch summed(kWorldSize);
  OnRanks(kAllRanks, [&](int rank) {
    Rank& self = ranks[static_cast<std::size_t>(rank)];
    ExpectSum(*self.world, rank, 10);
    summed.arrive_and_wait();
    Outcome outcome;
    double values[2] = {1, 1};
    const Operation op = SumOp(values, rank == 1 ? 2 : 1);
    // Where the fence of the others is faster than this rank, its operation does not even start.
    const auto seq = self.world->Submit(op, outcome.Callback());
    EXPECT_EQ((seq.ok() ? outcome.Await() : seq.status()).code(), StatusCode::kMismatch);
    // The fence may still be on its way; once it is here, Rebuild heals it.
    while (self.session->failure().ok()) std::this_thread::yield();
    EXPECT_EQ(CodeOf(Sum(*self.world, 1)), StatusCode::kMismatch);
    ASSERT_TRUE(self.session->Rebuild({}).ok());
    ExpectSum(*self.world, rank, 10);
    EXPECT_EQ(self.session->membership().generation, 2u);
  });
}

TEST_F(WorldTest, GroupAbort_EndsTheGenerationForAll) {
  MembershipHub hub(kWorldSize);
  auto ranks = StartAll(hub);
  std::latch waiting(3);
  OnRanks(kAllRanks, [&](int rank) {
    Rank& self = ranks[static_cast<std::size_t>(rank)];
    if (rank == 0) {
      waiting.wait();
      self.world->Abort("the user asked for it");
      while (self.session->failure().ok()) std::this_thread::yield();
    } else {
      Outcome outcome;
      ASSERT_TRUE(self.world->Submit({}, outcome.Callback()).ok());
      waiting.count_down();
      EXPECT_THAT(outcome.Await().message(), HasSubstr("the user asked for it"));
    }
    EXPECT_EQ(self.session->failure().code(), StatusCode::kCommFailed);
    ASSERT_TRUE(self.session->Rebuild({}).ok());
    ExpectSum(*self.world, rank, 10);
  });
}

TEST_F(WorldTest, RankThatLeaves_OperationsThatNeedItSayLeft) {
  MembershipHub hub(kWorldSize);
  auto ranks = StartAll(hub);
  OnRanks(kAllRanks, [&](int rank) {
    Rank& self = ranks[static_cast<std::size_t>(rank)];
    ExpectSum(*self.world, rank, 10);
    if (rank == 3) {
      self.session->Close();
      return;
    }
    EXPECT_EQ(CodeOf(Sum(*self.world, 1)), StatusCode::kLeft);
    EXPECT_TRUE(self.session->failure().ok()) << "a leave fences nobody";
  });
}

TEST_F(WorldTest, SeveralWorldsInOneProcess_AreIndependent) {
  MembershipHub first(kWorldSize);
  MembershipHub second(kWorldSize);
  auto a = StartAll(first);
  auto b = StartAll(second);
  first.Kill(0);
  OnRanks(kAllRanks, [&](int rank) {
    Rank& there = b[static_cast<std::size_t>(rank)];
    for (int i = 0; i < 10; ++i) ExpectSum(*there.world, rank, 10);
    Rank& here = a[static_cast<std::size_t>(rank)];
    while (here.session->failure().ok()) std::this_thread::yield();
    EXPECT_FALSE(Sum(*here.world, 1).ok());
    ExpectSum(*there.world, rank, 10);
  });
}

TEST_F(WorldTest, ForkedChild_IsRefusedAndTheRanksGoOn) {
  MembershipHub hub(kWorldSize);
  auto ranks = StartAll(hub);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const Status status = ranks[1].world->Submit({}, [](const Status&) {}).status();
    int wrong = status.code() == StatusCode::kForked ? 0 : 1;
    ranks = {};
    _exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  OnRanks(kAllRanks,
          [&](int rank) { ExpectSum(*ranks[static_cast<std::size_t>(rank)].world, rank, 10); });
}

}  // namespace
}  // namespace resilient::recovery
