// Goal: the rules of store/core/MEMBERSHIP.md about seats: who gets which seat, when a view is
// built, what a fence does, who is refused and how. Method: CoreMembership.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "store/core/codec.h"
#include "store/core/world.h"
#include "tests/unit/store/core_membership_fixture.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;

TEST_F(CoreMembership, AllJoined_GetOneView) {
  std::vector<ConnectionId> control;
  for (int i = 0; i < 3; ++i) control.push_back(OpenControl(i));
  for (const int i : {2, 0}) EXPECT_TRUE(Ask(control[At(i)], JoinOp{JoinOf(i, 3)}).status.ok());
  EXPECT_FALSE(Take<View>(control[0]));
  EXPECT_EQ(core_->LiveMembers(), 2u);
  Send(control[1], JoinOp{JoinOf(1, 3)});
  std::string secret;
  for (const ConnectionId connection : control) {
    const std::optional<View> view = Take<View>(connection);
    ASSERT_TRUE(view);
    EXPECT_EQ(view->life, 1u);
    EXPECT_EQ(view->round, 1u);
    EXPECT_EQ(view->generation, 1u);
    EXPECT_EQ(view->attempt, 1u);
    EXPECT_FALSE(view->secret.empty());
    EXPECT_TRUE(secret.empty() || secret == view->secret);
    secret = view->secret;
    ASSERT_EQ(view->members.size(), 3u);
    for (int i = 0; i < 3; ++i) {
      const Member& member = view->members[At(i)];
      EXPECT_EQ(member.rank, i);
      EXPECT_EQ(member.incarnation, "i" + std::to_string(i));
      EXPECT_EQ(member.host, "h" + std::to_string(i));
      EXPECT_EQ(member.pid, 100 + i);
      EXPECT_EQ(member.endpoint, "e" + std::to_string(i));
    }
  }
}

TEST_F(CoreMembership, Running_ComesWhenAllAreReady) {
  std::vector<ConnectionId> control{OpenControl(0), OpenControl(1)};
  Send(control[0], JoinOp{JoinOf(0, 2)});
  Send(control[0], ReadyOp{1});  // Too early: nothing is built.
  Send(control[1], JoinOp{JoinOf(1, 2)});
  Send(control[0], ReadyOp{1});
  Send(control[0], ReadyOp{1});
  EXPECT_FALSE(Take<RunningEvent>(control[0]));
  Send(control[1], ReadyOp{1});
  for (const ConnectionId connection : control) {
    EXPECT_EQ(Take<RunningEvent>(connection)->generation, 1u);
    EXPECT_FALSE(Take<RunningEvent>(connection));
  }
}

TEST_F(CoreMembership, ReadyOfAPastGeneration_IsIgnored) {
  const std::vector<ConnectionId> control = Run(2, kSecond);
  Kill(1);
  EXPECT_TRUE(Ask(control[0], ReadyOp{1}).status.ok());
}

TEST_F(CoreMembership, LostMember_FencesTheOthers) {
  const std::vector<ConnectionId> control = Run(3, kSecond);
  Kill(2);
  for (const int i : {0, 1}) {
    const std::optional<Fence> fence = Take<Fence>(control[At(i)]);
    ASSERT_TRUE(fence);
    EXPECT_EQ(fence->generation, 1u);
    EXPECT_EQ(fence->cause.code(), StatusCode::kRankLost);
    EXPECT_EQ(fence->cause.detail().rank, 2);
    EXPECT_EQ(fence->cause.detail().host, "h2");
    EXPECT_EQ(fence->cause.detail().pid, 102);
    EXPECT_EQ(fence->cause.detail().generation, 1u);
  }
  EXPECT_FALSE(Take<Fence>(control[2]));
  const auto lost = Take<SessionLostEvent>(control[2]);
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->why.code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(core_->LiveMembers(), 2u);
}

TEST_F(CoreMembership, Replacement_TakesTheEmptySeat) {
  const std::vector<ConnectionId> control = Run(3, kSecond);
  Kill(2);
  Send(control[0], JoinOp{JoinOf(0, 3, kSecond)});
  const ConnectionId newcomer = OpenControl(7);
  Send(newcomer, JoinOp{JoinOf(2, 3, kSecond)});
  EXPECT_FALSE(Take<View>(newcomer));
  Send(control[1], JoinOp{JoinOf(1, 3, kSecond)});
  EXPECT_EQ(Take<View>(newcomer)->members[2].incarnation, "i7");
  Send(newcomer, ReadyOp{2});
  EXPECT_EQ(BecomeReady({control[0], control[1]}), 2u);
  EXPECT_TRUE(Take<RunningEvent>(newcomer));
}

TEST_F(CoreMembership, LossWhileBuilding_FencesOnceMore) {
  std::vector<ConnectionId> control{OpenControl(0), OpenControl(1)};
  for (const int i : {0, 1}) Send(control[At(i)], JoinOp{JoinOf(i, 2, kSecond)});
  Send(control[0], ReadyOp{1});
  Kill(1);
  EXPECT_EQ(Take<Fence>(control[0])->generation, 1u);
  Send(control[0], JoinOp{JoinOf(0, 2, kSecond)});
  const ConnectionId newcomer = OpenControl(7);
  Send(newcomer, JoinOp{JoinOf(1, 2, kSecond)});
  Forget();
  Send(newcomer, ReadyOp{2});
  EXPECT_FALSE(Take<RunningEvent>(newcomer));  // The ready of generation 1 does not count.
  Send(control[0], ReadyOp{2});
  EXPECT_TRUE(Take<RunningEvent>(newcomer));
}

TEST_F(CoreMembership, LossWhileFormingAgain_FencesNobody) {
  const std::vector<ConnectionId> control = Run(3, kSecond);
  Kill(2);
  EXPECT_TRUE(Take<Fence>(control[0]));
  Send(control[0], JoinOp{JoinOf(0, 3, kSecond)});
  Send(control[1], JoinOp{JoinOf(1, 3, kSecond)});
  Kill(1);
  EXPECT_FALSE(Take<Fence>(control[0]));
  const ConnectionId newcomers[] = {OpenControl(7), OpenControl(8)};
  Send(newcomers[0], JoinOp{JoinOf(1, 3)});
  Send(newcomers[1], JoinOp{JoinOf(2, 3)});
  EXPECT_EQ(BecomeReady({control[0], newcomers[0], newcomers[1]}), 2u);
}

TEST_F(CoreMembership, LossInTheFirstForming_EmptiesTheSeat) {
  const ConnectionId first = OpenControl(0);
  const ConnectionId second = OpenControl(1);
  Send(first, JoinOp{JoinOf(0, 3)});
  Send(second, JoinOp{JoinOf(1, 3)});
  Kill(1);
  EXPECT_FALSE(Take<Fence>(first));
  Send(OpenControl(2), JoinOp{JoinOf(1, 3)});
  Send(OpenControl(3), JoinOp{JoinOf(2, 3)});
  EXPECT_EQ(Take<View>(first)->generation, 1u);
}

TEST_F(CoreMembership, SeatWaitOver_RefusesWithTheFirstCause) {
  const std::vector<ConnectionId> control = Run(3, kSecond);
  Kill(2);
  Send(control[0], JoinOp{JoinOf(0, 3, kSecond)});
  Advance(Millis(900), control);
  EXPECT_FALSE(Take<JoinRefusedEvent>(control[0]));
  Advance(Millis(200), control);
  const auto refused = Take<JoinRefusedEvent>(control[0]);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->why.code(), StatusCode::kRankLost);
  EXPECT_EQ(refused->why.detail().rank, 2);
  EXPECT_FALSE(Take<JoinRefusedEvent>(control[1]));  // It has not joined again.
  Send(control[1], JoinOp{JoinOf(1, 3, kSecond)});
  EXPECT_EQ(Take<JoinRefusedEvent>(control[1])->why.detail().rank, 2);
}

TEST_F(CoreMembership, NoSeatWait_RefusesTheSurvivorsJoin) {
  const std::vector<ConnectionId> control = Run(2);
  Kill(1);
  EXPECT_TRUE(Take<Fence>(control[0]));
  EXPECT_FALSE(Take<JoinRefusedEvent>(control[0]));
  Send(control[0], JoinOp{JoinOf(0, 2)});
  EXPECT_EQ(Take<JoinRefusedEvent>(control[0])->why.code(), StatusCode::kRankLost);
}

TEST_F(CoreMembership, LateSurvivor_IsWaitedForWithoutLimit) {
  const std::vector<ConnectionId> control = Run(2, kSecond);
  Kill(1);
  const ConnectionId newcomer = OpenControl(7);
  Send(newcomer, JoinOp{JoinOf(1, 2, kSecond)});
  Advance(std::chrono::seconds(100), {control[0], newcomer});
  EXPECT_FALSE(Take<JoinRefusedEvent>(newcomer));
  Send(control[0], JoinOp{JoinOf(0, 2, kSecond)});
  EXPECT_TRUE(Take<View>(newcomer));
}

TEST_F(CoreMembership, JoinTimeout_IsOneVerdictForAll) {
  std::vector<ConnectionId> control{OpenControl(0), OpenControl(1), OpenControl(3)};
  JoinRequest request = JoinOf(0, 4);
  request.join_timeout = std::chrono::seconds(2);
  Send(control[0], JoinOp{request});
  Advance(kSecond, {control[0]});
  for (const int i : {1, 3}) {
    request = JoinOf(i, 4);
    request.join_timeout = std::chrono::seconds(3);
    Send(control[i == 1 ? 1 : 2], JoinOp{request});
  }
  Advance(Millis(1900), control);
  EXPECT_FALSE(Take<JoinRefusedEvent>(control[0]));
  now_ += Millis(100);
  Tick();
  for (const ConnectionId connection : control) {
    const auto refused = Take<JoinRefusedEvent>(connection);
    ASSERT_TRUE(refused);
    EXPECT_EQ(refused->why.code(), StatusCode::kJoinTimeout);
    EXPECT_THAT(refused->why.message(),
                HasSubstr("3 of 4 joined; missing ranks 2; nothing was ever heard from them"));
  }
  // The round is over; a new try is a new round.
  Send(control[0], JoinOp{JoinOf(0, 1)});
  EXPECT_EQ(Take<View>(control[0])->generation, 2u);
}

TEST_F(CoreMembership, JoinTimeout_TellsWhoWasThereOnce) {
  const ConnectionId control = OpenControl(0);
  const ConnectionId other = OpenControl(1);
  Send(control, JoinOp{JoinOf(0, 3)});
  Send(other, JoinOp{JoinOf(1, 3)});
  Send(other, LeaveOp{});
  Advance(std::chrono::seconds(61), {control});
  const auto refused = Take<JoinRefusedEvent>(control);
  ASSERT_TRUE(refused);
  EXPECT_THAT(refused->why.message(), HasSubstr("rank 1 (host h1, pid 101) joined and left again"));
  EXPECT_THAT(refused->why.message(), HasSubstr("nothing was ever heard from 1 of them"));
}

TEST_F(CoreMembership, DuplicateOfALiveRank_IsRefusedNamingBoth) {
  const std::vector<ConnectionId> control = Run(2);
  const ConnectionId second = OpenControl(7);
  Send(second, JoinOp{JoinOf(1, 2)});
  EXPECT_TRUE(Take<PingEvent>(control[1]));
  Send(control[1], HeartbeatOp{1}, 0);
  EXPECT_TRUE(Take<PingEvent>(control[1]));
  Send(control[1], HeartbeatOp{2}, 0);
  const auto refused = Take<JoinRefusedEvent>(second);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->why.code(), StatusCode::kDuplicateRank);
  for (const char* part : {"host h7, pid 107, started at tick 1007",
                           "host h1, pid 101, started at tick 1001", "rank 1"}) {
    EXPECT_THAT(refused->why.message(), HasSubstr(part));
  }
  EXPECT_FALSE(Take<Fence>(control[0]));
}

TEST_F(CoreMembership, DuplicateOfASilentRank_WaitsAndTakesTheSeat) {
  const std::vector<ConnectionId> control = Run(2, std::chrono::seconds(60));
  const ConnectionId second = OpenControl(7);
  Send(second, JoinOp{JoinOf(1, 2)});
  Advance(std::chrono::seconds(4), {control[0], second});
  EXPECT_FALSE(Take<JoinRefusedEvent>(second));
  Advance(std::chrono::seconds(2), {control[0], second});
  EXPECT_TRUE(Take<Fence>(control[0]));
  Send(control[0], JoinOp{JoinOf(0, 2)});
  const std::optional<View> view = Take<View>(second);
  ASSERT_TRUE(view);
  EXPECT_EQ(view->members[1].incarnation, "i7");
}

TEST_F(CoreMembership, TwoDuplicates_TheSecondIsRefused) {
  const std::vector<ConnectionId> control = Run(2, std::chrono::seconds(60));
  const ConnectionId second = OpenControl(7);
  const ConnectionId third = OpenControl(8);
  Send(second, JoinOp{JoinOf(1, 2)});
  Send(third, JoinOp{JoinOf(1, 2)});
  Kill(1);
  EXPECT_TRUE(Take<PingEvent>(second));
  Send(second, HeartbeatOp{1}, 0);
  Send(second, HeartbeatOp{2}, 0);
  EXPECT_EQ(Take<JoinRefusedEvent>(third)->why.code(), StatusCode::kDuplicateRank);
}

TEST_F(CoreMembership, OtherWorldSize_IsRefusedNamingBoth) {
  const ConnectionId holder = OpenControl(0);
  Send(holder, JoinOp{JoinOf(0, 2)});
  for (const int rank : {0, 1, 3}) {
    const int process = 10 + rank;
    const ConnectionId stranger = OpenControl(process);
    Send(stranger, JoinOp{JoinOf(rank, 4)});
    Send(holder, HeartbeatOp{1}, 0);
    Send(holder, HeartbeatOp{2}, 0);
    const auto refused = Take<JoinRefusedEvent>(stranger);
    ASSERT_TRUE(refused) << rank;
    EXPECT_EQ(refused->why.code(), StatusCode::kWorldSize);
    EXPECT_THAT(refused->why.message(), HasSubstr("different size: 4 and 2"));
    EXPECT_THAT(refused->why.message(), HasSubstr("host h0, pid 100"));
    EXPECT_THAT(refused->why.message(), HasSubstr("pid " + std::to_string(100 + process)));
  }
}

TEST_F(CoreMembership, BadJoin_IsRefused) {
  const ConnectionId control = OpenControl(0);
  for (const auto& [rank, size] :
       std::vector<std::pair<int, int>>{{-1, 2}, {2, 2}, {0, 0}, {0, -1}, {0, kWorldSizeMax + 1}}) {
    Send(control, JoinOp{JoinOf(rank, size)});
    const auto refused = Take<JoinRefusedEvent>(control);
    ASSERT_TRUE(refused) << rank << " of " << size;
    EXPECT_EQ(refused->why.code(), StatusCode::kInvalidArgument);
  }
  JoinRequest request = JoinOf(0, 2);
  request.endpoint = std::string(kEndpointBytesMax + 1, 'e');
  Send(control, JoinOp{request});
  EXPECT_EQ(Take<JoinRefusedEvent>(control)->why.code(), StatusCode::kTooLarge);
  request.endpoint.pop_back();
  Send(control, JoinOp{request});
  Send(control, JoinOp{JoinOf(1, 2)});  // A session has one seat.
  EXPECT_EQ(Take<JoinRefusedEvent>(control)->why.code(), StatusCode::kInvalidArgument);
}

// A view that does not fit a frame could not be sent to anybody.
TEST_F(CoreMembership, EndpointsTooLongForAViewOfAll_AreRefused) {
  const ConnectionId control = OpenControl(0);
  JoinRequest request = JoinOf(0, 16384);
  request.endpoint = std::string(1024, 'e');
  Send(control, JoinOp{request});
  const auto refused = Take<JoinRefusedEvent>(control);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->why.code(), StatusCode::kTooLarge);
  EXPECT_THAT(refused->why.message(), HasSubstr("(endpoint 1024, host name"));
  EXPECT_THAT(refused->why.message(), HasSubstr("in a world of 16384 each rank may take 960"));
  request.endpoint.resize(800);
  Send(control, JoinOp{request});
  EXPECT_FALSE(Take<JoinRefusedEvent>(control));
}

TEST(World, RestoredMembersWithoutAView_AreDamage) {
  World world;
  world.seats.Resize(2);
  world.seats.At(0).state = SeatState::kMember;
  EXPECT_EQ(world.FinishRestore(Instant()).code(), StatusCode::kInternal);
  world.viewed = true;
  EXPECT_EQ(world.FinishRestore(Instant()).code(), StatusCode::kInternal);
  View view;
  view.members.resize(2);
  world.view = Share(view);
  EXPECT_TRUE(world.FinishRestore(Instant()).ok());
}

TEST_F(CoreMembership, LargestWorld_IsTaken) {
  const ConnectionId control = OpenControl(0);
  Send(control, JoinOp{JoinOf(kWorldSizeMax - 1, kWorldSizeMax)});
  EXPECT_FALSE(Take<JoinRefusedEvent>(control));
}

TEST_F(CoreMembership, ReopenedControl_IsToldTheState) {
  std::vector<ConnectionId> control = Run(2, std::chrono::seconds(60));
  control[0] = OpenControl(0);
  EXPECT_EQ(Take<View>(control[0])->generation, 1u);
  EXPECT_EQ(Take<RunningEvent>(control[0])->generation, 1u);
  Close(control[0]);
  Kill(1);
  control[0] = OpenControl(0);
  EXPECT_EQ(Take<Fence>(control[0])->generation, 1u);
  EXPECT_FALSE(Take<View>(control[0]));
  Send(control[0], JoinOp{JoinOf(0, 2)});
  Close(control[0]);
  Send(OpenControl(7), JoinOp{JoinOf(1, 2)});
  control[0] = OpenControl(0);
  EXPECT_EQ(Take<View>(control[0])->generation, 2u);
  EXPECT_FALSE(Take<RunningEvent>(control[0]));
  control[1] = OpenControl(1);
  EXPECT_TRUE(Take<SessionLostEvent>(control[1]));
}

TEST_F(CoreMembership, ReopenedControlOfARefused_IsToldWhy) {
  std::vector<ConnectionId> control = Run(2);
  Kill(1);
  Send(control[0], JoinOp{JoinOf(0, 2)});
  control[0] = OpenControl(0);
  EXPECT_EQ(Take<JoinRefusedEvent>(control[0])->why.code(), StatusCode::kRankLost);
}

}  // namespace
}  // namespace resilient::store
