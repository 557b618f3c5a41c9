// Goal: what callers of a session see through fences, rebuilds, refusals and its end.
// Method: a session between a fake membership line (a real control thread, scripted by the test)
// and fake communicators (a real comm thread; operations complete or are held). Time is manual, and
// the test waits for events, never for time.
#include <resilient/session.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <thread>

#include "tests/unit/recovery/fakes.h"

namespace resilient::recovery {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SessionTest : public ::testing::Test {
 protected:
  void Open() {
    auto rendezvous = std::make_unique<FakeRendezvous>(script_, record_);
    rendezvous_ = rendezvous.get();
    auto session = OpenSession(
        options_, std::move(rendezvous),
        [this](CommunicatorEvents& events) -> Result<std::unique_ptr<CommunicatorFactory>> {
          auto factory = std::make_unique<FakeFactory>(factory_script_, record_, events);
          factory_ = factory.get();
          return std::unique_ptr<CommunicatorFactory>(std::move(factory));
        },
        clock_);
    ASSERT_TRUE(session.ok()) << session.status().ToString();
    session_ = *session;
  }

  // RUNNING at generation 1, with the world's group.
  void Boot() {
    Open();
    const Status status = session_->Init();
    ASSERT_TRUE(status.ok()) << status.ToString();
    world_ = CreateGroup(kWorldGroup, {0, 1, 2, 3});
  }

  std::shared_ptr<Group> CreateGroup(const std::string& name, std::vector<int> ranks) {
    auto group = session_->CreateGroup(name, std::move(ranks));
    EXPECT_TRUE(group.ok()) << group.status().ToString();
    return group.ok() ? *group : nullptr;
  }

  Status Run(Group& group) {
    Outcome outcome;
    auto seq = group.Submit({}, outcome.Callback());
    return seq.ok() ? outcome.Await() : seq.status();
  }

  void FenceAndSettle(std::uint64_t generation, const Status& cause) {
    rendezvous_->SayFence(generation, cause);
    rendezvous_->Settle();
  }

  std::size_t Joins() {
    return record_->Get<std::size_t>([](const Record& record) { return record.joins.size(); });
  }
  std::vector<Report> Reports() {
    return record_->Get<std::vector<Report>>([](const Record& record) { return record.reports; });
  }

  FakeRendezvous::Script script_;
  FakeFactory::Script factory_script_;
  SessionOptions options_{.rank = 1, .world_size = 4, .interrupt = GiveUpAtTestBound()};
  ManualClock clock_;
  std::shared_ptr<Record> record_ = std::make_shared<Record>();
  FakeRendezvous* rendezvous_ = nullptr;
  FakeFactory* factory_ = nullptr;
  // Last: destroyed first.
  std::shared_ptr<Session> session_;
  std::shared_ptr<Group> world_;
};

TEST_F(SessionTest, Open_RankOutsideTheWorld_IsRefused) {
  options_.rank = 4;
  auto session = OpenSession(
      options_, std::make_unique<FakeRendezvous>(script_, record_),
      [](CommunicatorEvents&) -> Result<std::unique_ptr<CommunicatorFactory>> {
        return Status(StatusCode::kUnreachable, "no port");
      },
      clock_);
  EXPECT_EQ(session.status().code(), StatusCode::kInvalidArgument);
}

TEST_F(SessionTest, Open_MakerFails_ItsErrorComesBack) {
  auto session = OpenSession(
      options_, std::make_unique<FakeRendezvous>(script_, record_),
      [](CommunicatorEvents&) -> Result<std::unique_ptr<CommunicatorFactory>> {
        return Status(StatusCode::kUnreachable, "no port");
      },
      clock_);
  EXPECT_EQ(session.status().code(), StatusCode::kUnreachable);
}

TEST_F(SessionTest, Init_FirstWorld_Runs) {
  options_.seat_wait = std::chrono::seconds(7);
  Boot();
  const Membership membership = session_->membership();
  EXPECT_EQ(membership.state, SessionState::kRunning);
  EXPECT_EQ(membership.generation, 1u);
  EXPECT_EQ(membership.rank, 1);
  EXPECT_EQ(membership.members.size(), 4u);
  EXPECT_FALSE(session_->last_incident().has_value());
  const JoinRequest join =
      record_->Get<JoinRequest>([](const Record& record) { return record.joins.at(0); });
  EXPECT_EQ(join.rank, 1);
  EXPECT_EQ(join.world_size, 4);
  EXPECT_EQ(join.endpoint, "my-endpoint");
  EXPECT_EQ(join.generation, 0u);
  EXPECT_EQ(join.seat_wait, std::chrono::seconds(7));
  const GroupSpec spec = factory_->Latest(kWorldGroup)->spec();
  EXPECT_EQ(spec.generation, 1u);
  EXPECT_EQ(spec.rank, 1);
  EXPECT_EQ(spec.secret, "secret");
  EXPECT_EQ(spec.members.at(3).endpoint, "endpoint-3");
}

TEST_F(SessionTest, Init_StoreUnreachable_ClosesAndSaysWhy) {
  script_.start = Status(StatusCode::kRefused, "nobody listens");
  Open();
  EXPECT_EQ(session_->Init().code(), StatusCode::kRefused);
  EXPECT_EQ(session_->membership().state, SessionState::kClosed);
  EXPECT_TRUE(record_->Get<bool>([](const Record& record) { return record.closed; }));
}

TEST_F(SessionTest, Init_Refused_ClosesAndSaysWhy) {
  script_.autopilot = false;
  Open();
  auto init = std::async(std::launch::async, [this] { return session_->Init(); });
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 1; }));
  rendezvous_->SayRefused(Status(StatusCode::kJoinTimeout, "3 of 4 joined; missing ranks 2"));
  const Status status = init.get();
  EXPECT_EQ(status.code(), StatusCode::kJoinTimeout);
  EXPECT_THAT(status.message(), HasSubstr("missing ranks 2"));
  EXPECT_EQ(session_->membership().state, SessionState::kClosed);
}

TEST_F(SessionTest, Init_NoVerdictInTime_EndsByItself) {
  script_.autopilot = false;
  Open();
  auto init = std::async(std::launch::async, [this] { return session_->Init(); });
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 1; }));
  clock_.Advance(options_.init_timeout + options_.budget);
  EXPECT_EQ(init.get().code(), StatusCode::kJoinTimeout);
}

TEST_F(SessionTest, Init_Interrupted_EndsWithThatStatus) {
  script_.autopilot = false;
  options_.interrupt = [] { return Status(StatusCode::kInterrupted, "Ctrl-C"); };
  Open();
  EXPECT_EQ(session_->Init().code(), StatusCode::kInterrupted);
}

TEST_F(SessionTest, Init_FencedBeforeTheFirstRun_HealsByItself) {
  script_.autopilot = false;
  Open();
  auto init = std::async(std::launch::async, [this] { return session_->Init(); });
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 1; }));
  rendezvous_->SayView(1);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 1; }));
  rendezvous_->SayFence(1, Lost(2));
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 2; }));
  EXPECT_TRUE(session_->failure().ok());
  rendezvous_->SayView(2);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 2; }));
  rendezvous_->SayRunning(2);
  EXPECT_TRUE(init.get().ok());
  EXPECT_EQ(session_->membership().generation, 2u);
}

TEST_F(SessionTest, Init_FencedAndNotHealedInTime_ReturnsTheCause) {
  script_.autopilot = false;
  Open();
  auto init = std::async(std::launch::async, [this] { return session_->Init(); });
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 1; }));
  rendezvous_->SayView(1);
  rendezvous_->SayFence(1, Lost(2));
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 2; }));
  clock_.Advance(options_.init_timeout + options_.budget);
  EXPECT_EQ(init.get().code(), StatusCode::kRankLost);
}

// The interrupt hook runs on the waiting thread, which makes it late on purpose.
TEST_F(SessionTest, Init_FencedBeforeItsCallerWakes_ReturnsAndTheNextOperationRaises) {
  bool fenced = false;
  options_.interrupt = [&] {
    if (std::exchange(fenced, true)) return Status::Ok();
    EXPECT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 1; }));
    rendezvous_->SayView(1);
    EXPECT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 1; }));
    rendezvous_->SayRunning(1);
    rendezvous_->Settle();
    rendezvous_->set_autopilot(true);
    FenceAndSettle(1, Lost(2));
    EXPECT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 2; }));
    return Status::Ok();
  };
  script_.autopilot = false;
  Open();
  EXPECT_TRUE(session_->Init().ok());
  EXPECT_TRUE(fenced);
  EXPECT_EQ(session_->failure().code(), StatusCode::kRankLost);
  EXPECT_EQ(Run(*CreateGroup(kWorldGroup, {0, 1, 2, 3})).code(), StatusCode::kRankLost);
  EXPECT_TRUE(session_->Rebuild(Deadline::Never()).ok());
}

TEST_F(SessionTest, Rebuild_FencedAgainBeforeItsCallerWakes_ReturnsAndTheNextOperationRaises) {
  std::atomic<int> polls{-1000};
  options_.interrupt = [&] {
    if (++polls != 1) return Status::Ok();
    rendezvous_->SayView(2);
    EXPECT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 2; }));
    rendezvous_->SayRunning(2);
    FenceAndSettle(2, Lost(3));
    return Status::Ok();
  };
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  polls = 0;
  EXPECT_TRUE(session_->Rebuild(Deadline::Never()).ok());
  EXPECT_EQ(session_->failure().detail().rank, 3) << "another incident, not acknowledged";
  EXPECT_EQ(Run(*world_).detail().rank, 3);
}

TEST_F(SessionTest, Init_Twice_IsRefused) {
  Boot();
  EXPECT_EQ(session_->Init().code(), StatusCode::kFailedPrecondition);
}

TEST_F(SessionTest, Submit_Running_CompletesWithItsSequenceNumber) {
  Boot();
  Outcome first;
  Outcome second;
  EXPECT_EQ(world_->Submit({}, first.Callback()).value(), 1u);
  EXPECT_EQ(world_->Submit({}, second.Callback()).value(), 2u);
  EXPECT_TRUE(first.Await().ok());
  EXPECT_TRUE(second.Await().ok());
}

TEST_F(SessionTest, Submit_Invalid_IsRefusedAndLeavesNothingInFlight) {
  Boot();
  Operation op;
  op.kind = OpKind::kSend;
  op.peer = 9;
  EXPECT_EQ(world_->Submit(op, [](const Status&) { FAIL(); }).status().code(),
            StatusCode::kInvalidArgument);
  FenceAndSettle(1, Lost(2));
  EXPECT_EQ(Joins(), 2u) << "quiet at once";
}

TEST_F(SessionTest, Fence_OperationInFlight_FailsWithTheCause) {
  factory_script_.hold = true;
  Boot();
  Outcome outcome;
  Operation op;
  op.kind = OpKind::kAllReduce;
  op.dtype = DataType::kFloat32;
  op.reduce = ReduceOp::kSum;
  op.count = 4;
  ASSERT_TRUE(world_->Submit(op, outcome.Callback()).ok());
  rendezvous_->SayFence(1, Lost(2));
  const Status status = outcome.Await();
  EXPECT_EQ(status.code(), StatusCode::kRankLost);
  EXPECT_EQ(status.detail().rank, 2);
  EXPECT_EQ(status.detail().group, kWorldGroup);
  EXPECT_EQ(status.detail().seq, 1u);
  EXPECT_THAT(status.message(), HasSubstr("all_reduce(float32[4], sum)"));
}

TEST_F(SessionTest, Fence_OperationThatCompletesAfterwards_FailsAllTheSame) {
  factory_script_.hold = true;
  Boot();
  auto communicator = factory_->Latest(kWorldGroup);
  communicator->set_linger(true);
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  FenceAndSettle(1, Lost(2));
  EXPECT_EQ(session_->membership().state, SessionState::kAborting);
  EXPECT_EQ(Joins(), 1u) << "not quiet yet";
  communicator->CompleteNext(Status::Ok());
  EXPECT_EQ(outcome.Await().code(), StatusCode::kRankLost);
  EXPECT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 2; }))
      << "the last completion makes it quiet";
}

TEST_F(SessionTest, Fence_OperationWithAMismatchOfItsOwn_KeepsIt) {
  factory_script_.hold = true;
  Boot();
  auto communicator = factory_->Latest(kWorldGroup);
  communicator->set_linger(true);
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  FenceAndSettle(1, Lost(2));
  communicator->CompleteNext(Status(StatusCode::kMismatch, "barrier against all_reduce"));
  EXPECT_EQ(outcome.Await().code(), StatusCode::kMismatch);
}

TEST_F(SessionTest, Fence_IsStickyOnEveryGroupUntilRebuild) {
  Boot();
  auto pair = CreateGroup("pair", {1, 3});
  EXPECT_TRUE(Run(*pair).ok());
  FenceAndSettle(1, Lost(2));
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 2; }));
  rendezvous_->Settle();
  EXPECT_EQ(session_->membership().state, SessionState::kReady) << "healed, but shut";
  EXPECT_EQ(session_->membership().generation, 2u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Run(*world_).code(), StatusCode::kRankLost);
    EXPECT_EQ(Run(*pair).code(), StatusCode::kRankLost);
    EXPECT_THAT(Run(*pair).message(), HasSubstr("call rebuild()"));
  }
  auto made_behind_the_gate = CreateGroup("other", {1, 3});
  EXPECT_EQ(Run(*made_behind_the_gate).code(), StatusCode::kRankLost);
  EXPECT_EQ(session_->failure().code(), StatusCode::kRankLost);
  std::thread other([this] { EXPECT_EQ(Run(*world_).code(), StatusCode::kRankLost); });
  other.join();

  EXPECT_TRUE(session_->Rebuild(Deadline::Never()).ok());
  EXPECT_TRUE(session_->failure().ok());
  EXPECT_TRUE(Run(*world_).ok());
  EXPECT_TRUE(Run(*pair).ok());
  EXPECT_TRUE(Run(*made_behind_the_gate).ok());
  EXPECT_EQ(factory_->Latest("pair")->spec().generation, 2u);
}

TEST_F(SessionTest, Rebuild_NothingToAcknowledge_ReturnsAtOnce) {
  Boot();
  EXPECT_TRUE(session_->Rebuild(Deadline::At(clock_.Now())).ok());
}

TEST_F(SessionTest, Rebuild_WhileRecoveryGoesOn_WaitsForIt) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  auto rebuild =
      std::async(std::launch::async, [this] { return session_->Rebuild(Deadline::Never()); });
  rendezvous_->SayView(2);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 2; }));
  rendezvous_->SayRunning(2);
  EXPECT_TRUE(rebuild.get().ok());
  EXPECT_TRUE(Run(*world_).ok());
}

TEST_F(SessionTest, Rebuild_DeadlinePasses_GateStaysShutUntilTheNext) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  const Status status = session_->Rebuild(Deadline::At(clock_.Now()));
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_THAT(status.message(), HasSubstr("rank 2 was killed"));
  rendezvous_->SayView(2);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 2; }));
  rendezvous_->SayRunning(2);
  rendezvous_->Settle();
  EXPECT_EQ(session_->membership().state, SessionState::kReady);
  EXPECT_EQ(Run(*world_).code(), StatusCode::kRankLost);
  EXPECT_TRUE(session_->Rebuild(Deadline::Never()).ok());
}

TEST_F(SessionTest, Rebuild_Interrupted_EndsWithThatStatus) {
  std::atomic<bool> interrupted{false};
  options_.interrupt = [&interrupted] {
    return interrupted ? Status(StatusCode::kInterrupted, "Ctrl-C") : Status::Ok();
  };
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  auto rebuild =
      std::async(std::launch::async, [this] { return session_->Rebuild(Deadline::Never()); });
  interrupted = true;
  EXPECT_EQ(rebuild.get().code(), StatusCode::kInterrupted);
  EXPECT_EQ(session_->failure().code(), StatusCode::kRankLost);
}

TEST_F(SessionTest, Rebuild_SeatNotFilled_ReturnsFirstCauseAndMayTryAgain) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  rendezvous_->SayRefused(Status(StatusCode::kRankLost, "seat 2 stayed empty"));
  rendezvous_->Settle();
  EXPECT_EQ(session_->membership().state, SessionState::kFenced);
  EXPECT_EQ(session_->failure().message(), "rank 2 was killed");

  auto refused =
      std::async(std::launch::async, [this] { return session_->Rebuild(Deadline::Never()); });
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 3; }));
  rendezvous_->SayRefused(Status(StatusCode::kRankLost, "seat 2 stayed empty"));
  EXPECT_EQ(refused.get().message(), "rank 2 was killed");

  rendezvous_->set_autopilot(true);
  EXPECT_TRUE(session_->Rebuild(Deadline::Never()).ok());
  EXPECT_TRUE(Run(*world_).ok());
}

TEST_F(SessionTest, Rebuild_SecondFenceMeanwhile_OneMoreGenerationFirstCause) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  auto rebuild =
      std::async(std::launch::async, [this] { return session_->Rebuild(Deadline::Never()); });
  rendezvous_->SayView(2);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 2; }));
  rendezvous_->SayFence(2, Lost(3));
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 3; }));
  EXPECT_EQ(session_->failure().detail().rank, 2) << "the first cause";
  EXPECT_EQ(session_->last_incident()->generation, 2u);
  EXPECT_EQ(session_->last_incident()->cause.detail().rank, 3) << "one incident a fence";
  rendezvous_->SayView(3);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 3; }));
  rendezvous_->SayRunning(3);
  EXPECT_TRUE(rebuild.get().ok());
  EXPECT_EQ(session_->membership().generation, 3u);
}

TEST_F(SessionTest, Rebuild_BudgetSpent_FailsForGood) {
  Boot();
  rendezvous_->set_autopilot(false);
  factory_->set_script({.connect = false});
  FenceAndSettle(1, Lost(2));
  rendezvous_->SayView(2);
  rendezvous_->Settle();
  EXPECT_EQ(session_->membership().state, SessionState::kBuilding);
  clock_.Advance(options_.budget);
  EXPECT_EQ(Run(*world_).code(), StatusCode::kRankLost);
  EXPECT_EQ(session_->membership().state, SessionState::kFailed) << "any call notices";
  EXPECT_EQ(session_->Rebuild(Deadline::Never()).message(), "rank 2 was killed");
  EXPECT_EQ(session_->failure().message(), "rank 2 was killed");
}

TEST_F(SessionTest, SessionLost_EveryCallSaysSo) {
  factory_script_.hold = true;
  Boot();
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  rendezvous_->SayLost(Status(StatusCode::kStaleGeneration, "this process was given up"));
  EXPECT_EQ(outcome.Await().code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(Run(*world_).code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(session_->Rebuild(Deadline::Never()).code(), StatusCode::kStaleGeneration);
}

TEST_F(SessionTest, BuildFails_IsReportedAndTheFenceHealsIt) {
  script_.autopilot = false;
  factory_script_.fail = true;
  Open();
  auto init = std::async(std::launch::async, [this] { return session_->Init(); });
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 1; }));
  rendezvous_->SayView(1);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.reports.size() == 1; }));
  EXPECT_EQ(Reports()[0].kind, ReportKind::kCommFailed);
  EXPECT_EQ(Reports()[0].generation, 1u);
  factory_->set_script({});
  rendezvous_->set_autopilot(true);
  rendezvous_->SayFence(1, Reports()[0].status);
  EXPECT_TRUE(init.get().ok());
}

TEST_F(SessionTest, ViewWithoutThisRank_IsReported) {
  script_.autopilot = false;
  script_.world_size = 1;
  Open();
  auto init = std::async(std::launch::async, [this] { return session_->Init(); });
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.joins.size() == 1; }));
  rendezvous_->SayView(1);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.reports.size() == 1; }));
  EXPECT_EQ(Reports()[0].status.code(), StatusCode::kProtocol);
  session_->Close();
  EXPECT_EQ(init.get().code(), StatusCode::kFailedPrecondition);
}

TEST_F(SessionTest, LinkLost_IsReportedOnceASecond) {
  Boot();
  for (int i = 0; i < 3; ++i) factory_->SayLinkLost(kWorldGroup, 1, 2);
  factory_->SayLinkLost("pair", 1, 2);
  factory_->SayLinkLost(kWorldGroup, 1, 3);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.reports.size() == 2; }));
  clock_.Advance(std::chrono::seconds(1));
  factory_->SayLinkLost(kWorldGroup, 1, 2);
  factory_->SayLinkLost(kWorldGroup, 0, 0);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.reports.size() == 3; }));
  const std::vector<Report> reports = Reports();
  EXPECT_EQ(reports[0].accused_rank, 2);
  EXPECT_EQ(reports[1].accused_rank, 3);
  EXPECT_EQ(reports[2].accused_rank, 2);
  EXPECT_EQ(reports[2].kind, ReportKind::kLinkLost);
  EXPECT_EQ(session_->membership().state, SessionState::kRunning) << "the service decides";
}

TEST_F(SessionTest, Mismatch_IsReported) {
  Boot();
  FailureDetail detail;
  detail.rank = 3;
  factory_->SayMismatch(kWorldGroup, 1, Status(StatusCode::kMismatch, "a against b", detail));
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.reports.size() == 1; }));
  EXPECT_EQ(Reports()[0].kind, ReportKind::kMismatch);
  EXPECT_EQ(Reports()[0].accused_rank, 3);
}

TEST_F(SessionTest, GroupAbort_EndsItHereAndAsksForAFence) {
  factory_script_.hold = true;
  Boot();
  auto pair = CreateGroup("pair", {1, 3});
  Outcome outcome;
  ASSERT_TRUE(pair->Submit({}, outcome.Callback()).ok());
  pair->Abort("shutting down");
  EXPECT_EQ(outcome.Await().code(), StatusCode::kCommFailed);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.reports.size() == 1; }));
  const Report report = Reports()[0];
  EXPECT_EQ(report.kind, ReportKind::kCommFailed);
  EXPECT_THAT(report.status.message(), HasSubstr("shutting down"));
  FenceAndSettle(1, report.status);
  EXPECT_EQ(Run(*world_).code(), StatusCode::kCommFailed);
}

TEST_F(SessionTest, CreateGroup_BadRanks_AreRefused) {
  Boot();
  const auto code = [this](const std::string& name, std::vector<int> ranks) {
    return session_->CreateGroup(name, std::move(ranks)).status().code();
  };
  EXPECT_EQ(code("", {1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("a", {}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("a", {0, 2}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("a", {1, 1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("a", {1, 4}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("a", {-1, 1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kWorldGroup, {0, 1, 2, 3}), StatusCode::kInvalidArgument) << "it is open";
  auto group = CreateGroup("a", {3, 1});
  EXPECT_EQ(group->rank(), 1);
  EXPECT_EQ(group->size(), 2);
  EXPECT_EQ(code("a", {1, 3}), StatusCode::kInvalidArgument) << "the name is taken";
}

TEST_F(SessionTest, CreateGroup_Limit_IsKept) {
  Boot();
  std::vector<std::shared_ptr<Group>> groups;
  for (int i = 0; i < 4095; ++i) groups.push_back(CreateGroup("g" + std::to_string(i), {1}));
  EXPECT_EQ(session_->CreateGroup("more", {1}).status().code(), StatusCode::kResourceExhausted);
  groups.pop_back();
  EXPECT_TRUE(session_->CreateGroup("more", {1}).ok());
}

TEST_F(SessionTest, GroupCommunicator_IsMadeAtTheFirstOperationAndOnce) {
  Boot();
  auto pair = CreateGroup("pair", {1, 3});
  EXPECT_EQ(factory_->CreatedCount(), 1u) << "only the world's";
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { EXPECT_TRUE(Run(*pair).ok()); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(factory_->CreatedCount(), 2u);
}

TEST_F(SessionTest, GroupWhosePeerLeftTheWorld_SaysSo) {
  Boot();
  auto pair = CreateGroup("pair", {1, 3});
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(3));
  View view;
  view.generation = 2;
  for (int rank = 0; rank < 3; ++rank) view.members.push_back({rank, "i", "host", 1, "endpoint"});
  rendezvous_->SayView(view);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 2; }));
  rendezvous_->SayRunning(2);
  ASSERT_TRUE(session_->Rebuild(Deadline::Never()).ok());
  EXPECT_EQ(Run(*pair).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Run(*world_).ok());
}

TEST_F(SessionTest, GroupClose_SaysGoodbyeAndRefusesMore) {
  factory_script_.hold = true;
  Boot();
  auto pair = CreateGroup("pair", {1, 3});
  Outcome outcome;
  ASSERT_TRUE(pair->Submit({}, outcome.Callback()).ok());
  pair->Close();
  pair->Close();
  EXPECT_EQ(outcome.Await().code(), StatusCode::kCancelled);
  EXPECT_TRUE(factory_->Latest("pair")->left());
  EXPECT_EQ(pair->Submit({}, [](const Status&) { FAIL(); }).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(session_->CreateGroup("pair", {1, 3}).status().code(), StatusCode::kInvalidArgument);
  FenceAndSettle(1, Lost(2));
  ASSERT_TRUE(session_->Rebuild(Deadline::Never()).ok());
  EXPECT_TRUE(session_->CreateGroup("pair", {1, 3}).ok()) << "names are free in a new generation";
}

TEST_F(SessionTest, GroupClose_OfAnEndedGeneration_SaysNoGoodbye) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  rendezvous_->SayView(2);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 2; }));
  // The control thread is busy when recovery gives up, so nothing is aborted yet.
  std::promise<void> release;
  rendezvous_->Post([busy = release.get_future().share()] { busy.wait(); });
  clock_.Advance(options_.budget);
  EXPECT_EQ(Run(*world_).code(), StatusCode::kRankLost);
  EXPECT_EQ(session_->membership().state, SessionState::kFailed);
  world_->Close();
  EXPECT_FALSE(factory_->Latest(kWorldGroup)->left()) << "peers would take it for the cause";
  release.set_value();
}

TEST_F(SessionTest, WorldGroupClosed_ComesBackInTheNextGeneration) {
  Boot();
  world_->Close();
  EXPECT_EQ(session_->CreateGroup(kWorldGroup, {0, 1, 2, 3}).status().code(),
            StatusCode::kInvalidArgument);
  FenceAndSettle(1, Lost(2));
  ASSERT_TRUE(session_->Rebuild(Deadline::Never()).ok());
  EXPECT_TRUE(Run(*CreateGroup(kWorldGroup, {0, 1, 2, 3})).ok());
}

TEST_F(SessionTest, CreateGroup_BeforeInitOrAfterTheEnd_IsRefused) {
  Open();
  EXPECT_EQ(session_->CreateGroup("a", {1}).status().code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(session_->Init().ok());
  rendezvous_->SayLost(Status(StatusCode::kStaleGeneration, "this process was given up"));
  rendezvous_->Settle();
  EXPECT_EQ(session_->CreateGroup("a", {1}).status().code(), StatusCode::kStaleGeneration);
}

TEST_F(SessionTest, Groups_ManyInOneGeneration_DoNotPileUp) {
  Boot();
  for (int i = 0; i < 100; ++i) {
    auto group = CreateGroup("g" + std::to_string(i), {1, 3});
    EXPECT_TRUE(Run(*group).ok());
  }
  int held = 0;
  for (int i = 0; i < 100; ++i) {
    if (factory_->Latest("g" + std::to_string(i)).use_count() > 2) ++held;
  }
  EXPECT_LE(held, 16);
}

TEST_F(SessionTest, Incident_HasItsPhasesInOrder) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  clock_.Advance(std::chrono::seconds(1));
  rendezvous_->SayView(2);
  ASSERT_TRUE(record_->Await([](const Record& record) { return record.readies.size() == 2; }));
  clock_.Advance(std::chrono::seconds(1));
  rendezvous_->SayRunning(2);
  rendezvous_->Settle();
  EXPECT_EQ(session_->last_incident()->running_unix_s, 0) << "not acknowledged";
  ASSERT_TRUE(session_->Rebuild(Deadline::Never()).ok());
  const Incident incident = *session_->last_incident();
  EXPECT_EQ(incident.generation, 1u);
  EXPECT_EQ(incident.cause.code(), StatusCode::kRankLost);
  EXPECT_EQ(incident.aborted_unix_s, incident.known_unix_s);
  EXPECT_EQ(incident.joined_unix_s, incident.known_unix_s + 1);
  EXPECT_EQ(incident.rebuilt_unix_s, incident.known_unix_s + 1);
  EXPECT_EQ(incident.running_unix_s, incident.known_unix_s + 2);
}

TEST_F(SessionTest, Close_OrderAndIdempotence) {
  factory_script_.hold = true;
  Boot();
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back([this] { session_->Close(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(outcome.Await().ok());
  const auto calls =
      record_->Get<std::vector<std::string>>([](const Record& record) { return record.calls; });
  EXPECT_THAT(calls, ElementsAre("join", "ready", "rendezvous closed", "factory closed"));
  EXPECT_TRUE(factory_->Latest(kWorldGroup)->left());
  EXPECT_EQ(Run(*world_).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(session_->Rebuild(Deadline::Never()).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(session_->CreateGroup("x", {1}).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(session_->Init().code(), StatusCode::kFailedPrecondition);
}

TEST_F(SessionTest, Close_WakesWhoWaitsInRebuild) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  auto rebuild =
      std::async(std::launch::async, [this] { return session_->Rebuild(Deadline::Never()); });
  session_->Close();
  const Status status = rebuild.get();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("the session is closed"));
}

TEST_F(SessionTest, Close_BeforeInit_IsFine) {
  Open();
  session_->Close();
  EXPECT_EQ(session_->Init().code(), StatusCode::kFailedPrecondition);
}

TEST_F(SessionTest, Close_FromACompletion_DoesNotJoinItself) {
  Boot();
  std::promise<void> closed;
  ASSERT_TRUE(world_
                  ->Submit({},
                           [&](const Status&) {
                             session_->Close();
                             closed.set_value();
                           })
                  .ok());
  ASSERT_EQ(closed.get_future().wait_for(kTestBound), std::future_status::ready);
  EXPECT_EQ(session_->membership().state, SessionState::kClosed);
}

TEST_F(SessionTest, Group_KeepsItsSessionAlive) {
  Boot();
  session_.reset();
  EXPECT_TRUE(Run(*world_).ok());
  EXPECT_EQ(world_->session().membership().generation, 1u);
}

TEST_F(SessionTest, ForkedChild_EveryCallSaysForked) {
  Boot();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int wrong = 0;
    const Status status = world_->Submit({}, [](const Status&) {}).status();
    if (status.code() != StatusCode::kForked) wrong |= 1;
    if (status.message().find("forked from rank 1") == std::string::npos) wrong |= 2;
    if (!session_->InForkedChild()) wrong |= 4;
    if (session_->failure().code() != StatusCode::kForked) wrong |= 8;
    if (session_->Rebuild(Deadline::Never()).code() != StatusCode::kForked) wrong |= 16;
    if (session_->CreateGroup("x", {1}).status().code() != StatusCode::kForked) wrong |= 32;
    if (session_->membership().state != SessionState::kClosed) wrong |= 64;
    world_.reset();
    session_->Close();
    session_.reset();
    if (!record_->abandoned || record_->closed) wrong |= 128;
    _exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(Run(*world_).ok()) << "the parent goes on";
}

TEST_F(SessionTest, Stress_FencesWhileManyThreadsSubmit_NoOperationIsLost) {
  Boot();
  auto pair = CreateGroup("pair", {1, 3});
  std::atomic<bool> stop{false};
  std::atomic<int> started{0};
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      Group& group = i == 0 ? *world_ : *pair;
      while (!stop) {
        if (group.Submit({}, [&](const Status&) { ++ended; }).ok()) ++started;
        std::this_thread::yield();
      }
    });
  }
  for (std::uint64_t generation = 1; generation <= 30; ++generation) {
    rendezvous_->SayFence(generation, Lost(2));
    ASSERT_TRUE(record_->Await(
        [&](const Record& record) { return record.readies.size() == generation + 1; }));
    ASSERT_TRUE(session_->Rebuild(Deadline::Never()).ok());
    EXPECT_EQ(session_->membership().generation, generation + 1);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  session_->Close();
  EXPECT_EQ(started.load(), ended.load());
}

}  // namespace
}  // namespace resilient::recovery
