// Goal: every deadline of a recovery follows from the budget, settings that cannot work are refused
// and others are not, and the line at the start tells them. Method: pure functions, no time.
#include "runtime/recovery/deadlines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <resilient/ladder.h>
#include <resilient/settings.h>

namespace resilient::recovery {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

static_assert(LadderOf(seconds(20)).budget == seconds(20));
static_assert(LadderOf(seconds(20)).build == seconds(8));

TEST(Ladder, TwoTriesToBuild_FitWithTimeToSpare) {
  for (const Duration budget :
       {Duration(seconds(1)), Duration(seconds(20)), Duration(minutes(9))}) {
    const Ladder ladder = LadderOf(budget);
    EXPECT_GT(ladder.build, Duration::zero());
    EXPECT_LT(2 * ladder.build, ladder.budget);
  }
}

TEST(Ladder, Rebuild_IsTheMachineAndTheSeatsWithTheirLastCall) {
  EXPECT_EQ(LadderOf(seconds(20), minutes(10)).rebuild, seconds(620) + kLastCallMax);
  EXPECT_EQ(LadderOf(seconds(20), seconds(4)).rebuild, seconds(28));
  EXPECT_EQ(LadderOf(seconds(20)).rebuild, seconds(20));
}

TEST(Ladder, Answer_LeavesTimeToConnect) {
  EXPECT_EQ(LadderOf(Millis(200)).answer, seconds(1));
  EXPECT_EQ(LadderOf(seconds(20)).answer, seconds(20));
}

TEST(Ladder, EndlessWait_DoesNotOverflow) {
  EXPECT_EQ(LadderOf(seconds(20), Duration::max()).rebuild, Duration::max());
}

TEST(Deadlines, Defaults_AreFine) {
  const Settings settings;
  const SessionOptions options;
  EXPECT_TRUE(CheckDeadlines(options, settings.lease_ttl).ok());
  EXPECT_EQ(options.budget, settings.budget);
  EXPECT_EQ(options.seat_wait, settings.seat_wait);
  EXPECT_EQ(options.op_deadline, settings.op_deadline);
  EXPECT_EQ(options.stall, settings.stall);
  EXPECT_EQ(options.device_stall, settings.device_stall);
  EXPECT_EQ(options.wait_log, settings.wait_log);
}

TEST(Deadlines, LossThatIsKnownWithinTheBudget_IsFine) {
  SessionOptions options;
  options.budget = seconds(6);
  EXPECT_TRUE(CheckDeadlines(options, seconds(5)).ok());
  options.budget = seconds(2);
  EXPECT_TRUE(CheckDeadlines(options, seconds(1)).ok());
}

TEST(Deadlines, LossThatIsKnownBehindTheBudget_IsRefused) {
  SessionOptions options;
  options.budget = Millis(5999);
  const Status refused = CheckDeadlines(options, seconds(5));
  EXPECT_EQ(refused.code(), StatusCode::kSetting);
  for (const char* part :
       {"RESILIENT_BUDGET is 5.999 s", "RESILIENT_LEASE_TTL", "are of 5 s", "6 s or more"}) {
    EXPECT_THAT(refused.message(), HasSubstr(part));
  }
}

TEST(Deadlines, UnknownLease_ContradictsNothing) {
  SessionOptions options;
  options.budget = Millis(1);
  EXPECT_TRUE(CheckDeadlines(options, Duration::zero()).ok());
}

TEST(Deadlines, EndlessLease_IsRefusedToo) {
  EXPECT_EQ(CheckDeadlines({}, Duration::max()).code(), StatusCode::kSetting);
}

TEST(Deadlines, NoTimeAtAll_IsRefused) {
  SessionOptions options;
  options.budget = Duration::zero();
  EXPECT_THAT(CheckDeadlines(options, {}).message(), HasSubstr("the budget is 0 s"));
  options = {};
  options.seat_wait = -seconds(1);
  EXPECT_THAT(CheckDeadlines(options, {}).message(), HasSubstr("the wait for seats is -1 s"));
}

TEST(Deadlines, WhatOnlyLooksOdd_IsFine) {
  SessionOptions options;
  options.op_deadline = seconds(1);
  options.stall = seconds(1);
  options.wait_log = minutes(1);
  options.seat_wait = Duration::max();
  EXPECT_TRUE(CheckDeadlines(options, seconds(5)).ok());
}

TEST(Deadlines, Line_TellsThemAll) {
  SessionOptions options;
  options.seat_wait = minutes(10);
  EXPECT_EQ(ToText(DeadlinesRecord(options, Millis(2500))),
            "event=deadlines budget=20s abort=20s seat_wait=600s last_call=30s build=8s ready=20s "
            "rebuild=650s answer=20s lease=2.5s beat=0.5s known=3.5s op_deadline=120s stall=3600s "
            "device_stall=600s wait_log=30s: "
            "abort, build and ready share the budget of one failure");
  EXPECT_THAT(ToText(DeadlinesRecord(options, Duration::zero())), Not(HasSubstr("lease=")));
}

}  // namespace
}  // namespace resilient::recovery
