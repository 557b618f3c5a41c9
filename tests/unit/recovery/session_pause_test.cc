// Goal: what runs right behind a pause of its process starts nothing before the membership service
// has said that the process still has its seat. Method: manual time and a scripted control thread,
// which is as late as the test wants; a caller counts as waiting once it has polled its interrupt
// again.
#include <chrono>
#include <future>
#include <semaphore>

#include <gtest/gtest.h>

#include "tests/unit/recovery/session_fixture.h"

namespace resilient::recovery {
namespace {

constexpr Duration kLongLease = std::chrono::seconds(10);

class SessionPauseTest : public SessionTest {
 protected:
  // RUNNING; the control thread has run just now.
  void SetUp() override {
    options_.interrupt = [this, bound = GiveUpAtTestBound()] {
      polls_.release();
      return bound();
    };
    Boot();
    SayBeat();
  }
  void SayBeat() {
    rendezvous_->SayBeat(clock_.Now(), clock_.Now(), kLongLease);
    rendezvous_->Settle();
  }
  // Everything stands still for longer than half a lease; nothing has run since.
  void Pause() { clock_.Advance(kLongLease / 2 + Millis(1)); }
  // The control thread runs again, and knows what happened.
  void NotePause() {
    rendezvous_->SayPaused();
    SayBeat();
  }
  void Confirm() {
    rendezvous_->SayConfirmed();
    rendezvous_->Settle();
  }

  std::future<Status> StartOperation() {
    return std::async(std::launch::async, [this] { return Run(*world_); });
  }
  void ExpectWaits(std::future<Status>& operation) {
    while (polls_.try_acquire()) {
    }
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(polls_.try_acquire_for(std::chrono::seconds(20)));
    EXPECT_EQ(operation.wait_for(Duration::zero()), std::future_status::timeout);
  }

  std::counting_semaphore<> polls_{0};
};

TEST_F(SessionPauseTest, OperationBehindIt_WaitsForTheAnswer) {
  Pause();
  auto operation = StartOperation();
  ExpectWaits(operation);
  NotePause();
  ExpectWaits(operation);
  Confirm();
  EXPECT_TRUE(operation.get().ok());
  EXPECT_TRUE(Run(*world_).ok());
}

TEST_F(SessionPauseTest, ControlThreadRunsFirst_WaitsAllTheSame) {
  Pause();
  NotePause();
  auto operation = StartOperation();
  ExpectWaits(operation);
  Confirm();
  EXPECT_TRUE(operation.get().ok());
}

TEST_F(SessionPauseTest, SeatWasGivenAway_IsTheCause) {
  Pause();
  auto operation = StartOperation();
  ExpectWaits(operation);
  NotePause();
  rendezvous_->SayLost(Status(StatusCode::kStaleGeneration, "out"));
  EXPECT_EQ(operation.get().code(), StatusCode::kStaleGeneration);
}

TEST_F(SessionPauseTest, FencedMeanwhile_IsTheCause) {
  Pause();
  auto operation = StartOperation();
  ExpectWaits(operation);
  rendezvous_->SayFence(1, Status(StatusCode::kRankLost, "another"));
  EXPECT_EQ(operation.get().code(), StatusCode::kRankLost);
}

TEST_F(SessionPauseTest, NoAnswerWithinTheBudget_RefusesAndAsksAgain) {
  Pause();
  NotePause();
  auto operation = StartOperation();
  ExpectWaits(operation);
  clock_.Advance(options_.budget);
  const Status refused = operation.get();
  EXPECT_EQ(refused.code(), StatusCode::kStoreLost);
  EXPECT_NE(refused.message().find("was paused"), std::string::npos) << refused.message();
  SayBeat();
  Confirm();
  EXPECT_TRUE(Run(*world_).ok());
}

TEST_F(SessionPauseTest, OnlyTheControlThreadWasLate_IsNoPause) {
  Pause();
  auto operation = StartOperation();
  ExpectWaits(operation);
  SayBeat();
  EXPECT_TRUE(operation.get().ok());
}

}  // namespace
}  // namespace resilient::recovery
