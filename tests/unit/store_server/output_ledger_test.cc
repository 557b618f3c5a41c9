// Goal: what clients leave unread is counted one by one and in total, and progress is told from
// standing still. Method: a clock made of numbers.

#include "store/server/output_ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/server/metrics.h"

namespace resilient::store {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

Instant AtSecond(int second) { return Instant() + seconds(second); }

TEST(OutputLedger, Total_FollowsWhatWaits) {
  OutputLedger ledger;
  EXPECT_FALSE(ledger.Largest());
  ledger.Note(1, {100, 100, 0}, AtSecond(0));
  ledger.Note(2, {300, 300, 0}, AtSecond(0));
  ledger.Note(3, {200, 200, 0}, AtSecond(0));
  EXPECT_EQ(ledger.total(), 600u);
  EXPECT_EQ(ledger.Largest(), 2u);
  ledger.Note(2, {50, 50, 250}, AtSecond(1));
  EXPECT_EQ(ledger.total(), 350u);
  EXPECT_EQ(ledger.Largest(), 3u);
  ledger.Note(3, {0, 0, 200}, AtSecond(1));
  ledger.Forget(4);
  EXPECT_THAT(ledger.All(), ElementsAre(1u, 2u));
  ledger.Forget(1);
  ledger.Forget(2);
  EXPECT_EQ(ledger.total(), 0u);
}

TEST(OutputLedger, Stuck_AreThoseWithoutProgress) {
  OutputLedger ledger;
  ledger.Note(1, {100, 100, 0}, AtSecond(0));
  ledger.Note(2, {100, 100, 0}, AtSecond(0));
  ledger.Note(3, {10, 10, 0}, AtSecond(0));
  // More came for the first one, and nothing went; the second read a byte and got many.
  ledger.Note(1, {200, 200, 0}, AtSecond(5));
  ledger.Note(2, {500, 500, 1}, AtSecond(5));
  EXPECT_THAT(ledger.Stuck(50, AtSecond(-1)), IsEmpty());
  EXPECT_THAT(ledger.Stuck(50, AtSecond(0)), ElementsAre(1u));
  EXPECT_THAT(ledger.Stuck(50, AtSecond(5)), ElementsAre(1u, 2u));
  EXPECT_THAT(ledger.Stuck(5, AtSecond(0)), ElementsAre(1u, 3u));
}

TEST(OutputLedger, SharedBytes_AreUnreadButLittleMemory) {
  OutputLedger ledger;
  ledger.Note(1, {900, 10, 0}, AtSecond(0));
  ledger.Note(2, {200, 20, 0}, AtSecond(0));
  EXPECT_EQ(ledger.total(), 30u);
  EXPECT_EQ(ledger.Largest(), 2u);
  EXPECT_THAT(ledger.Stuck(500, AtSecond(0)), ElementsAre(1u));
  ledger.Note(3, {100, 0, 0}, AtSecond(0));
  ledger.Forget(1);
  ledger.Forget(2);
  EXPECT_EQ(ledger.total(), 0u);
  EXPECT_FALSE(ledger.empty());
  ledger.Forget(3);
  EXPECT_TRUE(ledger.empty());
}

TEST(Histogram, Observations_FallIntoTheBucketOfTheirBound) {
  Histogram histogram({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13});
  for (const double value : {0.5, 1.0, 1.5, 13.0, 14.0}) histogram.Observe(value);
  EXPECT_EQ(histogram.count(0), 2u);  // A bound belongs to its bucket.
  EXPECT_EQ(histogram.count(1), 1u);
  EXPECT_EQ(histogram.count(12), 1u);
  EXPECT_EQ(histogram.count(Histogram::kBounds), 1u);
  EXPECT_EQ(histogram.sum(), 30.0);
}

}  // namespace
}  // namespace resilient::store
