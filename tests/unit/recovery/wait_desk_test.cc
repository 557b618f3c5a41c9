// Goal: a rank that waits reports what, says whether all its threads are blocked, and writes one
// line an interval. Method: the clock is an argument; threads are real where they count.
#include "runtime/recovery/wait_desk.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include "runtime/base/thread.h"
#include "runtime/recovery/callers.h"

namespace resilient::recovery {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr Instant kDeskStart{std::chrono::hours(1)};

WaitingOperation Op(std::uint64_t seq, Duration age, std::vector<int> missing) {
  WaitingOperation operation;
  operation.seq = seq;
  operation.what = "barrier()";
  operation.call_site = "train.py:3 main";
  operation.age = age;
  operation.missing = std::move(missing);
  return operation;
}

Callers::Snapshot AllIn(const std::string& group, std::uint64_t seq) {
  return {true, {{group, false, seq}}};
}

class Desk : public ::testing::Test {
 protected:
  WaitDesk desk_{{2, seconds(30), std::chrono::hours(1)}};
};

TEST_F(Desk, WhatWaits_IsReportedUntilItIsTooOldOrEnds) {
  EXPECT_FALSE(desk_.Report(5, {}, kDeskStart));
  desk_.Note("world", 5, {Op(7, seconds(1), {0})}, kDeskStart);
  const auto report = desk_.Report(5, AllIn("world", 7), kDeskStart + Millis(500));
  ASSERT_TRUE(report);
  ASSERT_THAT(report->calls, SizeIs(1));
  EXPECT_EQ(report->generation, 5u);
  EXPECT_EQ(report->calls[0].group, "world");
  EXPECT_EQ(report->calls[0].operation.age, Millis(1500));
  EXPECT_TRUE(report->calls[0].blocked);
  EXPECT_TRUE(report->blocked);
  EXPECT_FALSE(report->tell);
  EXPECT_FALSE(desk_.Report(6, {}, kDeskStart + Millis(500)));  // A new generation.
  desk_.Note("world", 6, {Op(7, seconds(1), {0})}, kDeskStart);
  desk_.NoteEnd("world", true);
  EXPECT_TRUE(desk_.Report(6, {}, kDeskStart));
  desk_.NoteEnd("world", false);
  EXPECT_FALSE(desk_.Report(6, {}, kDeskStart));
  desk_.Note("world", 6, {Op(8, seconds(1), {0})}, kDeskStart);
  EXPECT_FALSE(desk_.Report(6, {}, kDeskStart + seconds(3)));
}

TEST_F(Desk, ARankIsBlocked_WhenEachThreadIsInAnOperationThatWaits) {
  desk_.Note("world", 5, {Op(7, seconds(1), {0})}, kDeskStart);
  const auto blocked = [this](Callers::Snapshot callers) {
    return desk_.Report(5, callers, kDeskStart)->blocked;
  };
  EXPECT_TRUE(blocked(AllIn("world", 0)));  // In the one that runs.
  EXPECT_TRUE(blocked(AllIn("world", 9)));  // In one that is queued behind it.
  EXPECT_FALSE(blocked(AllIn("world", 6)));
  EXPECT_FALSE(blocked(AllIn("other", 7)));
  EXPECT_FALSE(blocked({false, {{"world", false, 7}}}));
  EXPECT_FALSE(blocked({true, {{"world", false, 7}, {"other", false, 1}}}));
  EXPECT_TRUE(blocked({true, {}}));  // All are parked: its end alone wakes one.
}

TEST_F(Desk, OneLineAnInterval) {
  desk_.Note("world", 5, {Op(7, seconds(29), {0})}, kDeskStart);
  EXPECT_FALSE(desk_.Report(5, {}, kDeskStart)->tell);
  EXPECT_TRUE(desk_.Report(5, {}, kDeskStart + seconds(1))->tell);
  desk_.Note("world", 5, {Op(7, seconds(31), {0})}, kDeskStart + seconds(2));
  EXPECT_FALSE(desk_.Report(5, {}, kDeskStart + seconds(2))->tell);
  LateNotice notice{5, 0, 4, {{0, "rank 0 (host a, pid 7): alive"}}, 2, {}};
  EXPECT_EQ(desk_.Line(notice, kDeskStart + seconds(3)),
            "rank 2 has waited 32 s in barrier() #7 of group 'world' at train.py:3 main for rank 0 "
            "(host a, pid 7): alive; and 2 more ranks");
  EXPECT_THAT(desk_.Line(notice, kDeskStart + seconds(4)), IsEmpty());  // Not asked for.
  EXPECT_THAT(desk_.OverdueLine(kDeskStart + seconds(60)), IsEmpty());
  desk_.Note("world", 5, {Op(7, seconds(60), {0})}, kDeskStart + seconds(31));
  EXPECT_TRUE(desk_.Report(5, {}, kDeskStart + seconds(31))->tell);
}

TEST_F(Desk, AStoreThatDoesNotAnswer_LeavesALineAllTheSame) {
  WaitingOperation waiting = Op(7, seconds(40), {0, 3});
  waiting.not_begun = {1};
  desk_.Note("world", 5, {waiting}, kDeskStart);
  EXPECT_TRUE(desk_.Report(5, {}, kDeskStart)->tell);
  EXPECT_THAT(desk_.OverdueLine(kDeskStart + seconds(5)), IsEmpty());
  EXPECT_THAT(desk_.OverdueLine(kDeskStart + seconds(7)),
              AllOf(HasSubstr("has waited 47 s in barrier()"), HasSubstr("for ranks 0, 1, 3"),
                    HasSubstr("the store does not say")));
  EXPECT_THAT(desk_.OverdueLine(kDeskStart + seconds(8)), IsEmpty());
}

TEST_F(Desk, WhereTheOthersMayBe_IsALineThatNobodyAskedFor) {
  EXPECT_THAT(desk_.Line({}, kDeskStart), IsEmpty());
  LateNotice notice;
  notice.elsewhere = "look there";
  EXPECT_EQ(desk_.Line(notice, kDeskStart), "rank 2 waits to join; look there");
}

TEST_F(Desk, ALongJoin_HasALine) {
  EXPECT_FALSE(desk_.JoinReport(kDeskStart, kDeskStart + seconds(29)));
  const auto report = desk_.JoinReport(kDeskStart, kDeskStart + seconds(30));
  ASSERT_TRUE(report);
  EXPECT_EQ(report->generation, 0u);
  EXPECT_TRUE(report->tell);
  EXPECT_FALSE(desk_.JoinReport(kDeskStart, kDeskStart + seconds(31)));
  const LateNotice of_an_operation{5, 0, 4, {}, 0, {}};
  EXPECT_THAT(desk_.Line(of_an_operation, kDeskStart + seconds(31)), IsEmpty());
  EXPECT_EQ(
      desk_.Line({0, 61, 64, {{0, "rank 0: nothing"}}, 2, "look there"}, kDeskStart + seconds(31)),
      "rank 2 has waited 31 s to join: 61 of 64 ranks are ready; waiting for rank 0: nothing; "
      "and 2 more ranks; look there");
}

TEST_F(Desk, ARankIsNotBlocked_WhileSomethingIsInFlightThatIsNotTold) {
  WaitingOperation first = Op(7, seconds(1), {0});
  first.behind = 2;
  desk_.Note("world", 5, {first}, kDeskStart);
  WaitingOperation message = Op(3, seconds(1), {1});
  message.point_to_point = true;
  desk_.Note("pair", 5, {message}, kDeskStart);
  Callers::Snapshot callers = AllIn("world", 9);
  callers.token = 17;
  callers.in_flight = 5;
  EXPECT_FALSE(desk_.Report(5, callers, kDeskStart)->blocked);
  callers.in_flight = 4;
  const auto report = desk_.Report(5, callers, kDeskStart);
  EXPECT_TRUE(report->blocked);
  EXPECT_EQ(report->threads, 17u);
  // Any of them may wake a parked thread, or run a callback that submits something.
  ASSERT_THAT(report->calls, SizeIs(2));
  EXPECT_TRUE(report->calls[0].blocked);
  EXPECT_TRUE(report->calls[1].blocked);
}

TEST_F(Desk, ARankOfWhichTheOldestAreToldOnly_IsNotBlocked) {
  std::vector<WaitingOperation> messages;
  for (std::size_t i = 0; i < kWaitingOperationsMax; ++i) {
    messages.push_back(Op(i + 1, seconds(1), {0}));
    messages.back().point_to_point = true;
  }
  desk_.Note("world", 5, messages, kDeskStart);
  EXPECT_FALSE(desk_.Report(5, {true, {{"world", true, 1}}}, kDeskStart)->blocked);
}

TEST_F(Desk, TheLineSaysWhoMayStillAct) {
  desk_.Note("world", 5, {Op(7, seconds(31), {0})}, kDeskStart);
  Callers::Snapshot callers = AllIn("world", 7);
  callers.all = false;
  callers.may_act = "thread 'python3' (tid 9, train.py:3 send_later) runs";
  EXPECT_FALSE(desk_.Report(5, callers, kDeskStart)->blocked);
  EXPECT_THAT(desk_.Line({5, 0, 4, {{0, "rank 0: alive"}}, 0}, kDeskStart),
              HasSubstr("for rank 0: alive; here may still act: thread 'python3' (tid 9, "
                        "train.py:3 send_later) runs"));
}

TEST(CallersOfASession, AreThoseThatAreBlocked) {
  Callers callers;
  EXPECT_THAT(callers.Look().blocked, IsEmpty());
  callers.Block({"world", false, 3});
  EXPECT_THAT(callers.Look().blocked, SizeIs(1));
  EXPECT_THAT(callers.Look().threads, ElementsAre(gettid()));
  Thread other("other", [&callers] {
    callers.Block({"pair", true, 1});
    EXPECT_THAT(callers.Look().blocked, SizeIs(2));
    EXPECT_THAT(callers.Look().threads, ::testing::Contains(gettid()));
    callers.Unblock();
  });
  other.Join();
  Thread exempt("exempt", [&callers] {
    Callers::ExemptThisThread();
    callers.Block({"pair", true, 1});
    EXPECT_THAT(callers.Look().blocked, SizeIs(1));
    callers.Unblock();
  });
  exempt.Join();
  callers.Block({"pair", true, 2});  // In the handler of a signal.
  EXPECT_THAT(callers.Look().threads, ElementsAre(gettid()));
  EXPECT_EQ(callers.Look().blocked.front().seq, 2u);
  callers.Unblock();
  EXPECT_EQ(callers.Look().blocked.front().seq, 3u);
  callers.Unblock();
  EXPECT_THAT(callers.Look().blocked, IsEmpty());
}

}  // namespace
}  // namespace resilient::recovery
