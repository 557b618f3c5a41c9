// Goal: whatever goes wrong between ranks ends with the right cause on the right rank, and nothing
// ever returns a wrong result. Method: ranks are fabrics of one process; every test makes one thing
// go wrong and waits for what must follow.

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <thread>

#include "runtime/base/log.h"
#include "runtime/comm/endpoint.h"
#include "runtime/comm/mismatch.h"
#include "runtime/comm/wire.h"
#include "runtime/net/socket.h"
#include "tests/support/descriptors.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {
namespace {

// What an abort may take; without sanitizers it is a few milliseconds.
constexpr Millis kAbortBound(500);

const Status kLost(StatusCode::kRankLost, "rank 9 (nowhere, pid 9) was killed");

class Failure : public ::testing::TestWithParam<Transport> {
 protected:
  std::unique_ptr<World> MakeWorld(int size) { return std::make_unique<World>(GetParam(), size); }
  // The least size in which the first and the last rank are on one host, if any two are.
  int SizeWithAPair() const { return GetParam().host_of ? 3 : 2; }
};

INSTANTIATE_TEST_SUITE_P(Transports, Failure, ::testing::ValuesIn(AllTransports()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Encrypted, Failure, ::testing::ValuesIn(EncryptedTransports()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Striped, Failure, ::testing::Values(StripedTransport(3)),
                         [](const auto& info) { return info.param.name; });

// One rank differs from the others in one thing.
struct Difference {
  std::string what;
  std::function<Operation(std::vector<float>&, std::vector<std::vector<float>>&)> usual;
  std::function<Operation(std::vector<float>&, std::vector<std::vector<float>>&)> odd;
};

using Data = std::vector<float>;
using Outputs = std::vector<std::vector<float>>;

std::vector<Difference> Differences() {
  const auto sum = [](Data& d, Outputs&) { return AllReduceOp(d); };
  const auto max = [](Data& d, Outputs&) { return AllReduceOp(d, ReduceOp::kMax); };
  const auto fewer = [](Data& d, Outputs&) {
    Operation op = AllReduceOp(d);
    op.count -= 2;
    return op;
  };
  const auto ints = [](Data& d, Outputs&) {
    Operation op = AllReduceOp(d);
    op.dtype = DataType::kInt32;
    return op;
  };
  const auto root0 = [](Data& d, Outputs&) { return BroadcastOp(d, 0); };
  const auto root1 = [](Data& d, Outputs&) { return BroadcastOp(d, 1); };
  const auto gather = [](Data& d, Outputs& o) { return AllGatherOp(d, o); };
  const auto barrier = [](Data&, Outputs&) { return BarrierOp(); };
  return {{"reduce", sum, max},
          {"count", sum, fewer},
          {"dtype", sum, ints},
          {"root", root0, root1},
          {"root, odd first", root1, root0},
          {"all_reduce/all_gather", sum, gather},
          {"all_reduce/barrier", sum, barrier},
          {"barrier/broadcast", barrier, root0},
          {"broadcast/all_reduce", root0, sum},
          {"all_gather/broadcast", gather, root1}};
}

TEST_P(Failure, Mismatch_OfAnyField_IsToldAndNobodyGetsAWrongResult) {
  for (const std::size_t count : {std::size_t{6}, std::size_t{200'000}}) {
    for (const Difference& difference : Differences()) {
      for (int size = 2; size <= 3; ++size) {
        for (int odd = 0; odd < size; ++odd) {
          SCOPED_TRACE(difference.what + ", rank " + std::to_string(odd) + " of " +
                       std::to_string(size) + ", count " + std::to_string(count));
          const auto world = MakeWorld(size);
          const auto n = static_cast<std::size_t>(size);
          std::vector<Data> data;
          std::vector<Outputs> outputs(n, Outputs(n, Data(count)));
          for (std::size_t r = 0; r < n; ++r) data.emplace_back(count, static_cast<float>(r + 1));
          std::vector<Operation> ops;
          const std::vector<Status> outcomes = world->RunAll([&](int rank) {
            const auto r = static_cast<std::size_t>(rank);
            ops.push_back((rank == odd ? difference.odd : difference.usual)(data[r], outputs[r]));
            ops.back().call_site = "train.py:" + std::to_string(30 + rank);
            return ops.back();
          });
          for (std::size_t r = 0; r < n; ++r) {
            if (outcomes[r].code() == StatusCode::kMismatch) {
              EXPECT_NE(outcomes[r].message().find("train.py:"), std::string::npos);
              EXPECT_NE(outcomes[r].message().find("group world, operation 1"), std::string::npos);
              continue;
            }
            // Only a broadcast can be over before the difference is seen; then its data is right.
            ASSERT_TRUE(outcomes[r].ok()) << outcomes[r].ToString();
            ASSERT_EQ(ops[r].kind, OpKind::kBroadcast);
            EXPECT_EQ(data[r], Data(count, static_cast<float>(ops[r].root + 1)));
          }
          // Sooner or later all know, and nothing more runs.
          for (int r = 0; r < size; ++r) {
            EXPECT_TRUE(
                world->log(r).WaitFor([](EventLog& log) { return log.mismatches.size() == 1; }));
            EXPECT_EQ(world->at(r).Submit(BarrierOp(), nullptr).status().code(),
                      StatusCode::kMismatch);
          }
        }
      }
    }
  }
}

TEST_P(Failure, Mismatch_BothTakeTheOtherForTheRoot_IsFoundThoughNobodySends) {
  const auto world = MakeWorld(2);
  std::vector<Data> data(2, Data(4));
  const auto outcomes = world->RunAll(
      [&](int rank) { return BroadcastOp(data[static_cast<std::size_t>(rank)], 1 - rank); });
  for (const Status& status : outcomes) EXPECT_EQ(status.code(), StatusCode::kMismatch);
}

TEST_P(Failure, Mismatch_NamesBothSides) {
  const auto world = MakeWorld(2);
  Data a(4), b(6);
  Operation here = AllReduceOp(a);
  here.call_site = "train.py:31";
  Operation there = AllReduceOp(b);
  there.call_site = "train.py:30";
  const auto outcomes = world->RunAll([&](int rank) { return rank == 0 ? here : there; });
  for (const Status& status : outcomes) {
    for (const char* part : {"rank 0 (node0, pid 1000)", "rank 1 (node1, pid 1001)",
                             "all_reduce(float32[6], sum) at train.py:30",
                             "all_reduce(float32[4], sum) at train.py:31"}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
    EXPECT_EQ(status.detail().group, "world");
    EXPECT_EQ(status.detail().seq, 1u);
  }
}

TEST_P(Failure, Mismatch_OfARootThatRanAhead_IsFoundLater) {
  if (!GetParam().roots_run_ahead) GTEST_SKIP() << "here a root waits for all";
  const auto world = MakeWorld(2);
  Data data(4);
  for (int i = 0; i < 3; ++i)
    EXPECT_TRUE(Pending::Of(world->at(0), BroadcastOp(data, 0)).Wait().ok());
  Data other(4);
  const Pending late = Pending::Of(world->at(1), AllReduceOp(other));
  EXPECT_EQ(late.Wait().code(), StatusCode::kMismatch);
  EXPECT_TRUE(world->log(0).WaitFor([](EventLog& log) { return log.mismatches.size() == 1; }));
}

TEST_P(Failure, Mismatch_OfSendAndRecv) {
  const auto world = MakeWorld(2);
  Data four(4), five(5);
  const Pending send = Pending::Of(world->at(0), SendOp(four, 1, 0));
  const Status status = Pending::Of(world->at(1), RecvOp(five, 0, 0)).Wait();
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_NE(status.message().find("float32[4]"), std::string::npos) << status.message();
  const Status sent = send.Wait();  // It may be with the kernel before the recv is known.
  EXPECT_TRUE(sent.ok() || sent.code() == StatusCode::kMismatch) << sent.ToString();
}

TEST_P(Failure, Mismatch_OfSendAndRecvFromAny) {
  for (const bool send_first : {false, true}) {
    const auto world = MakeWorld(3);
    Data four(4), five(5);
    std::vector<Pending> others;
    if (send_first) {
      others.push_back(Pending::Of(world->at(2), SendOp(four, 1, 0)));
      EXPECT_TRUE(others[0].Wait().ok());
    }
    const Pending recv = Pending::Of(world->at(1), RecvOp(five, kAnyPeer, 0));
    if (!send_first) others.push_back(Pending::Of(world->at(2), SendOp(four, 1, 0)));
    const Status status = recv.Wait();
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_NE(status.message().find("recv(float32[5], from any rank, tag 0)"), std::string::npos)
        << status.message();
    EXPECT_EQ(status.detail().rank, 2);
    const Status sent = others[0].Wait();  // Its memory is in use until then.
    EXPECT_TRUE(sent.ok() || sent.code() == StatusCode::kMismatch) << sent.ToString();
  }
}

TEST_P(Failure, Abort_InTheMiddleOfALargeOperation_EndsItAtOnceAndFreesTheMemory) {
  for (const int present : {2, 3}) {
    const auto world = MakeWorld(3);
    std::vector<std::unique_ptr<Data>> data;
    std::vector<Pending> pending;
    for (int r = 0; r < present; ++r) {
      data.push_back(std::make_unique<Data>(16u << 20, 1.0f));
      pending.push_back(Pending::Of(world->at(r), AllReduceOp(*data.back())));
      pending.push_back(Pending::Of(world->at(r), BarrierOp()));
    }
    // An operation of another group that has come and gone says that the threads are at it.
    const auto other = world->CreateAll("other");
    std::vector<Pending> barriers;
    for (const auto& one : other) barriers.push_back(Pending::Of(*one, BarrierOp()));
    for (const Pending& one : barriers) EXPECT_TRUE(one.Wait().ok());
    const Instant start = world->clock.Now();
    std::thread aborter([&] {
      for (int r = 0; r < present; ++r) world->at(r).Abort(kLost);
    });
    for (const Pending& one : pending) {
      const Status status = one.Wait();
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kRankLost) << status.ToString();
    }
    EXPECT_LT(world->clock.Now() - start, kAbortBound);
    data.clear();  // A sanitizer sees it if the comm thread still writes there.
    aborter.join();
    EXPECT_EQ(world->at(0).Submit(BarrierOp(), nullptr).status().message(), kLost.message());
    EXPECT_TRUE(world->at(0).IsQuiet() || pending.back().IsDone());
    for (const auto& one : other) barriers.push_back(Pending::Of(*one, BarrierOp()));
    for (const Pending& one : barriers) EXPECT_TRUE(one.Wait().ok()) << "other groups go on";
  }
}

TEST_P(Failure, AbortCell_EndsAllGroupsThatWatchIt_FirstCauseWins) {
  const auto world = MakeWorld(2);
  const auto cell = std::make_shared<AbortCell>();
  const auto a = world->CreateAll("a", 1, cell);
  const auto b = world->CreateAll("b", 1, cell);
  Data data(4), got(4);
  const Pending one = Pending::Of(*a[0], AllReduceOp(data));
  const Pending two = Pending::Of(*b[0], RecvOp(got, 1, 0));
  std::thread([&] { EXPECT_TRUE(cell->Set(kLost)); }).join();
  EXPECT_EQ(one.Wait().code(), StatusCode::kRankLost);
  EXPECT_EQ(two.Wait().code(), StatusCode::kRankLost);
  a[0]->Abort(Status(StatusCode::kCancelled, "later"));
  EXPECT_EQ(a[0]->Submit(BarrierOp(), nullptr).status().code(), StatusCode::kRankLost);
  const auto born_dead = world->Create(0, world->Spec("c", 0), cell);
  EXPECT_EQ(born_dead->Submit(BarrierOp(), nullptr).status().code(), StatusCode::kRankLost);
}

TEST_P(Failure, AbortCell_OutlivesTheFabric) {
  const auto cell = std::make_shared<AbortCell>();
  {
    const auto world = MakeWorld(2);
    world->CreateAll("a", 1, cell);
  }
  cell->Set(kLost);
}

TEST_P(Failure, PeerGoneWithoutGoodbye_IsReportedOnceAndOperationsWaitForTheVerdict) {
  const auto world = MakeWorld(3);
  ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));
  Data data(4), got(4);
  const Pending sum = Pending::Of(world->at(0), AllReduceOp(data));
  const Pending recv = Pending::Of(world->at(0), RecvOp(got, 2, 0));
  world->at(2).Abort(kLost);
  world->fabrics[2].reset();
  for (int r = 0; r < 2; ++r)
    EXPECT_TRUE(world->log(r).WaitFor([](EventLog& log) { return log.lost[2] == 1; }));
  EXPECT_FALSE(sum.IsDone());
  EXPECT_FALSE(recv.IsDone());
  world->at(0).Abort(kLost);
  EXPECT_EQ(sum.Wait().code(), StatusCode::kRankLost);
  EXPECT_EQ(recv.Wait().code(), StatusCode::kRankLost);
  EXPECT_EQ(world->log(1).LostCount(2), 1);
}

TEST_P(Failure, PeerThatCannotBeReached_IsReportedAndTheOperationWaits) {
  const auto world = MakeWorld(2);
  world->at(0).Abort(kLost);
  world->fabrics[0].reset();
  GroupSpec spec = world->Spec("later", 1);
  const auto alone = world->Create(1, spec);
  const Pending pending = Pending::Of(*alone, BarrierOp());
  EXPECT_TRUE(world->log(1).WaitFor([](EventLog& log) { return log.unreached[0] >= 1; }));
  EXPECT_EQ(world->log(1).LostCountIn("later", 0), 0);
  EXPECT_FALSE(pending.IsDone());
  alone->Abort(kLost);
  EXPECT_EQ(pending.Wait().code(), StatusCode::kRankLost);
}

TEST_P(Failure, Leave_FailsWhatNeedsTheLeaverOnAllOthers) {
  const auto world = MakeWorld(3);
  ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));
  std::vector<Data> data(3, Data(100'000, 1.0f));
  std::vector<Pending> pending;
  for (int r = 0; r < 2; ++r)
    pending.push_back(Pending::Of(world->at(r), AllReduceOp(data[static_cast<std::size_t>(r)])));
  Data got(4);
  pending.push_back(Pending::Of(world->at(1), RecvOp(got, 2, 0)));
  world->at(2).Leave();
  for (const Pending& one : pending) {
    const Status status = one.Wait();
    EXPECT_EQ(status.code(), StatusCode::kLeft) << status.ToString();
    EXPECT_EQ(status.detail().rank, 2);
    EXPECT_NE(status.message().find("rank 2 (node2, pid 1002) has left"), std::string::npos);
  }
  // Among those who stay point-to-point goes on.
  const Pending send = Pending::Of(world->at(0), SendOp(data[0], 1, 0));
  EXPECT_TRUE(Pending::Of(world->at(1), RecvOp(data[1], 0, 0)).Wait().ok());
  EXPECT_TRUE(send.Wait().ok());
  EXPECT_EQ(Pending::Of(world->at(0), SendOp(data[0], 2, 0)).Wait().code(), StatusCode::kLeft);
  EXPECT_EQ(Pending::Of(world->at(1), BarrierOp()).Wait().code(), StatusCode::kLeft);
  EXPECT_EQ(world->log(0).LostCount(2), 0);
  EXPECT_EQ(world->at(2).Submit(BarrierOp(), nullptr).status().code(), StatusCode::kCancelled);
}

TEST_P(Failure, Leave_WhatWasSentBeforeStillArrives) {
  const auto world = MakeWorld(2);
  const bool broadcasts = GetParam().roots_run_ahead;
  Data sent(1000, 7.0f);
  std::vector<Pending> pending;
  for (int i = 0; i < 10; ++i) {
    pending.push_back(Pending::Of(world->at(1), SendOp(sent, 0, 0)));
    if (broadcasts) pending.push_back(Pending::Of(world->at(1), BroadcastOp(sent, 1)));
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  world->group[1]->Leave();
  world->group[1].reset();
  for (int i = 0; i < 10; ++i) {
    Data a(1000), b(1000);
    EXPECT_TRUE(Pending::Of(world->at(0), RecvOp(a, 1, 0)).Wait().ok());
    EXPECT_EQ(a, sent);
    if (!broadcasts) continue;
    EXPECT_TRUE(Pending::Of(world->at(0), BroadcastOp(b, 1)).Wait().ok());
    EXPECT_EQ(b, sent);
  }
  Data more(1000);
  EXPECT_EQ(Pending::Of(world->at(0), RecvOp(more, 1, 0)).Wait().code(), StatusCode::kLeft);
  EXPECT_EQ(Pending::Of(world->at(0), BroadcastOp(more, 1)).Wait().code(), StatusCode::kLeft);
  EXPECT_EQ(world->log(0).LostCount(1), 0);
}

// The thread of the leaver's loop gets no processor until its time to close is over.
TEST_P(Failure, Leave_AndCloseOnALoopThatIsRunLate_IsAGoodbye) {
  const auto world = MakeWorld(2);
  ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));
  Data sent(4, 1.0f), got(4), more(4);
  std::promise<void> held, go_on;
  ASSERT_TRUE(world->at(1)
                  .Submit(RecvOp(got, 0, 0),
                          [&](const Status&) {
                            held.set_value();
                            go_on.get_future().wait();
                          })
                  .ok());
  const Pending send = Pending::Of(world->at(0), SendOp(sent, 1, 0));
  ASSERT_EQ(held.get_future().wait_for(kBound), std::future_status::ready);
  world->at(1).Leave();
  std::thread closing([&] { world->fabrics[1]->Close(Deadline::At(world->clock.Now())); });
  int made = 0;
  EXPECT_TRUE(Eventually([&] {  // Until it has been asked to close.
    const auto late = world->Create(1, world->Spec(StrCat("late", made++), 1));
    return !late->Submit(BarrierOp(), nullptr).ok();
  }));
  go_on.set_value();
  closing.join();
  EXPECT_TRUE(send.Wait().ok());
  EXPECT_EQ(Pending::Of(world->at(0), RecvOp(more, 1, 0)).Wait().code(), StatusCode::kLeft);
  EXPECT_EQ(world->log(0).LostCount(1), 0);
}

TEST_P(Failure, Leave_ARecvFromAnyWaitsWhileOneIsLeftThatCouldSend) {
  const auto world = MakeWorld(3);
  ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));
  const auto recv_any = [&](Data& data, int& sender) {
    Operation op = RecvOp(data, kAnyPeer, 0);
    op.sender = &sender;
    return Pending::Of(world->at(0), op);
  };
  std::vector<Data> got(3, Data(1000));
  std::vector<int> senders(3, -1);
  std::vector<Pending> recvs;
  for (std::size_t i = 0; i < 3; ++i) recvs.push_back(recv_any(got[i], senders[i]));
  world->at(2).Leave();
  Data none(1);
  EXPECT_EQ(Pending::Of(world->at(0), RecvOp(none, 2, 1)).Wait().code(), StatusCode::kLeft);
  for (const Pending& one : recvs) EXPECT_FALSE(one.IsDone());
  // What the last one sends before it leaves still arrives.
  const Data sent(1000, 5.0f);
  Data copy = sent;
  for (int i = 0; i < 2; ++i)
    EXPECT_TRUE(Pending::Of(world->at(1), SendOp(copy, 0, 0)).Wait().ok());
  world->at(1).Leave();
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(recvs[i].Wait().ok());
    EXPECT_EQ(got[i], sent);
    EXPECT_EQ(senders[i], 1);
  }
  int late = -1;
  for (const Pending& one : {recvs[2], recv_any(none, late)}) {
    const Status status = one.Wait();
    EXPECT_EQ(status.code(), StatusCode::kLeft);
    EXPECT_NE(status.message().find("all other ranks have left the group world"), std::string::npos)
        << status.ToString();
  }
  EXPECT_EQ(senders[2], -1);
}

TEST_P(Failure, Leave_WhatWasSentBeforeGoesToALaterRecvFromAny) {
  const auto world = MakeWorld(2);
  Data sent(1000, 7.0f), got(1000);
  EXPECT_TRUE(Pending::Of(world->at(1), SendOp(sent, 0, 0)).Wait().ok());
  world->at(1).Leave();
  EXPECT_EQ(Pending::Of(world->at(0), RecvOp(got, 1, 9)).Wait().code(), StatusCode::kLeft);
  EXPECT_TRUE(Pending::Of(world->at(0), RecvOp(got, kAnyPeer, 0)).Wait().ok());
  EXPECT_EQ(got, sent);
  EXPECT_EQ(Pending::Of(world->at(0), RecvOp(got, kAnyPeer, 0)).Wait().code(), StatusCode::kLeft);
}

TEST_P(Failure, Abort_EndsARecvFromAny) {
  const auto world = MakeWorld(2);
  auto got = std::make_unique<Data>(4);
  const Pending recv = Pending::Of(world->at(0), RecvOp(*got, kAnyPeer, 0));
  world->at(0).Abort(kLost);
  EXPECT_EQ(recv.Wait().code(), StatusCode::kRankLost);
}

TEST_P(Failure, Leave_IsKnownToARecvThoughACollectiveWaitsBeforeTheGoodbye) {
  if (!GetParam().roots_run_ahead) GTEST_SKIP() << "here a root waits for all";
  const auto world = MakeWorld(2);
  Data sent(1000, 7.0f), got(1000);
  EXPECT_TRUE(Pending::Of(world->at(1), BroadcastOp(sent, 1)).Wait().ok());
  const Pending recv = Pending::Of(world->at(0), RecvOp(got, 1, 0));
  world->at(1).Leave();
  EXPECT_EQ(recv.Wait().code(), StatusCode::kLeft);
  EXPECT_TRUE(Pending::Of(world->at(0), BroadcastOp(got, 1)).Wait().ok());
  EXPECT_EQ(got, sent);
}

TEST_P(Failure, LostPeer_IsReportedThoughItsCollectiveWaits) {
  if (!GetParam().roots_run_ahead) GTEST_SKIP() << "here a root waits for all";
  const auto world = MakeWorld(2);
  Data sent(1000, 7.0f), got(1000);
  EXPECT_TRUE(Pending::Of(world->at(1), BroadcastOp(sent, 1)).Wait().ok());
  world->at(1).Abort(kLost);
  EXPECT_TRUE(world->log(0).WaitFor([](EventLog& log) { return log.lost[1] == 1; }));
  EXPECT_TRUE(Pending::Of(world->at(0), BroadcastOp(got, 1)).Wait().ok());
  EXPECT_EQ(got, sent);
}

TEST_P(Failure, Leave_CancelsOwnOperationsAndFreesTheirMemory) {
  const auto world = MakeWorld(2);
  auto large = std::make_unique<Data>(24u << 20, 3.0f);  // Far more than socket buffers take.
  Data small(4);
  const Pending send = Pending::Of(world->at(1), SendOp(*large, 0, 0));
  const Pending sum = Pending::Of(world->at(1), AllReduceOp(small));
  world->at(1).Leave();
  EXPECT_EQ(send.Wait().code(), StatusCode::kCancelled);
  EXPECT_EQ(sum.Wait().code(), StatusCode::kCancelled);
  large.reset();
  Data got(24u << 20);
  const Status status = Pending::Of(world->at(0), RecvOp(got, 1, 0)).Wait();
  if (status.ok()) {
    EXPECT_TRUE(got == Data(24u << 20, 3.0f));
  } else {
    EXPECT_EQ(status.code(), StatusCode::kLeft);
  }
}

TEST_P(Failure, Leave_BeforeThePeerMadeTheGroup_IsToldLater) {
  const int last = SizeWithAPair() - 1;
  for (const int leaver : {0, last}) {
    const auto world = MakeWorld(last + 1);
    auto early = world->Create(leaver, world->Spec("short", leaver));
    ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));  // The hello has gone out.
    early->Leave();
    const int other = last - leaver;
    const auto late = world->Create(other, world->Spec("short", other));
    Data data(4);
    EXPECT_EQ(Pending::Of(*late, RecvOp(data, leaver, 0)).Wait().code(), StatusCode::kLeft);
    if (last == 1) {
      EXPECT_EQ(Pending::Of(*late, BarrierOp()).Wait().code(), StatusCode::kLeft);
    }
    EXPECT_EQ(world->log(other).LostCount(leaver), 0);
  }
}

// The fence that ended it there says why, and comes later.
TEST_P(Failure, Abort_BeforeThePeerMadeTheGroup_IsNoGoodbye) {
  const int last = SizeWithAPair() - 1;
  for (const int aborted : {0, last}) {
    const auto world = MakeWorld(last + 1);
    auto early = world->Create(aborted, world->Spec("short", aborted));
    ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));  // The hello has gone out.
    early->Abort(kLost);
    const int other = last - aborted;
    const auto late = world->Create(other, world->Spec("short", other));
    Data data(4);
    const Pending recv = Pending::Of(*late, RecvOp(data, aborted, 0));
    const Pending barrier = Pending::Of(*late, BarrierOp());
    // That it cannot be reached is told, and decided elsewhere.
    EXPECT_TRUE(world->log(other).WaitFor(
        [&](EventLog& log) { return log.lost[aborted] + log.unreached[aborted] > 0; }));
    late->Abort(kLost);
    EXPECT_EQ(recv.Wait().code(), StatusCode::kRankLost);
    EXPECT_EQ(barrier.Wait().code(), StatusCode::kRankLost);
  }
}

TEST_P(Failure, DestroyedCommunicator_CancelsWhatIsLeft) {
  const auto world = MakeWorld(2);
  Data data(4);
  const Pending pending = Pending::Of(world->at(0), AllReduceOp(data));
  world->group[0].reset();
  EXPECT_EQ(pending.Wait().code(), StatusCode::kCancelled);
}

TEST_P(Failure, ClosedFabric_CancelsWhatIsLeftAndRefusesTheRest) {
  const auto world = MakeWorld(2);
  Data data(4);
  const Pending pending = Pending::Of(world->at(0), AllReduceOp(data));
  const Instant start = world->clock.Now();
  world->fabrics[0]->Close(Deadline::After(start, Millis(1000)));
  EXPECT_LT(world->clock.Now() - start, Millis(3000));
  EXPECT_TRUE(pending.IsDone());
  EXPECT_EQ(pending.Wait().code(), StatusCode::kCancelled);
  EXPECT_TRUE(world->at(0).IsQuiet());
  EXPECT_FALSE(world->at(0).Submit(BarrierOp(), nullptr).ok());
  const auto late = world->Create(0, world->Spec("late", 0));
  EXPECT_FALSE(late->Submit(BarrierOp(), nullptr).ok());
}

TEST_P(Failure, Rebuild_AtTheNextGenerationOnTheSameFabrics) {
  const auto world = MakeWorld(3);
  for (std::uint64_t generation = 2; generation < 12; ++generation) {
    std::vector<Data> data(3, Data(50'000, 1.0f));
    const Pending stuck = Pending::Of(world->at(0), AllReduceOp(data[0]));
    for (int r = 0; r < 3; ++r) world->at(r).Abort(kLost);
    EXPECT_EQ(stuck.Wait().code(), StatusCode::kRankLost);
    world->group = world->CreateAll("world", generation);
    ExpectAllOk(
        world->RunAll([&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); }));
    EXPECT_EQ(data[2], Data(50'000, 3.0f));
  }
}

// Says hello on a connection of its own; true when the other side closes it.
bool IsRefused(World& world, int rank, const std::string& bytes) {
  const Deadline deadline = Deadline::After(world.clock.Now(), kBound);
  auto socket = ConnectTcp(*ParseHostPort(DecodeEndpoint(world.endpoint(rank)).address),
                           world.clock, deadline, -1);
  if (!socket.ok()) return false;
  EXPECT_EQ(send(socket->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  std::vector<PollEntry> entries{{.fd = socket->get(), .events = POLLIN}};
  if (PollUntil(entries, world.clock, deadline) != 1) return false;
  char byte;
  return recv(socket->get(), &byte, 1, 0) <= 0;
}

TEST_P(Failure, Strangers_AreRefused) {
  const auto world = MakeWorld(2);
  world->group = world->CreateAll("world", 5);
  ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));
  const GroupRanks made = RanksOf(world->Spec("world", 1));
  Hello hello{.generation = 5, .from = 1, .to = 0, .group = "world"};
  hello.made = made;
  EXPECT_TRUE(IsRefused(*world, 0, SayHello(hello, "guess"))) << "wrong secret";
  EXPECT_TRUE(IsRefused(*world, 0, SayHello(hello, kSecret))) << "rank 1 is connected already";
  hello.generation = 4;
  EXPECT_TRUE(IsRefused(*world, 0, SayHello(hello, kSecret))) << "stale generation";
  hello.generation = 5;
  hello.group = "to come";
  EXPECT_TRUE(IsRefused(*world, 0, SayHello(hello, "guess"))) << "the view is known";
  EXPECT_TRUE(IsRefused(*world, 0, "GET /metrics HTTP/1.1\r\nHost: somewhere.example\r\n\r\n"));
  EXPECT_TRUE(IsRefused(*world, 0, std::string(kHelloFixedBytes, '\0')));
  hello = {.generation = 5, .from = 7, .to = 0, .group = "world"};
  hello.made = made;
  EXPECT_TRUE(IsRefused(*world, 0, SayHello(hello, kSecret))) << "no such rank";
  ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));
}

TEST_P(Failure, WrongSecretOfAPeer_NeverConnects) {
  const auto world = MakeWorld(2);
  const auto right = world->Create(0, world->Spec("private", 0));
  GroupSpec spec = world->Spec("private", 1);
  spec.secret = "guess";
  const auto wrong = world->Create(1, spec);
  const Pending pending = Pending::Of(*right, BarrierOp());
  EXPECT_TRUE(world->log(1).WaitFor([](EventLog& log) { return log.unreached[0] >= 1; }));
  EXPECT_FALSE(pending.IsDone());
  wrong->Abort(kLost);
  right->Abort(kLost);
  EXPECT_EQ(pending.Wait().code(), StatusCode::kRankLost);
}

TEST_P(Failure, TwoHundredGroups_LeakNoDescriptor) {
  const int last = SizeWithAPair() - 1;
  const auto world = MakeWorld(last + 1);
  ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));
  const std::size_t before = OpenDescriptors();
  for (std::uint64_t i = 2; i < 202; ++i) {
    const auto group = world->CreateAll("cycle", i);
    Data data(4), got(4);
    std::vector<Pending> pending = {Pending::Of(*group.front(), SendOp(data, last, 0)),
                                    Pending::Of(*group.back(), RecvOp(got, 0, 0))};
    for (const auto& one : group) pending.push_back(Pending::Of(*one, BarrierOp()));
    for (const Pending& one : pending) ASSERT_TRUE(one.Wait().ok());
    if (i % 2 == 0) {
      for (const auto& one : group) one->Abort(kLost);
    }
  }
  // Closing goes on behind the last leave: wait for it by asking for the same of a fresh world.
  const Instant give_up = world->clock.Now() + kBound;
  while (OpenDescriptors() > before && world->clock.Now() < give_up) std::this_thread::yield();
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_P(Failure, ForkedChild_IsRefusedAndMayDropEverything) {
  if (kThreadSanitized) GTEST_SKIP() << "ThreadSanitizer does not follow a fork with threads";
  const auto world = MakeWorld(2);
  ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool refused =
        world->at(0).Submit(BarrierOp(), nullptr).status().code() == StatusCode::kForked;
    world->at(0).Leave();
    world->group.clear();
    world->fabrics.clear();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));
  EXPECT_EQ(world->log(0).LostCount(1), 0);
}

}  // namespace
}  // namespace resilient::testing
