// Goal: which operations are run again behind a broken link is a function of what all members know,
// and never asks for what a member no longer has.
// Method: logs of a few members, brought to every state by hand, and the plan of their summaries.
#include "runtime/recovery/replay_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace resilient::recovery {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::size_t kBytes = 8;

// Of a group of all members.
ReplaySummary Of(const ReplayLog& log, int size = 2) {
  ReplaySummary summary;
  summary.epoch = 1;
  GroupSummary& group = summary.groups["world"];
  group = log.Summary();
  for (int rank = 0; rank < size; ++rank) group.ranks.push_back(rank);
  return summary;
}

// `started` collectives of which the first `ended` have ended.
ReplayLog LogOf(std::uint64_t started, std::uint64_t ended, bool synchronises = true,
                ReplayLimits limits = {}) {
  ReplayLog log(limits);
  for (std::uint64_t number = 1; number <= started; ++number) {
    log.Add(number, kBytes, synchronises);
    if (number <= ended) log.Complete(number);
  }
  return log;
}

TEST(ReplayLogTest, NothingStarted_BeginsAtOne) {
  const GroupSummary summary = ReplayLog().Summary();
  EXPECT_EQ(summary.next, 1u);
  EXPECT_EQ(summary.first_pending, 1u);
  EXPECT_EQ(summary.kept_from, 1u);
}

TEST(ReplayLogTest, SynchronisingOnes_TheLastTwoAreKept) {
  ReplayLog log = LogOf(4, 3);
  EXPECT_EQ(log.Summary().kept_from, 2u);
  EXPECT_EQ(log.Summary().first_pending, 4u);
  EXPECT_THAT(log.Complete(4), ElementsAre(2u));
  EXPECT_EQ(log.Summary().kept_from, 3u);
  EXPECT_EQ(log.Summary().first_pending, 5u);
}

TEST(ReplayLogTest, OthersAreKeptUpToTheLimits) {
  EXPECT_EQ(LogOf(5, 5, false).Summary().kept_from, 1u);
  EXPECT_EQ(LogOf(5, 5, false, {.operations = 2}).Summary().kept_from, 4u);
  EXPECT_EQ(LogOf(5, 5, false, {.bytes = 3 * kBytes}).Summary().kept_from, 3u);
}

TEST(ReplayLogTest, APendingOneIsNeverDropped) {
  ReplayLog log({.operations = 1});
  log.Add(1, kBytes, true);
  for (std::uint64_t number = 2; number <= 5; ++number) {
    log.Add(number, kBytes, true);
    EXPECT_THAT(log.Complete(number), IsEmpty());
  }
  EXPECT_EQ(log.Summary().first_pending, 1u);
  EXPECT_EQ(log.Summary().kept_from, 1u);
}

TEST(ReplayLogTest, CompletedTwice_CountsOnce) {
  ReplayLog log = LogOf(2, 1);
  EXPECT_THAT(log.Complete(1), IsEmpty());
  EXPECT_EQ(log.Summary().first_pending, 2u);
}

TEST(ReplayPlanTest, OneIsAhead_AllRunAgainFromTheOneBehind) {
  const ReplayPlan plan = PlanReplay({Of(LogOf(5, 4)), Of(LogOf(4, 3))});
  EXPECT_EQ(plan.refusal, "");
  EXPECT_EQ(plan.from.at("world"), 4u);
}

TEST(ReplayPlanTest, AllHaveEnded_NothingIsRunAgain) {
  const ReplayPlan plan = PlanReplay({Of(LogOf(3, 3)), Of(LogOf(3, 3))});
  EXPECT_EQ(plan.refusal, "");
  EXPECT_EQ(plan.from.at("world"), 4u);
}

TEST(ReplayPlanTest, ARootFarAhead_AsLongAsItHasTheInputs) {
  EXPECT_EQ(PlanReplay({Of(LogOf(9, 9, false)), Of(LogOf(3, 2, false))}).from.at("world"), 3u);
  const ReplayPlan plan =
      PlanReplay({Of(LogOf(9, 9, false, {.operations = 2})), Of(LogOf(3, 2, false))});
  EXPECT_THAT(plan.refusal, HasSubstr("rank 0 has the inputs of group 'world' from number 8 on"));
  EXPECT_THAT(plan.refusal, HasSubstr("number 3 is needed"));
}

TEST(ReplayPlanTest, AGroupThatOneHasNotMadeYet_IsRunFromItsBeginning) {
  ReplaySummary other;
  other.epoch = 1;
  const ReplayPlan plan = PlanReplay({Of(LogOf(2, 1, false)), other});
  EXPECT_EQ(plan.refusal, "");
  EXPECT_EQ(plan.from.at("world"), 1u);
  // All had entered it, or its third would not have ended: it is closed there.
  EXPECT_THAT(PlanReplay({Of(LogOf(4, 3)), other}).refusal, HasSubstr("number 1 is needed"));
}

TEST(ReplayPlanTest, AGroupMadeAnew_IsAnotherOne) {
  ReplaySummary again = Of(ReplayLog());
  again.groups["world"].instance = 2;
  EXPECT_THAT(PlanReplay({Of(LogOf(2, 2, false)), again}).refusal,
              HasSubstr("made or closed on only some"));
}

TEST(ReplayPlanTest, AGroupThatOneHasClosed_IsNotOneThatItWillMake) {
  ReplaySummary closed{.epoch = 1, .veto = {}, .groups = {}};
  closed.groups["world"].instance = 2;
  EXPECT_THAT(PlanReplay({Of(LogOf(1, 1)), closed}).refusal, HasSubstr("made or closed on only"));
  EXPECT_THAT(PlanReplay({closed, Of(LogOf(1, 1))}).refusal, HasSubstr("made or closed on only"));
  EXPECT_EQ(PlanReplay({closed, closed}).refusal, "");
  ReplaySummary again = Of(LogOf(2, 1, false));  // All have closed it, and one has made it anew.
  again.groups["world"].instance = 2;
  const ReplayPlan plan = PlanReplay({closed, again});
  EXPECT_EQ(plan.refusal, "");
  EXPECT_EQ(plan.from.at("world"), 1u);
  EXPECT_EQ(ReceivedFrom({closed, again}, "world", 1, {0, 7}), 0u);
}

TEST(ReplayPlanTest, OneVeto_NobodyRunsAgain) {
  ReplaySummary against = Of(LogOf(1, 0));
  against.veto = "it was aborted there";
  EXPECT_EQ(PlanReplay({Of(LogOf(1, 0)), against}).refusal, "rank 1: it was aborted there");
}

TEST(ReplayPlanTest, AnotherEpoch_NobodyRunsAgain) {
  ReplaySummary other = Of(LogOf(1, 0));
  other.epoch = 2;
  EXPECT_THAT(PlanReplay({Of(LogOf(1, 0)), other}).refusal, HasSubstr("began in generation 2"));
}

TEST(ReplayPlanTest, AMessageThatIsLost_NobodyRunsAgain) {
  ReplayLog sender;
  ReplayLog receiver;
  sender.CompleteSend({1, 7});
  EXPECT_THAT(PlanReplay({Of(sender), Of(receiver)}).refusal,
              HasSubstr("has sent 1 messages in group 'world' that were lost"));
  receiver.CompleteReceive({0, 7});
  EXPECT_EQ(PlanReplay({Of(sender), Of(receiver)}).refusal, "");
  // Received, and its sender does not know it yet: it is not sent again.
  receiver.CompleteReceive({0, 7});
  const std::vector<ReplaySummary> members = {Of(sender), Of(receiver)};
  EXPECT_EQ(PlanReplay(members).refusal, "");
  EXPECT_EQ(ReceivedFrom(members, "world", 0, {1, 7}), 2u);
  EXPECT_EQ(ReceivedFrom(members, "world", 0, {1, 8}), 0u);
}

TEST(ReplayPlanTest, GroupsOfOthers_DoNotCount) {
  ReplaySummary first = Of(LogOf(4, 3), 3);
  ReplaySummary second = Of(LogOf(3, 3), 3);
  first.groups["pair"] = LogOf(1, 0).Summary();
  second.groups["pair"] = LogOf(1, 1).Summary();
  first.groups["pair"].ranks = second.groups["pair"].ranks = {0, 1};
  const ReplayPlan plan = PlanReplay({first, second, Of(LogOf(3, 3), 3)});
  EXPECT_EQ(plan.refusal, "");
  EXPECT_EQ(plan.from.at("world"), 4u);
  EXPECT_EQ(plan.from.at("pair"), 1u);
}

TEST(ReplaySummaryTest, Encoded_IsReadBack) {
  ReplayLog log = LogOf(5, 4);
  log.CompleteSend({1, 7});
  log.CompleteReceive({1, 0xffffffff});
  ReplaySummary summary = Of(log);
  summary.veto = "no";
  const std::string bytes = EncodeSummary(summary);
  EXPECT_EQ(DecodeSummary(bytes), summary);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(DecodeSummary(bytes.substr(0, size)), std::nullopt);
  }
  EXPECT_EQ(DecodeSummary(bytes + "x"), std::nullopt);
}

TEST(ReplaySummaryTest, OnlyALink_IsALinkFailure) {
  EXPECT_TRUE(IsLinkFailure(Status(StatusCode::kCommFailed, "the link broke")));
  FailureDetail of_group;
  of_group.group = "world";
  EXPECT_FALSE(IsLinkFailure(Status(StatusCode::kCommFailed, "aborted", of_group)));
  EXPECT_FALSE(IsLinkFailure(Status(StatusCode::kRankLost, "killed")));
  EXPECT_FALSE(IsLinkFailure(Status::Ok()));
}

}  // namespace
}  // namespace resilient::recovery
