// Goal: barriers and exchanges are released exactly with all of theirs, tell who is late, and leave
// nothing behind. Method: Keyspace alone; each test is a short table of calls and results.
#include <gmock/gmock.h>

#include "store/core/keyspace.h"

namespace resilient::store {
namespace {

using Ended = std::vector<EndedWait>;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Optional;

class Gatherings : public ::testing::Test {
 protected:
  Status Barrier(WaitId id, std::int64_t size, std::uint64_t scope = 0) {
    return keys_.ArriveAtBarrier(id, scope, BarrierOp{"init/3", size}, ended_, rival_);
  }
  Status Exchange(WaitId id, std::int64_t rank, std::int64_t size, std::string value = "v",
                  std::uint64_t scope = 0) {
    return keys_.ArriveAtExchange(id, scope, ExchangeOp{"init/3", rank, size, std::move(value)},
                                  ended_, rival_);
  }
  void ExpectEmpty() {
    EXPECT_EQ(keys_.waits(), 0u);
    EXPECT_EQ(keys_.bytes(), 0u);
    EXPECT_EQ(keys_.keys(), 0u);
  }

  Keyspace keys_;
  Ended ended_;
  SessionId rival_ = 0;
};

TEST_F(Gatherings, ABarrier_IsReleasedWithTheLastOfItsSize) {
  ASSERT_TRUE(Barrier({1, 1}, 3).ok());
  ASSERT_TRUE(Barrier({1, 2}, 3).ok());  // Two threads of one session are two arrivals.
  ASSERT_TRUE(Barrier({1, 2}, 3).ok());  // A repeat is none.
  EXPECT_TRUE(ended_.empty());
  ASSERT_TRUE(Barrier({2, 1}, 3).ok());
  ASSERT_EQ(ended_.size(), 3u);
  for (const EndedWait& end : ended_) {
    EXPECT_TRUE(end.status.ok());
    EXPECT_TRUE(end.mutation);
  }
  ExpectEmpty();
}

TEST_F(Gatherings, ABarrier_IsFreeAfterwards) {
  for (std::uint64_t round = 1; round <= 3; ++round) {
    const auto size = static_cast<std::int64_t>(round);  // Even for another size.
    for (std::int64_t i = 0; i < size; ++i) {
      ASSERT_TRUE(Barrier({static_cast<SessionId>(i + 1), round}, size).ok());
    }
    EXPECT_EQ(ended_.size(), round);
    ended_.clear();
  }
  ExpectEmpty();
}

TEST_F(Gatherings, ABarrier_RefusesAnotherSize) {
  ASSERT_TRUE(Barrier({7, 1}, 3).ok());
  const Status status = Barrier({2, 1}, 4);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("barrier init/3"));
  EXPECT_THAT(status.message(), HasSubstr("3 by those who wait, 4 by"));
  EXPECT_EQ(rival_, 7u);
  EXPECT_EQ(Barrier({2, 2}, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(keys_.waits(), 1u);
  EXPECT_TRUE(Barrier({2, 3}, 3, 5).ok());  // Of another scope.
}

TEST_F(Gatherings, Cancel_WithdrawsTheArrivalAndTellsWhoIsLate) {
  for (SessionId session = 1; session <= 3; ++session) {
    ASSERT_TRUE(Barrier({session, 1}, 4).ok());
  }
  EXPECT_THAT(keys_.CancelWait({2, 1}), Optional(std::string("barrier init/3: 3 of 4 arrived")));
  EXPECT_EQ(keys_.CancelWait({2, 1}), std::nullopt);
  ASSERT_TRUE(Barrier({4, 1}, 4).ok());
  EXPECT_TRUE(ended_.empty());
  ASSERT_TRUE(Barrier({5, 1}, 4).ok());
  EXPECT_EQ(ended_.size(), 4u);
  ExpectEmpty();
}

TEST_F(Gatherings, ALostConnection_WithdrawsItsArrivals) {
  ASSERT_TRUE(Barrier({1, 1}, 2).ok());
  ASSERT_TRUE(Exchange({1, 2}, 0, 2).ok());
  keys_.DropWaits(1);
  ExpectEmpty();
  ASSERT_TRUE(Barrier({2, 1}, 2).ok());
  ASSERT_TRUE(Exchange({2, 2}, 1, 2).ok());
  EXPECT_TRUE(ended_.empty());
  ASSERT_TRUE(Barrier({1, 1}, 2).ok());
  ASSERT_TRUE(Exchange({1, 2}, 0, 2).ok());
  EXPECT_EQ(ended_.size(), 4u);
}

TEST_F(Gatherings, AnExchange_GivesAllTheValuesInRankOrder) {
  ASSERT_TRUE(Exchange({1, 1}, 2, 3, "c").ok());
  ASSERT_TRUE(Exchange({2, 1}, 0, 3, "").ok());
  EXPECT_TRUE(ended_.empty());
  ASSERT_TRUE(Exchange({3, 1}, 1, 3, "b").ok());
  ASSERT_EQ(ended_.size(), 3u);
  for (const EndedWait& end : ended_) {
    EXPECT_TRUE(end.mutation);
    ASSERT_TRUE(end.shared_values);
    EXPECT_THAT(end.shared_values->values, ElementsAre("", "b", "c"));
    EXPECT_EQ(end.shared_values, ended_[0].shared_values);
  }
  ExpectEmpty();
}

TEST_F(Gatherings, AnExchange_OfOneIsReleasedAtOnce) {
  ASSERT_TRUE(Exchange({1, 1}, 0, 1, "x").ok());
  ASSERT_EQ(ended_.size(), 1u);
  EXPECT_THAT(ended_[0].shared_values->values, ElementsAre("x"));
  ExpectEmpty();
}

TEST_F(Gatherings, AnExchange_RefusesWhatDoesNotFit) {
  ASSERT_TRUE(Exchange({7, 1}, 1, 3).ok());
  struct Row {
    std::int64_t rank;
    std::int64_t size;
    const char* text;
    SessionId rival;
  };
  for (const Row& row :
       {Row{1, 3, "another caller waits as rank 1", 7}, Row{2, 4, "3 by those who wait, 4 by", 7},
        Row{3, 3, "no rank 3 of 3", 0}, Row{-1, 3, "no rank -1", 0}, Row{0, 0, "no rank 0 of 0", 0},
        Row{0, kWorldSizeMax + 1, "a size is from 1 to", 0}}) {
    rival_ = 0;
    const Status status = Exchange({2, 1}, row.rank, row.size);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("exchange init/3: "));
    EXPECT_THAT(status.message(), HasSubstr(row.text));
    EXPECT_EQ(rival_, row.rival);
  }
  EXPECT_EQ(keys_.waits(), 1u);
  EXPECT_TRUE(Exchange({7, 1}, 1, 3).ok());  // A repeat of the same request.
}

TEST_F(Gatherings, Cancel_NamesTheMissingRanks) {
  for (const std::int64_t rank : {0, 1, 3}) {
    ASSERT_TRUE(Exchange({static_cast<SessionId>(rank + 1), 1}, rank, 4).ok());
  }
  EXPECT_THAT(keys_.CancelWait({1, 1}),
              Optional(std::string("exchange init/3: 3 of 4 arrived; missing ranks 2")));
  EXPECT_THAT(keys_.CancelWait({2, 1}),
              Optional(std::string("exchange init/3: 2 of 4 arrived; missing ranks 0, 2")));
  ASSERT_TRUE(keys_.CancelWait({4, 1}));
  ASSERT_TRUE(Exchange({1, 1}, 5, 100).ok());
  const std::optional<std::string> late = keys_.CancelWait({1, 1});
  ASSERT_TRUE(late);
  EXPECT_THAT(*late, HasSubstr("1 of 100 arrived; missing ranks 0, 1, 2, 3, 4, 6, 7"));
  EXPECT_THAT(*late, HasSubstr("15, 16 and 83 more"));
  ExpectEmpty();
}

TEST_F(Gatherings, Fences_EndThemWithTheCause) {
  const Status cause(StatusCode::kRankLost, "rank 2 is lost");
  ASSERT_TRUE(Barrier({1, 1}, 3, 4).ok());
  ASSERT_TRUE(Exchange({1, 2}, 0, 3, "v", 4).ok());
  ASSERT_TRUE(keys_.AddPop({1, 3}, 4, "q").ok());
  ASSERT_TRUE(Barrier({2, 1}, 3, 4).ok());
  ASSERT_TRUE(Barrier({1, 4}, 3).ok());
  keys_.EndScopedWaits(1, cause, ended_);
  EXPECT_EQ(ended_.size(), 3u);
  EXPECT_EQ(keys_.waits(), 2u);
  keys_.EndWaits(4, cause, true, ended_);
  ASSERT_EQ(ended_.size(), 4u);
  for (const EndedWait& end : ended_) {
    EXPECT_EQ(end.status.code(), StatusCode::kRankLost);
    EXPECT_TRUE(end.mutation);
  }
  EXPECT_EQ(keys_.waits(), 1u);
  keys_.DropAllKeys(cause, ended_);
  EXPECT_EQ(keys_.waits(), 1u);
  keys_.DropWaits(1);
  ExpectEmpty();
}

TEST_F(Gatherings, Values_HaveALimitTogether) {
  const std::string most(kReplyValuesBytesMax / 2, 'v');
  ASSERT_TRUE(Exchange({1, 1}, 0, 3, most).ok());
  ASSERT_TRUE(Exchange({2, 1}, 1, 3, most).ok());
  EXPECT_EQ(Exchange({3, 1}, 2, 3, "v").code(), StatusCode::kTooLarge);
  EXPECT_TRUE(Exchange({3, 2}, 2, 3, "").ok());
  EXPECT_EQ(ended_.size(), 3u);
  ExpectEmpty();
}

TEST_F(Gatherings, Arrivals_CountAgainstTheLimitsOfWaits) {
  Keyspace small({.keys = 1, .bytes = 10 + kWaitOverhead + kWaitKeyOverhead});
  EXPECT_EQ(
      small.ArriveAtExchange({1, 1}, 0, ExchangeOp{"12345", 0, 2, "123456"}, ended_, rival_).code(),
      StatusCode::kResourceExhausted);
  EXPECT_TRUE(
      small.ArriveAtExchange({1, 1}, 0, ExchangeOp{"12345", 0, 2, "12345"}, ended_, rival_).ok());
  EXPECT_EQ(small.ArriveAtBarrier({1, 2}, 0, BarrierOp{"b", 2}, ended_, rival_).code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(small.waits(), 1u);
  EXPECT_EQ(keys_
                .ArriveAtBarrier({1, 1}, 0, BarrierOp{std::string(kKeyBytesMax + 1, 'k'), 2},
                                 ended_, rival_)
                .code(),
            StatusCode::kTooLarge);
  for (std::uint64_t i = 1; i <= kInFlightPerSessionMax; ++i) {
    ASSERT_TRUE(Barrier({1, i}, 1000).ok());
  }
  EXPECT_EQ(Barrier({1, 1000}, 1000).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(keys_.AddPop({1, 1001}, 0, "q").code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(Barrier({2, 1}, 1000).ok());
}

}  // namespace
}  // namespace resilient::store
