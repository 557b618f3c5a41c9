// Goal: a leave that an operation needs ends the generation as a loss that heals, one that nobody
// needs ends nothing, and no view holds who has left; a member's own word of its end is a loss with
// that text. Method: CoreFixture.
#include <gmock/gmock.h>

#include "tests/unit/store/core_fixture.h"

namespace resilient::store {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CoreLeaving : public CoreFixture {
 protected:
  static Report Needs(int rank, std::uint64_t generation = 1) {
    Report report;
    report.kind = ReportKind::kNeedsLeaver;
    report.generation = generation;
    report.accused_rank = rank;
    return report;
  }
  static Report Ending(const std::string& why, std::uint64_t generation = 1) {
    Report report;
    report.kind = ReportKind::kEnding;
    report.generation = generation;
    report.status = Status(StatusCode::kRankLost, why);
    return report;
  }
  std::string FenceAt(ConnectionId connection) {
    const std::optional<Fence> fence = Take<Fence>(connection);
    return fence ? fence->cause.ToString() : "no fence";
  }
  std::vector<ConnectionId> RunSupervised(int n) {
    std::vector<ConnectionId> control;
    for (int i = 0; i < n; ++i) {
      Hello hello = HelloOf(i, Role::kControl);
      hello.supervised = true;
      control.push_back(Open(hello));
      Send(control.back(), JoinOp{JoinOf(i, n, kWait)});
    }
    BecomeReady(control);
    return control;
  }
};

TEST_F(CoreLeaving, ALeaveThatNobodyNeeds_FencesNobody) {
  const auto control = Run(3, kWait);
  Send(control[1], LeaveOp{});
  Advance(std::chrono::seconds(1), {control[0], control[2]});
  EXPECT_EQ(FenceAt(control[0]), "no fence");
}

// It may have been in no state to say so: os._exit, exec of another program.
TEST_F(CoreLeaving, AnEndWithCode0_IsALeave_WhoeverTellsOfIt) {
  for (const bool by_launcher : {true, false}) {
    SCOPED_TRACE(by_launcher ? "a launcher tells" : "a member tells");
    Restart();
    const auto control = Run(3, kWait);
    if (by_launcher) {
      ExitReportOp ended;
      ended.process = HelloOf(1, Role::kControl).process;
      EXPECT_TRUE(Ask(Open(HelloOf(99, Role::kAdmin)), ended).status.ok());
    } else {
      Report dead = Needs(1);
      dead.kind = ReportKind::kProcessDied;
      dead.accused_incarnation = HelloOf(1, Role::kControl).incarnation;
      dead.wait_status = 0;
      EXPECT_TRUE(Ask(control[0], ReportOp{dead}).status.ok());
    }
    EXPECT_EQ(core_->LiveMembers(), 2U);
    Advance(std::chrono::seconds(1), {control[0], control[2]});
    EXPECT_EQ(FenceAt(control[0]), "no fence");
    EXPECT_TRUE(Ask(control[0], ReportOp{Needs(1)}).status.ok());
    for (const int rank : {0, 2}) {
      EXPECT_THAT(FenceAt(control[At(rank)]), HasSubstr("[resilient:LEFT] rank 1"));
    }
  }
}

// Its goodbye may have been lost on its way.
TEST_F(CoreLeaving, LinkThatBrokeToALeaver_FencesNobodyUntilItIsNeeded) {
  for (const bool leaves_first : {true, false}) {
    SCOPED_TRACE(leaves_first ? "leaves first" : "the link breaks first");
    Restart();
    const auto control = Run(3, kWait);
    Report broke = Needs(1);
    broke.kind = ReportKind::kLinkLost;
    broke.status = Status(StatusCode::kCommFailed, "it was closed without a goodbye");
    if (leaves_first) Send(control[1], LeaveOp{});
    EXPECT_TRUE(Ask(control[0], ReportOp{broke}).status.ok());
    if (!leaves_first) Send(control[1], LeaveOp{});
    Advance(std::chrono::seconds(1), {control[0], control[2]});
    for (const int rank : {0, 2}) EXPECT_EQ(FenceAt(control[At(rank)]), "no fence");
    Report needs = Needs(1);
    needs.status = Status(StatusCode::kLeft, "barrier() #3 of group 'world'");
    EXPECT_TRUE(Ask(control[0], ReportOp{needs}).status.ok());
    for (const int rank : {0, 2}) {
      EXPECT_THAT(FenceAt(control[At(rank)]),
                  AllOf(HasSubstr("[resilient:LEFT] rank 1"), HasSubstr("rank 0 (host"),
                        HasSubstr("needs it for barrier() #3 of group 'world'")));
    }
  }
}

// What the program is given by a rebuild holds nobody that has left.
TEST_F(CoreLeaving, RebuildOfARunningWorld_FencesWhereAMemberHasLeft) {
  const auto control = Run(3, kWait);
  Report rebuild;
  rebuild.kind = ReportKind::kRebuild;
  rebuild.generation = 1;
  EXPECT_TRUE(Ask(control[0], ReportOp{rebuild}).status.ok());
  EXPECT_EQ(FenceAt(control[0]), "no fence");
  Send(control[1], LeaveOp{});
  EXPECT_EQ(FenceAt(control[0]), "no fence");
  EXPECT_EQ(Ask(control[0], ReportOp{rebuild}).status.code(), StatusCode::kLeft);
  for (const int rank : {0, 2}) EXPECT_THAT(FenceAt(control[At(rank)]), HasSubstr("rank 1"));
  EXPECT_TRUE(Ask(control[2], ReportOp{rebuild}).status.ok()) << "of the past";
  EXPECT_EQ(FenceAt(control[2]), "no fence");
}

TEST_F(CoreLeaving, NeededBeforeOrAfterItIsTold_FencesAndTheSeatIsFilled) {
  for (const bool leaves_first : {true, false}) {
    for (const int rank : {1, -1}) {
      SCOPED_TRACE(std::to_string(rank) + (leaves_first ? " leaves first" : " is needed first"));
      Restart();
      const auto control = Run(3, kWait);
      if (leaves_first) Send(control[1], LeaveOp{});
      EXPECT_TRUE(Ask(control[0], ReportOp{Needs(rank)}).status.ok());
      if (!leaves_first) {
        EXPECT_EQ(FenceAt(control[0]), "no fence") << "it may have left one group alone";
        Send(control[1], LeaveOp{});
      }
      for (const int left : {0, 2}) {
        EXPECT_THAT(FenceAt(control[At(left)]), HasSubstr("[resilient:LEFT] rank 1"));
        Send(control[At(left)], JoinOp{JoinOf(left, 3, kWait)});
        EXPECT_FALSE(Take<JoinRefusedEvent>(control[At(left)]));
      }
      const ConnectionId replacement = OpenControl(7);
      Send(replacement, JoinOp{JoinOf(1, 3, kWait)});
      const std::optional<View> view = Take<View>(control[0]);
      ASSERT_TRUE(view);
      EXPECT_EQ(view->members[1].incarnation, HelloOf(7, Role::kControl).incarnation);
    }
  }
}

TEST_F(CoreLeaving, NeededInAGenerationOfThePast_IsNot) {
  const auto control = Run(2, kWait);
  Send(control[0], ReportOp{Needs(1, 7)});
  Send(control[1], LeaveOp{});
  EXPECT_EQ(FenceAt(control[0]), "no fence");
}

TEST_F(CoreLeaving, SurvivorsThatShrink_GoOnWithoutTheLeaver) {
  const auto control = Run(3, kWait);
  Send(control[1], LeaveOp{});
  Send(control[2], ReportOp{Needs(1)});
  for (const int rank : {0, 2}) {
    JoinRequest request = JoinOf(rank, 3);
    request.min_world = 1;
    request.generation = 1;
    Send(control[At(rank)], JoinOp{request});
  }
  const std::optional<View> view = Take<View>(control[0]);
  ASSERT_TRUE(view);
  ASSERT_EQ(view->members.size(), 2u);
  EXPECT_EQ(view->members[1].incarnation, HelloOf(2, Role::kControl).incarnation);
}

TEST_F(CoreLeaving, TheLeaverJoinsAgain_GetsAWorldOfItsOwn) {
  const auto control = Run(2, kWait);
  Send(control[1], LeaveOp{});
  Send(control[0], ReportOp{Needs(1)});
  Hello again = HelloOf(1, Role::kControl, "another session");
  again.incarnation = HelloOf(1, Role::kControl).incarnation;
  const ConnectionId second = Open(again);
  Send(second, JoinOp{JoinOf(1, 2)});
  Send(control[0], JoinOp{JoinOf(0, 2, kWait)});
  EXPECT_FALSE(Take<View>(second)) << "it has left the seat of the other world for good";
}

TEST_F(CoreLeaving, ItEndedWell_NobodyWaitsForItsSeat) {
  const auto control = RunSupervised(2);
  Send(control[1], LeaveOp{});
  Send(control[0], ReportOp{Needs(1)});
  Send(control[0], JoinOp{JoinOf(0, 2, kWait)});
  EXPECT_FALSE(Take<JoinRefusedEvent>(control[0]));
  ExitReportOp report;
  report.process = HelloOf(1, Role::kControl).process;
  Ask(Open(HelloOf(99, Role::kAdmin)), report);
  EXPECT_EQ(Take<JoinRefusedEvent>(control[0])->why.code(), StatusCode::kLeft);
}

TEST_F(CoreLeaving, AMismatchWhereOneHasLeft_IsTheLeave) {
  const auto control = Run(3, kWait);
  Send(control[1], LeaveOp{});
  Report mismatch = Needs(2);
  mismatch.kind = ReportKind::kMismatch;
  mismatch.status = Status(StatusCode::kMismatch, "they differ");
  Send(control[0], ReportOp{mismatch});
  const std::string cause = FenceAt(control[2]);
  EXPECT_THAT(cause, HasSubstr("[resilient:LEFT] rank 1"));
  EXPECT_THAT(cause, HasSubstr("they differ"));
}

TEST_F(CoreLeaving, ItsOwnWordOfItsEnd_IsALossWithThatText) {
  const auto control = Run(3, kWait);
  Send(control[1], ReportOp{Ending("RuntimeError: CUDA out of memory (train.py:41)")});
  const std::string cause = FenceAt(control[0]);
  EXPECT_THAT(cause, HasSubstr("[resilient:RANK_LOST] rank 1 (host h1, pid 101) ended by "
                               "RuntimeError: CUDA out of memory (train.py:41), last seen"));
  EXPECT_EQ(FenceAt(control[2]), cause);
  EXPECT_EQ(Take<SessionLostEvent>(control[1])->why.code(), StatusCode::kStaleGeneration);
  Send(control[1], LeaveOp{});
  Close(control[1]);
  Advance(std::chrono::seconds(1), {control[0], control[2]});
  EXPECT_EQ(FenceAt(control[0]), "no fence") << "it is known";
}

TEST_F(CoreLeaving, ItsOwnWord_CountsInAnyGeneration) {
  const auto control = Run(2, kWait);
  Send(control[1], ReportOp{Ending("sys.exit(3) (train.py:7)", 9)});
  EXPECT_THAT(FenceAt(control[0]), HasSubstr("ended by sys.exit(3) (train.py:7)"));
}

}  // namespace
}  // namespace resilient::store
