// Goal: what callers of a session see through fences, rebuilds, refusals and reports of failures.
// Method: SessionTest.
#include <atomic>
#include <future>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <resilient/ladder.h>

#include "tests/support/captured_stderr.h"
#include "tests/unit/recovery/session_fixture.h"

namespace resilient::recovery {
namespace {

using ::testing::HasSubstr;

TEST_F(SessionTest, Init_FencedBeforeTheFirstRun_HealsByItself) {
  script_.autopilot = false;
  Open();
  auto init = StartInit();
  ASSERT_TRUE(AwaitCount(&Record::joins, 1));
  rendezvous_->SayView(1);
  ASSERT_TRUE(AwaitCount(&Record::readies, 1));
  rendezvous_->SayFence(1, Lost(2));
  ASSERT_TRUE(AwaitCount(&Record::joins, 2));
  EXPECT_TRUE(session_->failure().ok());
  rendezvous_->SayView(2);
  ASSERT_TRUE(AwaitCount(&Record::readies, 2));
  rendezvous_->SayRunning(2);
  EXPECT_TRUE(init.get().ok());
  EXPECT_EQ(session_->membership().generation, 2u);
}

TEST_F(SessionTest, Init_FencedAndNotHealedInTime_ReturnsTheCause) {
  script_.autopilot = false;
  Open();
  auto init = StartInit();
  ASSERT_TRUE(AwaitCount(&Record::joins, 1));
  rendezvous_->SayView(1);
  rendezvous_->SayFence(1, Lost(2));
  ASSERT_TRUE(AwaitCount(&Record::joins, 2));
  clock_.Advance(options_.init_timeout + options_.budget);
  EXPECT_EQ(init.get().code(), StatusCode::kRankLost);
}

// The interrupt hook runs on the waiting thread, which makes it late on purpose.
TEST_F(SessionTest, Init_FencedBeforeItsCallerWakes_ReturnsAndTheNextOperationRaises) {
  bool fenced = false;
  options_.interrupt = [&] {
    if (std::exchange(fenced, true)) return Status::Ok();
    EXPECT_TRUE(AwaitCount(&Record::joins, 1));
    rendezvous_->SayView(1);
    EXPECT_TRUE(AwaitCount(&Record::readies, 1));
    rendezvous_->SayRunning(1);
    rendezvous_->Settle();
    rendezvous_->set_autopilot(true);
    FenceAndSettle(1, Lost(2));
    EXPECT_TRUE(AwaitCount(&Record::readies, 2));
    return Status::Ok();
  };
  script_.autopilot = false;
  Open();
  EXPECT_TRUE(session_->Init().ok());
  EXPECT_TRUE(fenced);
  EXPECT_EQ(session_->failure().code(), StatusCode::kRankLost);
  EXPECT_EQ(Run(*CreateGroup(kWorldGroup, {0, 1, 2, 3})).code(), StatusCode::kRankLost);
  EXPECT_TRUE(session_->Rebuild({}).ok());
}

TEST_F(SessionTest, Rebuild_FencedAgainBeforeItsCallerWakes_ReturnsAndTheNextOperationRaises) {
  std::atomic<int> polls{-1000};
  options_.interrupt = [&] {
    if (++polls != 1) return Status::Ok();
    rendezvous_->SayView(2);
    EXPECT_TRUE(AwaitCount(&Record::readies, 2));
    rendezvous_->SayRunning(2);
    FenceAndSettle(2, Lost(3));
    return Status::Ok();
  };
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  polls = 0;
  EXPECT_TRUE(session_->Rebuild({}).ok());
  EXPECT_EQ(session_->failure().detail().rank, 3) << "another incident, not acknowledged";
  EXPECT_EQ(Run(*world_).detail().rank, 3);
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
  EXPECT_TRUE(AwaitCount(&Record::joins, 2)) << "the last completion makes it quiet";
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

TEST_F(SessionTest, Rebuild_BeforeTheFenceOfWhatHasFailedHere_WaitsForIt) {
  std::atomic<int> polls{-1000};
  options_.interrupt = [&] {
    if (++polls == 1) rendezvous_->SayFence(1, Status(StatusCode::kCommStalled, "nothing moves"));
    return Status::Ok();
  };
  factory_script_.hold = true;
  Boot();
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  factory_->Latest(kWorldGroup)->CompleteNext(Status(StatusCode::kCommStalled, "nothing moves"));
  EXPECT_EQ(outcome.Await().code(), StatusCode::kCommStalled);
  EXPECT_EQ(session_->membership().state, SessionState::kRunning)
      << "the service knows nothing yet";
  polls = 0;
  EXPECT_TRUE(session_->Rebuild({}).ok());
  EXPECT_EQ(session_->membership().generation, 2u);
}

TEST_F(SessionTest, Fence_IsStickyOnEveryGroupUntilRebuild) {
  Boot();
  auto pair = CreateGroup("pair", {1, 3});
  EXPECT_TRUE(Run(*pair).ok());
  FenceAndSettle(1, Lost(2));
  ASSERT_TRUE(AwaitCount(&Record::readies, 2));
  rendezvous_->Settle();
  EXPECT_EQ(session_->membership().state, SessionState::kReady) << "healed, but shut";
  EXPECT_EQ(session_->acknowledged().generation, 1U);
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

  EXPECT_TRUE(session_->Rebuild({}).ok());
  EXPECT_TRUE(session_->failure().ok());
  EXPECT_TRUE(Run(*world_).ok());
  EXPECT_TRUE(Run(*pair).ok());
  ASSERT_TRUE(AwaitCount(&Record::acknowledged, 1)) << "of the first nothing was left behind";
  EXPECT_TRUE(Run(*made_behind_the_gate).ok());
  EXPECT_EQ(factory_->Latest("pair")->spec().generation, 2u);
}

TEST_F(SessionTest, Rebuild_NothingToAcknowledge_ReturnsAtOnce) {
  Boot();
  const Instant now = clock_.Now();
  EXPECT_TRUE(session_->Rebuild({.deadline = Deadline::After(now, Millis(1))}).ok());
}

TEST_F(SessionTest, Rebuild_WhileRecoveryGoesOn_WaitsForIt) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  auto rebuild = StartRebuild();
  rendezvous_->SayView(2);
  ASSERT_TRUE(AwaitCount(&Record::readies, 2));
  rendezvous_->SayRunning(2);
  EXPECT_TRUE(rebuild.get().ok());
  EXPECT_TRUE(Run(*world_).ok());
}

TEST_F(SessionTest, Rebuild_DeadlinePasses_GateStaysShutUntilTheNext) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  const Status status = session_->Rebuild({.deadline = Deadline::At(clock_.Now())});
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_THAT(status.message(), HasSubstr("rank 2 was killed"));
  rendezvous_->SayView(2);
  ASSERT_TRUE(AwaitCount(&Record::readies, 2));
  rendezvous_->SayRunning(2);
  rendezvous_->Settle();
  EXPECT_EQ(session_->membership().state, SessionState::kReady);
  EXPECT_EQ(Run(*world_).code(), StatusCode::kRankLost);
  EXPECT_TRUE(session_->Rebuild({}).ok());
}

TEST_F(SessionTest, Rebuild_Interrupted_EndsWithThatStatus) {
  std::atomic<bool> interrupted{false};
  options_.interrupt = [&interrupted] {
    return interrupted ? Status(StatusCode::kInterrupted, "Ctrl-C") : Status::Ok();
  };
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  auto rebuild = StartRebuild();
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
  EXPECT_EQ(session_->Rebuild({.again = false}).message(), "rank 2 was killed");
  EXPECT_EQ(Joins(), 2u);

  auto refused = StartRebuild();
  ASSERT_TRUE(AwaitCount(&Record::joins, 3));
  rendezvous_->SayRefused(Status(StatusCode::kRankLost, "seat 2 stayed empty"));
  EXPECT_EQ(refused.get().message(), "rank 2 was killed");

  rendezvous_->set_autopilot(true);
  EXPECT_TRUE(session_->Rebuild({}).ok());
  EXPECT_TRUE(Run(*world_).ok());
}

TEST_F(SessionTest, Rebuild_SecondFenceMeanwhile_OneMoreGenerationFirstCause) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  auto rebuild = StartRebuild();
  rendezvous_->SayView(2);
  ASSERT_TRUE(AwaitCount(&Record::readies, 2));
  rendezvous_->SayFence(2, Lost(3));
  ASSERT_TRUE(AwaitCount(&Record::joins, 3));
  EXPECT_EQ(session_->failure().detail().rank, 2) << "the first cause";
  EXPECT_EQ(session_->last_incident()->generation, 2u);
  EXPECT_EQ(session_->last_incident()->cause.detail().rank, 3) << "one incident a fence";
  rendezvous_->SayView(3);
  ASSERT_TRUE(AwaitCount(&Record::readies, 3));
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
  EXPECT_EQ(session_->Rebuild({}).message(), "rank 2 was killed");
  EXPECT_EQ(session_->failure().message(), "rank 2 was killed");
}

TEST_F(SessionTest, Rebuild_BuildTakesTooLong_AnotherTryIsAskedFor) {
  Boot();
  rendezvous_->set_autopilot(false);
  factory_->set_script({.connect = false});
  FenceAndSettle(1, Lost(2));
  rendezvous_->SayView(2);
  rendezvous_->Settle();
  clock_.Advance(LadderOf(options_.budget).build);
  EXPECT_EQ(Run(*world_).code(), StatusCode::kRankLost);
  ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  const Report report = Reports().at(0);
  EXPECT_EQ(report.kind, ReportKind::kCommFailed);
  EXPECT_EQ(report.generation, 2u);
  EXPECT_NE(report.status.message().find("was not built on this rank within 8000 ms"),
            std::string::npos);
  factory_->set_script({});
  rendezvous_->set_autopilot(true);
  auto rebuild = StartRebuild();
  FenceAndSettle(2, report.status);
  EXPECT_TRUE(rebuild.get().ok());
  EXPECT_EQ(session_->membership().generation, 3u);
}

TEST_F(SessionTest, SessionLost_EveryCallSaysSo) {
  factory_script_.hold = true;
  Boot();
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  rendezvous_->SayLost(Status(StatusCode::kStaleGeneration, "this process was given up"));
  EXPECT_EQ(outcome.Await().code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(Run(*world_).code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(session_->Rebuild({}).code(), StatusCode::kStaleGeneration);
}

TEST_F(SessionTest, BuildFails_IsReportedAndTheFenceHealsIt) {
  script_.autopilot = false;
  factory_script_.fail = true;
  Open();
  auto init = StartInit();
  ASSERT_TRUE(AwaitCount(&Record::joins, 1));
  rendezvous_->SayView(1);
  ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  EXPECT_EQ(Reports()[0].kind, ReportKind::kCommFailed);
  EXPECT_EQ(Reports()[0].generation, 1u);
  factory_->set_script({});
  rendezvous_->set_autopilot(true);
  rendezvous_->SayFence(1, Reports()[0].status);
  EXPECT_TRUE(init.get().ok());
}

TEST_F(SessionTest, LinkLost_IsReportedOnceASecond) {
  Boot();
  for (int i = 0; i < 3; ++i) factory_->SayLinkLost(kWorldGroup, 1, 2);
  factory_->SayLinkLost("pair", 1, 2);
  factory_->SayLinkLost(kWorldGroup, 1, 3);
  ASSERT_TRUE(AwaitCount(&Record::reports, 2));
  clock_.Advance(std::chrono::seconds(1));
  factory_->SayLinkLost(kWorldGroup, 1, 2);
  factory_->SayLinkLost(kWorldGroup, 0, 0);
  ASSERT_TRUE(AwaitCount(&Record::reports, 3));
  const std::vector<Report> reports = Reports();
  EXPECT_EQ(reports[0].accused_rank, 2);
  EXPECT_EQ(reports[1].accused_rank, 3);
  EXPECT_EQ(reports[2].accused_rank, 2);
  EXPECT_EQ(reports[2].kind, ReportKind::kLinkLost);
  EXPECT_EQ(session_->membership().state, SessionState::kRunning) << "the service decides";
}

// What an operation is told of a peer that has said goodbye.
Status Gone(int rank) {
  FailureDetail detail;
  detail.rank = rank;
  return Status(StatusCode::kLeft, "rank 3 has left the group", detail);
}

// Of a world of which rank 3 has said goodbye.
class SessionLeaverTest : public SessionTest {
 protected:
  void BootAndMiss(int times) {
    factory_script_.hold = true;
    Boot();
    for (int i = 0; i < times; ++i) {
      Outcome outcome;
      ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
      factory_->Latest(kWorldGroup)->CompleteNext(Gone(3));
      EXPECT_EQ(outcome.Await().code(), StatusCode::kLeft);
    }
    ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  }
};

TEST_F(SessionLeaverTest, OperationNeedsIt_IsReportedOnceAndARebuildAwaitsTheFence) {
  BootAndMiss(2);
  EXPECT_EQ(Reports()[0].kind, ReportKind::kNeedsLeaver);
  EXPECT_EQ(Reports()[0].accused_rank, 3);
  std::future<Status> rebuild = StartRebuild();
  ASSERT_TRUE(AwaitCount(&Record::reports, 2)) << "a service that was restarted has forgotten it";
  EXPECT_NE(rebuild.wait_for(Millis(0)), std::future_status::ready);
  rendezvous_->SayFence(1, Gone(3));
  EXPECT_TRUE(rebuild.get().ok());
  EXPECT_EQ(session_->membership().generation, 2u);
}

TEST_F(SessionLeaverTest, ItHasLeftAGroupAlone_ARebuildGoesOnAfterAMoment) {
  BootAndMiss(1);
  std::future<Status> rebuild = StartRebuild();
  ASSERT_TRUE(AwaitCount(&Record::reports, 2));
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_TRUE(rebuild.get().ok());
  EXPECT_EQ(session_->membership().generation, 1u);
}

// Whether an operation has missed it or not.
TEST_F(SessionTest, RebuildOfARunningWorld_AwaitsTheWordOfTheService) {
  Boot();
  rendezvous_->HoldAnswers();
  std::future<Status> rebuild = StartRebuild();
  ASSERT_TRUE(AwaitCount(&Record::asked, 1));
  EXPECT_NE(rebuild.wait_for(Millis(0)), std::future_status::ready);
  rendezvous_->SayAnswer(Status::Ok());
  EXPECT_TRUE(rebuild.get().ok());
  EXPECT_EQ(session_->membership().generation, 1u) << "nobody has left";

  rebuild = StartRebuild();
  ASSERT_TRUE(AwaitCount(&Record::asked, 2));
  rendezvous_->SayAnswer(Gone(3));
  rendezvous_->Settle();
  EXPECT_NE(rebuild.wait_for(Millis(0)), std::future_status::ready);
  rendezvous_->SayFence(1, Gone(3));
  EXPECT_TRUE(rebuild.get().ok());
  EXPECT_EQ(session_->membership().generation, 2u);
}

TEST_F(SessionTest, RebuildOfARunningWorld_WithoutAnAnswer_SaysSo) {
  Boot();
  rendezvous_->HoldAnswers();
  std::future<Status> rebuild = StartRebuild();
  ASSERT_TRUE(AwaitCount(&Record::asked, 1));
  clock_.Advance(options_.budget + std::chrono::seconds(1));
  const Status silent = rebuild.get();
  EXPECT_EQ(silent.code(), StatusCode::kStoreLost);
  EXPECT_NE(silent.message().find("whether a member has left"), std::string::npos);
}

TEST_F(SessionTest, AnnouncedEnd_IsToldAndLeavesNoGoodbye) {
  Boot();
  std::future<void> told = std::async(std::launch::async, [this] {
    session_->AnnounceEnd("ValueError: x (train.py:7)",
                          Deadline::After(clock_.Now(), std::chrono::seconds(1)));
  });
  ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  EXPECT_EQ(Reports()[0].kind, ReportKind::kEnding);
  EXPECT_EQ(Reports()[0].status.message(), "ValueError: x (train.py:7)");
  rendezvous_->SayLost(Status(StatusCode::kStaleGeneration, "it has ended"));
  told.get();
  EXPECT_EQ(session_->membership().state, SessionState::kFailed);
  session_->AnnounceEnd("again", Deadline::After(clock_.Now(), std::chrono::seconds(1)));
  session_->Close();
  EXPECT_EQ(Reports().size(), 1u);
}

TEST_F(SessionTest, AnnouncedEndWithoutAnAnswer_EndsTheSessionAllTheSame) {
  Boot();
  session_->AnnounceEnd("x", Deadline::At(clock_.Now()));
  EXPECT_EQ(session_->membership().state, SessionState::kFailed);
  EXPECT_FALSE(Run(*world_).ok());
}

TEST_F(SessionTest, Mismatch_IsReported) {
  Boot();
  FailureDetail detail;
  detail.rank = 3;
  factory_->SayMismatch(kWorldGroup, 1, Status(StatusCode::kMismatch, "a against b", detail));
  ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  EXPECT_EQ(Reports()[0].kind, ReportKind::kMismatch);
  EXPECT_EQ(Reports()[0].accused_rank, 3);
}

// A program ends as soon as it has its error: what the leave must not overtake.
TEST_F(SessionTest, Verdict_IsReportedBeforeTheEnd_ThoughTheControlThreadIsLate) {
  Boot();
  std::promise<void> late;
  ASSERT_TRUE(rendezvous_->Post([waits = late.get_future().share()] { waits.wait(); }));
  FailureDetail detail;
  detail.rank = 3;
  factory_->SayMismatch(kWorldGroup, 1, Status(StatusCode::kMismatch, "a against b", detail));
  factory_->SayStalled("some group", 1, Status(StatusCode::kCommStalled, "no move", detail));
  factory_->Settle();
  session_->AnnounceEnd("MismatchError: a against b", Deadline::At(clock_.Now()));
  std::thread closing([this] { session_->Close(); });
  late.set_value();
  closing.join();
  ASSERT_GE(Reports().size(), 3U);
  EXPECT_EQ(Reports()[0].kind, ReportKind::kMismatch);
  EXPECT_EQ(Reports()[1].kind, ReportKind::kCommFailed);
  EXPECT_EQ(Reports()[2].kind, ReportKind::kEnding);
}

TEST_F(SessionTest, Stall_IsReported) {
  Boot();
  FailureDetail detail;
  detail.rank = 3;
  const Status stalled(StatusCode::kCommStalled, "nothing moves", detail);
  factory_->SayStalled("some group", 1, stalled);
  factory_->SayStalled("some group", 0, stalled);  // Over.
  factory_->SayLinkLost(kWorldGroup, 1, 2);
  ASSERT_TRUE(AwaitCount(&Record::reports, 2));
  EXPECT_EQ(Reports()[0].kind, ReportKind::kCommFailed);
  EXPECT_EQ(Reports()[0].status.code(), StatusCode::kCommStalled);
  EXPECT_EQ(Reports()[0].accused_rank, 3);
  EXPECT_EQ(Reports()[1].kind, ReportKind::kLinkLost);
}

// What a tool would find in the log of this process.
std::vector<std::string> IncidentLines(const std::string& log) {
  std::vector<std::string> found;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.find("incident {");
    if (at != std::string::npos) found.push_back(line.substr(at));
  }
  return found;
}

TEST_F(SessionTest, Incident_IsLoggedOnceAFenceHoweverItEnds) {
  Boot();
  BeginToCaptureStderr();
  FenceAndSettle(1, Lost(3));
  EXPECT_TRUE(session_->Rebuild({}).ok());
  FenceAndSettle(2, Lost(2));
  session_->Close();
  session_->Close();
  const auto lines = IncidentLines(TakeCapturedStderr());
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0],
              HasSubstr(R"("outcome": "running", "generation": 1, "next_generation": 2)"));
  EXPECT_THAT(lines[0], HasSubstr(R"("accused": {"rank": 3)"));
  EXPECT_THAT(lines[0], HasSubstr(R"("reporter": {"rank": 1)"));
  EXPECT_THAT(lines[1], HasSubstr(R"("outcome": "closed", "generation": 2)"));
}

TEST_F(SessionTest, IncidentOfARankThatIsGivenUp_IsLoggedToo) {
  Boot();
  BeginToCaptureStderr();
  rendezvous_->SayLost(Status(StatusCode::kStaleGeneration, "the job goes on"));
  rendezvous_->Settle();
  session_->Close();
  const auto lines = IncidentLines(TakeCapturedStderr());
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], HasSubstr(R"("outcome": "failed", "generation": 1)"));
  EXPECT_THAT(lines[0], HasSubstr(R"("code": "STALE_GENERATION")"));
  EXPECT_THAT(lines[0], HasSubstr(R"("by": "session")"));
}

TEST_F(SessionTest, Incident_HasItsPhasesInOrder) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  clock_.Advance(std::chrono::seconds(1));
  rendezvous_->SayView(2);
  ASSERT_TRUE(AwaitCount(&Record::readies, 2));
  clock_.Advance(std::chrono::seconds(1));
  rendezvous_->SayRunning(2);
  rendezvous_->Settle();
  EXPECT_EQ(session_->last_incident()->running_unix_s, 0) << "not acknowledged";
  ASSERT_TRUE(session_->Rebuild({}).ok());
  const Incident incident = *session_->last_incident();
  EXPECT_EQ(incident.generation, 1u);
  EXPECT_EQ(incident.cause.code(), StatusCode::kRankLost);
  EXPECT_EQ(incident.aborted_unix_s, incident.known_unix_s);
  EXPECT_EQ(incident.joined_unix_s, incident.known_unix_s + 1);
  EXPECT_EQ(incident.rebuilt_unix_s, incident.known_unix_s + 1);
  EXPECT_EQ(incident.running_unix_s, incident.known_unix_s + 2);
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
    ASSERT_TRUE(session_->Rebuild({}).ok());
    EXPECT_EQ(session_->membership().generation, generation + 1);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  session_->Close();
  EXPECT_EQ(started.load(), ended.load());
}

}  // namespace
}  // namespace resilient::recovery
