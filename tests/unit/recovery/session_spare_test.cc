// Goal: a session without a rank waits for one in its Init, and is that rank from then on. Method:
// SessionTest; this process is a spare of a world of four.
#include <future>
#include <memory>
#include <string>

#include <gmock/gmock.h>

#include "tests/unit/recovery/session_fixture.h"

namespace resilient::recovery {
namespace {

class SessionSpareTest : public SessionTest {
 protected:
  SessionSpareTest() { options_.rank = kSpareRank; }
  // A world of four in which this process is rank `own`.
  static View ViewWith(int own) {
    View view;
    view.life = 1;
    view.round = 1;
    view.generation = 2;
    for (int rank = 0; rank < 4; ++rank) {
      const std::string endpoint = rank == own ? "my-endpoint" : "endpoint-" + std::to_string(rank);
      view.members.push_back({rank, "i" + std::to_string(rank), "host", 100 + rank, endpoint});
    }
    return view;
  }
  JoinRequest LastJoin() {
    return record_->Get<JoinRequest>([](const Record& record) { return record.joins.back(); });
  }
  std::future<Status> Wait() {
    rendezvous_->set_autopilot(false);
    std::future<Status> init = StartInit();
    EXPECT_TRUE(AwaitCount(&Record::joins, 1));
    return init;
  }
  Status TakeSeat(int rank, std::future<Status> init) {
    rendezvous_->SayView(ViewWith(rank));
    EXPECT_TRUE(AwaitCount(&Record::readies, 1));
    rendezvous_->SayRunning(2);
    return init.get();
  }
};

TEST_F(SessionSpareTest, SeatBecomesFree_IsThatRank) {
  Open();
  std::future<Status> init = Wait();
  EXPECT_EQ(LastJoin().rank, kSpareRank);
  ASSERT_TRUE(TakeSeat(2, std::move(init)).ok());
  EXPECT_EQ(session_->membership().rank, 2);
  world_ = CreateGroup(kWorldGroup, {0, 1, 2, 3});
  EXPECT_EQ(world_->rank(), 2);
  EXPECT_TRUE(Run(*world_).ok());
}

TEST_F(SessionSpareTest, ItsNextJoin_IsOfItsRank) {
  Open();
  ASSERT_TRUE(TakeSeat(3, Wait()).ok());
  FenceAndSettle(2, Status(StatusCode::kRankLost, "rank 0 was killed"));
  ASSERT_TRUE(AwaitCount(&Record::joins, 2));
  EXPECT_EQ(LastJoin().rank, 3);
  EXPECT_EQ(LastJoin().generation, 2u);
}

TEST_F(SessionSpareTest, InitTimeoutHasPassed_WaitsOnWhileTheStoreAnswers) {
  options_.init_timeout = std::chrono::seconds(5);
  Open();
  std::future<Status> init = Wait();
  for (int minute = 0; minute < 10; ++minute) {
    const Instant then = clock_.Now() + std::chrono::minutes(1);
    rendezvous_->SayBeat(then, then);  // Known before time has passed: nobody sees it missing.
    rendezvous_->Settle();
    clock_.Advance(std::chrono::minutes(1));
  }
  EXPECT_EQ(init.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  EXPECT_TRUE(TakeSeat(0, std::move(init)).ok());
}

TEST_F(SessionSpareTest, WorldHasEnded_InitSaysSo) {
  Open();
  std::future<Status> init = Wait();
  rendezvous_->SayRefused(Status(StatusCode::kLeft, "the world has ended"));
  EXPECT_EQ(init.get().code(), StatusCode::kLeft);
}

TEST_F(SessionSpareTest, RankWasTaken_HasTheSeatThatItIsGiven) {
  options_.rank = 1;
  options_.spare_if_taken = true;
  Open();
  std::future<Status> init = Wait();
  EXPECT_EQ(LastJoin().rank, 1);
  EXPECT_TRUE(LastJoin().spare_if_taken);
  ASSERT_TRUE(TakeSeat(3, std::move(init)).ok());
  EXPECT_EQ(session_->membership().rank, 3);
}

}  // namespace
}  // namespace resilient::recovery
