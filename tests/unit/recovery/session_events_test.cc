// Goal: those who look on hear of each fence and of what follows it, in order, once, and of the
// end; who is slow is told how much he has missed. Method: SessionTest.
#include <chrono>
#include <future>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "runtime/recovery/event_ring.h"
#include "tests/unit/recovery/session_fixture.h"

namespace resilient::recovery {
namespace {

using ::testing::ElementsAre;
using Kind = SessionEvent::Kind;

class SessionEvents : public SessionTest {
 protected:
  // Kind and generation of each event up to now, "fenced 1".
  std::vector<std::string> Told() {
    std::vector<std::string> told;
    std::uint64_t after = 0;
    while (true) {
      const auto event = session_->AwaitEvent(after, Deadline::After(clock_.Now(), {}));
      if (!event.ok()) return told;
      EXPECT_EQ(event->number, after + 1);
      EXPECT_EQ(event->missed, 0u);
      after = event->number;
      told.push_back(Name(event->kind) + " " + std::to_string(event->generation));
    }
  }
  static std::string Name(Kind kind) {
    switch (kind) {
      case Kind::kFenced:
        return "fenced";
      case Kind::kRebuilt:
        return "rebuilt";
      case Kind::kRunning:
        return "running";
      case Kind::kRefused:
        return "refused";
      case Kind::kFailed:
        return "failed";
      case Kind::kClosed:
        return "closed";
    }
    return "";
  }
};

TEST_F(SessionEvents, Recovery_IsToldInOrder) {
  Boot();
  FenceAndSettle(1, Lost(2));
  ASSERT_TRUE(session_->Rebuild({}).ok());
  session_->Close();
  EXPECT_THAT(Told(), ElementsAre("running 1", "fenced 1", "rebuilt 2", "running 2", "closed 2"));
  const auto fenced = session_->AwaitEvent(1, Deadline::Never());
  ASSERT_TRUE(fenced.ok());
  EXPECT_EQ(fenced->cause.code(), StatusCode::kRankLost);
  EXPECT_EQ(fenced->cause.detail().rank, 2);
  EXPECT_EQ(session_->AwaitEvent(5, Deadline::Never()).status().code(),
            StatusCode::kFailedPrecondition);
}

TEST_F(SessionEvents, SecondFenceBeforeItRuns_IsToldToo) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  rendezvous_->SayView(2);
  ASSERT_TRUE(AwaitCount(&Record::readies, 2));
  FenceAndSettle(2, Lost(3));
  EXPECT_THAT(Told(), ElementsAre("running 1", "fenced 1", "rebuilt 2", "fenced 2"));
}

TEST_F(SessionEvents, SeatNotFilled_IsTold) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(2));
  rendezvous_->SayRefused(Lost(2));
  rendezvous_->Settle();
  EXPECT_THAT(Told(), ElementsAre("running 1", "fenced 1", "refused 1"));
}

TEST_F(SessionEvents, ProcessThatIsGivenUp_HasFailed) {
  Boot();
  rendezvous_->SayLost(Status(StatusCode::kStaleGeneration, "the job goes on"));
  rendezvous_->Settle();
  EXPECT_THAT(Told(), ElementsAre("running 1", "fenced 1", "failed 1"));
}

TEST_F(SessionEvents, WaitingReader_IsWokenByTheEvent) {
  Boot();
  auto next =
      std::async(std::launch::async, [this] { return session_->AwaitEvent(1, Deadline::Never()); });
  FenceAndSettle(1, Lost(2));
  const auto event = next.get();
  ASSERT_TRUE(event.ok());
  EXPECT_EQ(event->kind, Kind::kFenced);
}

TEST_F(SessionEvents, NoneInTime_IsATimeout) {
  Boot();
  EXPECT_EQ(session_->AwaitEvent(1, Deadline::After(clock_.Now(), {})).status().code(),
            StatusCode::kTimeout);
}

TEST_F(SessionEvents, SlowReader_IsToldWhatHeMissed) {
  Boot();
  constexpr std::uint64_t kRecoveries = 100;  // Of three events each.
  for (std::uint64_t generation = 1; generation <= kRecoveries; ++generation) {
    FenceAndSettle(generation, Lost(2));
    ASSERT_TRUE(session_->Rebuild({}).ok());
  }
  const std::uint64_t all = 1 + 3 * kRecoveries;
  const auto oldest = session_->AwaitEvent(0, Deadline::Never());
  ASSERT_TRUE(oldest.ok());
  EXPECT_EQ(oldest->missed, all - kSessionEventsKept);
  EXPECT_EQ(oldest->number, oldest->missed + 1);
  EXPECT_EQ(session_->AwaitEvent(all - 1, Deadline::Never())->generation, kRecoveries + 1);
}

}  // namespace
}  // namespace resilient::recovery
