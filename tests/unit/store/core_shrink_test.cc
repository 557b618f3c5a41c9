// Goal: a world whose lost seats stay empty goes on with the ranks that it has left, when all of
// them want that, and only then. Method: processes 0, 1, ... on one server core and manual time;
// after each step a second core is restored from what was kept.
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <resilient/ladder.h>

#include "store/core/presence_key.h"
#include "tests/unit/store/core_membership_fixture.h"

namespace resilient::store {
namespace {

constexpr Duration kSeatWait = std::chrono::seconds(30);

class Shrink : public CoreMembership {
 protected:
  // `process` joins again for a world of four, content with `least` ranks.
  void Wish(ConnectionId control, int process, int least, Duration wait = {},
            std::uint64_t generation = 1) {
    JoinRequest request = JoinOf(process, 4, wait);
    request.min_world = least;
    request.generation = generation;
    Send(control, JoinOp{request});
  }
  // "e0 e2 e3": the endpoints in the view that came, by rank.
  std::string ViewAt(ConnectionId control) {
    const std::optional<View> view = Take<View>(control);
    if (!view) return "no view";
    std::string text;
    int rank = 0;
    for (const Member& member : view->members) {
      EXPECT_EQ(member.rank, rank++);
      text += (text.empty() ? "" : " ") + member.endpoint;
    }
    return text;
  }
  void DropFences(const std::vector<ConnectionId>& control) {
    for (const ConnectionId connection : control) Take<Fence>(connection);
  }
};

TEST_F(Shrink, AllWhoAreLeftWantIt_GoOnInTheirOrder) {
  const auto control = Run(4);
  Kill(1);
  for (const int i : {3, 0, 2}) Wish(control[At(i)], i, 2);
  for (const int i : {0, 2}) EXPECT_EQ(ViewAt(control[At(i)]), "e0 e2 e3");
  // The last one's view is taken here: all are ready for it.
  Send(control[0], ReadyOp{2});
  Send(control[2], ReadyOp{2});
  EXPECT_FALSE(Take<RunningEvent>(control[0]));
  Send(control[3], ReadyOp{2});
  EXPECT_TRUE(Take<RunningEvent>(control[0]));
}

TEST_F(Shrink, NextLoss_IsOfTheNewNumbers) {
  const auto control = Run(4);
  Kill(1);
  for (const int i : {0, 2, 3}) Wish(control[At(i)], i, 1);
  BecomeReady({control[0], control[2], control[3]});
  DropFences(control);
  Kill(2);  // Which is rank 1 by now.
  const std::optional<Fence> fence = Take<Fence>(control[0]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.detail().rank, 1);
  for (const int i : {0, 3}) {
    JoinRequest request = JoinOf(i == 0 ? 0 : 2, 3);
    request.min_world = 1;
    request.generation = 2;
    Send(control[At(i)], JoinOp{request});
  }
  EXPECT_EQ(ViewAt(control[3]), "e0 e2");
}

TEST_F(Shrink, SeatsMayStillBeFilled_WaitsForTheLongest) {
  const auto control = Run(4, kSeatWait);
  Kill(1);
  Wish(control[0], 0, 2, kSeatWait);
  Wish(control[2], 2, 2, {});
  Wish(control[3], 3, 2, kSeatWait / 2);
  Advance(kSeatWait - kSecond, {control[0], control[2], control[3]});
  EXPECT_EQ(ViewAt(control[0]), "no view");
  Advance(kSecond, {control[0], control[2], control[3]});
  EXPECT_EQ(ViewAt(control[0]), "e0 e2 e3");
}

TEST_F(Shrink, SeatsLostOneAfterTheOther_WaitsForTheLast) {
  const auto control = Run(4, kSeatWait);
  Kill(1);
  Advance(kSeatWait / 2, {control[0], control[2], control[3]});
  Kill(2);
  Wish(control[0], 0, 2, kSeatWait);
  Wish(control[3], 3, 2, kSeatWait);
  Advance(kSeatWait / 2, {control[0], control[3]});
  EXPECT_FALSE(Take<JoinRefusedEvent>(control[0]));
  EXPECT_EQ(ViewAt(control[0]), "no view");
  Advance(kSeatWait / 2, {control[0], control[3]});
  EXPECT_EQ(ViewAt(control[0]), "e0 e3");
}

TEST_F(Shrink, SeatMayStillBeFilled_OnlyTheOneThatWantsTheWholeWorldIsRefused) {
  const auto control = Run(4, kSeatWait);
  Kill(1);
  Advance(kSeatWait / 2, {control[0], control[2], control[3]});
  Kill(2);
  Wish(control[0], 0, 2, kSeatWait);
  Wish(control[3], 3, 0, kSeatWait);
  Advance(kSeatWait / 2, {control[0], control[3]});
  EXPECT_FALSE(Take<JoinRefusedEvent>(control[0]));
  EXPECT_TRUE(Take<JoinRefusedEvent>(control[3]));
  Wish(control[3], 3, 1, kSeatWait);
  Advance(kSeatWait / 2, {control[0], control[3]});
  EXPECT_EQ(ViewAt(control[3]), "e0 e3");
}

TEST_F(Shrink, SeatIsFilledMeanwhile_StaysWhole) {
  const auto control = Run(4, kSeatWait);
  Kill(1);
  for (const int i : {0, 2, 3}) Wish(control[At(i)], i, 2, kSeatWait);
  const ConnectionId newcomer = OpenControl(7);
  Send(newcomer, JoinOp{JoinOf(1, 4, kSeatWait)});
  EXPECT_EQ(ViewAt(newcomer), "e0 e1 e2 e3");
}

TEST_F(Shrink, OneHasNotSaidSo_IsWaitedFor) {
  const auto control = Run(4);
  Kill(1);
  Wish(control[0], 0, 2);
  Wish(control[2], 2, 2);
  Advance(kSecond, {control[0], control[2], control[3]});
  EXPECT_FALSE(Take<JoinRefusedEvent>(control[0]));
  // Whoever wants all or nothing is told that there will not be all, and may think again.
  Wish(control[3], 3, 0);
  EXPECT_TRUE(Take<JoinRefusedEvent>(control[3]));
  EXPECT_FALSE(Take<JoinRefusedEvent>(control[0]));
  Wish(control[3], 3, 2);
  EXPECT_EQ(ViewAt(control[3]), "e0 e2 e3");
}

TEST_F(Shrink, OneThatDoesNotWantItIsLost_TheOthersGoOn) {
  const auto control = Run(4);
  Kill(1);
  Wish(control[0], 0, 2);
  Wish(control[2], 2, 2);
  Kill(3);
  EXPECT_EQ(ViewAt(control[0]), "e0 e2");
}

TEST_F(Shrink, TooFewAreLeft_RefusesWithTheFirstCause) {
  const auto control = Run(4);
  Kill(1);
  Wish(control[0], 0, 3);
  Wish(control[2], 2, 1);
  Kill(3);
  const auto refused = Take<JoinRefusedEvent>(control[0]);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->why.detail().rank, 1);
  // One of them is content with less, and both have to be.
  Wish(control[2], 2, 1);
  EXPECT_EQ(ViewAt(control[2]), "no view");
  Wish(control[0], 0, 2);
  EXPECT_EQ(ViewAt(control[2]), "e0 e2");
}

TEST_F(Shrink, RefusedWorld_IsOpenedAgain) {
  const auto control = Run(4);
  Kill(1);
  for (const int i : {0, 2, 3}) Wish(control[At(i)], i, 0);
  for (const int i : {0, 2, 3}) EXPECT_TRUE(Take<JoinRefusedEvent>(control[At(i)]));
  for (const int i : {0, 2, 3}) Wish(control[At(i)], i, 3);
  EXPECT_EQ(ViewAt(control[3]), "e0 e2 e3");
}

TEST_F(Shrink, JoinSentAgainUnderTheOldNumber_GetsTheView) {
  const auto control = Run(4);
  Kill(1);
  for (const int i : {0, 2, 3}) Wish(control[At(i)], i, 2);
  EXPECT_EQ(ViewAt(control[3]), "e0 e2 e3");
  Wish(control[3], 3, 2);
  EXPECT_EQ(ViewAt(control[3]), "e0 e2 e3");
  // It has heard of the end of the new generation, but not of its view.
  Kill(2);
  Wish(control[3], 3, 2, {}, 2);
  Wish(control[0], 0, 2, {}, 2);
  EXPECT_EQ(ViewAt(control[3]), "e0 e3");
}

TEST_F(Shrink, ReplacementThatComesLate_IsToldOfTheOtherSize) {
  const auto control = Run(4);
  Kill(1);
  for (const int i : {0, 2, 3}) Wish(control[At(i)], i, 2);
  BecomeReady({control[0], control[2], control[3]});
  const ConnectionId newcomer = OpenControl(7);
  Send(newcomer, JoinOp{JoinOf(1, 4)});
  for (int answers = 0; answers < 2; ++answers) {
    for (const int i : {0, 2, 3}) Send(control[At(i)], HeartbeatOp{1}, 0);
  }
  const auto refused = Take<JoinRefusedEvent>(newcomer);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->why.code(), StatusCode::kWorldSize);
}

TEST_F(Shrink, RefusalThatWasMissed_IsToldAgain) {
  const auto control = Run(4);
  Kill(1);
  Wish(control[0], 0, 2);
  Wish(control[2], 2, 2);
  Wish(control[3], 3, 0);
  EXPECT_TRUE(Take<JoinRefusedEvent>(control[3]));
  Close(control[3]);
  const ConnectionId again = OpenControl(3);
  EXPECT_TRUE(Take<JoinRefusedEvent>(again));
}

TEST_F(Shrink, RefusalThatWasMissed_IsToldAgainWhateverHasCome) {
  const auto control = Run(4);
  Kill(1);
  Wish(control[0], 0, 2);
  Wish(control[3], 3, 0);
  Close(control[3]);
  Send(OpenControl(7), JoinOp{JoinOf(1, 4)});
  EXPECT_TRUE(Take<JoinRefusedEvent>(OpenControl(3)));
}

TEST_F(Shrink, RefusalBeforeTheWorldWasOpenedAgain_IsToldAgain) {
  const auto control = Run(4);
  Kill(1);
  for (const int i : {0, 2, 3}) Wish(control[At(i)], i, 0);
  Close(control[2]);
  Wish(control[0], 0, 2, kSeatWait);
  const ConnectionId again = OpenControl(2);
  EXPECT_TRUE(Take<JoinRefusedEvent>(again));
}

TEST_F(Shrink, SeatIsFilled_NobodyIsRefusedForIt) {
  const auto control = Run(4);
  Kill(1);
  Wish(control[0], 0, 2);
  Wish(control[3], 3, 0);
  EXPECT_TRUE(Take<JoinRefusedEvent>(control[3]));
  const ConnectionId newcomer = OpenControl(7);
  Send(newcomer, JoinOp{JoinOf(1, 4)});
  Close(control[2]);
  ConnectionId again = OpenControl(2);
  EXPECT_FALSE(Take<JoinRefusedEvent>(again));
  Wish(again, 2, 2);
  Wish(control[3], 3, 0);
  EXPECT_EQ(ViewAt(again), "e0 e1 e2 e3");
  // Nor in what comes after it.
  resilient::Report report;
  report.kind = ReportKind::kCommFailed;
  report.generation = 2;
  Send(newcomer, ReportOp{report});
  Close(again);
  again = OpenControl(2);
  EXPECT_TRUE(Take<Fence>(again));
  EXPECT_FALSE(Take<JoinRefusedEvent>(again));
}

TEST_F(Shrink, OneOfTwoSeatsIsFilled_TheOtherHasItsTime) {
  const auto control = Run(4, kSeatWait);
  Kill(1);
  Advance(kSeatWait / 2, {control[0], control[2], control[3]});
  Kill(2);
  Wish(control[0], 0, 2);
  Wish(control[3], 3, 0, kSeatWait);
  Advance(kSeatWait / 2, {control[0], control[3]});
  EXPECT_TRUE(Take<JoinRefusedEvent>(control[3]));
  const ConnectionId newcomer = OpenControl(7);
  Send(newcomer, JoinOp{JoinOf(1, 4, kSeatWait)});
  EXPECT_FALSE(Take<JoinRefusedEvent>(newcomer));
  Advance(kSeatWait / 2, {control[0], control[3], newcomer});
  EXPECT_TRUE(Take<JoinRefusedEvent>(newcomer));
}

TEST_F(Shrink, DeathReportedUnderTheOldNumber_IsOfThatProcess) {
  const auto control = Run(4);
  Kill(0);
  for (const int i : {1, 2, 3}) Wish(control[At(i)], i, 2);
  BecomeReady({control[1], control[2], control[3]});
  DropFences(control);
  Report report;
  report.kind = ReportKind::kProcessDied;
  report.generation = 1;
  report.accused_rank = 3;  // Which there is none of any more.
  report.accused_incarnation = HelloOf(3, Role::kControl).incarnation;
  report.wait_status = 9;
  Send(control[1], ReportOp{report});
  const std::optional<Fence> fence = Take<Fence>(control[1]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.detail().rank, 2);
}

TEST_F(Shrink, BadNumber_IsRefused) {
  const auto control = Run(4);
  Kill(1);
  Wish(control[0], 0, 5);
  EXPECT_EQ(Take<JoinRefusedEvent>(control[0])->why.code(), StatusCode::kInvalidArgument);
}

// ---- Ranks of a world that ran at another store, which was lost ----

class ShrinkAtNextStore : public Shrink {
 protected:
  // `process` comes to this store as a rank of four, and goes on with `least` after `kSeatWait`.
  ConnectionId Come(int process, int least) {
    const ConnectionId control = OpenControl(process);
    JoinRequest request = JoinOf(process, 4);
    request.join_timeout = kSeatWait;
    request.min_world = least;
    Send(control, JoinOp{request});
    return control;
  }
};

TEST_F(ShrinkAtNextStore, AllCome_NobodyWaits) {
  std::vector<ConnectionId> control;
  for (int i = 0; i < 4; ++i) control.push_back(Come(i, 2));
  EXPECT_EQ(ViewAt(control[0]), "e0 e1 e2 e3");
}

TEST_F(ShrinkAtNextStore, SomeDoNotCome_OthersGoOnInTheirOrderAfterTheWait) {
  const std::vector<ConnectionId> control{Come(3, 2), Come(0, 2)};
  Advance(kSeatWait - kSecond, control);
  EXPECT_EQ(ViewAt(control[0]), "no view");
  Advance(kSecond, control);
  for (const ConnectionId connection : control) EXPECT_EQ(ViewAt(connection), "e0 e3");
}

TEST_F(ShrinkAtNextStore, TooFewCome_AreRefused) {
  const std::vector<ConnectionId> control{Come(3, 3), Come(0, 2)};
  Advance(kSeatWait, control);
  for (const ConnectionId connection : control) {
    const auto refused = Take<JoinRefusedEvent>(connection);
    ASSERT_TRUE(refused);
    EXPECT_EQ(refused->why.code(), StatusCode::kJoinTimeout);
    EXPECT_NE(refused->why.message().find("missing ranks 1, 2"), std::string::npos);
  }
}

TEST_F(ShrinkAtNextStore, RankThatIsAliveElsewhere_HasALastCall) {
  Hello present = HelloOf(1, Role::kControl, "present");
  present.leased_key = PresenceKey({4, 1});
  present.leased_value = "here";
  const ConnectionId line = Open(present);
  const std::vector<ConnectionId> control{Come(3, 2), Come(0, 2)};
  Advance(kSeatWait, {control[0], control[1], line});
  EXPECT_EQ(ViewAt(control[0]), "no view");
  Advance(LastCallOf(kSeatWait), {control[0], control[1], line});
  EXPECT_EQ(ViewAt(control[0]), "e0 e3");
}

TEST_F(ShrinkAtNextStore, ReplacementHasNoSay_AndIsTaken) {
  const std::vector<ConnectionId> control{Come(3, 2), Come(1, 0)};
  Advance(kSeatWait, control);
  for (const ConnectionId connection : control) EXPECT_EQ(ViewAt(connection), "e1 e3");
}

TEST_F(ShrinkAtNextStore, RankThatIsLostWhileTheyMeet_IsWaitedForAsLong) {
  const std::vector<ConnectionId> control{Come(3, 2), Come(0, 2), Come(2, 2)};
  Advance(kSeatWait / 2, control);
  Kill(2);
  Advance(kSeatWait / 2, {control[0], control[1]});
  EXPECT_EQ(ViewAt(control[0]), "no view");
  Advance(kSeatWait / 2, {control[0], control[1]});
  EXPECT_EQ(ViewAt(control[0]), "e0 e3");
}

TEST_F(ShrinkAtNextStore, RankThatComesTooLate_IsToldSo) {
  const std::vector<ConnectionId> control{Come(3, 2), Come(0, 2)};
  Advance(kSeatWait, control);
  BecomeReady(control);
  const ConnectionId late = Come(1, 2);
  Advance(2 * kSecond, control);  // In which the others show that they live.
  const auto refused = Take<JoinRefusedEvent>(late);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->why.code(), StatusCode::kWorldSize);
  EXPECT_NE(refused->why.message().find("gone on without this rank"), std::string::npos);
}

TEST_F(ShrinkAtNextStore, RanksOfAFirstWorld_WaitForAll) {
  const std::vector<ConnectionId> control{Come(3, 0), Come(0, 0)};
  Advance(kSeatWait, control);
  EXPECT_EQ(ViewAt(control[0]), "no view");
  EXPECT_TRUE(Take<JoinRefusedEvent>(control[0]));
}

}  // namespace
}  // namespace resilient::store
