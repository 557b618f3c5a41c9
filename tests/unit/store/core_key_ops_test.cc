// Goal: queues, barriers, exchanges and operations on several keys through the server: one effect
// and one answer for each request, over lost replies, cancels, fences and restarts. Method:
// CoreFixture; messages in, messages out.
#include <algorithm>

#include <gmock/gmock.h>

#include "store/core/key_ops.h"
#include "tests/unit/store/core_fixture.h"

namespace resilient::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class KeyOps : public CoreFixture {};

bool Same(const Reply& a, const Reply& b) {
  const auto values = [](const Reply& reply) {
    return reply.shared_values ? reply.shared_values->values : reply.values;
  };
  return a.status.code() == b.status.code() && a.status.message() == b.status.message() &&
         a.value == b.value && values(a) == values(b) && a.number == b.number && a.flag == b.flag;
}

TEST_F(KeyOps, EachOperation_Answers) {
  const ConnectionId connection = OpenRequest(1);
  EXPECT_EQ(Ask(connection, AppendOp{"a", "xy"}).number, 2);
  EXPECT_EQ(Ask(connection, AppendOp{"a", "z"}).number, 3);
  EXPECT_TRUE(Ask(connection, MultiSetOp{{"b", "c"}, {"1", "2"}}).status.ok());
  EXPECT_THAT(Ask(connection, MultiGetOp{{"c", "a"}, false}).values, ElementsAre("2", "xyz"));
  EXPECT_THAT(Ask(connection, MultiGetOp{{"c", "a"}, true}).values, ElementsAre("2", "xyz"));
  EXPECT_EQ(Ask(connection, MultiGetOp{{"c", "no"}, false}).status.code(), StatusCode::kNotFound);
  const Reply page = Ask(connection, ListKeysOp{"", "a"});
  EXPECT_THAT(page.values, ElementsAre("b", "c"));
  EXPECT_FALSE(page.flag);
  EXPECT_EQ(Ask(connection, QueuePushOp{"q", "i"}).number, 1);
  EXPECT_EQ(Ask(connection, QueuePushOp{"q", "j"}).number, 2);
  EXPECT_EQ(Ask(connection, QueueLengthOp{"q"}).number, 2);
  EXPECT_TRUE(Ask(connection, CheckOp{{"q"}}).flag);
  EXPECT_TRUE(Ask(connection, WaitOp{{"q"}}).status.ok());
  EXPECT_EQ(Ask(connection, NumKeysOp{}).number, 3);
  EXPECT_EQ(Ask(connection, QueuePopOp{"q", true}).value, "i");
  EXPECT_EQ(Ask(connection, QueuePopOp{"q", false}).value, "j");
  EXPECT_EQ(Ask(connection, QueuePopOp{"q", false}).status.code(), StatusCode::kQueueEmpty);
  EXPECT_FALSE(Ask(connection, CheckOp{{"q"}}).flag);
  EXPECT_TRUE(Ask(connection, BarrierOp{"b", 1}).status.ok());
  const Reply alone = Ask(connection, ExchangeOp{"e", 0, 1, "v"});
  ASSERT_TRUE(alone.shared_values);
  EXPECT_THAT(alone.shared_values->values, ElementsAre("v"));
}

TEST_F(KeyOps, OversizedRequests_AreAnswers) {
  const ConnectionId connection = OpenRequest(1);
  const std::string key(kKeyBytesMax + 1, 'k');
  const std::string value(kValueBytesMax + 1, 'v');
  const std::vector<std::string> many(kKeysPerRequestMax + 1, "k");
  const std::vector<Op> ops = {
      AppendOp{key, ""},      AppendOp{"k", value},       MultiGetOp{{key}, true},
      MultiGetOp{many, true}, MultiSetOp{{"k"}, {value}}, MultiSetOp{many, many},
      QueuePushOp{key, ""},   QueuePushOp{"k", value},    QueuePopOp{key, true},
      BarrierOp{key, 2},      ExchangeOp{key, 0, 2, ""},  ExchangeOp{"k", 0, 2, value}};
  for (const Op& op : ops) {
    EXPECT_EQ(Ask(connection, op).status.code(), StatusCode::kTooLarge) << op.index();
  }
  const std::vector<std::string> most(kKeysPerRequestMax, "k");
  EXPECT_TRUE(Ask(connection, MultiSetOp{most, most}).status.ok());
  EXPECT_EQ(Ask(connection, MultiGetOp{most, false}).values.size(), kKeysPerRequestMax);
  EXPECT_THAT(core_->StatusJson(now_), HasSubstr("\"waits\":0"));
  EXPECT_FALSE(Closed(connection));
}

// What the replies of all mutations are when each is asked twice, and its connection lost between.
TEST_F(KeyOps, ALostReply_IsGivenAgainWithoutASecondEffect) {
  ConnectionId connection = OpenRequest(1);
  const std::vector<Op> ops = {SetOp{"k", "v"},
                               AddOp{"n", 2},
                               AppendOp{"k", "w"},
                               CompareSetOp{"k", "vw", "x"},
                               MultiSetOp{{"a", "b"}, {"1", "2"}},
                               QueuePushOp{"q", "i"},
                               QueuePushOp{"q", "j"},
                               QueuePopOp{"q", true},
                               QueuePopOp{"empty", false},
                               BarrierOp{"b", 1},
                               ExchangeOp{"e", 0, 1, "v"},
                               ExchangeOp{"e", 1, 1, "v"},
                               DeleteOp{"a"}};
  std::uint64_t seq = 0;
  for (const Op& op : ops) {
    ASSERT_TRUE(IsKeyMutation(op));
    const Reply first = Ask(connection, op, ++seq);
    Close(connection);
    connection = OpenRequest(1);
    EXPECT_TRUE(Same(first, Ask(connection, op, seq))) << op.index();
  }
  const ConnectionId reader = OpenRequest(2);
  EXPECT_EQ(Ask(reader, GetOp{"n", false}).value, "2");
  EXPECT_EQ(Ask(reader, GetOp{"k", false}).value, "x");
  EXPECT_EQ(Ask(reader, QueueLengthOp{"q"}).number, 1);
  EXPECT_FALSE(Ask(reader, CheckOp{{"a"}}).flag);
}

TEST_F(KeyOps, APoppedItemWhoseReplyIsLost_IsNotLost) {
  ConnectionId popper = OpenRequest(1);
  const ConnectionId pusher = OpenRequest(2);
  Send(popper, QueuePopOp{"q", true}, 1);
  EXPECT_EQ(Ask(pusher, QueuePushOp{"q", "i"}).number, 0);
  Close(popper);  // With the reply.
  Forget();
  EXPECT_EQ(Ask(pusher, QueuePushOp{"q", "j"}).number, 1);
  popper = OpenRequest(1);
  EXPECT_EQ(Ask(popper, QueuePopOp{"q", true}, 1).value, "i");
  EXPECT_EQ(Ask(popper, QueuePopOp{"q", true}, 2).value, "j");
}

TEST_F(KeyOps, AWaitingPopWhoseConnectionIsLost_TakesNothing) {
  const ConnectionId popper = OpenRequest(1);
  const ConnectionId other = OpenRequest(2);
  Send(popper, QueuePopOp{"q", true}, 1);
  Close(popper);
  EXPECT_EQ(Ask(other, QueuePushOp{"q", "i"}).number, 1);
  EXPECT_EQ(Ask(OpenRequest(1), QueuePopOp{"q", true}, 1).value, "i");
}

TEST_F(KeyOps, CancelOfAPop_GivesTheItemOrNothing) {
  const ConnectionId popper = OpenRequest(1);
  const ConnectionId pusher = OpenRequest(2);
  Send(popper, QueuePopOp{"q", true}, 1);
  Send(popper, QueuePopOp{"q", true}, 2);
  Send(popper, CancelOp{2}, 0);
  EXPECT_EQ(TakeReply(popper, 2)->status.code(), StatusCode::kCancelled);
  EXPECT_EQ(Ask(pusher, QueuePushOp{"q", "i"}).number, 0);
  EXPECT_EQ(TakeReply(popper, 1)->value, "i");
  Send(popper, CancelOp{1}, 0);  // It was too late: the item is the answer, again.
  EXPECT_EQ(TakeReply(popper, 1)->value, "i");
  EXPECT_EQ(Ask(pusher, QueuePushOp{"q", "j"}).number, 1);
  // Given up for good.
  EXPECT_EQ(Ask(popper, QueuePopOp{"q", true}, 2).status.code(), StatusCode::kCancelled);
  EXPECT_EQ(Ask(pusher, QueueLengthOp{"q"}).number, 1);
}

TEST_F(KeyOps, ABarrier_IsReleasedOnceForEachOfItsRequests) {
  ConnectionId a = OpenRequest(1);
  const ConnectionId b = OpenRequest(2);
  Send(a, BarrierOp{"b", 2}, 1);
  Close(a);  // It has not arrived any more.
  Send(b, BarrierOp{"b", 2}, 1);
  EXPECT_FALSE(TakeReply(b, 1));
  a = OpenRequest(1);
  EXPECT_TRUE(Ask(a, BarrierOp{"b", 2}, 1).status.ok());
  EXPECT_TRUE(TakeReply(b, 1)->status.ok());
  Close(a);
  a = OpenRequest(1);
  EXPECT_TRUE(Ask(a, BarrierOp{"b", 2}, 1).status.ok());  // The reply was lost: no new arrival.
  Send(b, BarrierOp{"b", 2}, 2);
  EXPECT_FALSE(TakeReply(b, 2));
}

TEST_F(KeyOps, CancelOfABarrierOrExchange_TellsWhoIsLate) {
  std::vector<ConnectionId> connections;
  for (int i = 0; i < 4; ++i) connections.push_back(OpenRequest(i));
  for (const int i : {0, 1, 3}) {
    Send(connections[At(i)], ExchangeOp{"init/3", i, 4, "v"}, 1);
    Send(connections[At(i)], BarrierOp{"init/3", 4}, 2);
  }
  Send(connections[0], CancelOp{1}, 0);
  const std::optional<Reply> exchange = TakeReply(connections[0], 1);
  EXPECT_EQ(exchange->status.code(), StatusCode::kCancelled);
  EXPECT_EQ(exchange->status.message(), "exchange init/3: 3 of 4 arrived; missing ranks 2");
  Send(connections[0], CancelOp{2}, 0);
  EXPECT_EQ(TakeReply(connections[0], 2)->status.message(), "barrier init/3: 3 of 4 arrived");
}

TEST_F(KeyOps, CancelBehindTheRelease_TellsOfTheRelease) {
  const ConnectionId a = OpenRequest(1);
  const ConnectionId b = OpenRequest(2);
  Send(a, ExchangeOp{"e", 0, 2, "x"}, 1);
  Send(b, ExchangeOp{"e", 1, 2, "y"}, 1);
  const std::optional<Reply> first = TakeReply(a, 1);
  ASSERT_TRUE(first);
  Send(a, CancelOp{1}, 0);
  EXPECT_TRUE(Same(*first, TakeReply(a, 1).value_or(Reply{})));
}

// Each of n results has the values of n callers.
TEST_F(KeyOps, TheValuesOfAnExchange_AreKeptOnce) {
  constexpr int kCallers = 20;
  const auto shared_rows = [this] {
    return std::count_if(rows_.begin(), rows_.end(), [](const auto& row) {
      return row.first.front() == static_cast<char>(RowKind::kShared);
    });
  };
  std::vector<ConnectionId> callers;
  std::vector<std::string> values;
  for (int i = 0; i < kCallers; ++i) {
    callers.push_back(OpenRequest(i));
    values.push_back("v" + std::to_string(i));
    Send(callers.back(), ExchangeOp{"e", i, kCallers, values.back()}, 1);
  }
  EXPECT_EQ(shared_rows(), 1);
  Recover();
  for (int i = 0; i < kCallers; ++i) {
    callers[At(i)] = OpenRequest(i);
    const Reply again = Ask(callers[At(i)], ExchangeOp{"e", i, kCallers, values[At(i)]}, 1);
    ASSERT_TRUE(again.shared_values);
    EXPECT_EQ(again.shared_values->values, values);
  }
  for (int i = 0; i < kCallers; ++i) {
    EXPECT_EQ(shared_rows(), 1);
    Request next;
    next.seq = 2;
    next.first_unacked = 2;
    next.op = SetOp{"k", "v"};
    Send(callers[At(i)], next);
  }
  EXPECT_EQ(shared_rows(), 0);
}

TEST_F(KeyOps, DisagreementInAnExchange_NamesBoth) {
  Send(OpenRequest(1), ExchangeOp{"e", 0, 2, "x"}, 1);
  const Status rank = Ask(OpenRequest(2), ExchangeOp{"e", 0, 2, "y"}).status;
  EXPECT_EQ(rank.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(rank.message(), HasSubstr("(pid 101 on host h1 waits, pid 102 on host h2 came)"));
  const Status size = Ask(OpenRequest(3), ExchangeOp{"e", 1, 3, "y"}).status;
  EXPECT_EQ(size.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(size.message(), HasSubstr("pid 103 on host h3"));
}

TEST_F(KeyOps, WaitingMultiGet_IsAnsweredWithTheValues) {
  const ConnectionId waiter = OpenRequest(1);
  const ConnectionId setter = OpenRequest(2);
  Send(waiter, MultiGetOp{{"a", "b"}, true}, 1);
  ASSERT_TRUE(Ask(setter, SetOp{"b", "2"}).status.ok());
  EXPECT_FALSE(TakeReply(waiter, 1));
  ASSERT_TRUE(Ask(setter, SetOp{"a", "1"}).status.ok());
  EXPECT_THAT(TakeReply(waiter, 1)->values, ElementsAre("1", "2"));
}

TEST_F(KeyOps, AFence_EndsWhatWaitsInTheRound) {
  const std::vector<ConnectionId> control = Run(2);
  const ConnectionId request = OpenRequest(0);
  const std::string status = core_->StatusJson(now_);
  ASSERT_THAT(status, HasSubstr("\"round\":1"));
  Send(request, QueuePopOp{"q", true}, 1, 1);
  Send(request, BarrierOp{"b", 2}, 2, 1);
  Send(request, ExchangeOp{"e", 0, 2, "v"}, 3, 1);
  Send(request, BarrierOp{"b", 2}, 4, 0);
  ASSERT_FALSE(TakeReply(request, 1));
  Report report;
  report.kind = ReportKind::kCommFailed;
  report.generation = 1;
  report.status = Status(StatusCode::kCommFailed, "given up");
  Send(control[1], ReportOp{report});
  for (const std::uint64_t seq : {1u, 2u, 3u}) {
    const std::optional<Reply> reply = TakeReply(request, seq);
    ASSERT_TRUE(reply) << seq;
    EXPECT_FALSE(reply->status.ok());
    // The end of a wait is the answer to its repeat as well.
    EXPECT_TRUE(Same(*reply, Ask(request, BarrierOp{"b", 2}, seq, 1)));
  }
  EXPECT_FALSE(TakeReply(request, 4));
}

TEST_F(KeyOps, ALongWait_KeepsItsPlaceAmongTheResults) {
  ConnectionId waiter = OpenRequest(1);
  Send(waiter, BarrierOp{"b", 2}, 1);
  std::uint64_t seq = 1;
  for (std::size_t i = 0; i < 2 * kResultsPerLineMax; ++i) {
    ASSERT_EQ(Ask(waiter, AddOp{"n", 1}, ++seq).number, static_cast<std::int64_t>(i + 1));
  }
  Close(waiter);
  waiter = OpenRequest(1);
  Send(waiter, BarrierOp{"b", 2}, 1);
  EXPECT_FALSE(TakeReply(waiter, 1));
  EXPECT_TRUE(Ask(OpenRequest(2), BarrierOp{"b", 2}, 1).status.ok());
  EXPECT_TRUE(TakeReply(waiter, 1)->status.ok());
  Close(waiter);
  waiter = OpenRequest(1);
  EXPECT_TRUE(Ask(waiter, BarrierOp{"b", 2}, 1).status.ok());
  // The oldest of the others has had to go.
  EXPECT_EQ(Ask(waiter, AddOp{"n", 1}, 2).status.code(), StatusCode::kOutcomeUnknown);
  EXPECT_EQ(Ask(waiter, AddOp{"n", 1}, seq).number,
            static_cast<std::int64_t>(2 * kResultsPerLineMax));
}

TEST_F(KeyOps, AReadBehindForgottenResults_IsDoneAgain) {
  ConnectionId connection = OpenRequest(1);
  Send(connection, GetOp{"k", true}, 1);
  for (std::uint64_t seq = 2; seq < kResultsPerLineMax + 10; ++seq) {
    ASSERT_TRUE(Ask(connection, SetOp{"n", ""}, seq).status.ok());
  }
  Close(connection);
  connection = OpenRequest(1);
  Send(connection, GetOp{"k", true}, 1);
  ASSERT_TRUE(Ask(OpenRequest(2), SetOp{"k", "v"}).status.ok());
  const std::optional<Reply> reply = TakeReply(connection, 1);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->value, "v");
}

TEST_F(KeyOps, Admin_WaitsWithoutMemory) {
  const ConnectionId admin = Open(HelloOf(9, Role::kAdmin));
  Send(admin, QueuePopOp{"q", true}, 1);
  EXPECT_EQ(Ask(OpenRequest(1), QueuePushOp{"q", "i"}).number, 0);
  EXPECT_EQ(TakeReply(admin, 1)->value, "i");
}

}  // namespace
}  // namespace resilient::store
