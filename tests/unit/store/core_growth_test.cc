// Goal: a world takes in those who wait for a seat once all its members have made one commit and
// have room, as its last ranks, and is what it was when that fails. Method: processes 0, 1, ... on
// one server core and manual time; after each step a second core is restored from what was kept.
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/unit/store/core_membership_fixture.h"

namespace resilient::store {
namespace {

class Growth : public CoreSpares {
 protected:
  void Offer(ConnectionId control, std::uint64_t generation, std::uint64_t commit, int most) {
    Report report{ReportKind::kRoom, generation, -1, {}};
    report.commit = commit;
    report.max_world = most;
    EXPECT_TRUE(Ask(control, ReportOp{report}).status.ok());
  }
  void OfferAll(const std::vector<ConnectionId>& control, std::uint64_t generation,
                std::uint64_t commit, int most) {
    for (const ConnectionId member : control) Offer(member, generation, commit, most);
  }
  std::string FenceAt(ConnectionId control) {
    const std::optional<Fence> fence = Take<Fence>(control);
    return fence ? fence->cause.ToString() : "no fence";
  }
  void AllJoinAgain(const std::vector<ConnectionId>& control, int size) {
    for (int rank = 0; rank < static_cast<int>(control.size()); ++rank) {
      JoinAgain(control[At(rank)], rank, size);
    }
  }
  std::string EventAt(ConnectionId control) {
    if (Take<View>(control)) return "view";
    return "none";
  }
};

TEST_F(Growth, AllHaveMadeOneCommit_SpareIsTheLastRank) {
  const auto control = Run(2);
  const auto spare = Wait(10, 1, 2);
  Offer(control[0], 1, 5, 4);
  EXPECT_EQ(FenceAt(control[0]), "no fence");
  Offer(control[1], 1, 5, 4);
  EXPECT_EQ(FenceAt(control[0]),
            "[resilient:GROWTH] the world grows from 2 to 3 ranks at commit 5, which all have "
            "made: the spare on host h10, pid 110, takes part");
  EXPECT_EQ(EventAt(spare[0]), "none");  // Not before the others are there.
  AllJoinAgain(control, 2);              // As they know the world until they have its view.
  EXPECT_EQ(MembersAt(control[0]), "i0 i1 i10");
  EXPECT_EQ(MembersAt(spare[0]), "i0 i1 i10");
  EXPECT_EQ(MembersAt(control[1]), "i0 i1 i10");
}

TEST_F(Growth, GrownWorld_IsOneLikeAnyOther) {
  const auto control = Run(2);
  const auto spare = Wait(10, 2, 2);
  OfferAll(control, 1, 1, 3);
  AllJoinAgain(control, 2);
  const std::vector<ConnectionId> all = {control[0], control[1], spare[0]};
  BecomeReady(all);
  // The other spare takes the seat of the newcomer when that is lost.
  Kill(10);
  AllJoinAgain(control, 3);
  EXPECT_EQ(MembersAt(spare[1]), "i0 i1 i11");
}

TEST_F(Growth, OneIsFurther_TheNextCommitOfAllCounts) {
  const auto control = Run(2);
  Wait(10, 1, 2);
  Offer(control[0], 1, 1, 3);
  Offer(control[0], 1, 2, 3);
  Offer(control[1], 1, 1, 3);
  EXPECT_EQ(FenceAt(control[0]), "no fence");
  Offer(control[1], 1, 2, 3);
  EXPECT_NE(FenceAt(control[0]), "no fence");
}

TEST_F(Growth, OneSaysItTwice_CountsOnce) {
  const auto control = Run(2);
  Wait(10, 1, 2);
  Offer(control[0], 1, 1, 3);
  Offer(control[0], 1, 1, 3);
  EXPECT_EQ(FenceAt(control[0]), "no fence");
}

TEST_F(Growth, OfAnotherGeneration_DoesNotCount) {
  const auto control = Run(2);
  Wait(10, 1, 2);
  Offer(control[0], 1, 1, 3);
  Offer(control[1], 7, 1, 3);
  EXPECT_EQ(FenceAt(control[0]), "no fence");
}

TEST_F(Growth, NobodyWaits_NothingHappensUntilSomebodyDoes) {
  const auto control = Run(2);
  OfferAll(control, 1, 1, 3);
  Wait(10, 1, 2);
  EXPECT_EQ(FenceAt(control[0]), "no fence");  // In the middle of whatever they do now.
  OfferAll(control, 1, 2, 3);
  EXPECT_NE(FenceAt(control[0]), "no fence");
}

TEST_F(Growth, MoreWaitThanThereIsRoomFor_TheLeastThatAMemberWantsCounts) {
  const auto control = Run(2);
  const auto spare = Wait(10, 3, 2);
  Offer(control[0], 1, 1, 4);
  Offer(control[1], 1, 1, 3);
  AllJoinAgain(control, 2);
  EXPECT_EQ(MembersAt(control[0]), "i0 i1 i10");
  EXPECT_EQ(MembersAt(spare[1]), "no view");
}

TEST_F(Growth, NoRoom_NothingHappens) {
  const auto control = Run(2);
  Wait(10, 1, 2);
  OfferAll(control, 1, 1, 2);
  EXPECT_EQ(FenceAt(control[0]), "no fence");
}

TEST_F(Growth, WithoutAConnection_IsNotTakenIn) {
  const auto control = Run(2);
  const auto spare = Wait(10, 1, 2);
  Close(spare[0]);
  OfferAll(control, 1, 1, 3);
  EXPECT_EQ(FenceAt(control[0]), "no fence");
}

TEST_F(Growth, NewcomerIsLostBeforeTheView_TheWorldIsWhatItWas) {
  const auto control = Run(2);
  Wait(10, 1, 2);
  OfferAll(control, 1, 1, 3);
  Kill(10);
  AllJoinAgain(control, 2);
  EXPECT_EQ(MembersAt(control[0]), "i0 i1");
  EXPECT_EQ(MembersAt(control[1]), "i0 i1");
}

TEST_F(Growth, MemberIsLostBeforeTheView_TheNewcomerHasItsSeat) {
  const auto control = Run(3);
  const auto spare = Wait(10, 2, 3);
  OfferAll(control, 1, 1, 5);
  Kill(1);
  JoinAgain(control[0], 0, 3);
  JoinAgain(control[2], 2, 3);
  EXPECT_EQ(MembersAt(control[0]), "i0 i10 i2");
  EXPECT_EQ(MembersAt(spare[1]), "no view");
  EXPECT_EQ(RefusalAt(spare[1]), StatusCode::kOk);  // It waits on.
}

TEST_F(Growth, MemberLeavesBeforeTheView_TheWorldIsRefusedAndTheNewcomerWaitsOn) {
  const auto control = Run(2);
  const auto spare = Wait(10, 1, 2);
  OfferAll(control, 1, 1, 3);
  Send(control[1], LeaveOp{});
  JoinAgain(control[0], 0, 2);
  EXPECT_EQ(RefusalAt(control[0]), StatusCode::kLeft);
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kOk);
}

TEST_F(Growth, AllMembersAreLostBeforeTheView_TheNewcomerWaitsOn) {
  const auto control = Run(2);
  const auto spare = Wait(10, 1, 2);
  OfferAll(control, 1, 1, 3);
  Kill(0);
  Kill(1);
  EXPECT_EQ(MembersAt(spare[0]), "no view");
  EXPECT_EQ(RefusalAt(spare[0]), StatusCode::kOk);
}

TEST_F(Growth, WorldThatHadBecomeSmaller_GrowsByWhoReplacesTheLost) {
  const auto control = Run(3);
  Kill(1);
  for (const int rank : {0, 2}) {
    JoinRequest request = JoinOf(rank, 3);
    request.min_world = 2;
    request.generation = 1;
    Send(control[At(rank)], JoinOp{request});
  }
  BecomeReady({control[0], control[2]});
  const ConnectionId restarted = OpenControl(11);
  JoinRequest replacement = JoinOf(1, 3);
  replacement.spare_if_taken = true;
  Send(restarted, JoinOp{replacement});
  for (int answers = 0; answers < 2; ++answers) Send(control[2], HeartbeatOp{1}, 0);
  EXPECT_EQ(RefusalAt(restarted), StatusCode::kOk);
  OfferAll({control[0], control[2]}, 2, 1, 3);
  AllJoinAgain({control[0], control[2]}, 2);
  EXPECT_EQ(MembersAt(restarted), "i0 i2 i11");
}

TEST_F(Growth, WithTheGpuOfAMember_IsRefusedAndTheOthersGoOn) {
  const auto claim = [this](int process, int rank, const char* uuid) {
    JoinRequest request = rank < 0 ? SpareOf(process, 1) : JoinOf(rank, 1);
    request.device = DeviceClaim{.uuid = uuid};
    const ConnectionId control = OpenControl(process);
    Send(control, JoinOp{request});
    return control;
  };
  const ConnectionId member = claim(0, 0, "GPU-1");
  BecomeReady({member});
  Hello near = HelloOf(10, Role::kControl);
  near.process.boot_id = HelloOf(0, Role::kControl).process.boot_id;
  const ConnectionId same = Open(near);
  JoinRequest request = SpareOf(10, 1);
  request.device = DeviceClaim{.uuid = "GPU-1"};
  Send(same, JoinOp{request});
  Offer(member, 1, 1, 2);
  EXPECT_EQ(FenceAt(member), "no fence");
  EXPECT_EQ(RefusalAt(same), StatusCode::kDuplicateDevice);
}

}  // namespace
}  // namespace resilient::store
