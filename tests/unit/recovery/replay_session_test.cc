// Goal: behind a broken link the replay layer runs again what it may, and the program sees nothing;
// behind anything else it meets what it would meet without the layer.
// Method: a session whose service and communicators are the test's; this rank is alone in its
// world, so that it meets itself. What several ranks do is checked in replay_world_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "runtime/recovery/replay_log.h"
#include "runtime/recovery/replay_session.h"
#include "tests/unit/recovery/session_fixture.h"

namespace resilient::recovery {
namespace {

Status LinkBroke(std::uint64_t generation) {
  FailureDetail detail;
  detail.generation = generation;
  return Status(StatusCode::kCommFailed, "the link broke", detail);
}

// Keeps the first caller of an operation at the door of the session inside. Thread: thread-safe.
class Doorkeeper final : public Observer {
 public:
  explicit Doorkeeper(std::function<void()> keep) : keep_(std::move(keep)) {}
  void Ask(Answer answer) override { answer({}); }
  void NoteOperation() override {
    if (!kept_.exchange(true)) keep_();
  }
  std::vector<int> Submitters() const override { return {}; }
  std::uint64_t Expect(std::string, Duration) override { return 0; }
  void EndExpectation(std::uint64_t) override {}
  void Close(Deadline) override {}

 private:
  const std::function<void()> keep_;
  std::atomic<bool> kept_{false};
};

class ReplaySessionTest : public SessionTest {
 protected:
  void BootAlone(bool hold) {
    script_.world_size = 1;
    factory_script_.hold = hold;
    options_.rank = 0;
    options_.world_size = 1;
    options_.replay = true;
    Open();
    ASSERT_TRUE(session_->Init().ok());
    world_ = CreateGroup(kWorldGroup, {0});
  }

  // And this rank has asked for the next generation, which is the test's to give.
  void BreakTheLink() {
    rendezvous_->set_autopilot(false);
    FenceAndSettle(1, LinkBroke(1));
    ASSERT_TRUE(AwaitCount(&Record::joins, 2));
    rendezvous_->Settle();  // Which has been answered by nobody.
  }

  static Operation SumOf(float* value) {
    Operation sum;
    sum.kind = OpKind::kAllReduce;
    sum.dtype = DataType::kFloat32;
    sum.reduce = ReduceOp::kSum;
    sum.data = value;
    sum.count = 1;
    return sum;
  }
};

TEST_F(ReplaySessionTest, Undisturbed_OperationsEndAsWithoutTheLayer) {
  BootAlone(false);
  EXPECT_TRUE(Run(*world_).ok());
  EXPECT_TRUE(session_->failure().ok());
  EXPECT_EQ(session_->membership().generation, 1u);
}

TEST_F(ReplaySessionTest, LinkBreaks_ThePendingOperationEndsInTheNextGeneration) {
  BootAlone(true);
  float value = 1;
  Outcome outcome;
  ASSERT_TRUE(world_->Submit(SumOf(&value), outcome.Callback()).ok());
  value = 7;  // As a reduction that was cut off leaves it.
  factory_->set_script({});
  rendezvous_->SayFence(1, LinkBroke(1));
  EXPECT_TRUE(outcome.Await().ok());
  EXPECT_EQ(value, 1);  // Its input as it was.
  EXPECT_TRUE(session_->failure().ok());
  EXPECT_TRUE(Run(*world_).ok());
  EXPECT_EQ(session_->acknowledged().generation, 2u);
  EXPECT_EQ(session_->epoch(), 1u);
  EXPECT_EQ(session_->membership().fence_token, 1002u);
}

TEST_F(ReplaySessionTest, StartedMeanwhile_IsQueuedAndRunBehindIt) {
  BootAlone(true);
  Outcome first;
  Outcome second;
  ASSERT_TRUE(world_->Submit({}, first.Callback()).ok());
  BreakTheLink();
  const auto seq = world_->Submit({}, second.Callback());
  ASSERT_TRUE(seq.ok()) << seq.status().ToString();
  EXPECT_EQ(*seq, 2u);
  EXPECT_FALSE(first.HasRun());
  EXPECT_TRUE(session_->failure().ok());
  factory_->set_script({});
  rendezvous_->set_autopilot(true);
  rendezvous_->SayView(2);
  EXPECT_TRUE(first.Await().ok());
  EXPECT_TRUE(second.Await().ok());
}

TEST_F(ReplaySessionTest, RunOnTheCallersThread_IsReplayedToo) {
  BootAlone(true);
  ASSERT_TRUE(AwaitCount(&Record::readies, 1));
  factory_->Latest(kWorldGroup)->set_run_inline(Status::Ok());
  Outcome unused;
  const auto ran = world_->Run({}, unused.Callback(), nullptr);
  ASSERT_TRUE(ran.ok());
  ASSERT_TRUE(ran->outcome.has_value());
  EXPECT_TRUE(ran->outcome->ok());
  EXPECT_EQ(ran->seq, 1u);
  EXPECT_FALSE(unused.HasRun());
}

TEST_F(ReplaySessionTest, RankLost_IsToldAtOnceAndStaysUntilRebuild) {
  BootAlone(true);
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  factory_->set_script({});
  rendezvous_->SayFence(1, Lost(0));
  EXPECT_EQ(outcome.Await().code(), StatusCode::kRankLost);
  EXPECT_EQ(Run(*world_).code(), StatusCode::kRankLost);
  EXPECT_TRUE(session_->Rebuild({}).ok());
  EXPECT_TRUE(Run(*world_).ok());
}

// The layer's thread may come to a fence when the program has rebuilt behind it, at whatever point
// of its way: it must not take the new generation for the failed one.
TEST_F(ReplaySessionTest, RebuiltWhileItsThreadComesToTheFence_StaysOpen) {
  BootAlone(true);
  for (std::uint64_t generation = 1; generation <= 300; ++generation) {
    Outcome outcome;
    const auto seq = world_->Submit({}, outcome.Callback());
    ASSERT_TRUE(seq.ok()) << "in generation " << generation << ": " << seq.status().ToString();
    rendezvous_->SayFence(generation, Lost(0));
    ASSERT_EQ(outcome.Await().code(), StatusCode::kRankLost);
    ASSERT_TRUE(session_->Rebuild({}).ok());
  }
}

// Its word to those that heal is for them alone: no member has to hear it before another one
// leaves.
TEST_F(ReplaySessionTest, AMemberLeavesBeforeItsWordIsHeard_NobodyNeedsIt) {
  BootAlone(true);
  rendezvous_->SayFence(1, Lost(0));
  ASSERT_FALSE(session_->AwaitFailure(Deadline::Never()).ok());
  ASSERT_TRUE(session_->Rebuild({}).ok());
  const std::shared_ptr<FakeCommunicator> place = factory_->Latest("resilient.replay.2");
  ASSERT_NE(place, nullptr);
  FailureDetail detail;
  detail.rank = 0;
  place->CompleteNext(Status(StatusCode::kLeft, "rank 0 has left the group", detail));
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  factory_->Latest(kWorldGroup)->CompleteNext(Status::Ok());
  EXPECT_TRUE(outcome.Await().ok());
  rendezvous_->Settle();
  EXPECT_TRUE(Reports().empty());
}

TEST_F(ReplaySessionTest, AbortedByTheProgram_IsNotRunAgain) {
  BootAlone(true);
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  world_->Abort("on purpose");
  EXPECT_EQ(outcome.Await().code(), StatusCode::kCommFailed);
  ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  factory_->set_script({});
  rendezvous_->SayFence(1, Reports().front().status);
  rendezvous_->Settle();
  EXPECT_EQ(session_->AwaitFailure(Deadline::Never()).code(), StatusCode::kCommFailed);
  EXPECT_TRUE(session_->Rebuild({}).ok());
  EXPECT_TRUE(Run(*world_).ok());
}

TEST_F(ReplaySessionTest, MoreToTellThanFits_IsTheReasonThatIsTold) {
  BootAlone(false);
  std::vector<std::shared_ptr<Group>> groups;
  for (char name = 'a'; name <= 'p'; ++name) {
    groups.push_back(CreateGroup(std::string(kReplaySummaryMax / 16, name), {0}));
  }
  rendezvous_->SayFence(1, LinkBroke(1));
  EXPECT_THAT(session_->AwaitFailure(Deadline::Never()).message(),
              ::testing::HasSubstr("rank 0: it has too many groups and messages to tell of"));
}

// The others may have heard it, and go on by it.
TEST_F(ReplaySessionTest, NotAllMetInTime_TheGenerationOfTheMeetingIsEnded) {
  BootAlone(true);
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  rendezvous_->SayFence(1, LinkBroke(1));  // No operation of the next generation ends, either.
  const InterruptCheck bound = GiveUpAtTestBound();
  while (factory_->Latest("resilient.replay.2") == nullptr && bound().ok()) {
    std::this_thread::yield();
  }
  clock_.Advance(std::chrono::minutes(10));
  ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  EXPECT_EQ(Reports().front().generation, 2u);
  EXPECT_FALSE(IsLinkFailure(Reports().front().status));
  EXPECT_EQ(outcome.Await().code(), StatusCode::kCommFailed);
}

TEST_F(ReplaySessionTest, ProgramIsToldWhileItHeals_NothingIsRunAgain) {
  BootAlone(true);
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  BreakTheLink();
  EXPECT_FALSE(session_->Object(Lost(0)));
  EXPECT_TRUE(session_->Object(LinkBroke(1)));
  factory_->set_script({});
  rendezvous_->set_autopilot(true);
  rendezvous_->SayView(2);
  EXPECT_EQ(outcome.Await().code(), StatusCode::kCommFailed);
  EXPECT_THAT(session_->failure().message(), ::testing::HasSubstr("a wait of its program"));
  EXPECT_TRUE(session_->Rebuild({}).ok());
  EXPECT_FALSE(session_->Object(LinkBroke(1))) << "the program has met it since";
}

// The others go on already: this generation ends for all.
TEST_F(ReplaySessionTest, ProgramIsToldWhenItHasHealed_TheGenerationIsEnded) {
  BootAlone(false);
  rendezvous_->SayFence(1, LinkBroke(1));
  const InterruptCheck bound = GiveUpAtTestBound();
  while (session_->acknowledged().generation != 2 && bound().ok()) std::this_thread::yield();
  EXPECT_TRUE(Run(*world_).ok());
  EXPECT_TRUE(session_->Object(LinkBroke(1)));
  ASSERT_TRUE(AwaitCount(&Record::reports, 1));
  EXPECT_EQ(Reports().front().generation, 2u);
  EXPECT_FALSE(IsLinkFailure(Reports().front().status));
}

TEST_F(ReplaySessionTest, RebuildWhileItHeals_NothingIsRunAgain) {
  std::atomic<std::thread::id> rebuilder;
  std::atomic<bool> waits{false};
  const InterruptCheck bound = GiveUpAtTestBound();
  options_.interrupt = [&] {
    if (std::this_thread::get_id() == rebuilder.load()) waits = true;
    return bound();
  };
  BootAlone(true);
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  BreakTheLink();
  auto rebuild = std::async(std::launch::async, [&] {
    rebuilder = std::this_thread::get_id();
    return session_->Rebuild({});
  });
  while (!waits && bound().ok()) std::this_thread::yield();
  factory_->set_script({});
  rendezvous_->set_autopilot(true);
  rendezvous_->SayView(2);
  EXPECT_TRUE(rebuild.get().ok());
  EXPECT_EQ(outcome.Await().code(), StatusCode::kCommFailed);
  EXPECT_TRUE(Run(*world_).ok());
}

TEST_F(ReplaySessionTest, LossOnTheWay_IsToldInsteadOfTheLink) {
  BootAlone(true);
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  BreakTheLink();
  rendezvous_->SayView(2);
  rendezvous_->Settle();
  rendezvous_->SayFence(2, Lost(0));
  ASSERT_TRUE(AwaitCount(&Record::joins, 3));
  rendezvous_->SayRefused(Lost(0));  // Nobody takes the seat: the recovery ends.
  EXPECT_EQ(outcome.Await().code(), StatusCode::kRankLost);
  EXPECT_EQ(session_->failure().code(), StatusCode::kRankLost);
  EXPECT_EQ(Run(*world_).code(), StatusCode::kRankLost);
}

TEST_F(ReplaySessionTest, ClosedMeanwhile_TheOperationIsCancelled) {
  BootAlone(true);
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  BreakTheLink();
  session_->Close();
  EXPECT_EQ(outcome.Await().code(), StatusCode::kCancelled);
}

TEST_F(ReplaySessionTest, GroupIsClosedMeanwhile_WhatIsStartedLaterIsRefused) {
  BootAlone(true);
  BreakTheLink();
  world_->Close();
  Outcome outcome;
  const auto seq = world_->Submit({}, outcome.Callback());
  EXPECT_EQ(seq.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(seq.status().message(), ::testing::HasSubstr("is closed on this rank"));
}

TEST_F(ReplaySessionTest, SessionIsClosedMeanwhile_WhatIsStartedLaterIsRefused) {
  BootAlone(true);
  BreakTheLink();
  session_->Close();
  Outcome outcome;
  const auto seq = world_->Submit({}, outcome.Callback());
  EXPECT_EQ(seq.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(seq.status().message(), ::testing::HasSubstr("the session is closed"));
}

// A driver still uses its memory when the group is closed.
TEST_F(ReplaySessionTest, GroupIsClosedBeforeAnOperationEnds_ItsEndIsTold) {
  BootAlone(true);
  rendezvous_->set_autopilot(false);
  factory_->Latest(kWorldGroup)->set_linger(true);
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  FenceAndSettle(1, LinkBroke(1));
  world_->Close();
  EXPECT_FALSE(outcome.HasRun());
  factory_->Latest(kWorldGroup)->CompleteNext(LinkBroke(1));
  EXPECT_EQ(outcome.Await().code(), StatusCode::kCancelled);
}

// In the new generation it would be the first one, and at the others something else is.
TEST_F(ReplaySessionTest, OnItsWayInWhenTheLinkBreaks_IsQueuedBehindTheMeeting) {
  bool slipped = false;
  options_.observer = std::make_shared<Doorkeeper>([this, &slipped] {
    rendezvous_->SayFence(1, LinkBroke(1));
    ASSERT_TRUE(AwaitCount(&Record::readies, 2));  // The next generation is built.
    for (int i = 0; i < 2000 && !slipped; ++i) {
      std::this_thread::yield();
      slipped = record_->Get<bool>([](const Record& now) { return !now.acknowledged.empty(); });
    }
  });
  BootAlone(false);
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  EXPECT_FALSE(slipped) << "generation 2 was open to an operation of generation 1";
  EXPECT_TRUE(outcome.Await().ok());
  EXPECT_EQ(session_->acknowledged().generation, 2u);
}

// Those who were there before tell each other that nothing is run again, and wait until all have.
TEST_F(ReplaySessionTest, ANewcomer_TellsTheOthersThatItRunsNothingAgain) {
  script_.first_generation = 3;
  BootAlone(false);
  ASSERT_NE(factory_->Latest("resilient.replay.3"), nullptr);
  EXPECT_TRUE(factory_->Latest("resilient.replay.3")->IsQuiet());
}

TEST_F(ReplaySessionTest, TheFirstGeneration_HasNobodyToTell) {
  BootAlone(false);
  EXPECT_EQ(factory_->Latest("resilient.replay.1"), nullptr);
}

// A session that the test can step into. Owner: the layer around it. Thread: thread-safe.
class Interposed final : public Session {
 public:
  explicit Interposed(std::shared_ptr<Session> inner) : inner_(std::move(inner)) {}
  Status Init() override { return inner_->Init(); }
  Result<std::shared_ptr<Group>> CreateGroup(std::string name, std::vector<int> ranks,
                                             NcclOptions nccl, std::string made_at) override {
    return inner_->CreateGroup(std::move(name), std::move(ranks), std::move(nccl),
                               std::move(made_at));
  }
  Membership membership() const override { return inner_->membership(); }
  Membership acknowledged() const override {
    Membership found = inner_->acknowledged();
    if (on_acknowledged) std::exchange(on_acknowledged, nullptr)();
    return found;
  }
  std::uint64_t epoch() const override { return inner_->epoch(); }
  Status failure() const override {
    Status found = inner_->failure();
    if (on_failure) std::exchange(on_failure, nullptr)();
    return found;
  }
  Status AwaitFailure(Deadline deadline) const override { return inner_->AwaitFailure(deadline); }
  bool Object(const Status& told) override { return inner_->Object(told); }
  std::optional<Incident> last_incident() const override { return inner_->last_incident(); }
  Result<SessionEvent> AwaitEvent(std::uint64_t after, Deadline deadline) const override {
    asked_behind_ = after;
    auto event = inner_->AwaitEvent(after, deadline);
    if (!deaf) return event;
    std::this_thread::yield();
    return Status(StatusCode::kTimeout, "it does not listen");
  }
  Status Rebuild(const RebuildOptions& options) override {
    if (on_rebuild) std::exchange(on_rebuild, nullptr)();
    const Status rebuilt = inner_->Rebuild(options);
    if (on_rebuilt) std::exchange(on_rebuilt, nullptr)();
    return rebuilt;
  }
  Status OfferRoom(int size, std::uint64_t commit) override {
    return inner_->OfferRoom(size, commit);
  }
  void AnnounceEnd(const std::string& why, Deadline deadline) override {
    inner_->AnnounceEnd(why, deadline);
  }
  const InterruptCheck& interrupt() const override { return inner_->interrupt(); }
  void BeginBlocked(const std::string& group, bool point_to_point, std::uint64_t seq) override {
    inner_->BeginBlocked(group, point_to_point, seq);
  }
  void EndBlocked() override { inner_->EndBlocked(); }
  void Close() override { inner_->Close(); }
  bool InForkedChild() const override { return inner_->InForkedChild(); }

  std::function<void()> on_rebuild;  // Called once, before the session is.
  // Called once, before the layer hears of what was found.
  std::function<void()> on_rebuilt;
  mutable std::function<void()> on_acknowledged;
  mutable std::function<void()> on_failure;
  std::atomic<bool> deaf{false};  // The layer hears of no event.
  std::uint64_t asked_behind() const { return asked_behind_; }

 private:
  const std::shared_ptr<Session> inner_;
  mutable std::atomic<std::uint64_t> asked_behind_{0};
};

class ReplayAroundTest : public ReplaySessionTest {
 protected:
  void SetUp() override {
    script_.world_size = options_.world_size = 1;
    options_.rank = 0;
    Open();
    plain_ = session_;
    inside_ = std::make_shared<Interposed>(plain_);
    session_ = WithReplay(inside_, LadderOf(options_.budget, options_.seat_wait), clock_);
    ASSERT_TRUE(session_->Init().ok());
    world_ = CreateGroup(kWorldGroup, {0});
  }
  void TearDown() override {
    world_.reset();
    session_.reset();
  }

  void AwaitHealed(std::uint64_t generation) {
    const InterruptCheck bound = GiveUpAtTestBound();
    while (session_->acknowledged().generation != generation && bound().ok()) {
      std::this_thread::yield();
    }
    while (session_->membership().state != SessionState::kRunning && bound().ok()) {
      std::this_thread::yield();
    }
  }

  std::shared_ptr<Session> plain_;
  std::shared_ptr<Interposed> inside_;
};

// The session inside drops it: the generation is over.
TEST_F(ReplayAroundTest, AbortedBeforeTheLinkIsKnown_NothingIsRunAgain) {
  inside_->deaf = true;
  FenceAndSettle(1, LinkBroke(1));
  world_->Abort("on purpose");
  inside_->deaf = false;
  const Status failure = session_->AwaitFailure(Deadline::Never());
  EXPECT_EQ(failure.code(), StatusCode::kCommFailed);
  EXPECT_THAT(failure.message(), ::testing::HasSubstr("aborted group 'world': on purpose"));
}

TEST_F(ReplayAroundTest, LinkBreaksWhileRebuildReturns_IsGotOver) {
  FenceAndSettle(1, Lost(0));
  ASSERT_EQ(session_->AwaitFailure(Deadline::Never()).code(), StatusCode::kRankLost);
  inside_->on_rebuilt = [&] {
    FenceAndSettle(2, LinkBroke(2));
    std::uint64_t last = 0;
    for (bool rebuilt = false; !rebuilt;) {
      const auto event = plain_->AwaitEvent(last, Deadline::Never());
      ASSERT_TRUE(event.ok());
      last = event->number;
      rebuilt = event->kind == SessionEvent::Kind::kRebuilt && event->generation == 3;
    }
    // The thread waits, from the time before the clock is moved on.
    const InterruptCheck bound = GiveUpAtTestBound();
    while (inside_->asked_behind() < last && bound().ok()) std::this_thread::yield();
  };
  ASSERT_TRUE(session_->Rebuild({}).ok());
  clock_.Advance(std::chrono::seconds(2));
  AwaitHealed(3);
  EXPECT_EQ(session_->acknowledged().generation, 3u);
  EXPECT_TRUE(session_->failure().ok());
}

// The refusal has an event, which the layer's thread has not come to.
TEST_F(ReplayAroundTest, RefusedAsItIsAboutToRebuild_NoJoinIsTriedAgain) {
  rendezvous_->set_autopilot(false);
  inside_->on_rebuild = [&] {
    ASSERT_TRUE(AwaitCount(&Record::joins, 2));
    rendezvous_->SayRefused(Lost(0));
    rendezvous_->Settle();
  };
  FenceAndSettle(1, LinkBroke(1));
  EXPECT_EQ(session_->AwaitFailure(Deadline::Never()).code(), StatusCode::kCommFailed);
  EXPECT_EQ(Joins(), 2u);
}

// Whoever was refused finds a reason that is of the past when it comes to act on it.
TEST_F(ReplayAroundTest, HealedWhileTheRefusedLooksWhy_ItIsRunAndNothingElseHealed) {
  inside_->deaf = true;
  FenceAndSettle(1, LinkBroke(1));
  inside_->on_failure = [&] {
    inside_->deaf = false;
    AwaitHealed(2);
  };
  Outcome outcome;
  ASSERT_TRUE(world_->Submit({}, outcome.Callback()).ok());
  EXPECT_TRUE(outcome.Await().ok());
  EXPECT_EQ(session_->membership().state, SessionState::kRunning);
  EXPECT_EQ(session_->acknowledged().generation, 2u);
}

// Another of its threads has rebuilt meanwhile, and a link has broken and healed behind that.
TEST_F(ReplayAroundTest, RebuildReturnsBehindALaterOne_TheLaterOneStands) {
  FenceAndSettle(1, Lost(0));
  ASSERT_EQ(session_->AwaitFailure(Deadline::Never()).code(), StatusCode::kRankLost);
  inside_->on_acknowledged = [&] {
    ASSERT_TRUE(session_->Rebuild({}).ok());
    ASSERT_TRUE(Run(*world_).ok());
    FenceAndSettle(2, LinkBroke(2));
    AwaitHealed(3);
  };
  ASSERT_TRUE(session_->Rebuild({}).ok());
  EXPECT_EQ(session_->acknowledged().generation, 3u);
  EXPECT_EQ(session_->epoch(), 2u);
  EXPECT_TRUE(Run(*world_).ok());
}

TEST_F(ReplaySessionTest, ItsLastReferenceIsDroppedByACompletion_ItsMemoryStays) {
  BootAlone(true);
  const std::unique_ptr<Session> layer(session_.get());  // What was given up is the test's.
  Group& world = *world_;
  std::promise<void> ran;
  ASSERT_TRUE(world
                  .Submit({},
                          [&](const Status&) {
                            world_.reset();
                            session_.reset();
                            ran.set_value();
                          })
                  .ok());
  factory_->Latest(kWorldGroup)->CompleteNext(Status::Ok());
  ASSERT_EQ(ran.get_future().wait_for(kTestBound), std::future_status::ready);
  EXPECT_EQ(layer->membership().state, SessionState::kClosed);
}

Operation SendTo(int peer) {
  Operation send;
  send.kind = OpKind::kSend;
  send.peer = peer;
  return send;
}

TEST_F(ReplaySessionTest, MessageBehindOneThatIsSentAgain_HasItsOwnNumber) {
  BootAlone(true);
  Outcome first;
  Outcome second;
  ASSERT_TRUE(world_->Submit(SendTo(0), first.Callback()).ok());
  BreakTheLink();
  ASSERT_EQ(world_->Submit(SendTo(0), second.Callback()).value(), 2u);
  rendezvous_->set_autopilot(true);
  rendezvous_->SayView(2);
  const InterruptCheck bound = GiveUpAtTestBound();
  while (factory_->Latest("resilient.replay.2") == nullptr && bound().ok()) {
    std::this_thread::yield();
  }
  // All that they say to each other.
  const auto meeting = factory_->Latest("resilient.replay.2");
  while (session_->membership().state != SessionState::kRunning && bound().ok()) {
    if (!meeting->IsQuiet()) meeting->CompleteNext(Status::Ok());
    std::this_thread::yield();
  }
  session_->BeginBlocked(kWorldGroup, true, 2);
  const WaitingOperation waiting{.seq = 2, .point_to_point = true};
  factory_->SayWaiting(kWorldGroup, 2, waiting);
  ASSERT_TRUE(AwaitCount(&Record::waiting, 1));
  const WaitingReport report =
      record_->Get<WaitingReport>([](const Record& record) { return record.waiting.front(); });
  EXPECT_TRUE(report.calls.front().blocked) << "the second message at the new communicator";
  EXPECT_EQ(world_->Submit(SendTo(0), Outcome().Callback()).value(), 3u);
}

}  // namespace
}  // namespace resilient::recovery
