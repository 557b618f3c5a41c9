// Goal: sessions outlive connections for as long as promised, and results are kept exactly as long
// as a client may ask again; a full table is the trouble of the job that fills it. Method:
// ResultLog and SessionTable alone, then the server core.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "store/core/codec.h"
#include "store/core/session_table.h"
#include "tests/numbered_secrets.h"
#include "tests/unit/store/core_fixture.h"

namespace resilient::store {
namespace {

Reply ReplyOf(std::uint64_t seq, std::string value = {}) {
  Reply reply;
  reply.seq = seq;
  reply.value = std::move(value);
  return reply;
}

Hello HelloOf(std::string session, Role role, std::string incarnation = "i") {
  Hello hello;
  hello.job = "job";
  hello.session = std::move(session);
  hello.incarnation = std::move(incarnation);
  hello.role = role;
  return hello;
}

Instant AtSecond(int s) { return Instant(std::chrono::seconds(s)); }

TEST(ResultLog, FirstResult_IsKeptUntilAcknowledged) {
  ResultLog log;
  log.Remember(ReplyOf(1, "a"));
  log.Remember(ReplyOf(1, "b"));
  log.Remember(ReplyOf(2, "c"));
  ASSERT_NE(log.Find(1), nullptr);
  EXPECT_EQ(log.Find(1)->value, "a");
  log.Acknowledge(2);
  EXPECT_EQ(log.Find(1), nullptr);
  EXPECT_TRUE(log.Forgotten(1));
  EXPECT_FALSE(log.Forgotten(2));
  EXPECT_EQ(log.bytes(), 1u);
}

TEST(ResultLog, Results_HaveALimit) {
  ResultLog log;
  for (std::uint64_t seq = 1; seq <= kResultsPerLineMax; ++seq) log.Remember(ReplyOf(seq));
  EXPECT_NE(log.Find(1), nullptr);
  log.Remember(ReplyOf(kResultsPerLineMax + 1));
  EXPECT_EQ(log.size(), kResultsPerLineMax);
  EXPECT_TRUE(log.Forgotten(1));
  EXPECT_FALSE(log.Forgotten(2));
}

TEST(ResultLog, Bytes_HaveALimit) {
  ResultLog log;
  log.Remember(ReplyOf(1, std::string(kResultBytesPerLineMax / 2, 'v')));
  log.Remember(ReplyOf(2, std::string(kResultBytesPerLineMax / 2, 'v')));
  EXPECT_EQ(log.size(), 2u);
  log.Remember(ReplyOf(3, "v"));
  EXPECT_TRUE(log.Forgotten(1));
  EXPECT_NE(log.Find(3), nullptr);
  EXPECT_LE(log.bytes(), kResultBytesPerLineMax);
}

TEST(ResultLog, Shed_LeavesTheNumbers) {
  ResultLog log;
  for (std::uint64_t seq = 1; seq <= 3; ++seq) log.Remember(ReplyOf(seq, "v"));
  log.Remember(ReplyOf(4, std::string(5000, 'v')));
  log.Open(5);
  log.Shed();
  EXPECT_EQ(log.size(), 1u);
  EXPECT_TRUE(log.Forgotten(1));
  EXPECT_TRUE(log.Forgotten(3));
  ASSERT_NE(log.Find(4), nullptr);
  EXPECT_EQ(log.Find(4)->status.code(), StatusCode::kOutcomeUnknown);
  EXPECT_TRUE(log.Find(4)->value.empty());
  EXPECT_FALSE(log.Forgotten(5));  // It waits, and has taken no effect.
  log.Remember(ReplyOf(5, "v"));
  EXPECT_EQ(log.Find(5)->value, "v");
  log.Shed();
  EXPECT_EQ(log.Find(5)->value, "v");  // So small an answer costs no more than its number.
}

// What one session of a table has for its request line.
ResultLog& ResultsOf(SessionTable& table, SessionId session) {
  return table.Find(session)->request.results;
}

class ResultShares : public ::testing::Test {
 protected:
  static constexpr std::size_t kOfJob = 100 << 10;
  static constexpr std::size_t kOfAll = 250 << 10;

  SessionId Open(const std::string& name, const std::string& job = "job") {
    Hello hello = HelloOf(name, Role::kRequest);
    hello.job = job;
    table_.Connect(++connection_);
    return table_.Open(connection_, hello)->session;
  }
  void Remember(SessionId session, std::uint64_t seq, std::size_t bytes) {
    table_.Remember(*table_.Find(session), Role::kRequest, ReplyOf(seq, std::string(bytes, 'v')));
  }
  bool Keeps(SessionId session, std::uint64_t seq) {
    const Reply* reply = ResultsOf(table_, session).Find(seq);
    return reply != nullptr && reply->status.ok();
  }

  SessionTable table_{std::chrono::hours(1),
                      {.result_bytes_per_job = kOfJob, .result_bytes = kOfAll}};
  ConnectionId connection_ = 0;
};

TEST_F(ResultShares, OfAJobThatTakesTooMuch_TheLargestLineShedsItsResults) {
  const SessionId large = Open("large");
  const SessionId small = Open("small");
  Remember(small, 1, 10 << 10);
  Remember(large, 1, 45 << 10);
  Remember(large, 2, 25 << 10);
  EXPECT_TRUE(Keeps(large, 1));
  Remember(small, 2, 30 << 10);
  EXPECT_FALSE(Keeps(large, 1));
  EXPECT_FALSE(Keeps(large, 2));
  EXPECT_TRUE(Keeps(small, 1));
  EXPECT_TRUE(Keeps(small, 2));
  EXPECT_LT(table_.result_bytes(), 50u << 10);
}

TEST_F(ResultShares, WhoLostItsConnectionFirst_ShedsFirst) {
  const SessionId gone = Open("gone");
  Remember(gone, 1, 4 << 10);
  table_.Disconnect(connection_, AtSecond(1));
  const SessionId later = Open("later");
  Remember(later, 1, 8 << 10);
  table_.Disconnect(connection_, AtSecond(2));
  const SessionId here = Open("here");
  Remember(here, 1, 52 << 10);
  EXPECT_TRUE(Keeps(gone, 1));
  Remember(here, 2, 37 << 10);
  EXPECT_FALSE(Keeps(gone, 1));
  EXPECT_TRUE(Keeps(later, 1));
  EXPECT_TRUE(Keeps(here, 1));
  EXPECT_TRUE(Keeps(here, 2));
}

// One that takes more than there is keeps nothing, and tells so.
TEST_F(ResultShares, AnAnswerThatNoJobMayKeep_IsNotKept) {
  const SessionId session = Open("s");
  Remember(session, 1, 1);
  Remember(session, 2, kOfJob + 1);
  EXPECT_FALSE(Keeps(session, 2));
  EXPECT_TRUE(ResultsOf(table_, session).Forgotten(1));
  EXPECT_EQ(ResultsOf(table_, session).Find(2)->status.code(), StatusCode::kOutcomeUnknown);
  EXPECT_LT(table_.result_bytes(), 2u << 10);
}

TEST_F(ResultShares, JobsThatTakeAll_LeaveTheOthersTheirs) {
  std::vector<SessionId> greedy;
  for (const char* job : {"a", "b", "c"}) {
    greedy.push_back(Open("s", job));
    Remember(greedy.back(), 1, 90 << 10);
  }
  // The pool was full with the third, which shed what was its own.
  EXPECT_TRUE(Keeps(greedy[0], 1));
  EXPECT_TRUE(Keeps(greedy[1], 1));
  EXPECT_FALSE(Keeps(greedy[2], 1));
  const SessionId honest = Open("s", "honest");
  Remember(honest, 1, 40 << 10);
  Remember(honest, 2, 20 << 10);
  EXPECT_TRUE(Keeps(honest, 1));
  EXPECT_TRUE(Keeps(honest, 2));
}

TEST_F(ResultShares, NothingIsLeft_WhenSessionsAreForgotten) {
  const SessionId session = Open("s");
  Remember(session, 1, 50 << 10);
  Reply reply = ReplyOf(2);
  reply.shared_values = Share({std::string(20 << 10, 'v'), "w"});
  table_.Remember(*table_.Find(session), Role::kRequest, reply);
  const SessionId other = Open("other");
  const std::size_t before = table_.result_bytes();
  table_.Remember(*table_.Find(other), Role::kRequest, reply);
  EXPECT_LT(table_.result_bytes(), before + (2u << 10));  // Shared values count once.
  table_.Disconnect(1, AtSecond(1));
  table_.Disconnect(2, AtSecond(1));
  table_.Forget(session);
  EXPECT_GT(table_.result_bytes(), 40u << 10);
  table_.Forget(other);
  EXPECT_EQ(table_.result_bytes(), 0u);
}

TEST(SessionTable, Lines_AreOneSession) {
  SessionTable table(std::chrono::hours(1));
  table.Connect(1);
  table.Connect(2);
  const auto request = table.Open(1, HelloOf("s", Role::kRequest));
  const auto control = table.Open(2, HelloOf("s", Role::kControl));
  ASSERT_TRUE(request.ok() && control.ok());
  EXPECT_FALSE(request->known);
  EXPECT_TRUE(control->known);
  EXPECT_EQ(request->session, control->session);
  EXPECT_EQ(control->replaced, 0u);
  EXPECT_EQ(table.Of(2).role, Role::kControl);
}

TEST(SessionTable, SecondOfARole_ReplacesTheFirst) {
  SessionTable table(std::chrono::hours(1));
  table.Connect(1);
  table.Connect(2);
  ASSERT_TRUE(table.Open(1, HelloOf("s", Role::kRequest)).ok());
  const auto second = table.Open(2, HelloOf("s", Role::kRequest));
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->replaced, 1u);
  EXPECT_FALSE(table.Knows(1));
  EXPECT_EQ(table.Disconnect(1, AtSecond(0)).session, 0u);
  EXPECT_EQ(table.Of(2).session->request.connection, 2u);
}

TEST(SessionTable, SameNameInAnotherJob_IsAnotherSession) {
  SessionTable table(std::chrono::hours(1));
  table.Connect(1);
  table.Connect(2);
  Hello other = HelloOf("s", Role::kRequest);
  other.job = "other";
  const auto first = table.Open(1, HelloOf("s", Role::kRequest));
  const auto second = table.Open(2, other);
  EXPECT_NE(first->session, second->session);
}

TEST(SessionTable, AnotherProcess_CannotTakeASession) {
  SessionTable table(std::chrono::hours(1));
  table.Connect(1);
  table.Connect(2);
  ASSERT_TRUE(table.Open(1, HelloOf("s", Role::kRequest)).ok());
  EXPECT_EQ(table.Open(2, HelloOf("s", Role::kRequest, "j")).status().code(),
            StatusCode::kProtocol);
}

TEST(SessionTable, Memory_BeginsWithTheLastConnection) {
  SessionTable table(std::chrono::seconds(10));
  table.Connect(1);
  table.Connect(2);
  const SessionId id = table.Open(1, HelloOf("s", Role::kRequest))->session;
  ASSERT_TRUE(table.Open(2, HelloOf("s", Role::kControl)).ok());
  EXPECT_EQ(table.Disconnect(1, AtSecond(0)).session, id);
  EXPECT_TRUE(table.Idle(AtSecond(100)).empty());
  table.Disconnect(2, AtSecond(100));
  EXPECT_TRUE(table.Idle(AtSecond(109)).empty());
  EXPECT_EQ(table.Idle(AtSecond(110)), (std::vector<SessionId>{id}));
  table.Connect(3);
  EXPECT_TRUE(table.Open(3, HelloOf("s", Role::kRequest))->known);
  EXPECT_TRUE(table.Idle(AtSecond(1000)).empty());
  table.Disconnect(3, AtSecond(1000));
  table.Forget(id);
  table.Connect(4);
  EXPECT_FALSE(table.Open(4, HelloOf("s", Role::kRequest))->known);
}

TEST(SessionTable, Admin_EndsWithItsConnection) {
  SessionTable table(std::chrono::hours(1));
  table.Connect(1);
  table.Connect(2);
  ASSERT_TRUE(table.Open(1, HelloOf("s", Role::kAdmin)).ok());
  EXPECT_FALSE(table.Open(2, HelloOf("s", Role::kAdmin))->known);
  table.Disconnect(1, AtSecond(0));
  EXPECT_EQ(table.sessions(), 1u);
  EXPECT_EQ(table.connections(), 1u);
}

TEST(SessionTable, Sessions_HaveALimitThatAdminsAreOutside) {
  SessionTable table(std::chrono::hours(1), {.sessions = 2});
  for (ConnectionId id : {1, 2, 3, 4, 5, 6}) table.Connect(id);
  ASSERT_TRUE(table.Open(5, HelloOf("x", Role::kAdmin)).ok());
  ASSERT_TRUE(table.Open(1, HelloOf("a", Role::kRequest)).ok());
  ASSERT_TRUE(table.Open(2, HelloOf("b", Role::kRequest)).ok());
  EXPECT_EQ(table.Open(3, HelloOf("c", Role::kRequest)).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_TRUE(table.Open(4, HelloOf("a", Role::kControl)).ok());
  EXPECT_TRUE(table.Open(6, HelloOf("y", Role::kAdmin)).ok());
}

const auto kAnyMayGo = [](SessionId) { return true; };

TEST(SessionTable, Expendable_IsTheOldestIdleThatOwesNothing) {
  SessionTable table(std::chrono::hours(1), {.sessions = 4});
  std::vector<SessionId> ids;
  for (ConnectionId id : {1, 2, 3, 4}) {
    table.Connect(id);
    ids.push_back(table.Open(id, HelloOf("s" + std::to_string(id), Role::kRequest))->session);
  }
  EXPECT_TRUE(table.IsFull(HelloOf("new", Role::kRequest)));
  EXPECT_FALSE(table.IsFull(HelloOf("s1", Role::kRequest)));
  EXPECT_FALSE(table.IsFull(HelloOf("new", Role::kAdmin)));
  EXPECT_EQ(table.Expendable("job", kAnyMayGo), std::nullopt);
  // The first one owes an answer, the second waits for one, the third has had all of its own.
  table.Find(ids[0])->request.results.Remember(ReplyOf(1));
  table.Find(ids[1])->request.results.Open(1);
  table.Find(ids[2])->request.results.Remember(ReplyOf(1));
  table.Find(ids[2])->request.results.Acknowledge(2);
  for (ConnectionId id : {1, 2, 3}) table.Disconnect(id, AtSecond(static_cast<int>(id)));
  EXPECT_EQ(table.Expendable("job", kAnyMayGo), ids[2]);
  table.Forget(ids[2]);
  EXPECT_EQ(table.Expendable("job", kAnyMayGo), ids[0]);
  EXPECT_EQ(table.Expendable("job", [&](SessionId id) { return id != ids[0]; }), ids[1]);
  table.Connect(5);
  ASSERT_TRUE(table.Open(5, HelloOf("s1", Role::kRequest))->known);
  EXPECT_EQ(table.Expendable("job", kAnyMayGo), ids[1]);
}

TEST(SessionTable, Expendable_IsOfTheJobWithMostSessions) {
  SessionTable table(std::chrono::hours(1), {.sessions = 5});
  std::vector<SessionId> ids;
  for (ConnectionId id : {1, 2, 3, 4, 5}) {
    Hello hello = HelloOf("s" + std::to_string(id), Role::kRequest);
    hello.job = id <= 2 ? "small" : "large";
    table.Connect(id);
    ids.push_back(table.Open(id, hello)->session);
    table.Disconnect(id, AtSecond(static_cast<int>(id)));
  }
  EXPECT_EQ(table.Expendable("third", kAnyMayGo), ids[2]);
  EXPECT_EQ(table.Expendable("large", kAnyMayGo), ids[2]);
  // With the one that comes it would have as many: then it displaces itself.
  EXPECT_EQ(table.Expendable("small", kAnyMayGo), ids[0]);
  table.Forget(ids[0]);
  EXPECT_EQ(table.Expendable("small", kAnyMayGo), ids[2]);
}

// Where jobs cost nothing, one that has many sessions in use is not to be the only one to look at.
TEST(SessionTable, Expendable_IsOfAnyJobWhereTheLargestHasNone) {
  SessionTable table(std::chrono::hours(1), {.sessions = 4});
  std::vector<SessionId> ids;
  for (ConnectionId id : {1, 2, 3, 4}) {
    Hello hello = HelloOf("s" + std::to_string(id), Role::kRequest);
    hello.job = id <= 2 ? "in use" : "small " + std::to_string(id);
    table.Connect(id);
    ids.push_back(table.Open(id, hello)->session);
    if (id > 2) table.Disconnect(id, AtSecond(static_cast<int>(id)));
  }
  EXPECT_EQ(table.Expendable("another", kAnyMayGo), ids[2]);
}

CoreOptions WithSessions(std::size_t sessions) {
  CoreOptions options;
  options.server_id = "server-1";
  options.durable = true;
  options.make_secret = NumberedSecrets();
  options.limits.sessions = sessions;
  return options;
}

class CoreSessions : public CoreFixture {
 protected:
  CoreSessions() : CoreFixture(WithSessions(4)) {}

  // A session of the job that does something and goes, without a word.
  void ComeAndGo(const std::string& job, const std::string& name) {
    Hello hello = HelloOf(0, Role::kRequest, name);
    hello.job = job;
    const ConnectionId connection = Open(hello);
    EXPECT_TRUE(Ask(connection, SetOp{"k", name}).status.ok());
    Close(connection);
  }
};

TEST_F(CoreSessions, AJobThatFillsTheTable_DisplacesItself) {
  const std::vector<ConnectionId> members{OpenControl(1), OpenControl(2)};
  for (const int rank : {0, 1}) Send(members[At(rank)], JoinOp{JoinOf(rank, 2)});
  BecomeReady(members);
  for (int i = 0; i < 100; ++i) ComeAndGo("flood", "f" + std::to_string(i));
  EXPECT_EQ(core_->Gauges().sessions, 4u);
  // The members were never in danger, also without a connection, and another job still comes in.
  Close(members[0]);
  ComeAndGo("flood", "again");
  ComeAndGo("other", "o");
  EXPECT_EQ(core_->LiveMembers(), 2u);
  const ConnectionId back = Connect();
  const Reply welcome = Ask(back, Op(HelloOf(1, Role::kControl)), 0);
  ASSERT_TRUE(welcome.welcome);
  EXPECT_TRUE(welcome.welcome->session_known);
}

TEST_F(CoreSessions, SessionsWithAConnection_AreDisplacedByNobody) {
  for (int process = 0; process < 4; ++process) OpenRequest(process);
  const ConnectionId fifth = Connect();
  EXPECT_EQ(Ask(fifth, Op(HelloOf(5, Role::kRequest)), 0).status.code(),
            StatusCode::kResourceExhausted);
  EXPECT_TRUE(Closed(fifth));
}

TEST_F(CoreSessions, Goodbye_IsTheEndOfASession) {
  const ConnectionId one = OpenRequest(1);
  const ConnectionId other = OpenRequest(2);
  EXPECT_TRUE(Ask(one, SetOp{"k", "v"}).status.ok());
  Send(one, LeaveOp{}, 0);
  EXPECT_EQ(core_->Gauges().sessions, 2u);
  Close(one);
  EXPECT_EQ(core_->Gauges().sessions, 1u);
  Close(other);  // Without a goodbye.
  EXPECT_EQ(core_->Gauges().sessions, 1u);
  EXPECT_EQ(Ask(OpenRequest(3), GetOp{"k", false}).value, "v");
}

TEST_F(CoreSessions, Goodbye_OfAMembersRequestsLeavesItsMembership) {
  const std::vector<ConnectionId> control = Run(2);
  const ConnectionId requests = OpenRequest(0);
  Send(requests, LeaveOp{}, 0);
  Close(requests);
  Close(control[0]);
  EXPECT_EQ(core_->Gauges().sessions, 2u);
  EXPECT_EQ(core_->LiveMembers(), 2u);
}

TEST_F(CoreSessions, Goodbye_HasNoNumber) {
  const ConnectionId one = OpenRequest(1);
  EXPECT_EQ(Ask(one, LeaveOp{}, 7).status.code(), StatusCode::kInvalidArgument);
  Close(one);
  EXPECT_EQ(core_->Gauges().sessions, 1u);
}

TEST_F(CoreSessions, Goodbye_IsTakenBackByTheNextHello) {
  Send(OpenRequest(1), LeaveOp{}, 0);
  Close(OpenRequest(1));  // The first connection was replaced.
  EXPECT_EQ(core_->Gauges().sessions, 1u);
}

}  // namespace
}  // namespace resilient::store
