// Goal: the request connection carries each operation and its answer, refuses what cannot be sent,
// and serves callers that do not block each other, until it is closed or forked. Method:
// RequestClientTest.
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "store/client/link.h"
#include "tests/unit/store_client/request_client_fixture.h"

namespace resilient::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(RequestClientTest, Connect_StoreAnswers_IntroducesItself) {
  ConnectOptions options = Options();
  options.launcher_attempt = 3;
  options.supervised = true;
  options.expected_server = "server-1";
  auto connecting = StartConnect(options, In(kPatience));
  ScriptedConnection line = server_.Accept();
  Hello hello = line.Greet(TestWelcome());
  Result<std::shared_ptr<Client>> client = connecting.get();
  ASSERT_TRUE(client.ok());
  EXPECT_EQ((*client)->server_id(), "server-1");
  EXPECT_EQ(hello.job, "train");
  EXPECT_EQ(hello.session, options.session);
  EXPECT_EQ(hello.incarnation, ThisIncarnation());
  EXPECT_EQ(hello.role, Role::kRequest);
  EXPECT_EQ(hello.process.pid, ::getpid());
  EXPECT_EQ(hello.launcher_attempt, 3u);
  EXPECT_TRUE(hello.supervised);
  EXPECT_EQ(hello.expected_server, "server-1");
}

TEST_F(RequestClientTest, Connect_NothingListens_TriesUntilTheDeadlineAndNamesTheCause) {
  server_.StopListening();
  Result<std::shared_ptr<Client>> client = Connect(Options(), {}, clock_, In(Millis(200)));
  EXPECT_EQ(client.status().code(), StatusCode::kRefused);
  EXPECT_THAT(client.status().message(), HasSubstr("connection refused by " + server_.address()));
  EXPECT_THAT(client.status().message(), HasSubstr("is the store started?"));
}

TEST_F(RequestClientTest, Connect_NameDoesNotResolve_TriesUntilTheDeadline) {
  ConnectOptions options = Options();
  options.addresses = {"no-such-host.invalid:29500"};
  Result<std::shared_ptr<Client>> client = Connect(options, {}, clock_, In(Millis(50)));
  EXPECT_EQ(client.status().code(), StatusCode::kResolve) << client.status().ToString();
}

TEST_F(RequestClientTest, Connect_SecondAddressAnswers_IsUsed) {
  ScriptedServer dead;
  dead.StopListening();
  ConnectOptions options = Options();
  options.addresses = {dead.address(), server_.address()};
  auto connecting = StartConnect(options, In(kPatience));
  ScriptedConnection line = server_.Accept();
  line.Greet(TestWelcome());
  EXPECT_TRUE(connecting.get().ok());
}

TEST_F(RequestClientTest, Connect_OtherProtocol_FailsAtOnce) {
  auto connecting = StartConnect(Options(), Deadline::Never());
  ScriptedConnection line = server_.Accept();
  line.SendBytes("HTTP/1.1 400 Bad Request\r\n\r\n");
  Status status = connecting.get().status();
  EXPECT_EQ(status.code(), StatusCode::kProtocol);
  EXPECT_THAT(status.message(), HasSubstr("HTTP"));
  EXPECT_THAT(status.message(), HasSubstr(server_.address()));
}

TEST_F(RequestClientTest, Connect_HelloRefused_ReturnsTheServersStatus) {
  auto connecting = StartConnect(Options(), Deadline::Never());
  ScriptedConnection line = server_.Accept();
  std::optional<Request> hello = line.Read();
  line.SendBytes(EncodePreamble());
  line.SendReply(ReplyTo(hello, Status(StatusCode::kJob, "this store serves job other")));
  Status status = connecting.get().status();
  EXPECT_EQ(status.code(), StatusCode::kJob);
  EXPECT_THAT(status.message(), HasSubstr("serves job other"));
}

TEST_F(RequestClientTest, Connect_OneAddressRefuses_TheOtherIsAsked) {
  ScriptedServer other;
  ConnectOptions options = Options();
  options.addresses.push_back(other.address());
  for (const StatusCode code : {StatusCode::kJob, StatusCode::kAuth, StatusCode::kProtocol}) {
    auto connecting = StartConnect(options, In(kPatience));
    server_.Accept().Refuse(Status(code, "not here"));
    ScriptedConnection line = other.Accept();
    line.Greet(TestWelcome());
    const Status status = connecting.get().status();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
}

TEST_F(RequestClientTest, Connect_AllAddressesRefuse_EachCauseIsTold) {
  ScriptedServer other;
  ConnectOptions options = Options();
  options.addresses.push_back(other.address());
  auto connecting = StartConnect(options, Deadline::Never());
  server_.Accept().Refuse(Status(StatusCode::kAuth, "a wrong token"));
  other.Accept().Refuse(Status(StatusCode::kJob, "another job"));
  const Status status = connecting.get().status();
  EXPECT_EQ(status.code(), StatusCode::kAuth);
  EXPECT_THAT(status.message(), AllOf(HasSubstr(server_.address() + " (AUTH): "),
                                      HasSubstr("a wrong token; " + other.address() + " (JOB): "),
                                      HasSubstr("another job")));
}

// Waiting for the other one would be no use as far as anybody knows.
TEST_F(RequestClientTest, Connect_OneRefusesAndTheOtherIsNotThere_EndsAndTellsBoth) {
  ScriptedServer nobody;
  nobody.StopListening();
  ConnectOptions options = Options();
  options.addresses.insert(options.addresses.begin(), nobody.address());
  auto connecting = StartConnect(options, Deadline::Never());
  server_.Accept().Refuse(Status(StatusCode::kJob, "another job"));
  const Status status = connecting.get().status();
  EXPECT_EQ(status.code(), StatusCode::kJob);
  EXPECT_THAT(status.message(), AllOf(HasSubstr(nobody.address() + " (REFUSED): "),
                                      HasSubstr(server_.address() + " (JOB): another job")));
}

TEST_F(RequestClientTest, Connect_ClosedBeforeWelcome_TriesAgain) {
  auto connecting = StartConnect(Options(), In(kPatience));
  { ScriptedConnection dropped = server_.Accept(); }
  ScriptedConnection line = server_.Accept();
  line.Greet(TestWelcome());
  EXPECT_TRUE(connecting.get().ok());
}

TEST_F(RequestClientTest, Connect_Interrupted_ReturnsThatStatus) {
  server_.StopListening();
  interrupt_ = [] { return Status(StatusCode::kInterrupted, "Ctrl-C"); };
  Result<std::shared_ptr<Client>> client =
      Connect(Options(), interrupt_, clock_, Deadline::Never());
  EXPECT_EQ(client.status().code(), StatusCode::kInterrupted);
}

TEST_F(RequestClientTest, Connect_NoAddress_IsASettingError) {
  ConnectOptions options = Options();
  options.addresses.clear();
  EXPECT_EQ(Connect(options, {}, clock_, In(kPatience)).status().code(), StatusCode::kSetting);
  options.addresses = {"nonsense"};
  EXPECT_EQ(Connect(options, {}, clock_, In(kPatience)).status().code(), StatusCode::kSetting);
}

TEST_F(RequestClientTest, Operations_EachKind_CarryTheirFieldsAndAnswers) {
  auto client = Connected();
  Client::Call call = Patient();
  call.scope = 4;
  call.generation = 9;
  auto work = std::async(std::launch::async, [&] {
    EXPECT_TRUE(client->Set("k", "v", call).ok());
    EXPECT_EQ(*client->CompareSet("k", "v", "w", call), "w");
    EXPECT_TRUE(*client->Check({"k", "l"}, call));
    EXPECT_TRUE(*client->Delete("k", call));
    EXPECT_EQ(*client->NumKeys(call), 5);
    EXPECT_EQ(*client->StatusJson({}, call), "{}");
    EXPECT_EQ(client->Get("k", false, call).status().code(), StatusCode::kNotFound);
  });
  std::optional<Request> set = line_->Read();
  EXPECT_EQ(std::get<SetOp>(set->op).value, "v");
  EXPECT_EQ(set->scope, 4u);
  EXPECT_EQ(set->generation, 9u);
  EXPECT_EQ(set->seq, 1u);
  line_->SendReply(ReplyTo(set));
  std::optional<Request> swap = line_->Read();
  EXPECT_EQ(std::get<CompareSetOp>(swap->op).expected, "v");
  EXPECT_EQ(std::get<CompareSetOp>(swap->op).desired, "w");
  EXPECT_EQ(swap->first_unacked, 2u);
  line_->SendReply(ValueReply(swap, "w"));
  std::optional<Request> check = line_->Read();
  EXPECT_THAT(std::get<CheckOp>(check->op).keys, ElementsAre("k", "l"));
  Reply yes = ReplyTo(check);
  yes.flag = true;
  line_->SendReply(yes);
  yes.seq = line_->ReadOp<DeleteOp>()->seq;
  line_->SendReply(yes);
  line_->SendReply(NumberReply(line_->ReadOp<NumKeysOp>(), 5));
  Reply json = ReplyTo(line_->ReadOp<StatusOp>());
  json.status_json = "{}";
  line_->SendReply(json);
  std::optional<Request> get = line_->Read();
  EXPECT_FALSE(std::get<GetOp>(get->op).wait);
  line_->SendReply(ReplyTo(get, Status(StatusCode::kNotFound, "no such key")));
  work.get();
}

TEST_F(RequestClientTest, Operations_OnManyKeys_CarryTheirFieldsAndAnswers) {
  auto client = Connected();
  const Client::Call call = Patient();
  auto work = std::async(std::launch::async, [&] {
    EXPECT_EQ(*client->Append("k", "v", call), 7);
    EXPECT_THAT(*client->MultiGet({"a", "b"}, true, call), ElementsAre("1", ""));
    EXPECT_TRUE(client->MultiSet({"a", "b"}, {"x", "y"}, call).ok());
  });
  std::optional<Request> append = line_->Read();
  EXPECT_EQ(std::get<AppendOp>(append->op).key, "k");
  EXPECT_EQ(std::get<AppendOp>(append->op).value, "v");
  line_->SendReply(NumberReply(append, 7));
  std::optional<Request> get = line_->Read();
  EXPECT_THAT(std::get<MultiGetOp>(get->op).keys, ElementsAre("a", "b"));
  EXPECT_TRUE(std::get<MultiGetOp>(get->op).wait);
  line_->SendReply(ValuesReply(get, {"1", ""}));
  std::optional<Request> set = line_->Read();
  EXPECT_THAT(std::get<MultiSetOp>(set->op).keys, ElementsAre("a", "b"));
  EXPECT_THAT(std::get<MultiSetOp>(set->op).values, ElementsAre("x", "y"));
  line_->SendReply(ReplyTo(set));
  work.get();
}

TEST_F(RequestClientTest, Operations_OnQueuesAndMeetings_CarryTheirFieldsAndAnswers) {
  auto client = Connected();
  const Client::Call call = Patient();
  auto work = std::async(std::launch::async, [&] {
    EXPECT_EQ(*client->QueuePush("q", "v", call), 3);
    EXPECT_EQ(*client->QueueLength("q", call), 3);
    EXPECT_EQ(*client->QueuePop("q", true, call), "v");
    EXPECT_EQ(client->QueuePop("q", false, call).status().code(), StatusCode::kQueueEmpty);
    EXPECT_TRUE(client->Barrier("init", 4, call).ok());
    EXPECT_THAT(*client->Exchange("card", 1, 2, "mine", call), ElementsAre("theirs", "mine"));
  });
  std::optional<Request> push = line_->Read();
  EXPECT_EQ(std::get<QueuePushOp>(push->op).value, "v");
  line_->SendReply(NumberReply(push, 3));
  line_->SendReply(NumberReply(line_->ReadOp<QueueLengthOp>(), 3));
  std::optional<Request> pop = line_->Read();
  EXPECT_TRUE(std::get<QueuePopOp>(pop->op).wait);
  line_->SendReply(ValueReply(pop, "v"));
  pop = line_->Read();
  EXPECT_FALSE(std::get<QueuePopOp>(pop->op).wait);
  line_->SendReply(ReplyTo(pop, Status(StatusCode::kQueueEmpty, "queue q is empty")));
  std::optional<Request> barrier = line_->Read();
  EXPECT_EQ(std::get<BarrierOp>(barrier->op).key, "init");
  EXPECT_EQ(std::get<BarrierOp>(barrier->op).size, 4);
  line_->SendReply(ReplyTo(barrier));
  std::optional<Request> exchange = line_->Read();
  EXPECT_EQ(std::get<ExchangeOp>(exchange->op).rank, 1);
  EXPECT_EQ(std::get<ExchangeOp>(exchange->op).size, 2);
  EXPECT_EQ(std::get<ExchangeOp>(exchange->op).value, "mine");
  line_->SendReply(ValuesReply(exchange, {"theirs", "mine"}));
  work.get();
}

TEST_F(RequestClientTest, ListKeys_SeveralPages_AreOneAnswer) {
  auto client = Connected();
  auto listing = std::async(std::launch::async, [&] { return client->ListKeys("a/", Patient()); });
  for (const auto& [after, page, more] :
       {std::tuple("", std::vector<std::string>{"a/1", "a/2"}, true),
        std::tuple("a/2", std::vector<std::string>{"a/3"}, true),
        std::tuple("a/3", std::vector<std::string>{}, false)}) {
    std::optional<Request> request = line_->Read();
    EXPECT_EQ(std::get<ListKeysOp>(request->op).prefix, "a/");
    EXPECT_EQ(std::get<ListKeysOp>(request->op).after, after);
    Reply reply = ValuesReply(request, page);
    reply.flag = more;
    line_->SendReply(reply);
  }
  EXPECT_THAT(*listing.get(), ElementsAre("a/1", "a/2", "a/3"));
}

TEST_F(RequestClientTest, ListKeys_PagesThatDoNotLeadOn_EndWithAnError) {
  auto client = Connected();
  auto listing = std::async(std::launch::async, [&] { return client->ListKeys("", Patient()); });
  for (int i = 0; i < 2; ++i) {
    Reply reply = ValuesReply(line_->ReadOp<ListKeysOp>(), {"a", "b"});
    reply.flag = true;
    line_->SendReply(reply);
  }
  EXPECT_EQ(listing.get().status().code(), StatusCode::kProtocol);
}

TEST_F(RequestClientTest, WrongNumberOfValues_IsAnError) {
  auto client = Connected();
  auto getting = std::async(std::launch::async, [&] {
    return client->MultiGet({"a", "b"}, false, Patient());
  });
  line_->SendReply(ValuesReply(line_->Read(), {"1"}));
  Status status = getting.get().status();
  EXPECT_EQ(status.code(), StatusCode::kProtocol);
  EXPECT_THAT(status.message(), HasSubstr("1 values instead of 2"));
}

TEST_F(RequestClientTest, InvalidArguments_AreRefusedBeforeTheyAreSent) {
  auto client = Connected();
  const Client::Call call = Patient();
  EXPECT_EQ(client->Barrier("b", 0, call).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client->Exchange("e", 2, 2, "", call).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client->Exchange("e", -1, 2, "", call).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client->MultiSet({"a", "b"}, {"1"}, call).code(), StatusCode::kInvalidArgument);
  auto adding = StartAdd(*client, "n", call);
  line_->SendReply(NumberReply(line_->ReadOp<AddOp>(), 1));
  EXPECT_EQ(*adding.get(), 1);
}

TEST_F(RequestClientTest, BlockedWait_DoesNotHoldUpAnotherCaller) {
  auto client = Connected();
  auto waiting = StartWait(*client, {"k"}, Client::Call{});
  std::optional<Request> wait = line_->Read();
  for (int i = 1; i <= 20; ++i) {
    auto adding = StartAdd(*client, "n", Patient());
    line_->SendReply(NumberReply(line_->ReadOp<AddOp>(), i));
    EXPECT_EQ(*adding.get(), i);
  }
  line_->SendReply(ReplyTo(wait));
  EXPECT_TRUE(waiting.get().ok());
}

TEST_F(RequestClientTest, LeaderAnswered_HandsTheLeadOn) {
  auto client = Connected();
  constexpr int kCallers = 6;
  std::vector<std::future<Result<std::string>>> gets;
  std::vector<std::optional<Request>> requests;
  for (int i = 0; i < kCallers; ++i) {
    gets.push_back(StartGet(*client, "k" + std::to_string(i), Patient()));
    requests.push_back(line_->Read());
  }
  // The oldest caller leads each time: its answer makes the next one lead.
  for (std::size_t i = 0; i < kCallers; ++i) {
    line_->SendReply(ValueReply(requests[i], "v" + std::to_string(i)));
    EXPECT_EQ(*gets[i].get(), "v" + std::to_string(i));
  }
}

// The first moment of a wait is spent in recv, the rest in poll: answers count in both, and on the
// way from one to the other nothing is lost.
TEST_F(RequestClientTest, Answer_QuickSlowOrInPieces_Arrives) {
  auto client = Connected();
  for (const Duration pause :
       {Duration(0), Duration(Millis(1)), kQuickAnswer, Duration(Millis(30))}) {
    auto adding = StartAdd(*client, "n", Patient());
    const std::string bytes =
        EncodeFrame(EncodeServerMessage(NumberReply(line_->ReadOp<AddOp>(), 7)));
    EXPECT_EQ(adding.wait_for(pause), std::future_status::timeout);
    line_->SendBytes(std::string_view(bytes).substr(0, 5));
    EXPECT_EQ(adding.wait_for(pause), std::future_status::timeout);
    line_->SendBytes(std::string_view(bytes).substr(5));
    EXPECT_EQ(*adding.get(), 7);
  }
}

TEST_F(RequestClientTest, LargeAnswer_ArrivesWhole) {
  auto client = Connected();
  const std::string value(3u << 20, 'v');
  auto getting = StartGet(*client, "k", Patient());
  line_->SendReply(ValueReply(line_->ReadOp<GetOp>(), value));
  EXPECT_EQ(*getting.get(), value);
}

TEST_F(RequestClientTest, Signals_WhileACallWaits_LoseNothing) {
  struct sigaction ignore {};
  struct sigaction before {};
  ignore.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGUSR1, &ignore, &before), 0);
  auto client = Connected();
  for (int i = 0; i < 20; ++i) {
    std::promise<pthread_t> who;
    auto adding = std::async(std::launch::async, [&] {
      who.set_value(::pthread_self());
      return client->Add("n", 1, Patient());
    });
    const pthread_t caller = who.get_future().get();
    std::optional<Request> request = line_->ReadOp<AddOp>();
    for (int k = 0; k < 3; ++k) ::pthread_kill(caller, SIGUSR1);
    line_->SendReply(NumberReply(request, i));
    EXPECT_EQ(*adding.get(), i);
  }
  ASSERT_EQ(::sigaction(SIGUSR1, &before, nullptr), 0);
}

// Whatever the first of them sleeps in when the others come.
TEST_F(RequestClientTest, ManyCallersOfOneClient_EachGetsItsAnswer) {
  auto client = Connected();
  constexpr int kCallers = 4;
  constexpr int kCalls = 200;
  std::vector<std::future<int>> callers;
  for (int c = 0; c < kCallers; ++c) {
    callers.push_back(std::async(std::launch::async, [&, c] {
      int right = 0;
      for (int i = 0; i < kCalls; ++i) {
        const std::int64_t number = c * kCalls + i;
        const Result<std::int64_t> sum = client->Add("n", number, Patient());
        right += sum.ok() && *sum == number ? 1 : 0;
      }
      return right;
    }));
  }
  for (int i = 0; i < kCallers * kCalls; ++i) {
    std::optional<Request> request = line_->ReadOp<AddOp>();
    ASSERT_TRUE(request);
    line_->SendReply(NumberReply(request, std::get<AddOp>(request->op).amount));
  }
  for (auto& caller : callers) EXPECT_EQ(caller.get(), kCalls);
}

TEST_F(RequestClientTest, Close_AtTheSameTimeAsACall_EndsIt) {
  for (int i = 0; i < 10; ++i) {
    auto client = Connected();
    auto getting = StartGet(*client, "k", Patient());
    ASSERT_TRUE(line_->ReadOp<GetOp>());
    const Instant begun = clock_.Now();
    client->Close();
    EXPECT_EQ(getting.get().status().code(), StatusCode::kFailedPrecondition);
    EXPECT_LT(clock_.Now() - begun, Millis(1000));
    EXPECT_TRUE(line_->SeesEnd());
  }
}

TEST_F(RequestClientTest, ServersStatus_IsPassedThrough) {
  auto client = Connected();
  auto adding = StartAdd(*client, "n", Patient());
  FailureDetail detail;
  detail.rank = 2;
  detail.generation = 3;
  line_->SendReply(
      ReplyTo(line_->Read(), Status(StatusCode::kStaleGeneration, "generation 3 is over", detail)));
  Status status = adding.get().status();
  EXPECT_EQ(status.code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(status.detail(), detail);
}

TEST_F(RequestClientTest, TooLarge_IsRefusedBeforeItIsSent) {
  auto client = Connected();
  Client::Call call = Patient();
  std::string long_key(kKeyBytesMax + 1, 'k');
  std::string large(kValueBytesMax + 1, 'v');
  std::string half(kValueBytesMax, 'v');
  EXPECT_EQ(client->Set("k", large, call).code(), StatusCode::kTooLarge);
  EXPECT_EQ(client->Set(long_key, "v", call).code(), StatusCode::kTooLarge);
  EXPECT_EQ(client->Get(long_key, true, call).status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(client->CompareSet("k", "", large, call).status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(client->CompareSet("k", half, half, call).status().code(), StatusCode::kTooLarge);
  std::vector<std::string> many(kKeysPerRequestMax + 1, "k");
  EXPECT_EQ(client->Wait(many, call).code(), StatusCode::kTooLarge);
  std::vector<std::string> wide(kMaxFrameBody / kKeyBytesMax, std::string(kKeyBytesMax, 'k'));
  EXPECT_EQ(client->Check(wide, call).status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(client->Append("k", large, call).status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(client->QueuePush("q", large, call).status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(client->Exchange("e", 0, 1, large, call).status().code(), StatusCode::kTooLarge);
  Status together = client->MultiSet({"k", "l"}, {half, half}, call);
  EXPECT_EQ(together.code(), StatusCode::kTooLarge);
  EXPECT_THAT(together.message(), HasSubstr("limit of 16777216 bytes for one request"));
  EXPECT_EQ(client->MultiGet(wide, true, call).status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(client->MultiGet(many, true, call).status().code(), StatusCode::kTooLarge);
  // The connection is as it was, and values at the limit pass.
  auto setting = std::async(std::launch::async, [&] { return client->Set("k", half, call); });
  std::optional<Request> set = line_->Read();
  ASSERT_TRUE(set);
  EXPECT_EQ(std::get<SetOp>(set->op).value.size(), kValueBytesMax);
  line_->SendReply(ReplyTo(set));
  EXPECT_TRUE(setting.get().ok());
}

TEST_F(RequestClientTest, LargeValue_FollowerSendsWhileAnotherLeads) {
  auto client = Connected();
  auto waiting = StartWait(*client, {"k"}, Patient());
  std::optional<Request> wait = line_->Read();
  std::string large(kValueBytesMax, 'v');
  auto setting = std::async(std::launch::async, [&] { return client->Set("l", large, Patient()); });
  std::optional<Request> set = line_->Read();
  ASSERT_TRUE(set);
  EXPECT_EQ(std::get<SetOp>(set->op).value, large);
  line_->SendReply(ReplyTo(set));
  EXPECT_TRUE(setting.get().ok());
  line_->SendReply(ReplyTo(wait));
  EXPECT_TRUE(waiting.get().ok());
}

TEST_F(RequestClientTest, Close_EndsCallsAndConnection) {
  auto client = Connected();
  auto waiting = StartWait(*client, {"k"}, Client::Call{});
  line_->Read();
  client->Close();
  EXPECT_EQ(waiting.get().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(client->Set("k", "v", Patient()).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(line_->SeesEnd());
  client->Close();
}

TEST_F(RequestClientTest, ForkedChild_EveryCallSaysSoAndTheParentGoesOn) {
  auto client = Connected();
  auto waiting = StartWait(*client, {"k"}, Patient());
  std::optional<Request> wait = line_->Read();
  const std::string parent_incarnation = ThisIncarnation();
  pid_t child = ::fork();
  if (child == 0) {
    // No gtest in the child: its exit code tells.
    Status add = client->Add("n", 1, Client::Call{}).status();
    Status wait_status = client->Wait({"k"}, Client::Call{});
    bool forked = add.code() == StatusCode::kForked && wait_status.code() == StatusCode::kForked &&
                  add.message().find("fork") != std::string::npos && client->server_id().empty();
    client->Close();
    client.reset();
    ::_exit(forked && ThisIncarnation() != parent_incarnation ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(ThisIncarnation(), parent_incarnation);
  line_->SendReply(ReplyTo(wait));
  EXPECT_TRUE(waiting.get().ok());
}

TEST(SessionIdTest, NewSessionId_Twice_Differs) {
  EXPECT_EQ(NewSessionId().size(), 32u);
  EXPECT_NE(NewSessionId(), NewSessionId());
  EXPECT_EQ(ThisIncarnation(), ThisIncarnation());
}

}  // namespace
}  // namespace resilient::store
