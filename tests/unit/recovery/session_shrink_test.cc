// Goal: a session whose world has become smaller goes on under its new number, and what was made of
// the old ones is refused. Method: SessionTest; this process is rank 1 of 4 and becomes another.
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "runtime/recovery/host_watch.h"
#include "tests/unit/recovery/session_fixture.h"

namespace resilient::recovery {
namespace {

using ::testing::HasSubstr;

constexpr Duration kSeatWait = std::chrono::seconds(7);

class SessionShrinkTest : public SessionTest {
 protected:
  // Of the world of `generation`: those of the first one that are left, by their first ranks.
  static View ViewOf(std::uint64_t generation, const std::vector<int>& left) {
    View view;
    view.life = 1;
    view.round = 1;
    view.generation = generation;
    for (const int first : left) {
      const std::string endpoint = first == 1 ? "my-endpoint" : "endpoint-" + std::to_string(first);
      view.members.push_back({static_cast<int>(view.members.size()), "i" + std::to_string(first),
                              "host", 100 + first, endpoint});
    }
    return view;
  }
  JoinRequest LastJoin() {
    return record_->Get<JoinRequest>([](const Record& record) { return record.joins.back(); });
  }
  // Fenced at `generation`, rebuilt at the next with those that are left.
  void Lose(std::uint64_t generation, const std::vector<int>& left) {
    rendezvous_->set_autopilot(false);
    FenceAndSettle(generation, Lost(0));
    const std::size_t readies =
        record_->Get<std::size_t>([](const Record& record) { return record.readies.size(); });
    rendezvous_->SayView(ViewOf(generation + 1, left));
    ASSERT_TRUE(AwaitCount(&Record::readies, readies + 1));
    rendezvous_->SayRunning(generation + 1);
    ASSERT_TRUE(session_->Rebuild({}).ok());
  }
};

TEST_F(SessionShrinkTest, SmallerWorld_RanksAreThoseOfTheView) {
  Boot();
  Lose(1, {1, 2, 3});
  const Membership membership = session_->membership();
  EXPECT_EQ(membership.rank, 0);
  EXPECT_EQ(membership.members.size(), 3u);
  EXPECT_EQ(world_->rank(), 0);
  EXPECT_EQ(world_->size(), 3);
  EXPECT_TRUE(Run(*world_).ok());
  const GroupSpec& spec = factory_->Latest(kWorldGroup)->spec();
  EXPECT_EQ(spec.rank, 0);
  EXPECT_EQ(spec.members.size(), 3u);
  EXPECT_TRUE(Run(*CreateGroup("pair", {0, 2})).ok());
}

TEST_F(SessionShrinkTest, NextJoin_IsOfTheNewPlace) {
  Boot();
  Lose(1, {1, 3});
  FenceAndSettle(2, Lost(1));
  EXPECT_EQ(LastJoin().rank, 0);
  EXPECT_EQ(LastJoin().world_size, 2);
  EXPECT_EQ(LastJoin().generation, 2u);
}

TEST_F(SessionShrinkTest, GroupOfTheOldRanks_SaysWhatToDo) {
  Boot();
  auto pair = CreateGroup("pair", {1, 3});
  ASSERT_TRUE(Run(*pair).ok());
  Lose(1, {0, 1, 2});
  const Status status = Run(*pair);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("make the group anew"));
  pair->Close();
  EXPECT_TRUE(Run(*CreateGroup("pair", {1, 2})).ok());
}

TEST_F(SessionShrinkTest, SameSize_GroupsStay) {
  Boot();
  auto pair = CreateGroup("pair", {1, 3});
  Lose(1, {0, 1, 2, 3});
  EXPECT_TRUE(Run(*pair).ok());
  EXPECT_EQ(pair->rank(), 0);
}

TEST_F(SessionShrinkTest, ViewWithoutThisProcess_IsNoWorld) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(0));
  rendezvous_->SayView(ViewOf(2, {0, 2, 3}));
  rendezvous_->Settle();
  ASSERT_EQ(Reports().size(), 1u);
  EXPECT_EQ(Reports().front().kind, ReportKind::kCommFailed);
  EXPECT_THAT(Reports().front().status.message(), HasSubstr("not in the view"));
}

TEST_F(SessionShrinkTest, Wish_WhileJoining_IsSentAtOnce) {
  options_.seat_wait = kSeatWait;
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(0));
  EXPECT_EQ(LastJoin().min_world, 0);
  EXPECT_EQ(LastJoin().seat_wait, kSeatWait);
  const std::size_t before = Joins();
  auto rebuilt = std::async(std::launch::async, [this] {
    return session_->Rebuild({.min_world = 2, .seat_wait = Duration::zero()});
  });
  ASSERT_TRUE(AwaitCount(&Record::joins, before + 1));
  EXPECT_EQ(LastJoin().min_world, 2);
  EXPECT_EQ(LastJoin().seat_wait, Duration::zero());
  rendezvous_->SayView(ViewOf(2, {1, 2, 3}));
  ASSERT_TRUE(AwaitCount(&Record::readies, 2));
  rendezvous_->SayRunning(2);
  EXPECT_TRUE(rebuilt.get().ok());
  // It was of that recovery.
  FenceAndSettle(2, Lost(0));
  EXPECT_EQ(LastJoin().min_world, 0);
  EXPECT_EQ(LastJoin().seat_wait, kSeatWait);
}

TEST_F(SessionShrinkTest, Wish_OfARefusedJoin_IsSentWithTheNext) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(0));
  rendezvous_->SayRefused(Lost(0));
  rendezvous_->Settle();
  const std::size_t before = Joins();
  auto rebuilt =
      std::async(std::launch::async, [this] { return session_->Rebuild({.min_world = 3}); });
  ASSERT_TRUE(AwaitCount(&Record::joins, before + 1));
  EXPECT_EQ(LastJoin().min_world, 3);
  rendezvous_->SayRefused(Lost(0));
  EXPECT_EQ(rebuilt.get().code(), StatusCode::kRankLost);
}

TEST_F(SessionShrinkTest, SameWishAgain_SendsNothing) {
  Boot();
  rendezvous_->set_autopilot(false);
  FenceAndSettle(1, Lost(0));
  const Deadline at_once = Deadline::At(clock_.Now());
  EXPECT_EQ(session_->Rebuild({.deadline = at_once, .min_world = 2}).code(), StatusCode::kTimeout);
  rendezvous_->Settle();
  const std::size_t before = Joins();
  EXPECT_EQ(session_->Rebuild({.deadline = at_once, .min_world = 2}).code(), StatusCode::kTimeout);
  rendezvous_->Settle();
  EXPECT_EQ(Joins(), before);
}

TEST_F(SessionShrinkTest, BadNumber_IsRefused) {
  Boot();
  EXPECT_EQ(session_->Rebuild({.min_world = -1}).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace resilient::recovery
