// Goal: numbering, what is sent again after a lost connection, and the reconnect delays. Pure.
#include "store/client/client_core.h"

#include <gtest/gtest.h>

namespace resilient::store {
namespace {

Reply AnswerTo(std::uint64_t seq) {
  Reply reply;
  reply.seq = seq;
  return reply;
}

Hello JobHello() {
  Hello hello;
  hello.job = "job";
  return hello;
}

TEST(ClientCoreTest, Submit_Twice_NumbersFromOne) {
  ClientCore core(JobHello());
  EXPECT_EQ(core.first_unacked(), 1u);
  const Result<const Request*> first = core.Submit(AddOp{"a", 1}, 7, 3);
  const Result<const Request*> second = core.Submit(NumKeysOp{});
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ((*first)->seq, 1u);
  EXPECT_EQ((*first)->scope, 7u);
  EXPECT_EQ((*first)->generation, 3u);
  EXPECT_EQ((*second)->seq, 2u);
  EXPECT_EQ((*second)->first_unacked, 1u);
  EXPECT_EQ(core.InFlight(), 2u);
}

TEST(ClientCoreTest, MakeHello_AfterRequests_HasSeqZero) {
  ClientCore core(JobHello());
  ASSERT_TRUE(core.Submit(NumKeysOp{}).ok());
  Request hello = core.MakeHello();
  EXPECT_EQ(hello.seq, 0u);
  EXPECT_EQ(std::get<Hello>(hello.op).job, "job");
}

TEST(ClientCoreTest, Unanswered_AfterReplyOutOfOrder_KeepsOrderAndFloor) {
  ClientCore core(JobHello());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(core.Submit(AddOp{"k", i}).ok());
  EXPECT_TRUE(core.OnReply(AnswerTo(2)));
  EXPECT_EQ(core.first_unacked(), 1u);
  std::vector<Request> again = core.Unanswered();
  ASSERT_EQ(again.size(), 2u);
  EXPECT_EQ(again[0].seq, 1u);
  EXPECT_EQ(again[1].seq, 3u);
  EXPECT_EQ(std::get<AddOp>(again[1].op).amount, 2);
  EXPECT_TRUE(core.OnReply(AnswerTo(1)));
  EXPECT_EQ(core.Unanswered().front().first_unacked, 3u);
}

TEST(ClientCoreTest, OnReply_Repeated_IsDropped) {
  ClientCore core(JobHello());
  ASSERT_TRUE(core.Submit(NumKeysOp{}).ok());
  EXPECT_TRUE(core.OnReply(AnswerTo(1)));
  EXPECT_FALSE(core.OnReply(AnswerTo(1)));
  EXPECT_FALSE(core.OnReply(AnswerTo(9)));
}

TEST(ClientCoreTest, Forget_Open_ReplyIsDroppedAndFloorMoves) {
  ClientCore core(JobHello());
  ASSERT_TRUE(core.Submit(NumKeysOp{}).ok());
  core.Forget(1);
  EXPECT_EQ(core.first_unacked(), 2u);
  EXPECT_FALSE(core.OnReply(AnswerTo(1)));
  EXPECT_TRUE(core.Unanswered().empty());
}

TEST(ClientCoreTest, Renumber_OldWait_MovesItBehindEverything) {
  ClientCore core(JobHello());
  ASSERT_TRUE(core.Submit(WaitOp{{"k"}}, 5).ok());
  ASSERT_TRUE(core.Submit(AddOp{"n", 1}).ok());
  EXPECT_EQ(core.Renumber(1), 3u);
  EXPECT_EQ(core.first_unacked(), 2u);
  std::vector<Request> again = core.Unanswered();
  ASSERT_EQ(again.size(), 2u);
  EXPECT_EQ(again[1].seq, 3u);
  EXPECT_EQ(again[1].scope, 5u);
  EXPECT_TRUE(std::holds_alternative<WaitOp>(again[1].op));
  EXPECT_FALSE(core.OnReply(AnswerTo(1)));
  EXPECT_TRUE(core.OnReply(AnswerTo(3)));
}

TEST(ClientCoreTest, Submit_AtTheLimit_IsRefusedUntilOneIsAnswered) {
  ClientCore core(JobHello());
  for (std::size_t i = 0; i < kInFlightPerSessionMax; ++i) {
    ASSERT_TRUE(core.Submit(NumKeysOp{}).ok());
  }
  EXPECT_EQ(core.Submit(NumKeysOp{}).status().code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(core.OnReply(AnswerTo(5)));
  EXPECT_TRUE(core.Submit(NumKeysOp{}).ok());
}

TEST(BackoffTest, Next_ManyTimes_StaysUnderTheGrowingCeiling) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Backoff backoff(seed);
    Duration ceiling = Millis(20);
    for (int i = 0; i < 40; ++i) {
      Duration delay = backoff.Next();
      EXPECT_GE(delay, Duration::zero());
      EXPECT_LE(delay, ceiling);
      ceiling = std::min<Duration>(ceiling * 2, std::chrono::seconds(1));
    }
    backoff.Reset();
    EXPECT_LE(backoff.Next(), Millis(20));
  }
}

TEST(BackoffTest, Next_TwoSeeds_Differ) {
  Backoff one(1);
  Backoff two(2);
  EXPECT_NE(one.Next(), two.Next());
}

}  // namespace
}  // namespace resilient::store
