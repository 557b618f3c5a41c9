// Goal: what callers of a session see while it begins, of its groups and operations, at its end and
// in a forked child. Method: SessionTest.
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <map>
#include <memory>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>

#include "runtime/base/thread.h"
#include "runtime/recovery/watch_list.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/recovery/session_fixture.h"

namespace resilient::recovery {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

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

// A rank whose main thread is blocked in its first operation.
class BlockedSessionTest : public SessionTest {
 protected:
  // ThreadSanitizer has a thread of its own in each process, which may act by all that can be seen.
  void SetUp() override {
    if (testing::kThreadSanitized) GTEST_SKIP() << "no process has only threads that are parked";
  }
  void BootBlocked() {
    factory_script_.hold = true;
    Boot();
    ASSERT_TRUE(world_->Submit({}, outcome_.Callback()).ok());
    session_->BeginBlocked(kWorldGroup, false, 1);
  }

  // The first report that says so: other threads come to sleep in their own time.
  WaitingReport Report(bool blocked) {
    const InterruptCheck bound = GiveUpAtTestBound();
    while (true) {
      clock_.Advance(std::chrono::seconds(1));
      factory_->SayWaiting(kWorldGroup, 1, {.seq = 1, .missing = {0}});
      EXPECT_TRUE(
          record_->Await([&](const Record& record) { return record.waiting.size() >= told_ + 1; }));
      const auto report = record_->Get<WaitingReport>([this](const Record& record) {
        told_ = record.waiting.size();
        return record.waiting.back();
      });
      if (report.blocked == blocked || !bound().ok()) return report;
    }
  }

  std::size_t told_ = 0;
  Outcome outcome_;
};

TEST_F(BlockedSessionTest, AnotherThreadThatNeverSubmitted_MayActUntilItIsParked) {
  BootBlocked();
  EXPECT_TRUE(Report(true).blocked);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  std::binary_semaphore over(0);
  Thread helper("helper", [&] {
    char byte = 0;
    EXPECT_EQ(read(ends[0], &byte, 1), 1);
    over.acquire();
  });
  EXPECT_FALSE(Report(false).blocked);
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  EXPECT_TRUE(Report(true).blocked);
  over.release();
  helper.Join();
  EXPECT_TRUE(Report(true).blocked);
  close(ends[0]);
  close(ends[1]);
  session_->EndBlocked();
}

// Its end may run a callback, or wake a parked thread.
TEST_F(BlockedSessionTest, AnOperationThatHasJustBegun_MayEnd) {
  BootBlocked();
  EXPECT_TRUE(Report(true).blocked);
  Outcome younger;
  ASSERT_TRUE(world_->Submit({}, younger.Callback()).ok());
  EXPECT_FALSE(Report(false).blocked);
  session_->EndBlocked();
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
  EXPECT_EQ(DecodeSessionEndpoint(join.endpoint).communicator, "my-endpoint");
  EXPECT_EQ(join.generation, 0u);
  EXPECT_EQ(join.seat_wait, std::chrono::seconds(7));
  const GroupSpec spec = factory_->Latest(kWorldGroup)->spec();
  EXPECT_EQ(spec.generation, 1u);
  EXPECT_EQ(spec.rank, 1);
  EXPECT_EQ(spec.secret, "secret");
  EXPECT_EQ(spec.members.at(3).endpoint, "endpoint-3");
}

TEST_F(SessionTest, Init_BudgetBelowTheLease_IsRefusedBeforeTheJoin) {
  options_.budget = std::chrono::seconds(5);
  script_.lease = std::chrono::seconds(5);
  Open();
  const Status status = session_->Init();
  EXPECT_EQ(status.code(), StatusCode::kSetting);
  EXPECT_NE(status.message().find("RESILIENT_BUDGET is 5 s"), std::string::npos);
  EXPECT_EQ(Joins(), 0u);
  EXPECT_EQ(session_->membership().state, SessionState::kClosed);
}

TEST_F(SessionTest, Open_NoBudget_IsRefused) {
  options_.budget = Duration::zero();
  auto session = OpenSession(
      options_, std::make_unique<FakeRendezvous>(script_, record_),
      [](CommunicatorEvents&) -> Result<std::unique_ptr<CommunicatorFactory>> {
        return Status(StatusCode::kInternal, "not asked");
      },
      clock_);
  EXPECT_EQ(session.status().code(), StatusCode::kSetting);
}

TEST_F(SessionTest, FenceToken_IsThatOfTheGenerationThatRanHere) {
  Open();
  EXPECT_EQ(session_->membership().fence_token, 0u);
  ASSERT_TRUE(session_->Init().ok());
  EXPECT_EQ(session_->membership().fence_token, 1001u);
  FenceAndSettle(1, Lost(2));
  ASSERT_TRUE(AwaitCount(&Record::readies, 2));
  rendezvous_->Settle();
  EXPECT_EQ(session_->membership().generation, 2u);
  EXPECT_EQ(session_->membership().fence_token, 1001u) << "nobody has acknowledged";
  ASSERT_TRUE(session_->Rebuild({}).ok());
  EXPECT_EQ(session_->membership().fence_token, 1002u);
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
  auto init = StartInit();
  ASSERT_TRUE(AwaitCount(&Record::joins, 1));
  rendezvous_->SayRefused(Status(StatusCode::kJoinTimeout, "3 of 4 joined; missing ranks 2"));
  const Status status = init.get();
  EXPECT_EQ(status.code(), StatusCode::kJoinTimeout);
  EXPECT_THAT(status.message(), HasSubstr("missing ranks 2"));
  EXPECT_EQ(session_->membership().state, SessionState::kClosed);
}

TEST_F(SessionTest, Init_NoVerdictInTime_EndsByItself) {
  script_.autopilot = false;
  Open();
  auto init = StartInit();
  ASSERT_TRUE(AwaitCount(&Record::joins, 1));
  clock_.Advance(options_.init_timeout + options_.budget);
  EXPECT_EQ(init.get().code(), StatusCode::kJoinTimeout);
}

// A first init whose last rank comes when the timeout and the budget are over.
class SessionLateInitTest : public SessionTest {
 protected:
  void StartAndPassTheDeadline() {
    script_.autopilot = false;
    options_.interrupt = [this] {
      polls_.release();
      return Status::Ok();
    };
    Open();
    init_ = StartInit();
    ASSERT_TRUE(AwaitCount(&Record::joins, 1));
    const Duration both = options_.init_timeout + options_.budget;
    // The store answers all the while.
    rendezvous_->SayBeat(clock_.Now(), clock_.Now() + both);
    rendezvous_->Settle();
    clock_.Advance(both + Millis(1));
  }
  // The waiting thread has looked at the time so often from now on.
  void AwaitPolls(int count) {
    while (polls_.try_acquire()) {
    }
    for (int i = 0; i < count; ++i) ASSERT_TRUE(polls_.try_acquire_for(std::chrono::seconds(20)));
  }

  std::counting_semaphore<> polls_{0};
  std::future<Status> init_;
};

TEST_F(SessionLateInitTest, LastRankComes_HasTheBudgetToConnect) {
  StartAndPassTheDeadline();
  AwaitPolls(2);
  rendezvous_->SayView(1);
  ASSERT_TRUE(AwaitCount(&Record::readies, 1));
  clock_.Advance(options_.budget - Millis(1));
  AwaitPolls(2);
  rendezvous_->SayRunning(1);
  EXPECT_TRUE(init_.get().ok());
}

TEST_F(SessionLateInitTest, LastRankComesAndDoesNotConnect_EndsWithTheBudget) {
  StartAndPassTheDeadline();
  rendezvous_->SayView(1);
  ASSERT_TRUE(AwaitCount(&Record::readies, 1));
  clock_.Advance(options_.budget);
  const Status status = init_.get();
  EXPECT_EQ(status.code(), StatusCode::kJoinTimeout);
  EXPECT_THAT(status.message(), HasSubstr("state READY"));
}

TEST_F(SessionLateInitTest, Waiting_TakesNoProcessorTime) {
  StartAndPassTheDeadline();
  const SystemClock clock;
  AwaitPolls(1);
  const Instant began = clock.Now();
  AwaitPolls(4);
  EXPECT_GE(clock.Now() - began, 3 * Millis(kInterruptPollMs));
  rendezvous_->SayRefused(Status(StatusCode::kJoinTimeout, "a rank was never started"));
  EXPECT_EQ(init_.get().code(), StatusCode::kJoinTimeout);
}

TEST_F(SessionTest, Init_Interrupted_EndsWithThatStatus) {
  script_.autopilot = false;
  options_.interrupt = [] { return Status(StatusCode::kInterrupted, "Ctrl-C"); };
  Open();
  EXPECT_EQ(session_->Init().code(), StatusCode::kInterrupted);
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

TEST_F(SessionTest, Run_EndsWithinTheCall_ReturnsTheOutcomeAndNeverCallsBack) {
  Boot();
  factory_->Latest(kWorldGroup)->set_run_inline(Status::Ok());
  const auto never = [](const Status&) { FAIL(); };
  const auto ran = world_->Run({}, never, [] { return true; });
  ASSERT_TRUE(ran.ok()) << ran.status().ToString();
  EXPECT_EQ(ran->seq, 1u);
  ASSERT_TRUE(ran->outcome.has_value());
  EXPECT_TRUE(ran->outcome->ok());
  factory_->Latest(kWorldGroup)->set_run_inline(Status(StatusCode::kMismatch, "differs"));
  const auto failed = world_->Run({}, never, [] { return true; });
  ASSERT_TRUE(failed.ok());
  EXPECT_EQ(failed->outcome->code(), StatusCode::kMismatch);
  EXPECT_EQ(failed->outcome->detail().seq, 2u);
  FenceAndSettle(1, Lost(2));
  EXPECT_EQ(Joins(), 2u) << "nothing is left in flight";
}

TEST_F(SessionTest, Run_GoesOnBehindTheCall_CompletesAsSubmit) {
  Boot();
  Outcome outcome;
  const auto ran = world_->Run({}, outcome.Callback(), [] { return true; });
  ASSERT_TRUE(ran.ok());
  EXPECT_FALSE(ran->outcome.has_value());
  EXPECT_TRUE(outcome.Await().ok());
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

TEST_F(SessionTest, ViewWithoutThisRank_IsReported) {
  script_.autopilot = false;
  script_.world_size = 1;
  Open();
  auto init = StartInit();
  ASSERT_TRUE(AwaitCount(&Record::joins, 1));
  rendezvous_->SayView(1);
  ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  EXPECT_EQ(Reports()[0].status.code(), StatusCode::kProtocol);
  session_->Close();
  EXPECT_EQ(init.get().code(), StatusCode::kFailedPrecondition);
}

TEST_F(SessionTest, GroupAbort_EndsItHereAndAsksForAFence) {
  factory_script_.hold = true;
  Boot();
  auto pair = CreateGroup("pair", {1, 3});
  Outcome outcome;
  ASSERT_TRUE(pair->Submit({}, outcome.Callback()).ok());
  pair->Abort("shutting down");
  EXPECT_EQ(outcome.Await().code(), StatusCode::kCommFailed);
  ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  const Report report = Reports()[0];
  EXPECT_EQ(report.kind, ReportKind::kCommFailed);
  EXPECT_THAT(report.status.message(), HasSubstr("shutting down"));
  FenceAndSettle(1, report.status);
  EXPECT_EQ(Run(*world_).code(), StatusCode::kCommFailed);
}

// No operation is there to fail, so nothing but the abort itself says that a fence is to come.
TEST_F(SessionTest, GroupAbort_WithNothingInFlight_RebuildDoesNotTakeItForWhole) {
  Boot();
  world_->Abort("a new start");
  ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  const Status early = session_->Rebuild({.deadline = Deadline::At(clock_.Now())});
  EXPECT_EQ(early.code(), StatusCode::kTimeout);
  FenceAndSettle(1, Reports()[0].status);
  EXPECT_TRUE(session_->Rebuild({}).ok());
  EXPECT_EQ(session_->membership().generation, 2U);
}

// It had no communicator that could be aborted: until the fence came it took operations.
TEST_F(SessionTest, GroupAbort_BeforeItsFirstUse_LetsNothingIn) {
  Boot();
  auto pair = CreateGroup("pair", {1, 3});
  pair->Abort("not wanted");
  ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  EXPECT_EQ(Run(*pair).code(), StatusCode::kCommFailed);
  FenceAndSettle(1, Reports()[0].status);
  EXPECT_TRUE(session_->Rebuild({}).ok());
  EXPECT_TRUE(Run(*pair).ok());
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
  ASSERT_TRUE(session_->Rebuild({}).ok());
  EXPECT_TRUE(session_->CreateGroup("pair", {1, 3}).ok()) << "names are free in a new generation";
}

TEST_F(SessionTest, GroupClose_OfAnEndedGeneration_SaysNoGoodbye) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  rendezvous_->SayView(2);
  ASSERT_TRUE(AwaitCount(&Record::readies, 2));
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
  ASSERT_TRUE(session_->Rebuild({}).ok());
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
  EXPECT_EQ(session_->Rebuild({}).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(session_->CreateGroup("x", {1}).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(session_->Init().code(), StatusCode::kFailedPrecondition);
}

TEST_F(SessionTest, Close_WakesWhoWaitsInRebuild) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  auto rebuild = StartRebuild();
  session_->Close();
  const Status status = rebuild.get();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("the session is closed"));
}

TEST_F(SessionTest, Hold_ReachesTheCommunicators) {
  Boot();
  const Instant until = clock_.Now() + std::chrono::minutes(30);
  rendezvous_->SayHeld(until);
  rendezvous_->Settle();
  EXPECT_EQ(factory_->held_until(), until);
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
    if (session_->Rebuild({}).code() != StatusCode::kForked) wrong |= 16;
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

TEST_F(SessionTest, AskedHowFarItHasCome_SaysSoOfEachGroup_ThoughItWaitsForNothing) {
  Boot();
  const auto group = CreateGroup("pair", {0, 1});
  const auto gone = CreateGroup("gone", {0, 1});
  for (const auto& one : {group, gone}) ASSERT_TRUE(Run(*one).ok());
  gone->Close();
  factory_->Latest("pair")->set_progress(
      [this] { factory_->SayProgress(1, {.group = "pair", .entered = 1, .peers = {}}); });
  rendezvous_->SayAskProgress(1, {"pair", "gone", "never", "pair/cuda"});
  rendezvous_->Settle();
  std::map<std::string, GroupProgress> said;
  ASSERT_TRUE(record_->Await([&](const Record& record) {
    for (const WaitingReport& report : record.waiting) {
      EXPECT_EQ(report.generation, 1u);
      EXPECT_TRUE(report.calls.empty());
      for (const GroupProgress& one : report.progress) said[one.group] = one;
    }
    return said.size() == 3;
  }));
  EXPECT_TRUE(said.at("pair").exists);
  EXPECT_EQ(said.at("pair").entered, 1u);
  EXPECT_FALSE(said.at("never").exists);
  EXPECT_FALSE(said.at("pair/cuda").exists);
  EXPECT_FALSE(said.contains("gone"));  // It has left it, and says so there.
}

// Whoever asks compares it with what another rank has made of that name.
TEST_F(SessionTest, AskedAboutGroups_SaysOfWhichRanksTheyAreMade) {
  Boot();
  const auto pair = session_->CreateGroup("pair", {1, 0}, {}, "train.py:3 main").value();
  const auto unused = CreateGroup("unused", {0, 1, 2});
  const auto gone = CreateGroup("gone", {1, 3});
  for (const auto& one : {pair, gone}) ASSERT_TRUE(Run(*one).ok());
  gone->Close();
  factory_->Latest("pair")->set_progress(
      [this] { factory_->SayProgress(1, {.group = "pair", .entered = 1, .peers = {}}); });
  rendezvous_->SayAskProgress(1, {"pair", "unused", "gone", "never", "pair/cuda"});
  rendezvous_->Settle();
  std::map<std::string, GroupMade> said;
  ASSERT_TRUE(record_->Await([&](const Record& record) {
    for (const WaitingReport& report : record.waiting) {
      for (const GroupMade& one : report.made) said[one.group] = one;
    }
    return said.size() == 4;
  }));
  EXPECT_EQ(said.at("pair").ranks.text, "1,0");
  EXPECT_EQ(said.at("pair").ranks.made_at, "train.py:3 main");
  EXPECT_EQ(said.at("pair").ranks.digest, RanksOfGroup(std::vector{1, 0}, "").digest);
  EXPECT_TRUE(said.at("pair").used);
  EXPECT_EQ(said.at("pair/cuda").ranks.text, "1,0");
  EXPECT_EQ(said.at("unused").ranks.text, "0-2");
  EXPECT_FALSE(said.at("unused").used);
  EXPECT_EQ(said.at("gone").ranks.text, "1,3");
  EXPECT_TRUE(said.at("gone").used);
}

TEST_F(SessionTest, WhatWaits_IsToldWithTheRanksOfItsGroup) {
  Boot();
  const auto pair = session_->CreateGroup("pair", {1, 0}, {}, "train.py:3 main").value();
  ASSERT_TRUE(Run(*pair).ok());
  EXPECT_EQ(factory_->Latest("pair")->spec().made_at, "train.py:3 main");
  factory_->SayWaiting("pair", 1, {.seq = 2, .missing = {0}});
  ASSERT_TRUE(record_->Await([](const Record& record) { return !record.waiting.empty(); }));
  const WaitingReport report =
      record_->Get<WaitingReport>([](const Record& record) { return record.waiting.front(); });
  ASSERT_EQ(report.made.size(), 1u);
  EXPECT_EQ(report.made[0].group, "pair");
  EXPECT_EQ(report.made[0].ranks.text, "1,0");
  EXPECT_TRUE(report.made[0].used);
}

TEST_F(SessionTest, ThatAllHaveEntered_IsPassedOnToTheCommunicator) {
  Boot();
  const auto group = CreateGroup("pair", {0, 1});
  ASSERT_TRUE(Run(*group).ok());
  rendezvous_->SayAllEntered(7, {{"pair", false, 1}});  // Of another generation.
  rendezvous_->SayAllEntered(1, {{"pair", false, 1}, {"never", true, 2}});
  rendezvous_->Settle();
  const std::vector<EnteredCall> passed = factory_->Latest("pair")->all_entered();
  ASSERT_EQ(passed.size(), 1u);
  EXPECT_EQ(passed[0].group, "pair");
  EXPECT_EQ(passed[0].seq, 1u);
}

}  // namespace
}  // namespace resilient::recovery
