// Goal: a bound of an operation ends it on all ranks, with a text that names who is missing and
// which bound it was; and without one a rank that is late is waited for. Method: ranks are fabrics
// of one process; a rank that stands still is a connection of the test's own, or a caller that does
// not come back from its callback.

#include <future>
#include <utility>

#include <gmock/gmock.h>

#include "runtime/comm/op_timeouts.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/fake_rank.h"

namespace resilient::testing {
namespace {

using Data = std::vector<float>;
using ::testing::HasSubstr;
using Verdict = OpTimeouts::Verdict;

constexpr Duration kSecond = std::chrono::seconds(1);
constexpr std::size_t kLargeCount = 2u << 20;  // Elements; far more than buffers and windows hold.

constexpr Instant kNobodyHeld = Instant::min();

Instant At(int seconds) { return Instant(seconds * kSecond); }

TEST(OpTimeouts, WithoutBounds_IsAlwaysInTime) {
  OpTimeouts timeouts(Operation{}, At(1));
  timeouts.OnAllEntered(At(2));
  EXPECT_EQ(timeouts.Check(At(1 << 30), kNobodyHeld), Verdict::kInTime);
  EXPECT_EQ(timeouts.NextCheck(At(3), kNobodyHeld), kNever);
}

TEST(OpTimeouts, Timeout_CountsFromSubmissionWhateverMoves) {
  OpTimeouts timeouts(Bounded({}, 5 * kSecond, {}), At(10));
  EXPECT_EQ(timeouts.NextCheck(At(10), kNobodyHeld), At(15));
  timeouts.OnAllEntered(At(14));
  timeouts.OnMoved(At(14));
  EXPECT_EQ(timeouts.Check(At(15) - Duration(1), kNobodyHeld), Verdict::kInTime);
  EXPECT_EQ(timeouts.Check(At(15), kNobodyHeld), Verdict::kTimedOut);
  EXPECT_EQ(timeouts.Since(Verdict::kTimedOut), At(10));
}

TEST(OpTimeouts, Stall_CountsFromWhenAllHaveEnteredAndAnewWhenSomethingMoves) {
  OpTimeouts timeouts(Bounded({}, {}, 5 * kSecond), At(10));
  timeouts.OnMoved(At(11));
  EXPECT_EQ(timeouts.Check(At(1000), kNobodyHeld), Verdict::kInTime) << "a rank is late";
  EXPECT_EQ(timeouts.NextCheck(At(1000), kNobodyHeld), At(1005));
  timeouts.OnAllEntered(At(1000));
  timeouts.OnAllEntered(At(1004));
  EXPECT_EQ(timeouts.NextCheck(At(1001), kNobodyHeld), At(1005));
  timeouts.OnMoved(At(1003));
  EXPECT_EQ(timeouts.Check(At(1008) - Duration(1), kNobodyHeld), Verdict::kInTime);
  EXPECT_EQ(timeouts.Check(At(1008), kNobodyHeld), Verdict::kStalled);
  EXPECT_EQ(timeouts.Since(Verdict::kStalled), At(1003));
}

TEST(OpTimeouts, Stall_AfterAStopOfThisProcess_CountsAnew) {
  OpTimeouts timeouts(Bounded({}, {}, 5 * kSecond), At(10));
  timeouts.OnAllEntered(At(10));
  EXPECT_EQ(timeouts.Check(At(100), kNobodyHeld), Verdict::kInTime);
  EXPECT_EQ(timeouts.NextCheck(At(100), kNobodyHeld), At(105));
  EXPECT_EQ(timeouts.Check(At(105), kNobodyHeld), Verdict::kStalled);
}

TEST(OpTimeouts, Stall_WhileSomebodyIsHeld_CountsFromTheEndOfTheHold) {
  OpTimeouts timeouts(Bounded({}, {}, 5 * kSecond), At(10));
  timeouts.OnAllEntered(At(10));
  EXPECT_EQ(timeouts.Check(At(30), At(100)), Verdict::kInTime);
  EXPECT_EQ(timeouts.NextCheck(At(30), At(100)), At(35)) << "the hold may end at any time";
  EXPECT_EQ(timeouts.Check(At(44), At(40)), Verdict::kInTime) << "released at 40";
  EXPECT_EQ(timeouts.NextCheck(At(44), At(40)), At(45));
  EXPECT_EQ(timeouts.Check(At(45), At(40)), Verdict::kStalled);
  EXPECT_EQ(timeouts.Since(Verdict::kStalled), At(10));
}

TEST(OpTimeouts, Timeout_CountsThroughAHold) {
  OpTimeouts timeouts(Bounded({}, 5 * kSecond, {}), At(10));
  EXPECT_EQ(timeouts.NextCheck(At(10), At(100)), At(15));
  EXPECT_EQ(timeouts.Check(At(15), At(100)), Verdict::kTimedOut);
}

TEST(OpTimeouts, BothBounds_TheEarlierOneCounts) {
  OpTimeouts timeouts(Bounded({}, 10 * kSecond, 5 * kSecond), At(0));
  timeouts.OnAllEntered(At(3));
  EXPECT_EQ(timeouts.NextCheck(At(3), kNobodyHeld), At(8));
  timeouts.OnMoved(At(7));
  EXPECT_EQ(timeouts.NextCheck(At(7), kNobodyHeld), At(10));
  EXPECT_EQ(timeouts.Check(At(12), kNobodyHeld), Verdict::kTimedOut);
}

TEST(OpTimeouts, HugeBounds_AreNever) {
  OpTimeouts timeouts(Bounded({}, Duration::max(), Duration::max()), At(10));
  timeouts.OnAllEntered(At(10));
  EXPECT_EQ(timeouts.Check(At(1 << 30), kNobodyHeld), Verdict::kInTime);
}

TEST(CpuFabric, Interfaces_SayWhereItListens) {
  const SystemClock clock;
  EventLog events;
  CpuFabricOptions options;
  options.bind_address = "192.0.2.1";  // Of nobody.
  options.interfaces = "none0,lo";
  const auto fabric = MakeCpuFabric(options, clock, events);
  ASSERT_TRUE(fabric.ok()) << fabric.status().ToString();
  EXPECT_THAT((*fabric)->endpoint(), HasSubstr("127.0.0.1:"));
  options.interfaces = "none0";
  const Status status = MakeCpuFabric(options, clock, events).status();
  EXPECT_EQ(status.code(), StatusCode::kSetting);
  EXPECT_THAT(status.message(), HasSubstr("lo (127.0.0.1)"));
}

class Deadlines : public ::testing::TestWithParam<Transport> {
 protected:
  std::unique_ptr<World> MakeWorld(int size) {
    auto world = std::make_unique<World>(GetParam(), size);
    ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));
    return world;
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, Deadlines, ::testing::ValuesIn(AllTransports()),
                         [](const auto& info) { return info.param.name; });

struct Kind {
  std::string name;
  std::function<Operation(int rank, Data& data)> make;
};

// In all of them rank 2 is needed by everyone.
std::vector<Kind> NeedAll() {
  return {{"all_reduce", [](int, Data& d) { return AllReduceOp(d); }},
          {"barrier", [](int, Data&) { return BarrierOp(); }},
          {"broadcast", [](int, Data& d) { return BroadcastOp(d, 2); }}};
}

// In all of them somebody needs rank 2.
std::vector<Kind> NeedSome() {
  std::vector<Kind> kinds = NeedAll();
  kinds.push_back({"broadcast from 0", [](int, Data& d) { return BroadcastOp(d, 0); }});
  kinds.push_back({"reduce", [](int, Data& d) {
                     Operation op = AllReduceOp(d);
                     op.kind = OpKind::kReduce;
                     op.root = 0;
                     return op;
                   }});
  return kinds;
}

TEST_P(Deadlines, Timeout_RankThatDoesNotCome_FailsTheOthersInTimeAndItselfLater) {
  for (const Kind& kind : NeedAll()) {
    SCOPED_TRACE(kind.name);
    const auto world = MakeWorld(3);
    std::vector<Data> data(3, Data(100));
    const Instant start = world->clock.Now();
    std::vector<Pending> pending;
    for (const int rank : {0, 1}) {
      Operation op =
          Bounded(kind.make(rank, data[static_cast<std::size_t>(rank)]), Millis(300), {});
      op.call_site = "train.py:31";
      pending.push_back(Pending::Of(world->at(rank), op));
    }
    for (const Pending& one : pending) {
      const Status status = one.Wait();
      EXPECT_EQ(status.code(), StatusCode::kCommFailed) << status.ToString();
      EXPECT_THAT(status.message(), HasSubstr("rank 2 (node2, pid 1002) has not entered it"));
      EXPECT_THAT(status.message(), HasSubstr("at train.py:31"));
      EXPECT_THAT(status.message(), HasSubstr("its timeout of 0.3 s"));
      EXPECT_THAT(status.message(), HasSubstr("group world, operation 2"));
      EXPECT_EQ(status.detail().rank, 2);
    }
    EXPECT_GE(world->clock.Now() - start, Millis(300));
    // What the others say waits behind the operation that they have entered; in shared memory it
    // does not, and a rank that has not heard it yet finds all that it needs.
    if (!GetParam().roots_run_ahead) {
      EXPECT_TRUE(world->log(2).WaitFor([](EventLog& log) { return log.stalls.size() == 1; }));
    }
    const Operation op = kind.make(2, data[2]);
    EXPECT_EQ(Pending::Try(world->at(2), op).Wait().code(), StatusCode::kCommFailed);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(world->log(rank).WaitFor([](EventLog& log) { return log.stalls.size() == 1; }));
      EXPECT_EQ(Pending::Try(world->at(rank), BarrierOp()).Wait().code(), StatusCode::kCommFailed);
    }
  }
}

TEST_P(Deadlines, Timeout_OfSendAndRecv_NamesThePeer) {
  Data data(40u << 20);  // More than the other side keeps for a recv to come.
  for (const bool sends : {true, false}) {
    for (const int peer : {1, kAnyPeer}) {
      if (sends && peer == kAnyPeer) continue;
      const auto world = MakeWorld(2);
      const Operation op = sends ? SendOp(data, peer, 0) : RecvOp(data, peer, 0);
      const Status status = Pending::Of(world->at(0), Bounded(op, Millis(300), {})).Wait();
      EXPECT_EQ(status.code(), StatusCode::kCommFailed) << status.ToString();
      const std::string who =
          peer == kAnyPeer ? "no rank has sent for it" : "rank 1 (node1, pid 1001) has not ";
      EXPECT_THAT(status.message(), HasSubstr(who));
      EXPECT_NEAR(status.detail().since_unix_s, world->clock.WallSeconds(), 30);
      EXPECT_TRUE(world->log(1).WaitFor([](EventLog& log) { return log.stalls.size() == 1; }));
    }
  }
}

TEST_P(Deadlines, Timeout_WhatEndsInTime_IsLeftAlone) {
  const auto world = MakeWorld(3);
  std::vector<Data> data(3, Data(kLargeCount, 1.0f));
  for (int i = 0; i < 5; ++i) {
    ExpectAllOk(world->RunAll([&](int rank) {
      return Bounded(AllReduceOp(data[static_cast<std::size_t>(rank)]), kBound, kBound);
    }));
  }
  EXPECT_EQ(data[2][kLargeCount - 1], 243.0f);
}

TEST_P(Deadlines, Stall_RankThatIsLate_IsWaitedFor) {
  constexpr Duration kStall = 2 * kSecond;  // A busy machine stands still for a moment, too.
  const auto world = MakeWorld(3);
  const std::vector<Kind> kinds = NeedSome();
  std::vector<std::vector<Data>> data(kinds.size(), std::vector<Data>(3, Data(kLargeCount)));
  std::vector<std::vector<std::shared_ptr<Communicator>>> groups;
  for (const Kind& kind : kinds) groups.push_back(world->CreateAll(kind.name));
  std::vector<Pending> pending;
  const auto submit = [&](std::size_t rank) {
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      const Operation op = kinds[i].make(static_cast<int>(rank), data[i][rank]);
      pending.push_back(Pending::Of(*groups[i][rank], Bounded(op, {}, kStall)));
    }
  };
  submit(0);
  submit(1);
  Elapse(*world, kStall + kSecond / 2);
  submit(2);
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok()) << one.Wait().ToString();
}

TEST_P(Deadlines, Stall_RecvThatIsLate_IsWaitedFor) {
  const auto world = MakeWorld(2);
  Data sent(40u << 20, 2.0f), got(40u << 20);
  const Pending send = Pending::Of(world->at(0), Bounded(SendOp(sent, 1, 0), {}, Millis(50)));
  Elapse(*world, Millis(300));
  EXPECT_FALSE(send.IsDone());
  const Pending recv = Pending::Of(world->at(1), Bounded(RecvOp(got, 0, 0), {}, kBound));
  EXPECT_TRUE(send.Wait().ok());
  EXPECT_TRUE(recv.Wait().ok());
  EXPECT_EQ(got, sent);
}

// From now on some rank is held, for `time`; until what is returned.
Instant HoldAll(World& world, Duration time) {
  const Instant until = world.clock.Now() + time;
  for (const auto& fabric : world.fabrics) fabric->Hold(until);
  return until;
}

TEST_P(Deadlines, Stall_RankThatStandsStillInACollective_FailsAll) {
  const auto world = MakeWorld(2);
  const GroupSpec spec = SpecWithFake(*world, 0);
  const std::vector<std::shared_ptr<Communicator>> group = {
      world->Create(0, spec), world->Create(1, SpecWithFake(*world, 1))};
  FakeRank fake(*world, spec, 2, Lane::kCollective);
  std::vector<Data> data(2, Data(100));
  std::vector<Pending> pending;
  const Instant start = HoldAll(*world, Millis(700));
  for (std::size_t rank = 0; rank < 2; ++rank)
    pending.push_back(Pending::Of(*group[rank], Bounded(AllReduceOp(data[rank]), {}, Millis(300))));
  fake.EnterAndStand(AllReduceOp(data[0]), 1, 400, 100);
  for (const Pending& one : pending) {
    const Status status = one.Wait();
    EXPECT_EQ(status.code(), StatusCode::kCommStalled) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("rank 2 (fake, pid 66)"));
    EXPECT_THAT(status.message(), HasSubstr("nothing has moved between them for 0.3 s"));
    EXPECT_THAT(status.message(), HasSubstr("RESILIENT_OP_DEADLINE"));
    EXPECT_EQ(status.detail().rank, 2);
  }
  EXPECT_GE(world->clock.Now() - start, Millis(300));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(world->log(rank).WaitFor([](EventLog& log) { return log.stalls.size() == 1; }));
  }
}

TEST_P(Deadlines, Stall_SenderThatStandsStill_FailsTheRecv) {
  for (const bool recv_first : {true, false}) {
    const auto world = MakeWorld(1);
    const GroupSpec spec = SpecWithFake(*world, 0);
    const auto group = world->Create(0, spec);
    Data data(100);
    std::optional<Pending> recv;
    const auto submit = [&] {
      recv = Pending::Of(*group, Bounded(RecvOp(data, 1, 0), {}, Millis(300)));
    };
    Operation op = SendOp(data, 0, 0);
    const Instant start = HoldAll(*world, Millis(700));
    if (recv_first) submit();
    FakeRank fake(*world, spec, 1, Lane::kPointToPoint);
    fake.EnterAndStand(op, 1, 400, 100);
    if (!recv_first) submit();
    const Status status = recv->Wait();
    EXPECT_EQ(status.code(), StatusCode::kCommStalled) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("rank 1 (fake, pid 66)"));
    EXPECT_GE(world->clock.Now() - start, Millis(300)) << "it was held";
  }
}

TEST_P(Deadlines, Stall_CallerThatStandsStillInSharedMemory_FailsAll) {
  if (GetParam().roots_run_ahead) GTEST_SKIP() << "here no caller runs its own operation";
  const auto world = MakeWorld(2);
  std::vector<Data> data(2, Data(kLargeCount));
  std::promise<void> entered, go_on;
  bool asked = false;
  std::future<Result<Communicator::Ran>> other = std::async(std::launch::async, [&] {
    return world->at(1).Run(
        AllReduceOp(data[1]), [](const Status&) { ADD_FAILURE() << "the outcome is returned"; },
        [&] {
          if (!std::exchange(asked, true)) {
            entered.set_value();
            go_on.get_future().wait();
          }
          return true;
        });
  });
  ASSERT_EQ(entered.get_future().wait_for(kBound), std::future_status::ready);
  const Instant start = HoldAll(*world, Millis(700));
  const Status status =
      Pending::Of(world->at(0), Bounded(AllReduceOp(data[0]), {}, Millis(300))).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommStalled) << status.ToString();
  EXPECT_GE(world->clock.Now() - start, Millis(300)) << "it was held";
  EXPECT_THAT(status.message(), HasSubstr("rank 1 (node1, pid 1001)"));
  EXPECT_TRUE(world->log(1).WaitFor([](EventLog& log) { return log.stalls.size() == 1; }));
  go_on.set_value();
  const Result<Communicator::Ran> ran = other.get();
  ASSERT_TRUE(ran.ok() && ran->outcome);
  EXPECT_EQ(ran->outcome->code(), StatusCode::kCommStalled);
}

}  // namespace
}  // namespace resilient::testing
