// Goal: a session whose store is out of reach ends the waits that nobody else can end, and no
// other. Method: beats of a scripted control thread at manual times.
#include <future>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/recovery/session_fixture.h"

namespace resilient::recovery {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Duration kLease = std::chrono::seconds(5);
constexpr Duration kBeat = std::chrono::seconds(1);

class SessionOutageTest : public SessionTest {
 protected:
  void SetUp() override {
    options_.budget = std::chrono::seconds(20);
    factory_script_.hold = true;
    Boot();
    contact_ = clock_.Now();
    Beat();
  }
  void Beat() {
    rendezvous_->SayBeat(clock_.Now(), contact_, kLease);
    rendezvous_->Settle();
  }
  // The operation is told to wait for `missing` each second, as communicators do.
  void BeSilent(Duration time, std::vector<int> missing) {
    for (Duration passed{}; passed < time; passed += kBeat) {
      clock_.Advance(kBeat);
      if (!missing.empty()) {
        WaitingOperation waiting;
        waiting.seq = 1;
        waiting.what = "barrier()";
        waiting.missing = missing;
        factory_->SayWaiting(kWorldGroup, 1, std::move(waiting));
        factory_->Settle();
      }
      Beat();
    }
  }
  std::future<Status> StartOperation() {
    return std::async(std::launch::async, [this] { return Run(*world_); });
  }

  Instant contact_;
};

TEST_F(SessionOutageTest, OperationThatNeedsAnEndedLink_EndsAndTheStoreWillHearOfIt) {
  auto operation = StartOperation();
  factory_->SayLinkLost(kWorldGroup, 1, 2);
  factory_->Settle();
  BeSilent(options_.budget - kBeat, {2});
  EXPECT_TRUE(session_->failure().ok()) << session_->failure().ToString();
  BeSilent(kBeat, {2});
  const Status status = operation.get();
  EXPECT_EQ(status.code(), StatusCode::kStoreLost) << status.ToString();
  EXPECT_THAT(status.message(), HasSubstr("rank 2 (host host, pid 102) has gone"));
  EXPECT_EQ(session_->membership().state, SessionState::kFailed);
  EXPECT_EQ(Reports().back().kind, ReportKind::kEnding);
}

TEST_F(SessionOutageTest, RankThatGivesNoAnswer_EndsTheOperation) {
  auto operation = StartOperation();
  BeSilent(options_.budget / 2, {0, 3});
  ASSERT_TRUE(AwaitCount(&Record::knocks, 1));
  EXPECT_THAT(record_->Get<std::vector<int>>([](const Record& it) { return it.knocks.back(); }),
              ElementsAre(0, 3));
  factory_->SayKnocked(1, 0, Status::Ok());
  factory_->SayKnocked(1, 3, Status(StatusCode::kUnreachable, "10.0.0.3:9 gives no answer"));
  factory_->Settle();
  BeSilent(options_.budget / 2, {0, 3});
  const Status status = operation.get();
  EXPECT_EQ(status.code(), StatusCode::kStoreLost) << status.ToString();
  EXPECT_THAT(status.message(), HasSubstr("rank 3 (host host, pid 103) gives no answer"));
}

TEST_F(SessionOutageTest, LateRankThatAnswers_IsWaitedForWithoutEnd) {
  auto operation = StartOperation();
  for (std::size_t round = 1; round <= 5; ++round) {
    BeSilent(round == 1 ? options_.budget / 2 : options_.budget, {0});
    ASSERT_TRUE(AwaitCount(&Record::knocks, round));
    factory_->SayKnocked(1, 0, Status::Ok());
    factory_->Settle();
  }
  EXPECT_TRUE(session_->failure().ok()) << session_->failure().ToString();
  factory_->Latest(kWorldGroup)->CompleteNext(Status::Ok());
  EXPECT_TRUE(operation.get().ok());
}

TEST_F(SessionOutageTest, NothingWaits_GoesOn) {
  factory_->SayLinkLost(kWorldGroup, 1, 2);
  factory_->Settle();
  BeSilent(10 * options_.budget, {});
  EXPECT_TRUE(session_->failure().ok()) << session_->failure().ToString();
}

TEST_F(SessionOutageTest, Rebuild_EndsWithWhatItFollowed) {
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Status(StatusCode::kRankLost, "rank 2 was killed"));
  auto rebuild = StartRebuild();
  ASSERT_TRUE(AwaitCount(&Record::joins, 2));
  BeSilent(options_.budget, {});
  const Status status = rebuild.get();
  EXPECT_EQ(status.code(), StatusCode::kStoreLost) << status.ToString();
  EXPECT_THAT(status.message(), HasSubstr("rank 2 was killed"));
}

}  // namespace
}  // namespace resilient::recovery
