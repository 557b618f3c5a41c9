// Goal: a world whose links break again and again ends with the results of an undisturbed one, and
// its program sees nothing of it; where one rank's program objects, all see the failure.
// Method: threads as ranks, real sessions with the replay layer, the real CPU fabric over loopback;
// the hub says that a link broke while operations are in flight. Every result is checked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <latch>
#include <thread>

#include <resilient/session.h>
#include <resilient/transports.h>

#include "tests/unit/recovery/membership_hub.h"

namespace resilient::recovery {
namespace {

constexpr int kWorldSize = 3;
const std::vector<int> kAllRanks = {0, 1, 2};
constexpr int kSteps = 60;

struct Rank {
  std::shared_ptr<Session> session;
  std::shared_ptr<Group> world;
};

class ReplayWorldTest : public ::testing::Test {
 protected:
  Rank Start(MembershipHub& hub, int rank, CpuFabricOptions fabric = {}) {
    SessionOptions options;
    options.rank = rank;
    options.world_size = kWorldSize;
    options.replay = true;
    options.interrupt = GiveUpAtTestBound();
    auto session = OpenSession(
        options, hub.NewLine(),
        [&](CommunicatorEvents& events) { return MakeCpuFabric(fabric, clock_, events); }, clock_);
    EXPECT_TRUE(session.ok()) << session.status().ToString();
    const Status joined = (*session)->Init();
    EXPECT_TRUE(joined.ok()) << joined.ToString();
    auto world = (*session)->CreateGroup(kWorldGroup, kAllRanks);
    EXPECT_TRUE(world.ok()) << world.status().ToString();
    return {*session, *world};
  }

  void OnRanks(MembershipHub& hub, const std::function<void(int, Rank&)>& body,
               CpuFabricOptions fabric = {}) {
    std::vector<std::thread> threads;
    threads.reserve(kWorldSize);
    for (const int rank : kAllRanks) {
      threads.emplace_back([&, rank] {
        Rank self = Start(hub, rank, fabric);
        body(rank, self);
        self.world->Close();
        self.session->Close();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  static Operation Of(OpKind kind, double* data, std::size_t count = 1) {
    Operation op;
    op.kind = kind;
    op.dtype = DataType::kFloat64;
    op.reduce = Reduces(kind) ? ReduceOp::kSum : ReduceOp::kNone;
    op.root = HasRoot(kind) ? 0 : -1;
    op.data = data;
    op.count = count;
    return op;
  }

  static Status End(Group& group, const Operation& op) {
    Outcome outcome;
    const auto seq = group.Submit(op, outcome.Callback());
    return seq.ok() ? outcome.Await() : seq.status();
  }

  // On the caller's thread, where it goes.
  static Status EndHere(Group& group, const Operation& op) {
    Outcome outcome;
    const auto ran = group.Run(op, outcome.Callback(), nullptr);
    if (!ran.ok()) return ran.status();
    return ran->outcome ? *ran->outcome : outcome.Await();
  }

  // One of each kind; the values tell step and rank.
  static void Step(Group& world, int rank, int step) {
    const double own = 100.0 * step + rank;
    const double total = 300.0 * step + 3;
    std::vector<double> sums(4096, own);
    Outcome summed;
    ASSERT_TRUE(
        world.Submit(Of(OpKind::kAllReduce, sums.data(), sums.size()), summed.Callback()).ok());
    double told = rank == 0 ? own : -1;
    const Status broadcast = End(world, Of(OpKind::kBroadcast, &told));
    ASSERT_TRUE(broadcast.ok()) << broadcast.ToString();
    EXPECT_EQ(told, 100.0 * step);
    ASSERT_TRUE(summed.Await().ok());
    EXPECT_EQ(sums, std::vector<double>(4096, total));

    double sum = own;
    const Status here = EndHere(world, Of(OpKind::kAllReduce, &sum));
    ASSERT_TRUE(here.ok()) << here.ToString();
    EXPECT_EQ(sum, total);

    std::array<double, kWorldSize> all{};
    double mine = own;
    Operation gather = Of(OpKind::kAllGather, &mine);
    for (double& one : all) gather.outputs.push_back({&one, 1});
    ASSERT_TRUE(End(world, gather).ok());
    for (int from = 0; from < kWorldSize; ++from) {
      EXPECT_EQ(all[static_cast<std::size_t>(from)], 100.0 * step + from);
    }

    std::array<double, kWorldSize> parts;
    parts.fill(own);
    Operation scatter = Of(OpKind::kReduceScatter, parts.data() + rank);  // Over its own part.
    for (double& part : parts) scatter.inputs.push_back({&part, 1});
    ASSERT_TRUE(End(world, scatter).ok());
    EXPECT_EQ(parts[static_cast<std::size_t>(rank)], total);
  }

  SystemClock clock_;
};

TEST_F(ReplayWorldTest, LinksBreakAgainAndAgain_ResultsAreThoseOfAnUndisturbedRun) {
  MembershipHub hub(kWorldSize);
  OnRanks(hub, [&](int rank, Rank& self) {
    for (int step = 0; step < kSteps && !HasFatalFailure(); ++step) {
      if (step % 5 == rank) hub.CutLink();
      Step(*self.world, rank, step);
    }
    EXPECT_TRUE(self.session->failure().ok());
  });
  EXPECT_GT(hub.generation(), 5u);
}

TEST_F(ReplayWorldTest, OverTcp_LikeThroughSharedMemory) {
  MembershipHub hub(kWorldSize);
  CpuFabricOptions fabric;
  fabric.shm_limit = 0;
  OnRanks(
      hub,
      [&](int rank, Rank& self) {
        for (int step = 0; step < kSteps && !HasFatalFailure(); ++step) {
          if (step % 7 == rank) hub.CutLink();
          Step(*self.world, rank, step);
        }
      },
      fabric);
  EXPECT_GT(hub.generation(), 5u);
}

TEST_F(ReplayWorldTest, OneAborts_AllSeeIt) {
  MembershipHub hub(kWorldSize);
  std::latch stepped(kWorldSize);
  OnRanks(hub, [&](int rank, Rank& self) {
    Step(*self.world, rank, 1);
    stepped.arrive_and_wait();
    double value = 1;
    if (rank == 1) {
      self.world->Abort("on purpose");
    } else {
      EXPECT_EQ(End(*self.world, Of(OpKind::kAllReduce, &value)).code(), StatusCode::kCommFailed);
    }
    EXPECT_EQ(self.session->AwaitFailure(Deadline::After(clock_.Now(), kTestBound)).code(),
              StatusCode::kCommFailed);
    const Status rebuilt = self.session->Rebuild({});
    ASSERT_TRUE(rebuilt.ok()) << rebuilt.ToString();
    Step(*self.world, rank, 2);
  });
}

TEST_F(ReplayWorldTest, AMessageThatLeftAndDidNotArrive_AllSeeTheFailure) {
  MembershipHub hub(kWorldSize);
  std::latch sent(kWorldSize);
  OnRanks(hub, [&](int rank, Rank& self) {
    Step(*self.world, rank, 1);
    double value = 1;
    if (rank == 0) {
      Operation send = Of(OpKind::kSend, &value);
      send.peer = 1;
      ASSERT_TRUE(End(*self.world, send).ok());
    }
    sent.arrive_and_wait();
    if (rank == 0) hub.CutLink();
    const Status failure = self.session->AwaitFailure(Deadline::After(clock_.Now(), kTestBound));
    EXPECT_EQ(failure.code(), StatusCode::kCommFailed);
    EXPECT_THAT(failure.message(), ::testing::HasSubstr("lost on their way"));
    const Status rebuilt = self.session->Rebuild({});
    ASSERT_TRUE(rebuilt.ok()) << rebuilt.ToString();
    Step(*self.world, rank, 2);
  });
}

TEST_F(ReplayWorldTest, AGroupThatOneHasClosed_AllSeeTheFailure) {
  MembershipHub hub(kWorldSize);
  std::latch closed(kWorldSize);
  OnRanks(hub, [&](int rank, Rank& self) {
    Step(*self.world, rank, 1);
    double value = 1;
    std::shared_ptr<Group> pair;
    if (rank < 2) {
      pair = self.session->CreateGroup("pair", {0, 1}).value();
      ASSERT_TRUE(End(*pair, Of(OpKind::kAllReduce, &value)).ok());
    }
    if (rank == 0) {
      Operation send = Of(OpKind::kSend, &value);
      send.peer = 1;
      ASSERT_TRUE(End(*pair, send).ok());
      pair->Close();
    }
    closed.arrive_and_wait();
    if (rank == 2) hub.CutLink();
    const Status failure = self.session->AwaitFailure(Deadline::After(clock_.Now(), kTestBound));
    EXPECT_EQ(failure.code(), StatusCode::kCommFailed);
    EXPECT_THAT(failure.message(), ::testing::HasSubstr("made or closed on only some"));
    if (rank == 1) {
      Operation receive = Of(OpKind::kRecv, &value);
      receive.peer = 0;
      EXPECT_EQ(End(*pair, receive).code(), StatusCode::kCommFailed);
    }
    if (pair != nullptr) pair->Close();
    const Status rebuilt = self.session->Rebuild({});
    ASSERT_TRUE(rebuilt.ok()) << rebuilt.ToString();
    Step(*self.world, rank, 2);
  });
}

TEST_F(ReplayWorldTest, AMessageThatIsAwaited_ArrivesInTheNextGeneration) {
  MembershipHub hub(kWorldSize);
  std::latch posted(kWorldSize);
  OnRanks(hub, [&](int rank, Rank& self) {
    Step(*self.world, rank, 1);
    double value = rank;
    int sender = -1;
    Outcome received;
    if (rank == 1) {
      Operation receive = Of(OpKind::kRecv, &value);
      receive.peer = kAnyPeer;
      receive.sender = &sender;
      ASSERT_TRUE(self.world->Submit(receive, received.Callback()).ok());
    }
    posted.arrive_and_wait();
    if (rank == 2) {
      hub.CutLink();
      // What leaves before this rank has heard of it would be lost.
      std::uint64_t after = 0;
      for (auto kind = SessionEvent::Kind::kRunning; kind != SessionEvent::Kind::kFenced;) {
        const auto event =
            self.session->AwaitEvent(after, Deadline::After(clock_.Now(), kTestBound));
        ASSERT_TRUE(event.ok()) << event.status().ToString();
        after = event->number;
        kind = event->kind;
      }
      value = 42;
      Operation send = Of(OpKind::kSend, &value);
      send.peer = 1;
      ASSERT_TRUE(End(*self.world, send).ok());
    }
    if (rank == 1) {
      ASSERT_TRUE(received.Await().ok());
      EXPECT_EQ(value, 42);
      EXPECT_EQ(sender, 2);
    }
    Step(*self.world, rank, 2);
  });
}

}  // namespace
}  // namespace resilient::recovery
