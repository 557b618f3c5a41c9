// Goal: the rules of store/core/MEMBERSHIP.md about worlds: rounds and lives, several worlds of one
// process, goodbyes, what keys and server owe to them. Method: CoreMembership.
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tests/unit/store/core_membership_fixture.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;

TEST_F(CoreMembership, OtherWorldSizeThanADeadWorlds_IsANewLife) {
  const std::vector<ConnectionId> control = Run(2, kSecond);
  const ConnectionId next = OpenControl(5);
  Send(next, JoinOp{JoinOf(0, 1)});
  EXPECT_FALSE(Take<View>(next));
  Kill(0);
  EXPECT_FALSE(Take<View>(next));
  Kill(1);
  EXPECT_EQ(Take<View>(next)->life, 2u);
}

TEST_F(CoreMembership, SecondWorldOfTheSameProcesses_IsANewRound) {
  const std::vector<ConnectionId> control = Run(2);
  std::vector<ConnectionId> second;
  for (int i = 0; i < 2; ++i)
    second.push_back(Open(HelloOf(i, Role::kControl, "t" + std::to_string(i))));
  for (int i = 0; i < 2; ++i) Send(second[At(i)], JoinOp{JoinOf(i, 2)});
  const std::optional<View> view = Take<View>(second[0]);
  ASSERT_TRUE(view);
  EXPECT_EQ(view->life, 1u);
  EXPECT_EQ(view->round, 2u);
  EXPECT_EQ(view->generation, 2u);
  // A world of another size of a part of the processes.
  const ConnectionId third = Open(HelloOf(1, Role::kControl, "u1"));
  Send(third, JoinOp{JoinOf(0, 1)});
  EXPECT_EQ(Take<View>(third)->round, 3u);
}

TEST_F(CoreMembership, LostProcess_FencesAllItsWorlds) {
  const std::vector<ConnectionId> control = Run(2, kSecond);
  std::vector<ConnectionId> second;
  for (int i = 0; i < 2; ++i)
    second.push_back(Open(HelloOf(i, Role::kControl, "t" + std::to_string(i))));
  for (int i = 0; i < 2; ++i) Send(second[At(i)], JoinOp{JoinOf(i, 2, kSecond)});
  Kill(1);
  EXPECT_EQ(Take<Fence>(control[0])->generation, 1u);
  EXPECT_EQ(Take<Fence>(second[0])->generation, 2u);
}

TEST_F(CoreMembership, InitAfterDestroy_IsANewRound) {
  std::vector<ConnectionId> control = Run(2);
  Send(control[0], LeaveOp{});
  // Rank 0 is back before rank 1 has left.
  const ConnectionId again = Open(HelloOf(0, Role::kControl, "t0"));
  Send(again, JoinOp{JoinOf(0, 2)});
  Send(control[1], LeaveOp{});
  const ConnectionId other = Open(HelloOf(1, Role::kControl, "t1"));
  Send(other, JoinOp{JoinOf(1, 2)});
  const std::optional<View> view = Take<View>(again);
  ASSERT_TRUE(view);
  EXPECT_EQ(view->life, 1u);
  EXPECT_EQ(view->round, 2u);
  EXPECT_FALSE(Take<Fence>(control[1]));
}

TEST_F(CoreMembership, JoinWithNobodyAlive_IsANewLifeWithoutKeys) {
  const ConnectionId request = OpenRequest(0);
  ASSERT_TRUE(Ask(request, SetOp{"early", "v"}).status.ok());
  std::vector<ConnectionId> control = Run(1);
  EXPECT_EQ(Ask(request, GetOp{"early", false}).value, "v");  // The first life had none before it.
  ASSERT_TRUE(Ask(request, SetOp{"old", "v"}, {}, /*scope=*/1).status.ok());
  Send(control[0], LeaveOp{});
  const ConnectionId next = OpenControl(5);
  Send(next, JoinOp{JoinOf(0, 1)});
  const std::optional<View> view = Take<View>(next);
  EXPECT_EQ(view->life, 2u);
  EXPECT_EQ(view->round, 1u);
  EXPECT_EQ(view->generation, 2u);
  const ConnectionId now = OpenRequest(5);
  EXPECT_EQ(Ask(now, GetOp{"early", false}).status.code(), StatusCode::kNotFound);
  EXPECT_EQ(Ask(now, GetOp{"old", false}, {}, 1).status.code(), StatusCode::kNotFound);
}

TEST_F(CoreMembership, KeysOfARound_AreForThoseToo_ThatHaveLeftIt) {
  const std::vector<ConnectionId> control = Run(2);
  const ConnectionId request = OpenRequest(0);
  Send(control[0], LeaveOp{});
  EXPECT_TRUE(Ask(request, SetOp{"k", "v"}, {}, 1).status.ok());
  EXPECT_EQ(Ask(OpenRequest(1), GetOp{"k", false}, {}, 1).value, "v");
  EXPECT_EQ(Ask(request, SetOp{"k", "v"}, {}, 2).status.code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(Ask(request, SetOp{"k", "v"}, {}, 1, 1).status.code(), StatusCode::kStaleGeneration);
  Send(control[1], LeaveOp{});
  EXPECT_EQ(Ask(request, SetOp{"k", "v"}, {}, 1).status.code(), StatusCode::kStaleGeneration);
  // Of another life, whose first round has the same number.
  const ConnectionId next = OpenControl(5);
  Send(next, JoinOp{JoinOf(0, 1)});
  EXPECT_EQ(Take<View>(next)->round, 1U);
  EXPECT_EQ(Ask(request, SetOp{"k", "v"}, {}, 1).status.code(), StatusCode::kStaleGeneration);
}

TEST_F(CoreMembership, EndedRound_LosesItsKeys) {
  const std::vector<ConnectionId> control = Run(2);
  const ConnectionId request = OpenRequest(0);
  ASSERT_TRUE(Ask(request, SetOp{"k", "v"}, {}, 1).status.ok());
  const ConnectionId admin = Open(HelloOf(98, Role::kAdmin));
  EXPECT_EQ(Ask(admin, NumKeysOp{}, {}, 1).number, 1);
  Send(control[0], LeaveOp{});
  EXPECT_EQ(Ask(admin, NumKeysOp{}, {}, 1).number, 1);
  Send(control[1], LeaveOp{});
  EXPECT_EQ(Ask(admin, NumKeysOp{}, {}, 1).number, 0);
}

TEST_F(CoreMembership, Leave_FencesNobody) {
  const std::vector<ConnectionId> control = Run(3);
  EXPECT_TRUE(Ask(control[1], LeaveOp{}).status.ok());
  EXPECT_TRUE(Ask(control[1], LeaveOp{}).status.ok());
  Close(control[1]);
  Advance(std::chrono::seconds(10), {control[0], control[2]});
  EXPECT_FALSE(Take<Fence>(control[0]));
  EXPECT_EQ(core_->LiveMembers(), 2u);
  EXPECT_EQ(Ask(OpenControl(1), JoinOp{JoinOf(1, 3)}).status.code(),
            StatusCode::kFailedPrecondition);
}

TEST_F(CoreMembership, LeaveWhileBuilding_FencesWithLeft) {
  std::vector<ConnectionId> control{OpenControl(0), OpenControl(1)};
  for (const int i : {0, 1}) Send(control[At(i)], JoinOp{JoinOf(i, 2)});
  Send(control[1], LeaveOp{});
  EXPECT_EQ(Take<Fence>(control[0])->cause.code(), StatusCode::kLeft);
  Send(control[0], JoinOp{JoinOf(0, 2)});
  EXPECT_EQ(Take<JoinRefusedEvent>(control[0])->why.code(), StatusCode::kLeft);
}

TEST_F(CoreMembership, SeatThatWasLeft_IsNotFilledAfterALoss) {
  const std::vector<ConnectionId> control = Run(3, std::chrono::minutes(10));
  Send(control[1], LeaveOp{});
  Kill(2);
  Send(control[0], JoinOp{JoinOf(0, 3, std::chrono::minutes(10))});
  // Nobody will ever come for seat 1, so waiting for seat 2 is pointless.
  EXPECT_EQ(Take<JoinRefusedEvent>(control[0])->why.code(), StatusCode::kRankLost);
}

TEST_F(CoreMembership, HigherLauncherAttempt_EndsTheOldWorlds) {
  const std::vector<ConnectionId> control = Run(2);
  const ConnectionId request = OpenRequest(0);
  Hello hello = HelloOf(7, Role::kControl);
  hello.launcher_attempt = 1;
  const ConnectionId newcomer = Open(hello);
  Send(newcomer, JoinOp{JoinOf(0, 2)});
  for (const ConnectionId connection : control) {
    EXPECT_EQ(Take<Fence>(connection)->cause.code(), StatusCode::kStaleGeneration);
    EXPECT_EQ(Take<SessionLostEvent>(connection)->why.code(), StatusCode::kStaleGeneration);
  }
  EXPECT_EQ(Ask(request, SetOp{"k", "v"}, {}, 1).status.code(), StatusCode::kStaleGeneration);
  hello = HelloOf(8, Role::kControl);
  hello.launcher_attempt = 1;
  const ConnectionId other = Open(hello);
  Send(other, JoinOp{JoinOf(1, 2)});
  EXPECT_EQ(Take<View>(other)->life, 2u);
  // And one that is late comes to nothing.
  const ConnectionId late = OpenControl(9);
  Send(late, JoinOp{JoinOf(1, 2)});
  EXPECT_EQ(Take<JoinRefusedEvent>(late)->why.code(), StatusCode::kStaleGeneration);
}

TEST_F(CoreMembership, Worlds_HaveALimit) {
  for (std::size_t i = 0; i <= kWorldsPerJobMax; ++i) {
    const ConnectionId control = Open(HelloOf(0, Role::kControl, "w" + std::to_string(i)));
    Send(control, JoinOp{JoinOf(0, 2)});
    const auto refused = Take<JoinRefusedEvent>(control);
    ASSERT_EQ(refused.has_value(), i == kWorldsPerJobMax);
    if (refused) {
      EXPECT_EQ(refused->why.code(), StatusCode::kResourceExhausted);
    }
  }
}

TEST_F(CoreMembership, ScopedKeys_AreForTheirRoundAndGeneration) {
  const std::vector<ConnectionId> control = Run(2, kSecond);
  const ConnectionId request = OpenRequest(0);
  EXPECT_TRUE(Ask(request, SetOp{"k", "v"}, {}, 1, 1).status.ok());
  EXPECT_TRUE(Ask(request, GetOp{"k", false}, {}, 1, 0).status.ok());
  EXPECT_TRUE(Ask(request, GetOp{"k", false}, {}, 0, 1).status.code() == StatusCode::kNotFound);
  EXPECT_EQ(Ask(request, SetOp{"k", "v"}, {}, 2, 0).status.code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(Ask(request, SetOp{"k", "v"}, {}, 1, 9).status.code(), StatusCode::kStaleGeneration);
  const ConnectionId stranger = OpenRequest(7);
  EXPECT_EQ(Ask(stranger, SetOp{"k", "v"}, {}, 1).status.code(), StatusCode::kStaleGeneration);
  EXPECT_TRUE(Ask(stranger, SetOp{"k", "v"}).status.ok());
  Kill(1);
  EXPECT_EQ(Ask(request, SetOp{"k", "v"}, {}, 1, 1).status.code(), StatusCode::kStaleGeneration);
  EXPECT_TRUE(Ask(request, SetOp{"k", "v"}, {}, 1, 0).status.ok());
}

TEST_F(CoreMembership, WaitsOfARound_EndWithTheFirstCause) {
  const std::vector<ConnectionId> control = Run(3, kSecond);
  const ConnectionId survivor = OpenRequest(0);
  const ConnectionId dead = OpenRequest(2);
  Send(survivor, GetOp{"k", true}, 1, 1);
  Send(survivor, GetOp{"k", true}, 2, 0);
  Send(dead, GetOp{"k", true}, 1, 1);
  Kill(2);
  EXPECT_EQ(TakeReply(survivor, 1)->status.code(), StatusCode::kRankLost);
  EXPECT_FALSE(TakeReply(survivor, 2));
  EXPECT_EQ(TakeReply(dead, 1)->status.code(), StatusCode::kStaleGeneration);
  // The answer stays, should it have been lost with its connection.
  EXPECT_EQ(Ask(OpenRequest(0), GetOp{"k", true}, 1, 1).status.code(), StatusCode::kRankLost);
}

TEST_F(CoreMembership, LastLeave_EndsTheServer) {
  const std::vector<ConnectionId> control = Run(2);
  Send(control[0], LeaveOp{});
  EXPECT_FALSE(last_member_left_);
  Send(control[1], LeaveOp{});
  EXPECT_TRUE(last_member_left_);
}

TEST_F(CoreMembership, LostLastMember_LeavesTheServerToItsLinger) {
  const std::vector<ConnectionId> control = Run(2);
  Send(control[0], LeaveOp{});
  Kill(1);
  EXPECT_FALSE(last_member_left_);
  EXPECT_EQ(core_->LiveMembers(), 0u);
}

TEST_F(CoreMembership, MembersOfAnotherJob_KeepTheServer) {
  const std::vector<ConnectionId> control = Run(1);
  Hello hello = HelloOf(5, Role::kControl);
  hello.job = "other";
  const ConnectionId other = Open(hello);
  Send(other, JoinOp{JoinOf(0, 1)});
  Send(control[0], LeaveOp{});
  EXPECT_FALSE(last_member_left_);
  Send(other, LeaveOp{});
  EXPECT_TRUE(last_member_left_);
}

TEST_F(CoreMembership, HostOfTheStore_StopsListeningWithItsLastWorld) {
  Hello hello = HelloOf(0, Role::kControl, "a");
  hello.hosts_store = true;
  const ConnectionId first = Open(hello);
  hello.session = "b";
  const ConnectionId second = Open(hello);
  const ConnectionId other = OpenControl(1);
  Send(first, JoinOp{JoinOf(0, 2)});
  Send(other, JoinOp{JoinOf(1, 2)});
  Send(second, JoinOp{JoinOf(0, 1)});
  Send(first, LeaveOp{});
  EXPECT_TRUE(listens_);
  Send(other, LeaveOp{});
  EXPECT_TRUE(listens_);
  Send(second, LeaveOp{});
  EXPECT_FALSE(listens_);
}

TEST_F(CoreMembership, HostLeaves_NextWorldBeginsElsewhere) {
  const auto [hosting, other] = JoinWithHost();
  const ConnectionId early = Open(HelloOf(1, Role::kControl, "next"));
  Send(hosting, LeaveOp{});
  EXPECT_FALSE(listens_);
  Send(other, LeaveOp{});
  Send(early, JoinOp{JoinOf(1, 2)});
  const auto refused = Take<JoinRefusedEvent>(early);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->why.code(), StatusCode::kStoreLost);
}

TEST_F(CoreMembership, HostLeavesLast_IsAwaitedByTheNextWorld) {
  const auto [hosting, other] = JoinWithHost();
  Send(other, LeaveOp{});
  Send(Open(HelloOf(1, Role::kControl, "next")), JoinOp{JoinOf(1, 2)});
  Send(hosting, LeaveOp{});
  EXPECT_TRUE(listens_);
}

TEST_F(CoreMembership, HostLeavesAWorldThatGoesOn_TheStoreListensForItsReplacement) {
  Report needs;
  needs.kind = ReportKind::kNeedsLeaver;
  needs.generation = 1;
  needs.accused_rank = 0;
  for (const bool leaves_first : {true, false}) {
    SCOPED_TRACE(leaves_first ? "leaves first" : "is needed first");
    Restart();
    const auto [hosting, other] = JoinWithHost(std::chrono::seconds(60));
    BecomeReady({hosting, other});
    if (leaves_first) {
      Send(hosting, LeaveOp{});
      EXPECT_FALSE(listens_);
    }
    Send(other, ReportOp{needs});
    if (!leaves_first) Send(hosting, LeaveOp{});
    ASSERT_TRUE(Take<Fence>(other));
    EXPECT_TRUE(listens_);
    const ConnectionId newcomer = Open(HelloOf(0, Role::kControl, "next"));
    Send(newcomer, JoinOp{JoinOf(0, 2)});
    EXPECT_FALSE(Take<JoinRefusedEvent>(newcomer));
  }
}

TEST_F(CoreMembership, HostLeavesAWorldThatEndsWithIt_TheStoreListensNoMore) {
  const auto [hosting, other] = JoinWithHost();  // No seat may stay empty.
  BecomeReady({hosting, other});
  Send(hosting, LeaveOp{});
  Report needs;
  needs.kind = ReportKind::kNeedsLeaver;
  needs.generation = 1;
  needs.accused_rank = 0;
  Send(other, ReportOp{needs});
  EXPECT_FALSE(listens_);
}

TEST_F(CoreMembership, EachView_HasASecretOfItsOwn) {
  std::vector<std::string> made;
  CoreOptions options = Options();
  options.make_secret = [&made] {
    made.push_back("secret " + std::to_string(made.size()));
    return made.back();
  };
  Restart(options);
  for (int process = 0; process < 3; ++process) {
    Hello hello = HelloOf(process, Role::kControl);
    hello.job = "job " + std::to_string(process);
    const ConnectionId control = Open(hello);
    Send(control, JoinOp{JoinOf(0, 1)});
    const std::optional<View> view = Take<View>(control);
    ASSERT_TRUE(view);
    EXPECT_EQ(view->secret, made[made.size() - 2]);
    EXPECT_EQ(view->world_secret, made.back());
  }
  EXPECT_EQ(made.size(), 6u);
}

TEST_F(CoreMembership, WorldSecret_IsOfAllViewsOfARoundAndOfNoOther) {
  const auto view_of = [this](const std::vector<ConnectionId>& control) {
    for (const int rank : {0, 1}) Send(control[At(rank)], JoinOp{JoinOf(rank, 2, kWait)});
    const std::optional<View> view = Take<View>(control[0]);
    const std::optional<View> same = Take<View>(control[1]);
    EXPECT_TRUE(view && same && view->world_secret == same->world_secret);
    return view.value_or(View());
  };
  const std::vector<ConnectionId> control{OpenControl(0), OpenControl(1)};
  const View first = view_of(control);
  EXPECT_FALSE(first.world_secret.empty());
  Close(control[0]);
  Advance(std::chrono::seconds(20), {control[1]});
  ASSERT_TRUE(Take<Fence>(control[1]));
  Recover();
  const std::vector<ConnectionId> replaced{OpenControl(2), OpenControl(1)};
  const View second = view_of(replaced);
  EXPECT_EQ(second.round, first.round);
  EXPECT_NE(second.secret, first.secret);
  EXPECT_EQ(second.world_secret, first.world_secret);
  for (const ConnectionId member : replaced) Send(member, LeaveOp{});
  EXPECT_NE(view_of({OpenControl(3), OpenControl(4)}).world_secret, first.world_secret);
}

TEST_F(CoreMembership, Status_ShowsWorldsAndMembers) {
  Run(2);
  const std::string status = core_->StatusJson(now_);
  for (const char* part : {"\"life\":1", "\"generation\":1", "\"phase\":\"RUNNING\"", "\"rank\":1",
                           "\"state\":\"member\"", "\"pid\":101", "\"live_members\":2"}) {
    EXPECT_THAT(status, HasSubstr(part));
  }
}

}  // namespace
}  // namespace resilient::store
