// Goal: what the server core answers on a connection: Hello, key operations, exactly once, waits,
// cancel, roles. Method: CoreFixture; messages in, messages out.
#include <gmock/gmock.h>

#include "tests/unit/store/core_fixture.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;

class CoreServer : public CoreFixture {};

TEST_F(CoreServer, Hello_IsWelcomed) {
  const ConnectionId connection = Connect();
  const Reply reply = Ask(connection, Op(HelloOf(1, Role::kRequest)), 0);
  EXPECT_EQ(reply.welcome->server, "server-1");
  EXPECT_EQ(reply.welcome->lease_ttl_ms, 5000u);
  EXPECT_EQ(reply.welcome->heartbeat_interval_ms, 1000u);
  EXPECT_EQ(reply.welcome->key_bytes_max, kKeyBytesMax);
  EXPECT_EQ(reply.welcome->value_bytes_max, kValueBytesMax);
  EXPECT_FALSE(reply.welcome->session_known);
  const Reply second = Ask(Connect(), Op(HelloOf(1, Role::kControl)), 0);
  EXPECT_TRUE(second.welcome->session_known);
}

TEST_F(CoreServer, Beginning_IsKeptWithTheStore) {
  CoreOptions options = Options();
  options.began_unix_ms = 7;
  core_ = std::make_unique<ServerCore>(options, now_);
  EXPECT_EQ(Ask(Connect(), Op(HelloOf(1, Role::kControl)), 0).welcome->began_unix_ms, 7u);
  options.began_unix_ms = 8;
  Recover(options);
  EXPECT_EQ(Ask(Connect(), Op(HelloOf(1, Role::kControl)), 0).welcome->began_unix_ms, 7u);
}

TEST_F(CoreServer, MissingHello_ClosesTheConnection) {
  const ConnectionId connection = Connect();
  EXPECT_EQ(Ask(connection, SetOp{"k", "v"}).status.code(), StatusCode::kProtocol);
  EXPECT_TRUE(Closed(connection));
  Send(connection, SetOp{"k", "v"}, 99);
  EXPECT_FALSE(TakeReply(connection, 99));
  EXPECT_EQ(core_->Connections(), 0u);
}

TEST_F(CoreServer, RepeatedHello_ClosesTheConnection) {
  const ConnectionId connection = OpenRequest(1);
  EXPECT_EQ(Ask(connection, Op(HelloOf(1, Role::kRequest)), 0).status.code(),
            StatusCode::kProtocol);
  EXPECT_TRUE(Closed(connection));
}

TEST_F(CoreServer, BadHello_IsRefused) {
  struct Row {
    std::function<void(Hello&)> change;
    StatusCode code;
  };
  for (const Row& row : {Row{[](Hello& h) { h.expected_server = "server-0"; }, StatusCode::kJob},
                         Row{[](Hello& h) { h.job.clear(); }, StatusCode::kJob},
                         Row{[](Hello& h) { h.session.clear(); }, StatusCode::kProtocol}}) {
    Hello hello = HelloOf(1, Role::kRequest);
    row.change(hello);
    const ConnectionId connection = Connect();
    EXPECT_EQ(Ask(connection, Op(hello), 0).status.code(), row.code);
    EXPECT_TRUE(Closed(connection));
  }
}

TEST_F(CoreServer, ExpectedServer_IsTheRightOne) {
  Hello hello = HelloOf(1, Role::kRequest);
  hello.expected_server = "server-1";
  Open(hello);
}

TEST_F(CoreServer, KeyOperations_Answer) {
  const ConnectionId connection = OpenRequest(1);
  EXPECT_TRUE(Ask(connection, SetOp{"k", "v"}).status.ok());
  EXPECT_EQ(Ask(connection, GetOp{"k", false}).value, "v");
  EXPECT_EQ(Ask(connection, GetOp{"k", true}).value, "v");
  EXPECT_EQ(Ask(connection, GetOp{"none", false}).status.code(), StatusCode::kNotFound);
  EXPECT_EQ(Ask(connection, AddOp{"n", 3}).number, 3);
  EXPECT_EQ(Ask(connection, GetOp{"n", false}).value, "3");
  EXPECT_EQ(Ask(connection, AddOp{"k", 1}).status.code(), StatusCode::kWrongType);
  const Reply swapped = Ask(connection, CompareSetOp{"k", "v", "w"});
  EXPECT_EQ(swapped.value, "w");
  EXPECT_TRUE(swapped.flag);
  EXPECT_EQ(Ask(connection, CompareSetOp{"none", "x", "w"}).value, "x");
  EXPECT_TRUE(Ask(connection, CheckOp{{"k", "n"}}).flag);
  EXPECT_FALSE(Ask(connection, CheckOp{{"k", "none"}}).flag);
  EXPECT_TRUE(Ask(connection, WaitOp{{"k", "n"}}).status.ok());
  EXPECT_EQ(Ask(connection, NumKeysOp{}).number, 2);
  EXPECT_TRUE(Ask(connection, DeleteOp{"k"}).flag);
  EXPECT_FALSE(Ask(connection, DeleteOp{"k"}).flag);
  EXPECT_FALSE(Closed(connection));
}

TEST_F(CoreServer, OversizedRequest_IsAnAnswer) {
  const ConnectionId connection = OpenRequest(1);
  const std::string key(kKeyBytesMax + 1, 'k');
  EXPECT_EQ(Ask(connection, SetOp{key, ""}).status.code(), StatusCode::kTooLarge);
  EXPECT_EQ(Ask(connection, GetOp{key, true}).status.code(), StatusCode::kTooLarge);
  EXPECT_EQ(Ask(connection, WaitOp{{key}}).status.code(), StatusCode::kTooLarge);
  EXPECT_EQ(Ask(connection, SetOp{"k", std::string(kValueBytesMax + 1, 'v')}).status.code(),
            StatusCode::kTooLarge);
  std::vector<std::string> keys(kKeysPerRequestMax, "k");
  EXPECT_TRUE(Ask(connection, CheckOp{keys}).status.ok());
  keys.push_back("k");
  EXPECT_EQ(Ask(connection, CheckOp{keys}).status.code(), StatusCode::kTooLarge);
  EXPECT_EQ(Ask(connection, WaitOp{keys}).status.code(), StatusCode::kTooLarge);
  EXPECT_TRUE(Ask(connection, SetOp{"k", ""}).status.ok());
}

TEST_F(CoreServer, RepeatedMutation_IsAppliedOnce) {
  ConnectionId connection = OpenRequest(1);
  EXPECT_EQ(Ask(connection, AddOp{"n", 1}, 7).number, 1);
  EXPECT_EQ(Ask(connection, AddOp{"n", 1}, 7).number, 1);
  Close(connection);
  connection = OpenRequest(1);
  EXPECT_EQ(Ask(connection, AddOp{"n", 1}, 7).number, 1);
  EXPECT_EQ(Ask(connection, AddOp{"n", 1}, 8).number, 2);
  EXPECT_EQ(Ask(OpenRequest(2), AddOp{"n", 1}, 7).number, 3);
}

TEST_F(CoreServer, RepeatedMutationThatFailed_FailsTheSame) {
  const ConnectionId connection = OpenRequest(1);
  ASSERT_TRUE(Ask(connection, SetOp{"n", "x"}, 1).status.ok());
  EXPECT_EQ(Ask(connection, AddOp{"n", 1}, 2).status.code(), StatusCode::kWrongType);
  ASSERT_TRUE(Ask(connection, SetOp{"n", "5"}, 3).status.ok());
  EXPECT_EQ(Ask(connection, AddOp{"n", 1}, 2).status.code(), StatusCode::kWrongType);
}

TEST_F(CoreServer, AcknowledgedResult_IsForgotten) {
  const ConnectionId connection = OpenRequest(1);
  EXPECT_EQ(Ask(connection, AddOp{"n", 1}, 1).number, 1);
  Request next{.seq = 2, .first_unacked = 2, .op = AddOp{"n", 1}};
  Send(connection, next);
  EXPECT_EQ(TakeReply(connection, 2)->number, 2);
  // A repeat of what was acknowledged is a bug of the client; it must not take effect again.
  EXPECT_EQ(Ask(connection, AddOp{"n", 1}, 1).status.code(), StatusCode::kOutcomeUnknown);
  EXPECT_EQ(Ask(connection, GetOp{"n", false}, 3).value, "2");
}

TEST_F(CoreServer, SecondConnectionOfARole_ReplacesTheFirst) {
  const ConnectionId first = OpenRequest(1);
  const ConnectionId second = OpenRequest(1);
  EXPECT_TRUE(Closed(first));
  Send(first, SetOp{"k", "v"}, 50);
  EXPECT_FALSE(TakeReply(first, 50));
  EXPECT_TRUE(Ask(second, SetOp{"k", "v"}, 50).status.ok());
}

TEST_F(CoreServer, WaitingGet_IsAnsweredInOneMessage) {
  const ConnectionId waiter = OpenRequest(1);
  const ConnectionId setter = OpenRequest(2);
  Send(waiter, GetOp{"k", true}, 1);
  EXPECT_FALSE(TakeReply(waiter, 1));
  EXPECT_TRUE(Ask(setter, SetOp{"k", "v"}).status.ok());
  const std::optional<Reply> reply = TakeReply(waiter, 1);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->value, "v");
}

TEST_F(CoreServer, Wait_IsRegisteredAgainAfterALostConnection) {
  ConnectionId waiter = OpenRequest(1);
  const ConnectionId setter = OpenRequest(2);
  Send(waiter, WaitOp{{"a", "b"}}, 1);
  Close(waiter);
  EXPECT_TRUE(Ask(setter, SetOp{"a", ""}).status.ok());
  waiter = OpenRequest(1);
  Send(waiter, WaitOp{{"a", "b"}}, 1);
  EXPECT_FALSE(TakeReply(waiter, 1));
  EXPECT_TRUE(Ask(setter, SetOp{"b", ""}).status.ok());
  EXPECT_TRUE(TakeReply(waiter, 1)->status.ok());
}

TEST_F(CoreServer, Cancel_AnswersTheRequestItEnds) {
  const ConnectionId connection = OpenRequest(1);
  Send(connection, GetOp{"k", true}, 1);
  Send(connection, CancelOp{1}, 0);
  EXPECT_EQ(TakeReply(connection, 1)->status.code(), StatusCode::kCancelled);
  EXPECT_FALSE(TakeReply(connection, 0));
  EXPECT_TRUE(Ask(OpenRequest(2), SetOp{"k", "v"}).status.ok());
  EXPECT_FALSE(TakeReply(connection, 1));
}

TEST_F(CoreServer, CancelOfAMutation_TellsWhatHappened) {
  const ConnectionId connection = OpenRequest(1);
  EXPECT_EQ(Ask(connection, AddOp{"n", 1}, 1).number, 1);
  Send(connection, CancelOp{1}, 0);
  EXPECT_EQ(TakeReply(connection, 1)->number, 1);
  // The cancel overtook the request: it takes no effect any more.
  Send(connection, CancelOp{2}, 0);
  EXPECT_EQ(TakeReply(connection, 2)->status.code(), StatusCode::kCancelled);
  EXPECT_EQ(Ask(connection, AddOp{"n", 1}, 2).status.code(), StatusCode::kCancelled);
  EXPECT_EQ(Ask(connection, GetOp{"n", false}, 3).value, "1");
}

TEST_F(CoreServer, CancelOfAForgottenWait_EndsItSilently) {
  const ConnectionId connection = OpenRequest(1);
  Send(connection, GetOp{"k", true}, 1);
  Send(connection, Request{.seq = 0, .first_unacked = 2, .op = CancelOp{1}});
  TakeReply(connection, 1);
  EXPECT_THAT(core_->StatusJson(now_), HasSubstr("\"waits\":0"));
}

TEST_F(CoreServer, Operations_BelongToTheirConnection) {
  EXPECT_EQ(Ask(OpenControl(1), SetOp{"k", "v"}).status.code(), StatusCode::kInvalidArgument);
  const ConnectionId request = OpenRequest(1);
  EXPECT_EQ(Ask(request, JoinOp{JoinOf(0, 1)}).status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(core_->LiveMembers(), 0u);
}

TEST_F(CoreServer, Jobs_AreApart) {
  Hello other = HelloOf(1, Role::kRequest);
  other.job = "other";
  const ConnectionId mine = OpenRequest(1);
  const ConnectionId theirs = Open(other);
  EXPECT_TRUE(Ask(mine, SetOp{"k", "v"}).status.ok());
  EXPECT_EQ(Ask(theirs, GetOp{"k", false}).status.code(), StatusCode::kNotFound);
}

TEST_F(CoreServer, Jobs_HaveALimit) {
  Hello hello = HelloOf(1, Role::kRequest);
  for (std::size_t i = 0; i < kJobsMax; ++i) {
    hello.job = "job" + std::to_string(i);
    Open(hello);
  }
  hello.job = "one more";
  const ConnectionId connection = Connect();
  EXPECT_EQ(Ask(connection, Op(hello), 0).status.code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(Closed(connection));
}

TEST_F(CoreServer, Admin_WorksWithoutMemory) {
  const ConnectionId request = OpenRequest(1);
  ASSERT_TRUE(Ask(request, SetOp{"k", "v"}).status.ok());
  const ConnectionId admin = Open(HelloOf(9, Role::kAdmin));
  EXPECT_EQ(Ask(admin, GetOp{"k", false}, 1).value, "v");
  EXPECT_EQ(Ask(admin, AddOp{"n", 1}, 1).number, 1);
  EXPECT_EQ(Ask(admin, AddOp{"n", 1}, 1).number, 2);
  EXPECT_TRUE(Ask(admin, GetOp{"n", false}, 2, /*scope=*/5).status.code() == StatusCode::kNotFound);
  EXPECT_THAT(Ask(admin, StatusOp{}).status_json, HasSubstr("\"job\":\"job\""));
  EXPECT_EQ(Ask(admin, JoinOp{JoinOf(0, 1)}).status.code(), StatusCode::kInvalidArgument);
  Send(admin, GetOp{"later", true}, 70);
  Close(admin);
  EXPECT_TRUE(Ask(request, SetOp{"later", "v"}).status.ok());
}

TEST_F(CoreServer, AdminWithoutAJob_SeesTheStatus) {
  Hello hello = HelloOf(9, Role::kAdmin);
  hello.job.clear();
  hello.session.clear();
  const ConnectionId admin = Open(hello);
  EXPECT_THAT(Ask(admin, StatusOp{}).status_json, HasSubstr("\"jobs\":[]"));
  EXPECT_EQ(Ask(admin, SetOp{"k", "v"}).status.code(), StatusCode::kInvalidArgument);
}

TEST_F(CoreServer, Heartbeat_IsAcknowledged) {
  const ConnectionId control = OpenControl(1);
  Send(control, HeartbeatOp{42}, 0);
  EXPECT_EQ(Take<HeartbeatAckEvent>(control)->beat, 42u);
  EXPECT_FALSE(TakeReply(control, 0));
}

TEST_F(CoreServer, NamesInTheStatus_AreEscaped) {
  Hello hello = HelloOf(1, Role::kRequest);
  hello.job = "a\"b\n";
  Open(hello);
  EXPECT_THAT(core_->StatusJson(now_), HasSubstr("\"job\":\"a\\\"b\\u000a\""));
}

class CoreServerShortMemory : public CoreFixture {
 protected:
  CoreServerShortMemory() : CoreFixture(Short()) {}
  static CoreOptions Short() {
    CoreOptions options = Options();
    options.session_memory = std::chrono::seconds(10);
    return options;
  }
};

TEST_F(CoreServerShortMemory, SessionIsForgotten_AfterItsMemory) {
  Close(OpenRequest(1));
  Advance(std::chrono::seconds(9));
  ConnectionId connection = Connect();
  EXPECT_TRUE(Ask(connection, Op(HelloOf(1, Role::kRequest)), 0).welcome->session_known);
  Close(connection);
  Advance(std::chrono::seconds(11));
  EXPECT_THAT(core_->StatusJson(now_), HasSubstr("\"jobs\":[]"));
  connection = Connect();
  EXPECT_FALSE(Ask(connection, Op(HelloOf(1, Role::kRequest)), 0).welcome->session_known);
}

TEST_F(CoreServerShortMemory, ForgottenJob_GoesOnAboveItsGenerations) {
  const std::vector<ConnectionId> control = Run(1);
  Send(control[0], LeaveOp{});
  Close(control[0]);
  Advance(std::chrono::seconds(11));
  EXPECT_THAT(core_->StatusJson(now_), HasSubstr("\"jobs\":[]"));
  const ConnectionId again = OpenControl(1);
  Send(again, JoinOp{JoinOf(0, 1)});
  EXPECT_EQ(Take<View>(again)->generation, 2u);
}

// ---- Jobs that keep nothing ----

class CoreServerFewJobs : public CoreFixture {
 protected:
  CoreServerFewJobs() : CoreFixture(OfJobs(2)) {}
  static CoreOptions OfJobs(std::size_t jobs) {
    CoreOptions options = Options();
    options.limits.jobs = jobs;
    return options;
  }
  static Hello OfJob(int number, Role role) {
    Hello hello = HelloOf(number, role);
    hello.job = "job " + std::to_string(number);
    return hello;
  }
  bool IsTaken(int number) {
    return Ask(Connect(), Op(OfJob(number, Role::kRequest)), 0).status.ok();
  }
};

TEST_F(CoreServerFewJobs, WhatAdminsAskFor_LeavesNoJob) {
  for (int number = 0; number < 8; ++number) {
    const ConnectionId admin = Open(OfJob(number, Role::kAdmin));
    EXPECT_FALSE(Ask(admin, GetOp{"k"}).status.ok());
    Tick();
    Close(admin);
  }
  EXPECT_THAT(core_->StatusJson(now_), HasSubstr("\"jobs\":[]"));
  EXPECT_TRUE(IsTaken(1));
}

TEST_F(CoreServerFewJobs, AdminsKeysAndWaits_KeepTheirJob) {
  const ConnectionId admin = Open(OfJob(1, Role::kAdmin));
  EXPECT_TRUE(Ask(admin, SetOp{"k", "v"}).status.ok());
  Send(Open(OfJob(2, Role::kAdmin)), GetOp{"k", true});
  Tick();
  EXPECT_FALSE(IsTaken(3));
  EXPECT_TRUE(Ask(admin, DeleteOp{"k"}).flag);
  Tick();
  EXPECT_TRUE(IsTaken(3));
}

TEST_F(CoreServerFewJobs, RefusedHello_LeavesNoJob) {
  for (int number = 0; number < 8; ++number) {
    Hello hello = OfJob(number, Role::kControl);
    hello.session.clear();
    EXPECT_FALSE(Ask(Connect(), Op(hello), 0).status.ok());
  }
  EXPECT_THAT(core_->StatusJson(now_), HasSubstr("\"jobs\":[]"));
  EXPECT_TRUE(IsTaken(1) && IsTaken(2));
  EXPECT_FALSE(IsTaken(3));
  EXPECT_FALSE(IsTaken(3));
}

TEST_F(CoreServerFewJobs, LowerLimit_IsNoDamageToWhatWasKept) {
  EXPECT_TRUE(IsTaken(1) && IsTaken(2));
  Recover(OfJobs(1));
  EXPECT_TRUE(IsTaken(1) && IsTaken(2));
  EXPECT_FALSE(IsTaken(3));
}

TEST_F(CoreServer, CancelOnTheControlConnection_IsOfNoWait) {
  const ConnectionId request = OpenRequest(1);
  Send(request, GetOp{"k", true}, 1);
  Send(OpenControl(1), CancelOp{1}, 0);
  EXPECT_FALSE(TakeReply(request, 1));
  EXPECT_TRUE(Ask(OpenRequest(2), SetOp{"k", "v"}).status.ok());
  EXPECT_EQ(TakeReply(request, 1)->value, "v");
}

}  // namespace
}  // namespace resilient::store
