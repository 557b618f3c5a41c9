// Goal: the request connection keeps its promises when answers do not come: exactly once over lost
// connections, definitive answers at deadlines and interrupts, the truth about a store that has
// forgotten. Method: RequestClientTest.
#include <algorithm>
#include <atomic>
#include <future>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "tests/support/captured_stderr.h"
#include "tests/unit/store_client/request_client_fixture.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;

TEST_F(RequestClientTest, LostConnection_SendsExactlyTheUnansweredAgainInOrder) {
  auto client = Connected();
  std::vector<std::future<Result<std::int64_t>>> adds;
  std::vector<std::optional<Request>> first;
  for (int i = 0; i < 4; ++i) {
    adds.push_back(StartAdd(*client, "key" + std::to_string(i), Patient()));
    first.push_back(line_->Read());
    ASSERT_TRUE(first.back());
  }
  line_->SendReply(NumberReply(first[1], 11));
  EXPECT_EQ(*adds[1].get(), 11);
  Break(KnownWelcome());
  for (int i : {0, 2, 3}) {
    std::optional<Request> again = line_->Read();
    ASSERT_TRUE(again);
    EXPECT_EQ(again->seq, first[static_cast<std::size_t>(i)]->seq);
    EXPECT_EQ(again->first_unacked, first[0]->seq);
    EXPECT_EQ(std::get<AddOp>(again->op).key, "key" + std::to_string(i));
  }
  for (int i : {3, 0, 2}) {
    line_->SendReply(NumberReply(first[static_cast<std::size_t>(i)], 10 + i));
  }
  for (int i : {0, 2, 3}) EXPECT_EQ(*adds[static_cast<std::size_t>(i)].get(), 10 + i);
}

TEST_F(RequestClientTest, LostConnection_WaitIsAskedAnewUnderANewNumber) {
  auto client = Connected();
  auto getting = StartGet(*client, "k", Patient());
  std::optional<Request> get = line_->Read();
  auto adding = StartAdd(*client, "n", Patient());
  std::optional<Request> add = line_->Read();
  Break(KnownWelcome());
  EXPECT_EQ(line_->Read()->seq, add->seq);
  std::optional<Request> again = line_->Read();
  EXPECT_GT(again->seq, add->seq);
  EXPECT_EQ(again->first_unacked, add->seq);
  line_->SendReply(NumberReply(add, 1));
  line_->SendReply(ValueReply(again, "v"));
  EXPECT_EQ(*adding.get(), 1);
  EXPECT_EQ(*getting.get(), "v");
}

// An arrival, a popped item: done twice it would be a second one, so the number stays.
TEST_F(RequestClientTest, LostConnection_WaitsWithAnEffectKeepTheirNumber) {
  auto client = Connected();
  auto popping = StartPop(*client, "q", Patient());
  std::optional<Request> pop = line_->Read();
  auto meeting = StartBarrier(*client, "init", Patient());
  std::optional<Request> barrier = line_->Read();
  Break(KnownWelcome());
  std::optional<Request> pop_again = line_->Read();
  std::optional<Request> barrier_again = line_->Read();
  ASSERT_TRUE(pop_again && std::holds_alternative<QueuePopOp>(pop_again->op));
  ASSERT_TRUE(barrier_again && std::holds_alternative<BarrierOp>(barrier_again->op));
  EXPECT_EQ(pop_again->seq, pop->seq);
  EXPECT_EQ(barrier_again->seq, barrier->seq);
  line_->SendReply(ReplyTo(barrier));
  line_->SendReply(ValueReply(pop, "item"));
  EXPECT_TRUE(meeting.get().ok());
  EXPECT_EQ(*popping.get(), "item");
}

TEST_F(RequestClientTest, LostConnection_IsOneLineOfLogWithItsDuration) {
  auto client = Connected();
  auto adding = StartAdd(*client, "n", Patient());
  line_->Read();
  BeginToCaptureStderr();
  Break(KnownWelcome());
  line_->SendReply(NumberReply(line_->Read(), 1));
  EXPECT_EQ(*adding.get(), 1);
  const std::string log = TakeCapturedStderr();
  EXPECT_THAT(log, HasSubstr("job train was without its connection for "));
  EXPECT_THAT(log, HasSubstr("connected again to " + server_.address()));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
}

TEST_F(RequestClientTest, DuplicateReply_IsDropped) {
  auto client = Connected();
  auto first = StartAdd(*client, "a", Patient());
  std::optional<Request> one = line_->Read();
  line_->SendReply(NumberReply(one, 1));
  EXPECT_EQ(*first.get(), 1);
  line_->SendReply(NumberReply(one, 77));
  auto second = StartAdd(*client, "a", Patient());
  std::optional<Request> two = line_->Read();
  line_->SendReply(NumberReply(one, 78));
  line_->SendReply(NumberReply(two, 2));
  EXPECT_EQ(*second.get(), 2);
}

TEST_F(RequestClientTest, Deadline_ResultWasThere_IsReturned) {
  auto client = Connected();
  auto getting = StartGet(*client, "k", Within(Millis(50)));
  std::optional<Request> get = line_->Read();
  std::optional<Request> cancel = line_->Read();
  ASSERT_TRUE(cancel && std::holds_alternative<CancelOp>(cancel->op));
  EXPECT_EQ(std::get<CancelOp>(cancel->op).seq, get->seq);
  EXPECT_EQ(cancel->seq, 0u);
  line_->SendReply(ValueReply(get, "just in time"));
  EXPECT_EQ(*getting.get(), "just in time");
}

TEST_F(RequestClientTest, Deadline_WaitNotMet_IsATimeoutThatNamesTheKeys) {
  auto client = Connected();
  auto waiting = StartWait(*client, {"alpha", "beta"}, Within(Millis(50)));
  std::optional<Request> wait = line_->Read();
  line_->ReadOp<CancelOp>();
  line_->SendReply(ReplyTo(wait, Status(StatusCode::kTimeout, "cancelled")));
  Status status = waiting.get();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_THAT(status.message(), HasSubstr("wait timeout after "));
  EXPECT_THAT(status.message(), HasSubstr(" ms, keys: alpha, beta (store " + server_.address()));
  EXPECT_THAT(status.message(), HasSubstr("job train"));
}

TEST_F(RequestClientTest, Deadline_NoAnswerAtAll_WaitTimesOutAndMutationIsUnknown) {
  auto client = Connected();
  auto waiting = StartWait(*client, {"k"}, Within(Millis(20)));
  auto adding = StartAdd(*client, "counter", Within(Millis(20)));
  EXPECT_EQ(waiting.get().code(), StatusCode::kTimeout);
  Status unknown = adding.get().status();
  EXPECT_EQ(unknown.code(), StatusCode::kOutcomeUnknown);
  EXPECT_THAT(unknown.message(), HasSubstr("counter"));
  EXPECT_THAT(unknown.message(), HasSubstr("timeout"));
}

// The first one to give up has the silent connection replaced, just before the second one's end.
TEST_F(RequestClientTest, Deadline_ConnectionIsReplacedMeanwhile_IsATimeoutAllTheSame) {
  auto client = Connected();
  auto adding = StartAdd(*client, "counter", Within(Millis(1)));
  auto waiting = StartWait(*client, {"k"}, Within(Millis(30)));
  EXPECT_EQ(adding.get().status().code(), StatusCode::kOutcomeUnknown);
  EXPECT_EQ(waiting.get().code(), StatusCode::kTimeout);
}

TEST_F(RequestClientTest, Deadline_ItemWasPopped_IsReturned) {
  auto client = Connected();
  auto popping = StartPop(*client, "q", Within(Millis(50)));
  std::optional<Request> pop = line_->Read();
  EXPECT_EQ(std::get<CancelOp>(line_->ReadOp<CancelOp>()->op).seq, pop->seq);
  line_->SendReply(ValueReply(pop, "just in time"));
  EXPECT_EQ(*popping.get(), "just in time");
}

TEST_F(RequestClientTest, Deadline_NothingToPop_IsATimeout) {
  auto client = Connected();
  auto popping = StartPop(*client, "q", Within(Millis(50)));
  std::optional<Request> pop = line_->Read();
  line_->ReadOp<CancelOp>();
  line_->SendReply(ReplyTo(pop, Status(StatusCode::kCancelled, "given up")));
  Status status = popping.get().status();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_THAT(status.message(), HasSubstr("queue_pop timeout after "));
  EXPECT_THAT(status.message(), HasSubstr(" ms, keys: q (store "));
}

TEST_F(RequestClientTest, Deadline_PopWithoutAnswer_HasAnUnknownOutcome) {
  auto client = Connected();
  auto popping = StartPop(*client, "q", Within(Millis(20)));
  EXPECT_EQ(popping.get().status().code(), StatusCode::kOutcomeUnknown);
}

TEST_F(RequestClientTest, Deadline_OthersAreLate_SaysWhatTheStoreKnows) {
  auto client = Connected();
  auto meeting = StartBarrier(*client, "init/3", Within(Millis(50)));
  std::optional<Request> barrier = line_->Read();
  line_->ReadOp<CancelOp>();
  line_->SendReply(
      ReplyTo(barrier, Status(StatusCode::kCancelled, "barrier init/3: 3 of 4 arrived")));
  Status status = meeting.get();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_THAT(status.message(), HasSubstr("barrier timeout after "));
  EXPECT_THAT(status.message(), HasSubstr("job train): barrier init/3: 3 of 4 arrived"));
}

TEST_F(RequestClientTest, Deadline_BarrierWasReleasedMeanwhile_IsPassed) {
  auto client = Connected();
  auto meeting = StartBarrier(*client, "init/3", Within(Millis(50)));
  std::optional<Request> barrier = line_->Read();
  line_->ReadOp<CancelOp>();
  line_->SendReply(ReplyTo(barrier));
  EXPECT_TRUE(meeting.get().ok());
}

TEST_F(RequestClientTest, Deadline_DisconnectedMutation_SaysWhetherItMayHaveBeenApplied) {
  auto client = Connected();
  auto sent = StartAdd(*client, "n", Within(Millis(300)));
  line_->Read();
  server_.StopListening();
  line_.reset();
  Status unknown = sent.get().status();
  EXPECT_EQ(unknown.code(), StatusCode::kOutcomeUnknown);
  EXPECT_THAT(unknown.message(), HasSubstr("may or may not have been applied"));
  Status unsent = client->Add("n", 1, Within(Millis(50))).status();
  EXPECT_EQ(unsent.code(), StatusCode::kStoreLost);
  EXPECT_THAT(unsent.message(), HasSubstr("it was not sent"));
}

TEST_F(RequestClientTest, Deadline_WhileDisconnected_IsStoreLost) {
  auto client = Connected();
  auto getting = StartGet(*client, "k", Within(Millis(1500)));
  line_->Read();
  server_.StopListening();
  line_.reset();
  Status status = getting.get().status();
  EXPECT_EQ(status.code(), StatusCode::kStoreLost);
  EXPECT_THAT(status.message(), HasSubstr("timeout"));
  EXPECT_THAT(status.message(), HasSubstr("keys: k"));
  EXPECT_THAT(status.message(), HasSubstr("connection refused"));
}

TEST_F(RequestClientTest, Deadline_ConnectionLostAfterCancel_CancelsAgain) {
  auto client = Connected();
  auto getting = StartGet(*client, "k", Within(Millis(20)));
  line_->ReadOp<CancelOp>();
  Break(KnownWelcome());
  std::optional<Request> get = line_->Read();
  ASSERT_TRUE(get && std::holds_alternative<GetOp>(get->op));
  std::optional<Request> cancel = line_->Read();
  ASSERT_TRUE(cancel && std::holds_alternative<CancelOp>(cancel->op));
  line_->SendReply(ReplyTo(get, Status(StatusCode::kTimeout, "cancelled")));
  EXPECT_EQ(getting.get().status().code(), StatusCode::kTimeout);
}

TEST_F(RequestClientTest, Interrupt_LeaderAndFollower_EndSoonAndCancel) {
  std::atomic<bool> pressed{false};
  interrupt_ = [&pressed] {
    return pressed ? Status(StatusCode::kInterrupted, "Ctrl-C") : Status();
  };
  auto client = Connected();
  auto leader = StartGet(*client, "a", Client::Call{});
  std::optional<Request> first = line_->Read();
  auto follower = StartGet(*client, "b", Client::Call{});
  std::optional<Request> second = line_->Read();
  pressed = true;
  const Instant begun = clock_.Now();
  EXPECT_EQ(leader.get().status().code(), StatusCode::kInterrupted);
  EXPECT_EQ(follower.get().status().code(), StatusCode::kInterrupted);
  // 100 ms between checks; the rest is for a busy machine.
  EXPECT_LT(clock_.Now() - begun, Millis(1000));
  pressed = false;
  std::optional<Request> one = line_->Read();
  std::optional<Request> two = line_->Read();
  ASSERT_TRUE(one && two);
  EXPECT_EQ(std::get<CancelOp>(one->op).seq + std::get<CancelOp>(two->op).seq,
            first->seq + second->seq);
  // Late replies to what was given up disturb nobody.
  line_->SendReply(ValueReply(first, "late"));
  auto adding = StartAdd(*client, "n", Patient());
  line_->SendReply(NumberReply(line_->ReadOp<AddOp>(), 1));
  EXPECT_EQ(*adding.get(), 1);
}

TEST_F(RequestClientTest, Stop_OfOneCall_EndsThatCallOnly) {
  auto client = Connected();
  std::atomic<bool> fenced{false};
  Client::Call call;
  call.stop = [&fenced] { return fenced ? Status(StatusCode::kRankLost, "rank 2") : Status(); };
  auto stopped = StartWait(*client, {"a"}, call);
  line_->Read();
  auto other = StartGet(*client, "b", Patient());
  std::optional<Request> get = line_->Read();
  fenced = true;
  EXPECT_EQ(stopped.get().code(), StatusCode::kRankLost);
  line_->SendReply(ValueReply(get, "v"));
  EXPECT_EQ(*other.get(), "v");
}

// What a test of Call::settle begins with: an exchange that is on its way, and a fence.
class SettledCall : public RequestClientTest {
 protected:
  std::future<Result<std::vector<std::string>>> Start(Client& client, Duration settle) {
    Client::Call call;
    call.deadline = deadline_;
    call.settle = settle;
    call.stop = [this] {
      if (deadline_.ExpiredAt(clock_.Now()) || fenced_) asked_ = true;
      asked_.notify_all();
      return fenced_ ? Status(StatusCode::kRankLost, "rank 2") : Status();
    };
    return std::async(std::launch::async,
                      [&client, call] { return client.Exchange("agree/1", 0, 2, "a", call); });
  }
  // The client has another connection, on which the store does not answer yet.
  void LoseConnection() {
    line_.reset();
    line_ = std::make_unique<ScriptedConnection>(server_.Accept());
  }
  Reply Values(const std::optional<Request>& to) {
    Reply reply = ReplyTo(to);
    reply.values = {"a", "b"};
    return reply;
  }

  // The same request comes over another connection, with its cancel.
  void AnswerWhenAskedAgain(ScriptedConnection& line, const std::optional<Request>& exchange) {
    EXPECT_EQ(line.Read()->seq, exchange->seq);
    line.ReadOp<CancelOp>();
    line.SendReply(Values(exchange));
  }

  std::atomic<bool> fenced_{false};
  std::atomic<bool> asked_{false};  // `stop` was, while the call was to end.
  Deadline deadline_ = Deadline::Never();
};

TEST_F(SettledCall, Stopped_ResultWasThere_IsReturned) {
  auto client = Connected();
  auto meeting = Start(*client, kPatience);
  std::optional<Request> exchange = line_->Read();
  fenced_ = true;
  EXPECT_EQ(std::get<CancelOp>(line_->ReadOp<CancelOp>()->op).seq, exchange->seq);
  line_->SendReply(Values(exchange));
  const Result<std::vector<std::string>> values = meeting.get();
  ASSERT_TRUE(values.ok()) << values.status().ToString();
  EXPECT_EQ(values->size(), 2u);
}

TEST_F(SettledCall, Stopped_NoResult_EndsWithTheReasonToStop) {
  auto client = Connected();
  auto meeting = Start(*client, kPatience);
  std::optional<Request> exchange = line_->Read();
  fenced_ = true;
  line_->ReadOp<CancelOp>();
  line_->SendReply(ReplyTo(exchange, Status(StatusCode::kCancelled, "1 of 2 arrived")));
  EXPECT_EQ(meeting.get().status().code(), StatusCode::kRankLost);
}

TEST_F(SettledCall, Stopped_ConnectionIsLost_TheAnswerIsAskedForAgain) {
  auto client = Connected();
  auto meeting = Start(*client, kPatience);
  std::optional<Request> exchange = line_->Read();
  fenced_ = true;
  line_->ReadOp<CancelOp>();
  Break(KnownWelcome());
  AnswerWhenAskedAgain(*line_, exchange);
  EXPECT_TRUE(meeting.get().ok());
}

TEST_F(SettledCall, Stopped_WhileDisconnected_TheAnswerIsAskedForAgain) {
  auto client = Connected();
  auto meeting = Start(*client, kPatience);
  std::optional<Request> exchange = line_->Read();
  LoseConnection();
  fenced_ = true;
  asked_.wait(false);
  line_->Greet(KnownWelcome());
  AnswerWhenAskedAgain(*line_, exchange);
  EXPECT_TRUE(meeting.get().ok());
}

TEST_F(SettledCall, Stopped_ConnectionIsSilent_IsReplacedAndAskedAgain) {
  auto client = Connected();
  auto meeting = Start(*client, kPatience);
  std::optional<Request> exchange = line_->Read();
  fenced_ = true;
  line_->ReadOp<CancelOp>();
  ScriptedConnection again = server_.Accept();
  again.Greet(KnownWelcome());
  AnswerWhenAskedAgain(again, exchange);
  EXPECT_TRUE(meeting.get().ok());
}

TEST_F(SettledCall, Stopped_NoStoreAnyMore_EndsWithTheReasonAtTheEndOfItsTime) {
  auto client = Connected();
  const Instant begun = clock_.Now();
  auto meeting = Start(*client, Millis(1500));
  line_->Read();
  server_.StopListening();
  line_.reset();
  fenced_ = true;
  EXPECT_EQ(meeting.get().status().code(), StatusCode::kRankLost);
  EXPECT_GE(clock_.Now() - begun, Millis(1500));
}

TEST_F(SettledCall, Deadline_WhileDisconnected_WaitsForTheAnswerAllTheSame) {
  auto client = Connected();
  deadline_ = In(Millis(50));
  auto meeting = Start(*client, kPatience);
  std::optional<Request> exchange = line_->Read();
  LoseConnection();
  asked_.wait(false);
  line_->Greet(KnownWelcome());
  AnswerWhenAskedAgain(*line_, exchange);
  EXPECT_TRUE(meeting.get().ok());
}

TEST_F(RequestClientTest, SessionForgotten_WaitsGoOnAndMutationsAreUnknown) {
  auto client = Connected();
  auto adding = StartAdd(*client, "n", Patient());
  line_->Read();
  auto getting = StartGet(*client, "k", Patient());
  line_->Read();
  Break(TestWelcome());
  EXPECT_EQ(adding.get().status().code(), StatusCode::kOutcomeUnknown);
  std::optional<Request> get = line_->Read();
  ASSERT_TRUE(get && std::holds_alternative<GetOp>(get->op));
  line_->SendReply(ValueReply(get, "v"));
  EXPECT_EQ(*getting.get(), "v");
}

TEST_F(RequestClientTest, StoreRestarted_EverythingSaysSo) {
  auto client = Connected();
  auto adding = StartAdd(*client, "n", Patient());
  line_->Read();
  auto getting = StartGet(*client, "k", Patient());
  line_->Read();
  Welcome other = TestWelcome();
  other.server = "server-2";
  Break(other);
  EXPECT_EQ(adding.get().status().code(), StatusCode::kOutcomeUnknown);
  Status lost = getting.get().status();
  EXPECT_EQ(lost.code(), StatusCode::kStoreLost);
  EXPECT_THAT(lost.message(), HasSubstr("restarted and lost its keys"));
  EXPECT_EQ(client->NumKeys(Patient()).status().code(), StatusCode::kStoreLost);
}

TEST_F(RequestClientTest, Reconnect_RefusedAsStale_EndsAllCalls) {
  auto client = Connected();
  auto getting = StartGet(*client, "k", Patient());
  line_->Read();
  line_.reset();
  ScriptedConnection line = server_.Accept();
  std::optional<Request> hello = line.Read();
  line.SendBytes(EncodePreamble());
  line.SendReply(ReplyTo(hello, Status(StatusCode::kStaleGeneration, "this process is out")));
  EXPECT_EQ(getting.get().status().code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(client->Add("n", 1, Patient()).status().code(), StatusCode::kStaleGeneration);
}

// What stands at the other address knows nothing of the store of this session, which may come back.
TEST_F(RequestClientTest, Reconnect_AnotherAddressRefuses_EndsNothing) {
  ScriptedServer other;
  ConnectOptions options = Options();
  options.addresses.push_back(other.address());
  auto connecting = StartConnect(options, In(kPatience));
  line_ = std::make_unique<ScriptedConnection>(server_.Accept());
  line_->Greet(TestWelcome());
  const auto client = *connecting.get();
  server_.StopListening();
  line_.reset();
  auto getting = StartGet(*client, "k", Within(Millis(1500)));
  for (int round = 0; round < 2; ++round) {
    other.Accept().Refuse(Status(StatusCode::kAuth, "who are you?"));
  }
  other.StopListening();
  const Status status = getting.get().status();
  EXPECT_EQ(status.code(), StatusCode::kStoreLost) << status.ToString();
  EXPECT_EQ(client->NumKeys(Within(Millis(10))).status().code(), StatusCode::kStoreLost);
}

TEST_F(RequestClientTest, Reconnect_TheStoreOfTheSessionRefuses_EndsAllCalls) {
  ScriptedServer nobody;
  nobody.StopListening();
  ConnectOptions options = Options();
  options.addresses.insert(options.addresses.begin(), nobody.address());
  auto connecting = StartConnect(options, In(kPatience));
  line_ = std::make_unique<ScriptedConnection>(server_.Accept());
  line_->Greet(TestWelcome());
  const auto client = *connecting.get();
  line_.reset();
  auto getting = StartGet(*client, "k", Patient());
  server_.Accept().Refuse(Status(StatusCode::kAuth, "the token has changed"));
  const Status status = getting.get().status();
  EXPECT_EQ(status.code(), StatusCode::kAuth);
  EXPECT_THAT(status.message(), HasSubstr("the token has changed"));
}

}  // namespace
}  // namespace resilient::store
