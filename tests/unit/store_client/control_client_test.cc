// Goal: the membership line (beats, events in order, messages until acknowledged, pings, goodbye,
// lost sessions) and exit reports. Method: the test plays the server step by step.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <resilient/store/client.h>

#include "store/client/fence_token.h"
#include "tests/support/captured_stderr.h"
#include "tests/support/jumping_clock.h"
#include "tests/unit/store_client/scripted_server.h"

namespace resilient::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Writes down what was called. Thread: thread-safe.
class EventLog final : public RendezvousEvents {
 public:
  void OnView(const View& view) override {
    token_ = view.fence_token;
    Note("view " + std::to_string(view.generation));
  }
  void OnRunning(std::uint64_t generation) override {
    Note("running " + std::to_string(generation));
  }
  void OnFence(const Fence& fence) override {
    Note("fence " + std::to_string(fence.generation) + " " +
         std::string(CodeName(fence.cause.code())));
  }
  void OnJoinRefused(std::uint64_t, const Status& why) override {
    Note("refused " + std::string(CodeName(why.code())));
  }
  void OnSessionLost(const Status& why) override {
    Note("lost " + std::string(CodeName(why.code())));
  }
  void OnHeld(Instant until) override {
    Note(until > SystemClock().Now() + std::chrono::seconds(30) ? "held" : "not held");
  }
  void OnBeat(Instant now, Instant contact, Duration lease) override {
    RendezvousEvents::OnBeat(now, contact, lease);
    std::lock_guard lock(mutex_);
    lease_ = lease;
  }
  void OnPaused() override { Note("paused"); }
  void OnConfirmed() override { Note("confirmed"); }

  std::uint64_t token() const { return token_; }

  void Note(std::string text) {
    std::lock_guard lock(mutex_);
    lines_.push_back(std::move(text));
    changed_.notify_all();
  }
  // Of the last beat; none while the control thread is away.
  std::optional<Duration> lease() {
    std::lock_guard lock(mutex_);
    return lease_;
  }
  // What was noted once there are `count` lines.
  std::vector<std::string> Await(std::size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [&] { return lines_.size() >= count; }));
    return lines_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::uint64_t> token_ = 0;  // Of the latest view.
  // Guarded by mutex_.
  std::vector<std::string> lines_;
  std::optional<Duration> lease_;
};

class ControlClientTest : public ::testing::Test {
 protected:
  ConnectOptions Options() {
    ConnectOptions options;
    options.addresses = {server_.address()};
    options.job = "train";
    return options;
  }
  Deadline In(Duration time) { return Deadline::After(clock_.Now(), time); }

  // A started membership line; the server's side of it is `line_`.
  std::unique_ptr<Rendezvous> Started(const Welcome& welcome) {
    auto rendezvous = MakeRendezvous(Options(), {}, clock_);
    StartAndGreet(*rendezvous, events_, welcome);
    return rendezvous;
  }
  void StartAndGreet(Rendezvous& rendezvous, EventLog& events, const Welcome& welcome) {
    auto starting =
        std::async(std::launch::async, [&] { return rendezvous.Start(events, In(kPatience)); });
    line_ = std::make_unique<ScriptedConnection>(server_.Accept());
    EXPECT_EQ(line_->Greet(welcome).role, Role::kControl);
    Status status = starting.get();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  void Break(const Welcome& welcome) {
    line_.reset();
    line_ = std::make_unique<ScriptedConnection>(server_.Accept());
    line_->Greet(welcome);
  }
  // Plays the server's part of a goodbye.
  void CloseOrderly(Rendezvous& rendezvous) {
    auto closing = std::async(std::launch::async, [&] { rendezvous.Close(In(kPatience)); });
    std::optional<Request> leave = line_->ReadOp<LeaveOp>();
    EXPECT_TRUE(leave);
    line_->SendReply(ReplyTo(leave));
    EXPECT_TRUE(line_->SeesEnd());
    closing.get();
  }

  JoinRequest JoinOf(int rank) {
    JoinRequest request;
    request.rank = rank;
    request.world_size = 4;
    request.endpoint = "127.0.0.1:5";
    request.generation = 2;
    return request;
  }

  testing::JumpingClock clock_;
  ScriptedServer server_;
  EventLog events_;
  std::unique_ptr<ScriptedConnection> line_;
};

// Else a pause right behind the join is measured with the lease that was assumed before.
TEST_F(ControlClientTest, Lease_IsToldBeforeAnyEvent) {
  Welcome welcome = TestWelcome();
  welcome.heartbeat_interval_ms = 20'000;
  welcome.lease_ttl_ms = 60'000;
  ConnectOptions options = Options();
  const std::string& address = options.addresses.front();
  for (const std::string& host :
       {address.substr(0, address.rfind(':')), std::string("localhost")}) {
    options.addresses = {host + address.substr(address.rfind(':'))};
    auto rendezvous = MakeRendezvous(options, {}, clock_);
    EventLog events;
    StartAndGreet(*rendezvous, events, welcome);
    line_->SendEvent(RunningEvent{2});
    events.Await(1);
    EXPECT_EQ(events.lease(), std::chrono::seconds(60));
    CloseOrderly(*rendezvous);
  }
}

TEST_F(ControlClientTest, Beats_ComeByThemselvesAndGrow) {
  Welcome welcome = TestWelcome();
  welcome.heartbeat_interval_ms = 20;
  auto rendezvous = Started(welcome);
  std::uint64_t last = 0;
  for (int i = 0; i < 10; ++i) {
    std::optional<Request> beat = line_->ReadOp<HeartbeatOp>();
    ASSERT_TRUE(beat);
    EXPECT_GT(std::get<HeartbeatOp>(beat->op).beat, last);
    EXPECT_EQ(beat->seq, 0u);
    last = std::get<HeartbeatOp>(beat->op).beat;
    line_->SendEvent(HeartbeatAckEvent{last});
  }
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, Events_ArriveInOrderWithTasksBetween) {
  auto rendezvous = Started(TestWelcome());
  View view;
  view.generation = 3;
  line_->SendEvent(view);
  line_->SendEvent(RunningEvent{3});
  line_->SendEvent(Fence{3, Status(StatusCode::kRankLost, "rank 2 is gone")});
  line_->SendEvent(JoinRefusedEvent{Status(StatusCode::kWorldSize, "4 or 5")});
  events_.Await(4);
  std::promise<std::thread::id> task;
  EXPECT_TRUE(rendezvous->Post([&] {
    events_.Note("task");
    task.set_value(std::this_thread::get_id());
  }));
  EXPECT_NE(task.get_future().get(), std::this_thread::get_id());
  EXPECT_THAT(events_.Await(5), ElementsAre("view 3", "running 3", "fence 3 RANK_LOST",
                                            "refused WORLD_SIZE", "task"));
  CloseOrderly(*rendezvous);
  EXPECT_FALSE(rendezvous->Post([] {}));
}

TEST_F(ControlClientTest, View_CarriesTheTokenOfItsGeneration) {
  Welcome welcome = TestWelcome();
  welcome.began_unix_ms = 1'800'000'000'000;
  auto rendezvous = MakeRendezvous(Options(), {}, clock_);
  EXPECT_EQ(rendezvous->lease(), Duration::zero());
  StartAndGreet(*rendezvous, events_, welcome);
  EXPECT_EQ(rendezvous->lease(), Millis(welcome.lease_ttl_ms));
  View view;
  view.generation = 3;
  view.fence_token = 99;  // A view on the wire has none.
  line_->SendEvent(view);
  events_.Await(1);
  EXPECT_EQ(events_.token(), FenceTokenOf(welcome.began_unix_ms, 3));
  CloseOrderly(*rendezvous);
}

// By what is said of the job: another member may still be held when one is so no longer.
TEST_F(ControlClientTest, Holds_AreToldUntilNobodyIsHeld) {
  auto rendezvous = Started(TestWelcome());
  line_->SendEvent(HeldEvent{.rank = 1, .held = true, .for_ms = 60'000, .job_for_ms = 60'000});
  line_->SendEvent(HeldEvent{.rank = 2, .held = false, .job_for_ms = 50'000});
  line_->SendEvent(HeldEvent{.rank = 1, .held = false});
  EXPECT_THAT(events_.Await(3), ElementsAre("held", "held", "not held"));
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, AHoldThatEndedDuringAnOutage_IsOver) {
  auto rendezvous = Started(TestWelcome());
  const HeldEvent held{.rank = 1, .held = true, .for_ms = 60'000, .job_for_ms = 60'000};
  line_->SendEvent(held);
  EXPECT_THAT(events_.Await(1), ElementsAre("held"));
  Break(KnownWelcome());
  line_->SendEvent(held);  // It goes on after all.
  EXPECT_THAT(events_.Await(3), ElementsAre("held", "not held", "held"));
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, MessagesBeforeTheConnection_AreSentInOrder) {
  auto rendezvous = MakeRendezvous(Options(), {}, clock_);
  rendezvous->Join(JoinOf(1));
  Report report;
  report.kind = ReportKind::kMismatch;
  report.generation = 2;
  report.status = Status(StatusCode::kMismatch, "two operations");
  rendezvous->Send(report);
  StartAndGreet(*rendezvous, events_, TestWelcome());
  std::optional<Request> join = line_->ReadOp<JoinOp>();
  ASSERT_TRUE(join);
  EXPECT_EQ(std::get<JoinOp>(join->op).request.rank, 1);
  EXPECT_EQ(std::get<JoinOp>(join->op).request.generation, 2u);
  std::optional<Request> told = line_->Read();
  ASSERT_TRUE(told && std::holds_alternative<ReportOp>(told->op));
  EXPECT_EQ(std::get<ReportOp>(told->op).report.status.code(), StatusCode::kMismatch);
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, WhatIsAsked_IsAnsweredOnce_AlsoOverALostConnection) {
  auto rendezvous = Started(TestWelcome());
  const auto ask = [&] {
    rendezvous->Ask({ReportKind::kRebuild, 1},
                    [this](const Status& answer) { events_.Note(answer.ToString()); });
  };
  ask();
  std::optional<Request> first = line_->ReadOp<ReportOp>();
  ASSERT_TRUE(first);
  EXPECT_EQ(std::get<ReportOp>(first->op).report.kind, ReportKind::kRebuild);
  Break(KnownWelcome());
  std::optional<Request> again = line_->ReadOp<ReportOp>();
  ASSERT_TRUE(again);
  EXPECT_EQ(again->seq, first->seq);
  Reply left = ReplyTo(again);
  left.status = Status(StatusCode::kLeft, "gone");
  line_->SendReply(left);
  line_->SendReply(left);
  ask();
  line_->SendReply(ReplyTo(line_->ReadOp<ReportOp>()));
  EXPECT_THAT(events_.Await(2), ElementsAre(HasSubstr("gone"), HasSubstr("OK")));
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, LostConnection_SendsAgainUntilAcknowledged) {
  auto rendezvous = Started(TestWelcome());
  rendezvous->Join(JoinOf(1));
  std::optional<Request> join = line_->ReadOp<JoinOp>();
  ASSERT_TRUE(join);
  Break(KnownWelcome());
  std::optional<Request> beat = line_->Read();
  ASSERT_TRUE(beat && std::holds_alternative<HeartbeatOp>(beat->op));
  std::optional<Request> again = line_->Read();
  ASSERT_TRUE(again && std::holds_alternative<JoinOp>(again->op));
  EXPECT_EQ(again->seq, join->seq);
  line_->SendReply(ReplyTo(again));
  line_->SendEvent(RunningEvent{1});
  events_.Await(1);  // So the reply before it was read as well.
  rendezvous->Ready(3);
  std::optional<Request> ready = line_->ReadOp<ReadyOp>();
  ASSERT_TRUE(ready);
  EXPECT_EQ(ready->first_unacked, ready->seq);
  Break(KnownWelcome());
  line_->Read();  // The heartbeat.
  std::optional<Request> next = line_->Read();
  ASSERT_TRUE(next && std::holds_alternative<ReadyOp>(next->op));
  EXPECT_EQ(next->seq, ready->seq);
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, Ping_IsAnsweredAtOnce) {
  auto rendezvous = Started(TestWelcome());
  ASSERT_TRUE(line_->ReadOp<HeartbeatOp>());  // The first; the next is due in a minute.
  line_->SendEvent(PingEvent{1});
  EXPECT_TRUE(line_->ReadOp<HeartbeatOp>());
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, SilentServer_IsLeftForANewConnection) {
  Welcome welcome = TestWelcome();
  welcome.heartbeat_interval_ms = 200;  // An acknowledgement may be delayed by 0.2 s.
  welcome.lease_ttl_ms = 2000;
  BeginToCaptureStderr();
  auto rendezvous = Started(welcome);
  const auto silent = std::exchange(line_, std::make_unique<ScriptedConnection>(server_.Accept()));
  // A server would take its end for that of the process.
  EXPECT_FALSE(silent->HasEnded());
  line_->Greet(KnownWelcome());
  EXPECT_TRUE(silent->SeesEnd());
  CloseOrderly(*rendezvous);
  // Its host took all beats and nothing was lost: nobody needs to be warned.
  EXPECT_THAT(TakeCapturedStderr(), Not(HasSubstr("without its connection")));
}

TEST_F(ControlClientTest, BusyServer_WhoseHostTakesTheBeats_KeepsItsConnection) {
  Welcome welcome = TestWelcome();
  welcome.heartbeat_interval_ms = 200;
  auto rendezvous = Started(welcome);
  // For longer than the 0.9 s in which beats that the network loses are noticed.
  for (int i = 0; i < 7; ++i) ASSERT_TRUE(line_->ReadOp<HeartbeatOp>()) << i;
  CloseOrderly(*rendezvous);
}

// Each time shorter than a pause, and in sum longer than a server may be silent.
TEST_F(ControlClientTest, ThreadThatIsRunLate_DoesNotTakeTheServerForSilent) {
  Welcome welcome = TestWelcome();
  welcome.heartbeat_interval_ms = 200;
  auto rendezvous = Started(welcome);
  line_->SendEvent(RunningEvent{3});
  EXPECT_THAT(events_.Await(1), ElementsAre("running 3"));
  std::optional<Request> beat;
  const Duration late = Duration(Millis(welcome.lease_ttl_ms)) / 2 - std::chrono::seconds(2);
  for (int times = 1; times <= 2; ++times) {
    clock_.Jump(times * late);
    for (int i = 0; i < 3; ++i) {
      beat = line_->ReadOp<HeartbeatOp>();
      ASSERT_TRUE(beat) << "the connection was given up";
    }
  }
  line_->SendEvent(HeartbeatAckEvent{std::get<HeartbeatOp>(beat->op).beat});
  CloseOrderly(*rendezvous);
}

// The pause came first: it does not excuse the silence that follows.
TEST_F(ControlClientTest, PausedProcess_NoticesASilentServer) {
  Welcome welcome = TestWelcome();
  welcome.heartbeat_interval_ms = 20;
  welcome.lease_ttl_ms = 1000;
  auto rendezvous = Started(welcome);
  clock_.Jump(std::chrono::seconds(1000));
  line_ = std::make_unique<ScriptedConnection>(server_.Accept());
  line_->Greet(KnownWelcome());
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, PausedProcess_BeatsFirstAndKeepsItsConnection) {
  auto rendezvous = Started(TestWelcome());
  const std::optional<Request> before = line_->ReadOp<HeartbeatOp>();
  ASSERT_TRUE(before);
  // Long enough to take the server for silent, had this process been running meanwhile.
  clock_.Jump(std::chrono::seconds(1000));
  // The turn that the jump fell into may have read the clock before it; the next one has not.
  auto turned = std::make_shared<std::promise<void>>();
  ASSERT_TRUE(rendezvous->Post([turned] { turned->set_value(); }));
  ASSERT_EQ(turned->get_future().wait_for(kPatience), std::future_status::ready);
  rendezvous->Ready(3);
  std::optional<Request> first = line_->Read();
  ASSERT_TRUE(first);
  EXPECT_TRUE(std::holds_alternative<HeartbeatOp>(first->op));
  EXPECT_TRUE(line_->ReadOp<ReadyOp>());
  // An answer from before the pause tells nothing of the time after.
  line_->SendEvent(HeartbeatAckEvent{std::get<HeartbeatOp>(before->op).beat});
  line_->SendEvent(RunningEvent{3});
  line_->SendEvent(HeartbeatAckEvent{std::get<HeartbeatOp>(first->op).beat});
  EXPECT_THAT(events_.Await(3), ElementsAre("paused", "running 3", "confirmed"));
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, JoinAnsweredWithError_IsRefused) {
  auto rendezvous = Started(TestWelcome());
  rendezvous->Join(JoinOf(9));
  line_->SendReply(ReplyTo(line_->ReadOp<JoinOp>(), Status(StatusCode::kInvalidArgument, "rank")));
  EXPECT_THAT(events_.Await(1), ElementsAre("refused INVALID_ARGUMENT"));
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, StaleReply_MeansTheSessionIsLost) {
  auto rendezvous = Started(TestWelcome());
  rendezvous->Ready(3);
  line_->SendReply(ReplyTo(line_->ReadOp<ReadyOp>(), Status(StatusCode::kStaleGeneration, "out")));
  EXPECT_TRUE(line_->SeesEnd());
  EXPECT_THAT(events_.Await(1), ElementsAre("lost STALE_GENERATION"));
  rendezvous->Close(In(kPatience));
}

TEST_F(ControlClientTest, SessionLostEvent_EndsTheConnectionAndTasksGoOn) {
  auto rendezvous = Started(TestWelcome());
  line_->SendEvent(SessionLostEvent{Status(StatusCode::kStaleGeneration, "the lease is gone")});
  line_->SendEvent(RunningEvent{3});
  EXPECT_TRUE(line_->SeesEnd());
  events_.Await(1);
  EXPECT_TRUE(rendezvous->Post([&] { events_.Note("task"); }));
  EXPECT_THAT(events_.Await(2), ElementsAre("lost STALE_GENERATION", "task"));
  rendezvous->Close(In(kPatience));
}

TEST_F(ControlClientTest, ServerWithoutMemory_MeansTheSessionIsLost) {
  auto rendezvous = Started(TestWelcome());
  Break(TestWelcome());
  EXPECT_THAT(events_.Await(1), ElementsAre("lost STORE_LOST"));
  rendezvous->Close(In(kPatience));
}

TEST_F(ControlClientTest, AnotherServer_MeansTheSessionIsLost) {
  auto rendezvous = Started(TestWelcome());
  Welcome other = KnownWelcome();
  other.server = "server-2";
  Break(other);
  EXPECT_THAT(events_.Await(1), ElementsAre("lost STORE_LOST"));
  rendezvous->Close(In(kPatience));
}

TEST_F(ControlClientTest, Outage_IsSurvived) {
  auto rendezvous = Started(TestWelcome());
  for (int i = 0; i < 5; ++i) {
    line_.reset();
    { ScriptedConnection dropped = server_.Accept(); }  // Before the Welcome.
    line_ = std::make_unique<ScriptedConnection>(server_.Accept());
    line_->Greet(KnownWelcome());
  }
  line_->SendEvent(RunningEvent{1});
  EXPECT_THAT(events_.Await(1), ElementsAre("running 1"));
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, Close_WithoutAnswer_EndsAtTheDeadline) {
  auto rendezvous = Started(TestWelcome());
  auto closing = std::async(std::launch::async, [&] { rendezvous->Close(In(Millis(500))); });
  EXPECT_TRUE(line_->ReadOp<LeaveOp>());
  closing.get();
  EXPECT_TRUE(line_->SeesEnd());
  rendezvous->Close(In(kPatience));
}

TEST_F(ControlClientTest, Close_ConnectionLostMeanwhile_SaysGoodbyeOnTheNext) {
  auto rendezvous = Started(TestWelcome());
  auto closing = std::async(std::launch::async, [&] { rendezvous->Close(In(kPatience)); });
  EXPECT_TRUE(line_->ReadOp<LeaveOp>());
  Break(KnownWelcome());
  std::optional<Request> leave = line_->ReadOp<LeaveOp>();
  ASSERT_TRUE(leave);
  line_->SendReply(ReplyTo(leave));
  closing.get();
}

TEST_F(ControlClientTest, Close_NeverStarted_ReturnsAtOnce) {
  auto rendezvous = MakeRendezvous(Options(), {}, clock_);
  rendezvous->Close(Deadline::Never());
}

TEST_F(ControlClientTest, Start_NothingListens_NamesTheCauseAtTheDeadline) {
  server_.StopListening();
  auto rendezvous = MakeRendezvous(Options(), {}, clock_);
  Status status = rendezvous->Start(events_, In(Millis(500)));
  EXPECT_EQ(status.code(), StatusCode::kRefused);
  EXPECT_THAT(status.message(), HasSubstr("connection refused by " + server_.address()));
}

// Whoever found the store looks for the next one, instead of waiting here for it to come back.
TEST_F(ControlClientTest, Start_FoundServerHasStopped_IsLostAtOnce) {
  server_.StopListening();
  ConnectOptions options = Options();
  options.expected_server = "s1";
  auto rendezvous = MakeRendezvous(options, {}, clock_);
  Status status = rendezvous->Start(events_, In(kPatience));
  EXPECT_EQ(status.code(), StatusCode::kStoreLost);
  EXPECT_THAT(status.message(), HasSubstr("(server s1) has stopped"));
}

// "localhost" may resolve to ::1 first, where nobody listens.
TEST_F(ControlClientTest, Start_FoundServerAtTheSecondAddress_IsReached) {
  ConnectOptions options = Options();
  ScriptedServer nobody;
  nobody.StopListening();
  options.addresses = {nobody.address(), server_.address()};
  options.expected_server = "s1";
  auto rendezvous = MakeRendezvous(options, {}, clock_);
  StartAndGreet(*rendezvous, events_, {.server = "s1"});
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, Start_Interrupted_ReturnsThatStatus) {
  server_.StopListening();
  auto rendezvous = MakeRendezvous(
      Options(), [] { return Status(StatusCode::kInterrupted, "Ctrl-C"); }, clock_);
  EXPECT_EQ(rendezvous->Start(events_, Deadline::Never()).code(), StatusCode::kInterrupted);
}

TEST_F(ControlClientTest, Start_HelloRefused_FailsAtOnce) {
  auto rendezvous = MakeRendezvous(Options(), {}, clock_);
  auto starting =
      std::async(std::launch::async, [&] { return rendezvous->Start(events_, Deadline::Never()); });
  ScriptedConnection line = server_.Accept();
  std::optional<Request> hello = line.Read();
  line.SendBytes(EncodePreamble());
  line.SendReply(ReplyTo(hello, Status(StatusCode::kJob, "another store")));
  EXPECT_EQ(starting.get().code(), StatusCode::kJob);
}

TEST_F(ControlClientTest, Start_OneAddressRefuses_TheOtherIsAsked) {
  ScriptedServer other;
  ConnectOptions options = Options();
  options.addresses.insert(options.addresses.begin(), other.address());
  auto rendezvous = MakeRendezvous(options, {}, clock_);
  auto starting =
      std::async(std::launch::async, [&] { return rendezvous->Start(events_, In(kPatience)); });
  other.Accept().Refuse(Status(StatusCode::kJob, "another job"));
  line_ = std::make_unique<ScriptedConnection>(server_.Accept());
  line_->Greet(TestWelcome());
  EXPECT_TRUE(starting.get().ok());
  // Nor does it count for a session that has its store elsewhere.
  line_.reset();
  line_ = std::make_unique<ScriptedConnection>(server_.Accept());
  line_->Greet(KnownWelcome());
  rendezvous->Post([&] { events_.Note("alive"); });
  EXPECT_THAT(events_.Await(1), ElementsAre("alive"));
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, Reconnect_AnotherAddressRefuses_LosesNothing) {
  ScriptedServer other;
  ConnectOptions options = Options();
  options.addresses.push_back(other.address());
  auto rendezvous = MakeRendezvous(options, {}, clock_);
  StartAndGreet(*rendezvous, events_, TestWelcome());
  server_.StopListening();
  line_.reset();
  for (int round = 0; round < 3; ++round) {
    other.Accept().Refuse(Status(StatusCode::kAuth, "who are you?"));
  }
  rendezvous->Post([&] { events_.Note("alive"); });
  EXPECT_THAT(events_.Await(1), ElementsAre("alive"));
  rendezvous->Close(Deadline::At(clock_.Now()));
}

// The line is open by then, and has to be closed.
TEST_F(ControlClientTest, Start_FailsWithWhatIsStartedBehindIt) {
  const Deadline deadline = In(kPatience);
  Instant told{};
  auto rendezvous = MakeRendezvous(Options(), {}, clock_, [&told](Deadline its) {
    told = its.when();
    return Status(StatusCode::kStoreLost, "it has stopped");
  });
  auto starting =
      std::async(std::launch::async, [&] { return rendezvous->Start(events_, deadline); });
  line_ = std::make_unique<ScriptedConnection>(server_.Accept());
  line_->Greet(TestWelcome());
  EXPECT_EQ(starting.get().code(), StatusCode::kStoreLost);
  EXPECT_EQ(told, deadline.when());
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, Start_BadAddress_IsASettingError) {
  ConnectOptions options = Options();
  options.addresses = {"nonsense"};
  auto rendezvous = MakeRendezvous(options, {}, clock_);
  EXPECT_EQ(rendezvous->Start(events_, Deadline::Never()).code(), StatusCode::kSetting);
  rendezvous->Close(Deadline::Never());
}

TEST_F(ControlClientTest, ForkedChild_IsSilentAndTheParentGoesOn) {
  auto rendezvous = Started(TestWelcome());
  pid_t child = ::fork();
  if (child == 0) {
    bool refused = !rendezvous->Post([] {});
    rendezvous->Join(JoinOf(1));
    rendezvous->Close(Deadline::Never());
    rendezvous->AbandonInChild();
    rendezvous.reset();
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  line_->SendEvent(RunningEvent{1});
  EXPECT_THAT(events_.Await(1), ElementsAre("running 1"));
  CloseOrderly(*rendezvous);
}

TEST_F(ControlClientTest, ReportExit_IsAcknowledged) {
  ExitNotice notice;
  notice.rank = 2;
  notice.pid = 4711;
  notice.start_time = 99;
  notice.signal = 9;
  notice.text = "killed";
  auto reporting = std::async(std::launch::async,
                              [&] { return ReportExit(Options(), notice, clock_, In(kPatience)); });
  { ScriptedConnection dropped = server_.Accept(); }  // It tries again.
  ScriptedConnection line = server_.Accept();
  EXPECT_EQ(line.Greet(TestWelcome()).role, Role::kAdmin);
  std::optional<Request> request = line.Read();
  ASSERT_TRUE(request);
  const ExitReportOp& report = std::get<ExitReportOp>(request->op);
  EXPECT_EQ(report.rank, 2);
  EXPECT_EQ(report.process.pid, 4711);
  EXPECT_EQ(report.process.start_time, 99u);
  EXPECT_EQ(report.process.boot_id, ThisProcess().boot_id);
  EXPECT_EQ(report.signal, 9);
  EXPECT_EQ(report.text, "killed");
  line.SendReply(ReplyTo(request));
  EXPECT_TRUE(reporting.get().ok());
}

TEST_F(ControlClientTest, ReportExit_NoStore_EndsAtTheDeadline) {
  server_.StopListening();
  Status status = ReportExit(Options(), ExitNotice{}, clock_, In(Millis(50)));
  EXPECT_EQ(status.code(), StatusCode::kRefused);
}

}  // namespace
}  // namespace resilient::store
