// Goal: each kind of evidence of death ends in one loss with its own text, in its own time, and
// what is no evidence does not. Method: CoreFixture; the clock moves in ticks.
#include <gmock/gmock.h>

#include "tests/unit/store/core_fixture.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;

class CoreEvidence : public CoreFixture {
 protected:
  void Exit(std::uint64_t watch) {
    Effects effects;
    core_->OnProcessExit(watch, now_, effects);
    // Nothing else of the effects matters here but what is sent.
    for (Effects::Outgoing& out : effects.send) {
      if (auto* event = std::get_if<Event>(&out.message)) exit_events_.push_back(std::move(*event));
    }
  }
  Reply ReportExit(int process, int signal, int code, std::string text = {},
                   std::uint64_t start_time = 1) {
    if (admin_ == 0) admin_ = Open(HelloOf(99, Role::kAdmin));
    ExitReportOp report;
    report.process = HelloOf(process, Role::kControl).process;
    if (start_time != 1) report.process.start_time = start_time;
    report.signal = signal;
    report.exit_code = code;
    report.text = std::move(text);
    return Ask(admin_, report);
  }
  // Runs n supervised ranks.
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
  static Report Dead(int accused, int wait_status, std::uint64_t generation = 1) {
    Report report;
    report.kind = ReportKind::kProcessDied;
    report.generation = generation;
    report.accused_rank = accused;
    report.accused_incarnation = HelloOf(accused, Role::kControl).incarnation;
    report.wait_status = wait_status;
    report.status = Status(StatusCode::kRankLost, "seen");
    return report;
  }

  std::vector<Event> exit_events_;
  ConnectionId admin_ = 0;
};

TEST_F(CoreEvidence, SilentRank_IsLostByItsLease) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Advance(Millis(4950), {control[0]});
  EXPECT_EQ(CauseAt(control[0]), "no fence");
  Advance(Millis(200), {control[0]});
  EXPECT_THAT(CauseAt(control[0]),
              HasSubstr("rank 1 (host h1, pid 101) sent no heartbeat for 5.0 s (lease 5.0 s)"));
  EXPECT_TRUE(Take<SessionLostEvent>(control[1]));
}

TEST_F(CoreEvidence, AnyFrameOnTheControlConnection_Renews) {
  const std::vector<ConnectionId> control = Run(1, kWait);
  for (int i = 0; i < 5; ++i) {
    Advance(std::chrono::seconds(4));
    Send(control[0], ReadyOp{1});
  }
  EXPECT_EQ(core_->LiveMembers(), 1u);
  // Key operations come from other threads: they prove nothing about the control thread.
  const ConnectionId request = OpenRequest(0);
  for (int i = 0; i < 3; ++i) {
    Advance(std::chrono::seconds(2));
    Ask(request, SetOp{"k", "v"});
  }
  EXPECT_EQ(core_->LiveMembers(), 0u);
}

TEST_F(CoreEvidence, PausedServer_LosesNobody) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  now_ += std::chrono::minutes(5);
  Tick(false);
  now_ += kTickInterval;
  Tick(true);
  Advance(std::chrono::seconds(2));
  EXPECT_EQ(core_->LiveMembers(), 2u);
  EXPECT_EQ(CauseAt(control[0]), "no fence");
}

TEST_F(CoreEvidence, UnreadInput_ExpiresNobody) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Close(control[1]);
  for (int i = 0; i < 200; ++i) {
    now_ += kTickInterval;
    Tick(false);
  }
  EXPECT_EQ(core_->LiveMembers(), 2u);
  Tick(true);
  EXPECT_EQ(core_->LiveMembers(), 0u);
}

// What waits for the turn of its job is a sign of life of who has sent it.
TEST_F(CoreEvidence, UnreadRequestsOfARank_KeepItsLeaseAndNoOther) {
  const std::vector<ConnectionId> control = Run(3, kWait);
  for (int i = 0; i < 200; ++i) {
    now_ += kTickInterval;
    core_->OnUnread(control[0], now_);
    Tick();
  }
  EXPECT_EQ(core_->LiveMembers(), 1u);
  EXPECT_FALSE(Take<SessionLostEvent>(control[0]));
}

TEST_F(CoreEvidence, UnreadRequestsOfAJob_HoldItsVerdictsBackAndNoOthers) {
  const std::vector<ConnectionId> control = RunSupervised(2);
  Hello other = HelloOf(5, Role::kControl);
  other.job = "other";
  other.supervised = true;
  Send(Open(other), JoinOp{JoinOf(0, 1)});
  ASSERT_EQ(watched_.size(), 3u);
  Exit(watched_[1].watch);
  Exit(watched_[2].watch);
  for (int i = 0; i < 40; ++i) {
    now_ += kTickInterval;
    core_->OnUnread(control[0], now_);
    Tick();
  }
  EXPECT_EQ(core_->LiveMembers(), 2u) << "its report may be among what is unread";
  Tick();
  EXPECT_EQ(core_->LiveMembers(), 1u);
}

TEST_F(CoreEvidence, Watch_CoversAMembersLife) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  ASSERT_EQ(watched_.size(), 2u);
  EXPECT_EQ(watched_[1].process.pid, 101);
  Send(control[1], JoinOp{JoinOf(1, 2, kWait)});
  EXPECT_EQ(watched_.size(), 2u);
  Send(control[1], LeaveOp{});
  EXPECT_EQ(unwatched_, (std::vector<std::uint64_t>{watched_[1].watch}));
}

TEST_F(CoreEvidence, ProcessWithoutIdentity_IsNotWatched) {
  Hello hello = HelloOf(1, Role::kControl);
  hello.process.boot_id.clear();
  Send(Open(hello), JoinOp{JoinOf(0, 1)});
  EXPECT_TRUE(watched_.empty());
}

TEST_F(CoreEvidence, ExitOfAnUnsupervisedProcess_IsLostAtOnce) {
  Run(2, kWait);
  Exit(watched_[1].watch);
  EXPECT_EQ(core_->LiveMembers(), 1u);
  bool fenced = false;
  for (const Event& event : exit_events_) {
    const Fence* fence = std::get_if<Fence>(&event);
    if (!fence) continue;
    fenced = true;
    EXPECT_THAT(fence->cause.message(), HasSubstr("its process ended (how was not reported)"));
  }
  EXPECT_TRUE(fenced);
}

TEST_F(CoreEvidence, ExitOfASupervisedProcess_WaitsForTheReport) {
  const std::vector<ConnectionId> control = RunSupervised(3);
  Exit(watched_[1].watch);
  EXPECT_EQ(core_->LiveMembers(), 3u);
  now_ += Millis(20);
  Tick();
  EXPECT_TRUE(ReportExit(1, 9, 0).status.ok());
  EXPECT_THAT(CauseAt(control[0]),
              HasSubstr("rank 1 (host h1, pid 101) was killed by signal 9 (SIGKILL), last seen 0.0 "
                        "s ago, in generation 1"));
  // Without a report the grace decides.
  Exit(watched_[2].watch);
  Advance(Millis(950), {control[0]});
  EXPECT_EQ(core_->LiveMembers(), 2u);
  Advance(Millis(100), {control[0]});
  EXPECT_EQ(core_->LiveMembers(), 1u);
}

TEST_F(CoreEvidence, ExitReport_TellsHow) {
  struct Row {
    int signal;
    int code;
    const char* text;
    const char* expected;
  };
  int process = 0;
  for (const Row& row : {Row{9, 0, "", "was killed by signal 9 (SIGKILL)"},
                         Row{64, 0, "", "by signal 64,"}, Row{0, 1, "", "exited with code 1,"},
                         Row{0, 1, "ValueError: x", "exited with code 1 (ValueError: x),"}}) {
    Restart();
    admin_ = 0;
    const std::vector<ConnectionId> control = Run(2, kWait);
    ReportExit(1, row.signal, row.code, row.text);
    EXPECT_THAT(CauseAt(control[0]), HasSubstr(row.expected)) << ++process;
  }
}

TEST_F(CoreEvidence, LongReport_IsCut) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  ReportExit(1, 0, 1, std::string(kTextBytesMax + 1000, 'x'));
  const std::string cause = CauseAt(control[0]);
  EXPECT_THAT(cause, HasSubstr("xxx...)"));
  EXPECT_LT(cause.size(), kTextBytesMax + 200);
}

TEST_F(CoreEvidence, ReportOfAnotherProcess_IsIgnored) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  ReportExit(5, 9, 0);
  ReportExit(1, 9, 0, "", /*start_time=*/77);  // The pid is used again.
  EXPECT_EQ(core_->LiveMembers(), 2u);
  ReportExit(1, 9, 0, "", /*start_time=*/0);  // Not known to the launcher: the pid counts.
  EXPECT_EQ(core_->LiveMembers(), 1u);
}

TEST_F(CoreEvidence, LeaverThatEndedBadly_IsReplaced) {
  const std::vector<ConnectionId> control = RunSupervised(2);
  Send(control[1], LeaveOp{});
  EXPECT_EQ(CauseAt(control[0]), "no fence");
  ReportExit(1, 0, 1);
  EXPECT_THAT(CauseAt(control[0]), HasSubstr("exited with code 1"));
  Send(control[0], JoinOp{JoinOf(0, 2, kWait)});
  const ConnectionId newcomer = OpenControl(7);
  Send(newcomer, JoinOp{JoinOf(1, 2, kWait)});
  EXPECT_TRUE(Take<View>(newcomer));
}

TEST_F(CoreEvidence, LeaverThatEndedWell_IsNot) {
  const std::vector<ConnectionId> control = RunSupervised(3);
  Send(control[1], LeaveOp{});
  ReportExit(1, 0, 0);
  EXPECT_EQ(CauseAt(control[0]), "no fence");
  ReportExit(2, 9, 0);
  Send(control[0], JoinOp{JoinOf(0, 3, kWait)});
  EXPECT_EQ(Take<JoinRefusedEvent>(control[0])->why.code(), StatusCode::kRankLost);
}

TEST_F(CoreEvidence, LeaverWhoseEndIsNotKnown_MayStillBeReplaced) {
  const std::vector<ConnectionId> control = RunSupervised(3);
  Send(control[1], LeaveOp{});
  ReportExit(2, 9, 0);
  Send(control[0], JoinOp{JoinOf(0, 3, kWait)});
  EXPECT_FALSE(Take<JoinRefusedEvent>(control[0]));
  ReportExit(1, 0, 1);
  EXPECT_FALSE(Take<JoinRefusedEvent>(control[0]));
  for (const int rank : {1, 2}) Send(OpenControl(5 + rank), JoinOp{JoinOf(rank, 3, kWait)});
  EXPECT_TRUE(Take<View>(control[0]));
}

TEST_F(CoreEvidence, DeathSeenByAMember_IsALossAtOnce) {
  struct Row {
    int wait_status;
    const char* text;
  };
  for (const Row& row : {Row{-1, "rank 1 (host h1, pid 101) is gone: its process ended (how was"},
                         Row{9, "rank 1 (host h1, pid 101) was killed by signal 9 (SIGKILL), last"},
                         Row{0x8b, "was killed by signal 11 (SIGSEGV), last"},
                         Row{3 << 8, "rank 1 (host h1, pid 101) exited with code 3, last"}}) {
    SCOPED_TRACE(row.text);
    Restart();
    const std::vector<ConnectionId> control = Run(2, kWait);
    EXPECT_TRUE(Ask(control[0], ReportOp{Dead(1, row.wait_status)}).status.ok());
    EXPECT_THAT(CauseAt(control[0]), HasSubstr(row.text));
    EXPECT_EQ(core_->LiveMembers(), 1u);
    // Others tell of it too.
    EXPECT_TRUE(Ask(control[0], ReportOp{Dead(1, row.wait_status)}).status.ok());
    EXPECT_EQ(CauseAt(control[0]), "no fence");
  }
}

TEST_F(CoreEvidence, DeathOfASupervisedRank_WaitsForTheReportWhereThatMaySayMore) {
  std::vector<ConnectionId> control = RunSupervised(2);
  EXPECT_TRUE(Ask(control[0], ReportOp{Dead(1, 3 << 8)}).status.ok());
  EXPECT_EQ(CauseAt(control[0]), "no fence");
  ReportExit(1, 0, 3, "ValueError: x");
  EXPECT_THAT(CauseAt(control[0]), HasSubstr("exited with code 3 (ValueError: x)"));
  for (const int wait_status : {-1, 3 << 8}) {
    Restart();
    control = RunSupervised(2);
    Send(control[0], ReportOp{Dead(1, wait_status)});
    Advance(Millis(1050), {control[0]});
    EXPECT_THAT(CauseAt(control[0]),
                HasSubstr(wait_status < 0 ? "how was not reported" : "exited with code 3"));
  }
  Restart();
  control = RunSupervised(2);
  Send(control[0], ReportOp{Dead(1, 9)});
  EXPECT_THAT(CauseAt(control[0]), HasSubstr("was killed by signal 9"))
      << "there is no more to say";
}

// The generation may have ended meanwhile, for another reason.
TEST_F(CoreEvidence, DeathSeenWhileTheWorldForms_EmptiesTheSeat) {
  const std::vector<ConnectionId> control = Run(3, kWait);
  Send(control[0], ReportOp{Dead(1, 9)});
  EXPECT_THAT(CauseAt(control[0]), HasSubstr("rank 1"));
  Send(control[0], ReportOp{Dead(2, 9)});
  EXPECT_EQ(core_->LiveMembers(), 1u);
}

TEST_F(CoreEvidence, DeathOfAnotherProcessThanTheSeatHolds_IsIgnored) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Report report = Dead(1, 9);
  report.accused_incarnation = "its predecessor";
  EXPECT_TRUE(Ask(control[0], ReportOp{report}).status.ok());
  EXPECT_EQ(core_->LiveMembers(), 2u);
  for (const int rank : {-1, 2}) {
    report.accused_rank = rank;
    EXPECT_EQ(Ask(control[0], ReportOp{report}).status.code(), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(Ask(control[0], ReportOp{Dead(0, 9)}).status.code(), StatusCode::kInvalidArgument)
      << "its own";
  EXPECT_EQ(core_->LiveMembers(), 2u);
}

TEST_F(CoreEvidence, DeathOfALeaver_ChangesNothing) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Send(control[1], LeaveOp{});
  EXPECT_TRUE(Ask(control[0], ReportOp{Dead(1, 9)}).status.ok());
  EXPECT_EQ(CauseAt(control[0]), "no fence");
}

// An exchange with a generation is one of all its members.
TEST_F(CoreEvidence, MemberThatLeavesWhileAllAreWaitedFor_FencesWithLeft) {
  const std::vector<ConnectionId> control = Run(3);
  const ConnectionId waits = OpenRequest(0);
  Send(waits, ExchangeOp{"agree", 0, 3, "v"}, 1, 1, 1);
  Send(control[1], LeaveOp{});
  const std::optional<Fence> fence = Take<Fence>(control[2]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.code(), StatusCode::kLeft);
  EXPECT_EQ(fence->cause.detail().rank, 1);
  EXPECT_EQ(TakeReply(waits, 1)->status.code(), StatusCode::kLeft);
}

TEST_F(CoreEvidence, AllAreWaitedForAfterOneHasLeft_FencesWithLeft) {
  const std::vector<ConnectionId> control = Run(3);
  const ConnectionId waits = OpenRequest(0);
  Send(control[1], LeaveOp{});
  EXPECT_FALSE(Take<Fence>(control[2]));
  EXPECT_EQ(Ask(waits, ExchangeOp{"agree", 0, 3, "v"}, 1, 1, 1).status.code(), StatusCode::kLeft);
  EXPECT_EQ(Take<Fence>(control[2])->cause.detail().rank, 1);
}

TEST_F(CoreEvidence, MemberThatLeavesWhileOthersMeet_FencesNobody) {
  const std::vector<ConnectionId> control = Run(3);
  std::vector<ConnectionId> requests;
  for (int i = 0; i < 3; ++i) {
    requests.push_back(OpenRequest(i));
    Send(requests.back(), ExchangeOp{"agree", i, 3, "v"}, 1, 1, 1);
    Send(requests.back(), ExchangeOp{"mine", i, 4, "v"}, 2, 1);
  }
  Send(control[1], LeaveOp{});
  EXPECT_FALSE(Take<Fence>(control[2]));
  EXPECT_TRUE(TakeReply(requests[0], 1)->status.ok());
}

TEST_F(CoreEvidence, ExchangeOfAGeneration_EndsWithItAndNeverAfterIt) {
  const std::vector<ConnectionId> control = Run(3);
  const ConnectionId early = OpenRequest(0);
  const ConnectionId late = OpenRequest(2);
  Send(early, ExchangeOp{"agree", 0, 2, "v"}, 1, 1, 1);
  ReportExit(1, 9, 0);
  EXPECT_EQ(TakeReply(early, 1)->status.code(), StatusCode::kRankLost);
  EXPECT_EQ(Ask(late, ExchangeOp{"agree", 1, 2, "v"}, 1, 1, 1).status.code(),
            StatusCode::kStaleGeneration);
  // Sent again, as after a lost connection.
  EXPECT_EQ(Ask(early, ExchangeOp{"agree", 0, 2, "v"}, 1, 1, 1).status.code(),
            StatusCode::kRankLost);
}

TEST_F(CoreEvidence, ReportOfThePast_IsIgnored) {
  const std::vector<ConnectionId> control = Run(2);
  EXPECT_TRUE(Ask(control[0], ReportOp{Broken(1, 9)}).status.ok());
  EXPECT_FALSE(Take<PingEvent>(control[1]));
}

TEST_F(CoreEvidence, MismatchAndCommFailed_Fence) {
  struct Row {
    ReportKind kind;
    StatusCode told;
    StatusCode cause;
  };
  for (const Row& row :
       {Row{ReportKind::kMismatch, StatusCode::kMismatch, StatusCode::kMismatch},
        Row{ReportKind::kMismatch, StatusCode::kInternal, StatusCode::kMismatch},
        Row{ReportKind::kCommFailed, StatusCode::kCommStalled, StatusCode::kCommStalled},
        Row{ReportKind::kCommFailed, StatusCode::kDeviceLost, StatusCode::kDeviceLost},
        Row{ReportKind::kCommFailed, StatusCode::kRankLost, StatusCode::kCommFailed}}) {
    Restart();
    const std::vector<ConnectionId> control = Run(2);
    Report report;
    report.kind = row.kind;
    report.generation = 1;
    report.status = Status(row.told, "both sides");
    EXPECT_TRUE(Ask(control[0], ReportOp{report}).status.ok());
    const std::optional<Fence> fence = Take<Fence>(control[1]);
    ASSERT_TRUE(fence);
    EXPECT_EQ(fence->cause.code(), row.cause);
    EXPECT_EQ(fence->cause.message(), "both sides");
    EXPECT_EQ(fence->cause.detail().generation, 1u);
    EXPECT_EQ(core_->LiveMembers(), 2u);
  }
}

TEST_F(CoreEvidence, DeadSession_CanChangeNothing) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  const ConnectionId request = OpenRequest(1);
  ReportExit(1, 9, 0);
  EXPECT_TRUE(Take<SessionLostEvent>(control[1]));
  Send(control[1], HeartbeatOp{1}, 0);
  EXPECT_TRUE(Take<SessionLostEvent>(control[1]));
  EXPECT_FALSE(Take<HeartbeatAckEvent>(control[1]));
  EXPECT_EQ(Ask(control[1], JoinOp{JoinOf(1, 2)}).status.code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(Ask(control[1], ReadyOp{2}).status.code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(Ask(control[1], ReportOp{Broken(0, 2)}).status.code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(Ask(request, AddOp{"n", 1}, {}, 1).status.code(), StatusCode::kStaleGeneration);
  EXPECT_TRUE(Ask(request, AddOp{"n", 1}).status.ok());
  EXPECT_EQ(core_->LiveMembers(), 1u);
  // The same process may come back as a new session, into its old seat.
  const ConnectionId again = Open(HelloOf(1, Role::kControl, "new"));
  Send(again, JoinOp{JoinOf(1, 2, kWait)});
  Send(control[0], JoinOp{JoinOf(0, 2, kWait)});
  EXPECT_TRUE(Take<View>(again));
}

}  // namespace
}  // namespace resilient::store
