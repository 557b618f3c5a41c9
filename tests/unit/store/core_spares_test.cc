// Goal: a lost seat is given to a process that waits for one, at once and once, and a process that
// waits is sent away when nobody will need it. Method: processes 0, 1, ... on one server core and
// manual time; after each step a second core is restored from what was kept.
#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "store/core/membership.h"
#include "store/core/participant_row.h"
#include "tests/unit/store/core_membership_fixture.h"

namespace resilient::store {
namespace {

constexpr Duration kGrace = MembershipLimits().spare_grace;

using Spares = CoreSpares;

TEST_F(Spares, RankIsLost_SpareHasItsSeatInTheNextView) {
  const auto control = Run(3);
  const auto spare = Wait(10, 1, 3);
  EXPECT_EQ(MembersAt(spare[0]), "no view");
  Kill(1);
  JoinAgain(control[0], 0, 3);
  EXPECT_EQ(MembersAt(spare[0]), "no view");  // Not before all survivors are there.
  JoinAgain(control[2], 2, 3);
  EXPECT_EQ(MembersAt(control[0]), "i0 i10 i2");
  EXPECT_EQ(MembersAt(spare[0]), "i0 i10 i2");
  // It repeats its join as it was, and is not refused for it.
  Send(spare[0], JoinOp{SpareOf(10, 3)});
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kOk);
  JoinRequest known = SpareOf(10, 3);
  known.rank = 1;
  Send(spare[0], JoinOp{known});
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kOk);
}

TEST_F(Spares, SeatIsFilled_NobodyIsRefusedWithoutSeatWait) {
  const auto control = Run(2);
  Wait(10, 1, 2);
  Kill(1);
  JoinAgain(control[0], 0, 2);
  EXPECT_EQ(RefusalAt(control[0]), StatusCode::kOk);
  EXPECT_EQ(MembersAt(control[0]), "i0 i10");
}

TEST_F(Spares, NoneWasLeft_SeatIsRefusedAsEver) {
  const auto control = Run(3);
  const auto spare = Wait(10, 1, 3);
  Kill(1);
  Kill(2);
  JoinAgain(control[0], 0, 3);
  EXPECT_EQ(RefusalAt(control[0]), StatusCode::kRankLost);
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kOk);  // It waits for another seat.
}

TEST_F(Spares, ArrivesBehindTheLoss_TakesTheSeat) {
  const auto control = Run(2, std::chrono::minutes(1));
  Kill(1);
  JoinAgain(control[0], 0, 2);
  const auto spare = Wait(10, 1, 2);
  EXPECT_EQ(MembersAt(spare[0]), "i0 i10");
}

TEST_F(Spares, TheSpareIsLostToo_TheNextOneTakesTheSeat) {
  const auto control = Run(2);
  const auto spare = Wait(10, 2, 2);
  Kill(1);
  Kill(10);
  JoinAgain(control[0], 0, 2);
  EXPECT_EQ(MembersAt(spare[1]), "i0 i11");
}

TEST_F(Spares, OnlySparesAreLeft_TheWorldEndsAndTheyWaitOn) {
  Run(2, std::chrono::minutes(1));
  const auto spare = Wait(10, 1, 2);
  Kill(1);  // The spare has its seat.
  Kill(0);
  std::vector<ConnectionId> next;
  for (int i = 2; i < 4; ++i) {
    next.push_back(OpenControl(i));
    Send(next.back(), JoinOp{JoinOf(i - 2, 2)});
  }
  BecomeReady(next);
  EXPECT_EQ(MembersAt(spare[0]), "no view");
  Kill(2);
  JoinAgain(next[1], 1, 2);
  EXPECT_EQ(MembersAt(spare[0]), "i10 i3");
}

TEST_F(Spares, LastRankIsLost_NoneIsSeatedInItsWorld) {
  Run(1);
  const auto spare = Wait(10, 1, 1);
  Kill(0);
  EXPECT_EQ(MembersAt(spare[0]), "no view");
  // It may be started again: that is waited for as long as for any rank.
  Advance(std::chrono::seconds(59), spare);
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kOk);
  Advance(kSecond, spare);
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kJoinTimeout);
}

TEST_F(Spares, AllWhoHadSeatsAreLost_ThoseWhoClaimedThemBeginTheNextWorld) {
  const auto control = Run(2);
  const auto spare = Wait(10, 2, 2);
  std::vector<ConnectionId> restarted;
  for (const int rank : {0, 1}) {
    Kill(rank);
    JoinAgain(rank == 0 ? control[1] : spare[0], rank == 0 ? 1 : 0, 2);
    BecomeReady(rank == 0 ? std::vector{spare[0], control[1]} : spare);
    JoinRequest replacement = JoinOf(rank, 2);
    replacement.spare_if_taken = true;
    restarted.push_back(OpenControl(20 + rank));
    Send(restarted.back(), JoinOp{replacement});
    for (int answers = 0; answers < 2; ++answers) Send(spare[At(rank)], HeartbeatOp{1}, 0);
  }
  EXPECT_EQ(RefusalAt(restarted[0]), StatusCode::kOk);
  Kill(10);
  Kill(11);
  EXPECT_EQ(MembersAt(restarted[1]), "i20 i21");
}

TEST_F(Spares, WorldHadBecomeSmaller_ItsClaimIsOfTheWholeOne) {
  const auto control = Run(4);
  Kill(3);
  for (int rank = 0; rank < 3; ++rank) {
    JoinRequest request = JoinOf(rank, 4);
    request.min_world = 2;
    request.generation = 1;
    Send(control[At(rank)], JoinOp{request});
  }
  BecomeReady({control[0], control[1], control[2]});
  JoinRequest replacement = JoinOf(3, 4);
  replacement.spare_if_taken = true;
  const ConnectionId restarted = OpenControl(20);
  Send(restarted, JoinOp{replacement});
  for (int answers = 0; answers < 2; ++answers) Send(control[0], HeartbeatOp{1}, 0);
  for (int rank = 0; rank < 3; ++rank) Kill(rank);
  for (int rank = 0; rank < 3; ++rank) Send(OpenControl(30 + rank), JoinOp{JoinOf(rank, 4)});
  EXPECT_EQ(MembersAt(restarted), "i30 i31 i32 i20");
}

TEST_F(Spares, Several_TheOneOnTheHostOfTheLostRankComesFirst) {
  const auto control = Run(2);
  Wait(10, 1, 2);
  Hello near = HelloOf(11, Role::kControl);
  near.process.host = "h1";
  Send(Open(near), JoinOp{SpareOf(11, 2)});
  Kill(1);
  JoinAgain(control[0], 0, 2);
  EXPECT_EQ(MembersAt(control[0]), "i0 i11");
}

TEST_F(Spares, WithoutAConnection_IsLeftOutUntilItIsBack) {
  const auto control = Run(2, std::chrono::minutes(1));
  const auto spare = Wait(10, 1, 2);
  Close(spare[0]);
  Kill(1);
  JoinAgain(control[0], 0, 2);
  EXPECT_EQ(MembersAt(control[0]), "no view");
  OpenControl(10);
  EXPECT_EQ(MembersAt(control[0]), "i0 i10");
}

TEST_F(Spares, OfAnotherWorldSize_IsLeftOut) {
  const auto control = Run(2);
  const auto spare = Wait(10, 1, 3);
  Kill(1);
  JoinAgain(control[0], 0, 2);
  EXPECT_EQ(MembersAt(spare[0]), "no view");
}

TEST_F(Spares, WorldMaySpareSeats_TheyAreFilledFirst) {
  const auto control = Run(4);
  const auto spare = Wait(10, 1, 4);
  Kill(1);
  Kill(2);
  for (const int rank : {0, 3}) {
    JoinRequest request = JoinOf(rank, 4);
    request.min_world = 2;
    request.generation = 1;
    Send(control[At(rank)], JoinOp{request});
  }
  // One of the two seats is filled, the other one dropped.
  EXPECT_EQ(MembersAt(control[0]), "i0 i10 i3");
  EXPECT_EQ(MembersAt(spare[0]), "i0 i10 i3");
}

TEST_F(Spares, SeatIsTaken_ReplacementWaitsAsSpareWhereItMay) {
  const auto control = Run(2);
  const auto spare = Wait(10, 1, 2);
  Kill(1);
  JoinAgain(control[0], 0, 2);
  BecomeReady({control[0], spare[0]});
  Take<Fence>(control[0]);
  JoinRequest replacement = JoinOf(1, 2);
  replacement.spare_if_taken = true;
  const ConnectionId restarted = OpenControl(11);
  Send(restarted, JoinOp{replacement});
  for (int answers = 0; answers < 2; ++answers) Send(spare[0], HeartbeatOp{1}, 0);
  EXPECT_EQ(RefusalAt(restarted), StatusCode::kOk);
  Kill(0);
  JoinAgain(spare[0], 1, 2);
  EXPECT_EQ(MembersAt(restarted), "i11 i10");
}

TEST_F(Spares, SeatWasLeftInARefusedWorld_ReplacementWaitsForTheNextOne) {
  const auto control = Run(3);
  for (const int rank : {0, 1}) Send(control[At(rank)], LeaveOp{});
  JoinRequest replacement = JoinOf(1, 3);
  replacement.spare_if_taken = true;
  const ConnectionId restarted = OpenControl(11);
  Send(restarted, JoinOp{replacement});
  EXPECT_EQ(MembersAt(restarted), "no view");
  // The last one of the old world is gone; who replaces it finds the other one waiting.
  Send(control[2], LeaveOp{});
  for (const int rank : {0, 2}) {
    JoinRequest request = JoinOf(rank, 3);
    request.spare_if_taken = true;
    Send(OpenControl(20 + rank), JoinOp{request});
  }
  EXPECT_EQ(MembersAt(restarted), "i20 i11 i22");
}

TEST_F(Spares, RefusedWorldGoesOnWithLess_ReplacementOfASeatThatWasLeftIsInIt) {
  const auto control = Run(3);
  Kill(0);
  Send(control[1], LeaveOp{});
  JoinAgain(control[2], 2, 3);
  EXPECT_EQ(RefusalAt(control[2]), StatusCode::kRankLost);
  JoinRequest replacement = JoinOf(1, 3);
  replacement.spare_if_taken = true;
  const ConnectionId restarted = OpenControl(11);
  Send(restarted, JoinOp{replacement});
  JoinRequest less = JoinOf(2, 3);
  less.min_world = 1;
  less.generation = 1;
  less.number = 2;
  Send(control[2], JoinOp{less});
  EXPECT_EQ(MembersAt(restarted), "i11 i2");
}

TEST_F(Spares, SeatIsFree_ReplacementTakesItsOwn) {
  const auto control = Run(2, std::chrono::minutes(1));
  Kill(1);
  JoinAgain(control[0], 0, 2);
  JoinRequest replacement = JoinOf(1, 2);
  replacement.spare_if_taken = true;
  const ConnectionId restarted = OpenControl(11);
  Send(restarted, JoinOp{replacement});
  EXPECT_EQ(MembersAt(restarted), "i0 i11");
}

TEST_F(Spares, WorldHasEnded_TheyAreSentAwayBehindTheGrace) {
  const auto control = Run(2);
  const auto spare = Wait(10, 1, 2);
  for (const ConnectionId rank : control) Send(rank, LeaveOp{});
  Advance(kGrace - kSecond, spare);
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kOk);
  Advance(kSecond, spare);
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kLeft);
}

TEST_F(Spares, ComesWhenItsWorldHasEnded_IsSentAwayLikewise) {
  const auto control = Run(2);
  for (const ConnectionId rank : control) Send(rank, LeaveOp{});
  const auto spare = Wait(10, 1, 2);
  Advance(kGrace, spare);
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kLeft);
}

TEST_F(Spares, ComesAheadOfTheNextAttempt_WaitsForIt) {
  const auto control = Run(2);
  for (const ConnectionId rank : control) Send(rank, LeaveOp{});
  Hello anew = HelloOf(10, Role::kControl);
  anew.launcher_attempt = 1;
  const ConnectionId spare = Open(anew);
  Send(spare, JoinOp{SpareOf(10, 2)});
  Advance(kGrace + kSecond, {spare});
  EXPECT_EQ(RefusalAt(spare), StatusCode::kOk);
}

TEST_F(Spares, RankIsOnItsWay_TheyWaitForIt) {
  const auto control = Run(2);
  const auto spare = Wait(10, 1, 2);
  for (const ConnectionId rank : control) Send(rank, LeaveOp{});
  Hello late = HelloOf(5, Role::kControl);
  late.leased_key = PresenceKey({2, 0});
  const ConnectionId coming = Open(late);
  Advance(2 * kGrace, {spare[0], coming});
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kOk);
  Close(coming);
  Advance(3 * kGrace, spare);
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kLeft);
}

TEST_F(Spares, AnotherWorldBegins_TheyAreItsSpares) {
  const auto control = Run(2);
  const auto spare = Wait(10, 1, 2);
  for (const ConnectionId rank : control) Send(rank, LeaveOp{});
  Advance(kGrace / 2, spare);
  std::vector<ConnectionId> next;
  for (int i = 2; i < 4; ++i) {
    next.push_back(OpenControl(i));
    Send(next.back(), JoinOp{JoinOf(i - 2, 2)});
  }
  BecomeReady(next);
  std::vector<ConnectionId> all = next;
  all.push_back(spare[0]);
  Advance(kGrace, all);
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kOk);
  Kill(3);
  JoinAgain(next[0], 0, 2);
  EXPECT_EQ(MembersAt(spare[0]), "i2 i10");
}

TEST_F(Spares, NoRankEverJoins_TheirOwnTimeoutEndsTheWait) {
  const auto spare = Wait(10, 1, 2);
  Advance(std::chrono::seconds(59), spare);
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kOk);
  Advance(kSecond, spare);
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kJoinTimeout);
}

TEST_F(Spares, WorldIsFormingForLong_TheyWaitWithIt) {
  const auto spare = Wait(10, 1, 2);
  const ConnectionId rank = OpenControl(0);
  JoinRequest request = JoinOf(0, 2);
  request.join_timeout = std::chrono::minutes(30);
  Send(rank, JoinOp{request});
  Advance(std::chrono::minutes(2), {rank, spare[0]});
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kOk);
}

TEST_F(Spares, LauncherRestartsAll_SparesOfTheOldAttemptAreOut) {
  Run(2);
  const auto spare = Wait(10, 1, 2);
  Hello anew = HelloOf(20, Role::kControl);
  anew.launcher_attempt = 1;
  Send(Open(anew), JoinOp{JoinOf(0, 2)});
  const std::optional<SessionLostEvent> lost = Take<SessionLostEvent>(spare[0]);
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->why.code(), StatusCode::kStaleGeneration);
}

TEST_F(Spares, ServerIsStartedAnew_TheyAreStillThere) {
  auto control = Run(2, std::chrono::minutes(1));
  Wait(10, 1, 2);
  Recover();
  control = {OpenControl(0), OpenControl(1)};
  const ConnectionId spare = OpenControl(10);
  Kill(1);
  JoinAgain(control[0], 0, 2);
  EXPECT_EQ(MembersAt(spare), "i0 i10");
}

TEST_F(Spares, AsksForWhomItWaits_ForNobody) {
  const auto spare = Wait(10, 1, 2);
  WaitingReport report;
  report.tell = true;
  Send(spare[0], WaitingOp{report});
  const std::optional<LateEvent> late = Take<LateEvent>(spare[0]);
  ASSERT_TRUE(late);
  EXPECT_EQ(late->notice.world_size, 0);
}

TEST_F(Spares, Status_NamesThem) {
  Wait(10, 1, 2);
  const std::string text = core_->StatusJson(now_);
  EXPECT_NE(text.find("\"spares\":[{\"state\":\"spare\",\"host\":\"h10\""), std::string::npos)
      << text;
}

// ---- What a repeated join may change ----

// The holder of rank 5 of eight, and a process that waits for that rank.
class Claims : public CoreSpares {
 protected:
  void SetUp() override {
    holder_ = OpenControl(5);
    Send(holder_, JoinOp{JoinOf(5, 8)});
    Ask(5, 8);
    for (int answer = 0; answer < 2; ++answer) Send(holder_, HeartbeatOp{1}, 0);
    Forget();
  }
  // The claimant joins, for the first time or again.
  void Ask(int rank, int size) {
    if (claimant_ == 0) claimant_ = OpenControl(20);
    JoinRequest request = JoinOf(rank, size);
    request.spare_if_taken = true;
    Send(claimant_, JoinOp{request});
  }
  ConnectionId holder_ = 0;
  ConnectionId claimant_ = 0;
};

TEST_F(Claims, SpareThatAsksForASmallerWorld_IsRefusedAndKeepsItsClaim) {
  Ask(0, 1);
  EXPECT_EQ(RefusalAt(claimant_), StatusCode::kInvalidArgument);
  Ask(5, 2);
  EXPECT_EQ(RefusalAt(claimant_), StatusCode::kInvalidArgument);  // Beyond that world anyhow.
  Ask(1, 2);
  EXPECT_EQ(RefusalAt(claimant_), StatusCode::kInvalidArgument);
  Kill(5);
  EXPECT_EQ(core_->LiveMembers(), 1u);  // The claimant begins the next world, with rank 5 of eight.
  for (int rank = 0; rank < 8; ++rank) {
    if (rank != 5) Send(OpenControl(30 + rank), JoinOp{JoinOf(rank, 8)});
  }
  EXPECT_EQ(MembersAt(claimant_), "i30 i31 i32 i33 i34 i20 i36 i37");
}

TEST_F(Claims, SpareThatAsksForASmallerWorld_HasNoSeatInOne) {
  Ask(1, 2);
  for (int rank = 0; rank < 2; ++rank) {
    JoinRequest request = JoinOf(rank, 2);
    Hello hello = HelloOf(40 + rank, Role::kControl);
    hello.launcher_attempt = 1;  // Ends the world of eight.
    Send(Open(hello), JoinOp{request});
  }
  EXPECT_EQ(core_->LiveMembers(), 2u);
}

TEST_F(Claims, MemberThatAsksForASmallerWorld_IsRefused) {
  JoinRequest request = JoinOf(0, 1);
  request.spare_if_taken = true;
  request.endpoint.assign(4000, 'e');
  Send(holder_, JoinOp{request});
  EXPECT_EQ(RefusalAt(holder_), StatusCode::kInvalidArgument);
}

TEST_F(Claims, OneThatWaitsForAnAnswer_CannotAskForAnotherWorld) {
  claimant_ = OpenControl(21);
  JoinRequest request = JoinOf(5, 8);
  Send(claimant_, JoinOp{request});
  request.rank = 0;
  request.world_size = 1;
  request.spare_if_taken = true;
  Send(claimant_, JoinOp{request});
  EXPECT_EQ(RefusalAt(claimant_), StatusCode::kInvalidArgument);
}

TEST_F(Claims, KeptClaimThatNoWorldHas_IsDroppedWithItsSpare) {
  const auto row = std::find_if(rows_.begin(), rows_.end(), [](const auto& kept) {
    const std::optional<RowName> name = ParseRowName(kept.first);
    Participant who;
    return name && name->kind == RowKind::kParticipant && DecodeRow(kept.second, who) &&
           who.state == ParticipantState::kSpare;
  });
  ASSERT_NE(row, rows_.end());
  Participant who;
  ASSERT_TRUE(DecodeRow(row->second, who));
  who.request.world_size = 1;
  row->second = EncodeRow(who);
  Recover();
  Advance(std::chrono::seconds(10));  // The holder does not come back, and its world ends.
  EXPECT_EQ(core_->LiveMembers(), 0u);
}

}  // namespace
}  // namespace resilient::store
