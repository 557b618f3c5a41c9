// Goal: what ended connections and broken links say of a rank, alone and together, and what they do
// not say. Method: CoreFixture; the clock moves in ticks.
#include <gmock/gmock.h>

#include "tests/unit/store/core_fixture.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;

using CoreConnections = CoreFixture;

// A network that ends a connection leaves the links as they are.
TEST_F(CoreConnections, LoneClose_IsLeftToTheLease) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Close(control[1]);
  Advance(Millis(4900), {control[0]});
  EXPECT_EQ(CauseAt(control[0]), "no fence");
  Advance(std::chrono::seconds(1), {control[0]});
  EXPECT_THAT(CauseAt(control[0]), HasSubstr("sent no heartbeat"));
}

TEST_F(CoreConnections, CloseWithASecondWitness_IsLostAfterItsGrace) {
  for (const bool links_first : {true, false}) {
    SCOPED_TRACE(links_first);
    Restart();
    const std::vector<ConnectionId> control = Run(2, kWait);
    if (links_first) Send(control[0], ReportOp{Broken(1)});
    Close(control[1]);
    if (!links_first) Send(control[0], ReportOp{Broken(1)});
    Advance(Millis(250), {control[0]});
    EXPECT_EQ(CauseAt(control[0]), "no fence");
    Advance(Millis(100), {control[0]});
    EXPECT_THAT(CauseAt(control[0]),
                HasSubstr("lost its connection and its links (reported by rank "
                          "0), and did not come back within 0.3 s"));
  }
}

TEST_F(CoreConnections, CloseWithALateWitness_IsLostAtOnce) {
  for (const bool claimed : {true, false}) {
    SCOPED_TRACE(claimed);
    Restart();
    const std::vector<ConnectionId> control = Run(2, kWait);
    Close(control[1]);
    Advance(std::chrono::seconds(1), {control[0]});
    EXPECT_EQ(CauseAt(control[0]), "no fence");
    if (claimed) {
      Send(OpenControl(7), JoinOp{JoinOf(1, 2, kWait)});
    } else {
      Send(control[0], ReportOp{Broken(1)});
    }
    Advance(Millis(100), {control[0]});
    EXPECT_THAT(CauseAt(control[0]), HasSubstr("lost its connection"));
  }
}

TEST_F(CoreConnections, LoneCloseBeforeThereAreLinks_IsLeftToTheLease) {
  const ConnectionId first = OpenControl(0);
  Send(first, JoinOp{JoinOf(0, 2, kWait)});
  Close(first);
  Advance(std::chrono::seconds(4));
  EXPECT_EQ(core_->LiveMembers(), 1u);
  Advance(std::chrono::seconds(2));
  EXPECT_EQ(core_->LiveMembers(), 0u);
}

TEST_F(CoreConnections, LoneCloseBeforeThereAreLinks_IsLostToWhoeverComesForItsSeat) {
  const ConnectionId first = OpenControl(0);
  Send(first, JoinOp{JoinOf(0, 2, kWait)});
  Close(first);
  const ConnectionId claimant = OpenControl(7);
  Send(claimant, JoinOp{JoinOf(0, 2, kWait)});
  Advance(Millis(500), {claimant});
  const ConnectionId second = OpenControl(1);
  Send(second, JoinOp{JoinOf(1, 2, kWait)});
  BecomeReady({claimant, second});
}

TEST_F(CoreConnections, ReopenedConnection_IsNoEvidence) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Close(control[1]);
  Advance(Millis(250), {control[0]});
  const ConnectionId again = OpenControl(1);
  Advance(std::chrono::seconds(10), {control[0], again});
  EXPECT_EQ(CauseAt(control[0]), "no fence");
}

TEST_F(CoreConnections, RequestConnectionClosed_IsNoEvidence) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Close(OpenRequest(1));
  Advance(std::chrono::seconds(10), control);
  EXPECT_EQ(CauseAt(control[0]), "no fence");
}

TEST_F(CoreConnections, ManyClosesTogether_AreLeftToThePing) {
  for (const int closing : {8, 9}) {
    SCOPED_TRACE(closing);
    Restart();
    const std::vector<ConnectionId> control = Run(20, kWait);
    for (int i = 0; i < closing; ++i) Close(control[At(i)]);
    Send(control.back(), ReportOp{Broken(0)});
    Advance(Millis(400), {control.begin() + closing, control.end()});
    EXPECT_THAT(CauseAt(control.back()),
                HasSubstr(closing == 8 ? "lost its connection" : "no fence"));
    Advance(Millis(400), {control.begin() + closing, control.end()});
    if (closing > 8) {
      EXPECT_THAT(CauseAt(control.back()), HasSubstr("did not answer"));
    }
  }
}

TEST_F(CoreConnections, AccusedSaysWhyItsLinksBroke_IsTheCause) {
  const auto control = Run(2);
  Send(control[0], ReportOp{Broken(1)});
  Send(control[1], HeartbeatOp{1}, 0);  // One of two signs of life; its report would be the other.
  Report why = Broken(1);
  why.kind = ReportKind::kCommFailed;
  why.status = Status(StatusCode::kCommFailed, "rank 1 aborted the group");
  Send(control[1], ReportOp{why});
  const std::optional<Fence> fence = Take<Fence>(control[0]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.message(), "rank 1 aborted the group");
  EXPECT_FALSE(Take<Fence>(control[0]));
}

TEST_F(CoreConnections, AccusedThatAnswers_FencesWithTheSameMembers) {
  const std::vector<ConnectionId> control = Run(2);
  EXPECT_TRUE(Ask(control[0], ReportOp{Broken(1)}).status.ok());
  EXPECT_TRUE(Take<PingEvent>(control[1]));
  Send(control[1], HeartbeatOp{1}, 0);  // May have been under way before the ping.
  EXPECT_EQ(CauseAt(control[0]), "no fence");
  EXPECT_TRUE(Take<PingEvent>(control[1]));
  Send(control[1], HeartbeatOp{2}, 0);
  for (const ConnectionId connection : control) {
    const std::optional<Fence> fence = Take<Fence>(connection);
    ASSERT_TRUE(fence);
    EXPECT_EQ(fence->cause.code(), StatusCode::kCommFailed);
    EXPECT_THAT(fence->cause.message(), HasSubstr("connection reset"));
  }
  for (const int i : {0, 1}) Send(control[At(i)], JoinOp{JoinOf(i, 2)});
  EXPECT_EQ(BecomeReady(control), 2u);
}

// A link that was never up may come up: the network between two that live decides nothing.
TEST_F(CoreConnections, UnreachedThatLives_FencesNobody) {
  const std::vector<ConnectionId> control = Run(2);
  Report unreached = Broken(1);
  unreached.kind = ReportKind::kUnreached;
  for (int second = 0; second < 60; ++second) {
    EXPECT_TRUE(Ask(control[0], ReportOp{unreached}).status.ok());
    EXPECT_FALSE(Take<PingEvent>(control[1]));
    Advance(std::chrono::seconds(1), {control[0], control[1]});
  }
  EXPECT_EQ(CauseAt(control[0]), "no fence");
  // A broken one is looked at all the same.
  EXPECT_TRUE(Ask(control[0], ReportOp{Broken(1)}).status.ok());
  while (Take<PingEvent>(control[1])) Send(control[1], HeartbeatOp{1}, 0);
  EXPECT_THAT(CauseAt(control[0]), HasSubstr("connection reset"));
}

// Both are of the network's making: a host without its network for a while.
TEST_F(CoreConnections, UnreachedWithoutConnection_IsLeftToItsLease) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Close(control[1]);
  Report unreached = Broken(1);
  unreached.kind = ReportKind::kUnreached;
  for (int second = 0; second < 4; ++second) {
    Send(control[0], ReportOp{unreached});
    Advance(std::chrono::seconds(1), {control[0]});
  }
  EXPECT_EQ(CauseAt(control[0]), "no fence");
  Advance(std::chrono::seconds(2), {control[0]});
  EXPECT_THAT(CauseAt(control[0]), HasSubstr("sent no heartbeat"));
}

TEST_F(CoreConnections, AccusedWithoutConnection_IsLostAfterThePing) {
  CoreOptions options = Options();
  options.lone_close_grace = std::chrono::seconds(3);
  Restart(options);
  const std::vector<ConnectionId> control = Run(2, kWait);
  Close(control[1]);
  Send(control[0], ReportOp{Broken(1)});
  Advance(Millis(450), {control[0]});
  EXPECT_EQ(CauseAt(control[0]), "no fence");
  Advance(Millis(100), {control[0]});
  EXPECT_THAT(CauseAt(control[0]), HasSubstr("lost its links (reported by rank 0)"));
}

TEST_F(CoreConnections, AccusedThatIsSilent_IsLeftToItsLease) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Send(control[0], ReportOp{Broken(1)});
  Advance(std::chrono::seconds(4), {control[0]});
  EXPECT_EQ(CauseAt(control[0]), "no fence");
  Advance(std::chrono::seconds(2), {control[0]});
  EXPECT_THAT(CauseAt(control[0]), HasSubstr("sent no heartbeat"));
}

TEST_F(CoreConnections, LeaverThatWasAccusedInThePast_FencesNobody) {
  const std::vector<ConnectionId> control = Run(3);
  Send(control[0], ReportOp{Broken(1)});
  Report failed = Broken(-1);
  failed.kind = ReportKind::kCommFailed;
  Send(control[2], ReportOp{failed});
  EXPECT_NE(CauseAt(control[0]), "no fence");
  for (const ConnectionId connection : control) Take<Fence>(connection);
  for (const int i : {0, 1, 2}) Send(control[At(i)], JoinOp{JoinOf(i, 3)});
  EXPECT_EQ(BecomeReady(control), 2u);
  Send(control[1], LeaveOp{});
  EXPECT_EQ(CauseAt(control[2]), "no fence");
}

TEST_F(CoreConnections, AccusationOfNobody_IsInvalid) {
  const std::vector<ConnectionId> control = Run(2);
  for (const int rank : {-1, 0, 2}) {
    EXPECT_EQ(Ask(control[0], ReportOp{Broken(rank)}).status.code(), StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace resilient::store
