// Goal: while the store is out of reach a wait ends for a rank that is gone, and never for one that
// lives or for time in which this process did not run.
#include "runtime/recovery/store_outage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace resilient::recovery {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Duration kPatience = std::chrono::seconds(20);
constexpr Duration kLease = std::chrono::seconds(5);
constexpr Duration kBeat = std::chrono::seconds(1);

class StoreOutageTest : public ::testing::Test {
 protected:
  // So long the store is silent, and this process looks for it.
  void BeSilent(Duration time) {
    for (Duration passed{}; passed < time; passed += kBeat) {
      now_ += kBeat;
      outage_.OnBeat(now_, contact_, kLease);
    }
  }
  void Hear() {
    contact_ = now_;
    outage_.OnBeat(now_, contact_, kLease);
  }
  std::optional<Status> Verdict() {
    return outage_.Verdict("10.0.0.1:29500", calls_, links_, members_);
  }

  static WaitingCall CallFor(std::vector<int> missing) {
    WaitingCall call;
    call.group = "world";
    call.operation.seq = 3;
    call.operation.what = "barrier()";
    call.operation.missing = std::move(missing);
    return call;
  }

  Instant now_ = Instant(std::chrono::hours(1));
  Instant contact_ = now_;
  StoreOutage outage_{kPatience};
  LostLinks links_;
  std::vector<WaitingCall> calls_{CallFor({1, 2})};
  std::vector<Member> members_{
      {.rank = 1, .incarnation = {}, .host = "b", .pid = 11, .endpoint = {}},
      {.rank = 2, .incarnation = {}, .host = "c", .pid = 12, .endpoint = {}}};
};

TEST_F(StoreOutageTest, EndedLink_EndsTheWaitOnceTheStoreHasHadItsTime) {
  Hear();
  links_.Note("world", 1);
  BeSilent(kPatience - kBeat);
  EXPECT_EQ(Verdict(), std::nullopt) << "a store that was killed may come back";
  BeSilent(kBeat);
  const auto verdict = Verdict();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->code(), StatusCode::kStoreLost);
  EXPECT_THAT(verdict->message(),
              HasSubstr("the store at 10.0.0.1:29500 has not answered for 20 s"));
  EXPECT_THAT(verdict->message(), HasSubstr("rank 1 (host b, pid 11) has gone"));
  EXPECT_THAT(verdict->message(), HasSubstr("barrier() #3 of group 'world' waits for it"));
  EXPECT_EQ(verdict->detail().rank, 1);
}

TEST_F(StoreOutageTest, NothingWaitsOverIt_GoesOn) {
  Hear();
  links_.Note("world", 3);
  BeSilent(10 * kPatience);
  EXPECT_EQ(Verdict(), std::nullopt);
}

TEST_F(StoreOutageTest, StoreThatComesBack_JudgesAgain) {
  Hear();
  links_.Note("world", 1);
  BeSilent(kPatience - kBeat);
  Hear();
  BeSilent(kPatience - kBeat);
  EXPECT_EQ(Verdict(), std::nullopt);
}

TEST_F(StoreOutageTest, TimeInWhichTheProcessDidNotRun_IsNoSilence) {
  Hear();
  links_.Note("world", 1);
  now_ += std::chrono::hours(1);
  outage_.OnBeat(now_, contact_, kLease);
  EXPECT_EQ(outage_.lasts(), kBeat);
  EXPECT_EQ(Verdict(), std::nullopt);
}

TEST_F(StoreOutageTest, HealthyJob_AsksNobody) {
  Hear();
  BeSilent(kPatience / 2 - kBeat);
  EXPECT_THAT(outage_.Round(7, calls_), IsEmpty());
}

TEST_F(StoreOutageTest, AwaitedRanks_AreAskedAgainWhenAllAreKnown) {
  Hear();
  BeSilent(kPatience / 2);
  EXPECT_THAT(outage_.Round(7, calls_), ElementsAre(1, 2));
  EXPECT_THAT(outage_.Round(7, calls_), IsEmpty());
  outage_.OnKnocked(7, 1, {});
  EXPECT_THAT(outage_.Round(7, calls_), IsEmpty());
  outage_.OnKnocked(7, 2, {});
  EXPECT_THAT(outage_.Round(7, calls_), ElementsAre(1, 2));
}

TEST_F(StoreOutageTest, RankThatGivesNoAnswer_EndsTheWait) {
  Hear();
  BeSilent(kPatience);
  (void)outage_.Round(7, calls_);
  outage_.OnKnocked(7, 1, {});
  EXPECT_EQ(Verdict(), std::nullopt) << "the other one has time to answer";
  outage_.OnKnocked(7, 2, Status(StatusCode::kUnreachable, "10.0.0.3:9 gives no answer"));
  const auto verdict = Verdict();
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->message(),
              HasSubstr("rank 2 (host c, pid 12) gives no answer over the network"));
  EXPECT_THAT(verdict->message(), HasSubstr("10.0.0.3:9 gives no answer"));
}

TEST_F(StoreOutageTest, RankThatAnswersAgain_IsWaitedFor) {
  Hear();
  BeSilent(kPatience / 2);
  for (const bool answers : {false, true}) {
    (void)outage_.Round(7, calls_);
    outage_.OnKnocked(7, 1, {});
    outage_.OnKnocked(7, 2, answers ? Status() : Status(StatusCode::kUnreachable, "no answer"));
  }
  BeSilent(kPatience);
  EXPECT_EQ(Verdict(), std::nullopt);
}

TEST_F(StoreOutageTest, WordOfAnEarlierGeneration_IsNone) {
  Hear();
  BeSilent(kPatience);
  (void)outage_.Round(7, calls_);
  (void)outage_.Round(8, calls_);
  outage_.OnKnocked(7, 1, Status(StatusCode::kUnreachable, "no answer"));
  EXPECT_EQ(Verdict(), std::nullopt);
}

TEST_F(StoreOutageTest, Rebuild_NeedsTheStore) {
  Hear();
  const Status lost(StatusCode::kRankLost, "rank 1 was killed");
  EXPECT_EQ(outage_.RebuildVerdict("a:1", lost), std::nullopt);
  BeSilent(kPatience);
  const auto verdict = outage_.RebuildVerdict("a:1", lost);
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->code(), StatusCode::kStoreLost);
  EXPECT_THAT(verdict->message(), HasSubstr("rank 1 was killed"));
}

}  // namespace
}  // namespace resilient::recovery
