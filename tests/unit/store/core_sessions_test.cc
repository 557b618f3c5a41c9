// Goal: sessions outlive connections for as long as promised, and results are kept exactly as long
// as a client may ask again. Method: ResultLog and SessionTable alone.
#include <gtest/gtest.h>

#include "store/core/session_table.h"

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

TEST(SessionTable, Sessions_HaveALimit) {
  SessionTable table(std::chrono::hours(1), 2);
  for (ConnectionId id : {1, 2, 3, 4}) table.Connect(id);
  ASSERT_TRUE(table.Open(1, HelloOf("a", Role::kRequest)).ok());
  ASSERT_TRUE(table.Open(2, HelloOf("b", Role::kRequest)).ok());
  EXPECT_EQ(table.Open(3, HelloOf("c", Role::kRequest)).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_TRUE(table.Open(4, HelloOf("a", Role::kControl)).ok());
}

}  // namespace
}  // namespace resilient::store
