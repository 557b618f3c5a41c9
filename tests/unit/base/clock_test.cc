// Goal: deadlines saturate and never wrap; the system's clock goes forward.
// Method: a table of instants; two readings.
#include <resilient/clock.h>

#include <gtest/gtest.h>

namespace resilient {
namespace {

using std::chrono::hours;
using std::chrono::seconds;

constexpr Instant kStart{seconds(100)};

TEST(Deadline, After_IsTheSum) {
  const Deadline deadline = Deadline::After(kStart, seconds(5));
  EXPECT_EQ(deadline.when(), kStart + seconds(5));
  EXPECT_FALSE(deadline.IsNever());
  EXPECT_EQ(deadline, Deadline::At(kStart + seconds(5)));
}

TEST(Deadline, Expiry_IsAtTheInstantItself) {
  const Deadline deadline = Deadline::After(kStart, seconds(5));
  EXPECT_FALSE(deadline.ExpiredAt(kStart + seconds(5) - Duration(1)));
  EXPECT_TRUE(deadline.ExpiredAt(kStart + seconds(5)));
  EXPECT_EQ(deadline.LeftAt(kStart), seconds(5));
  EXPECT_EQ(deadline.LeftAt(kStart + seconds(5)), Duration::zero());
  EXPECT_EQ(deadline.LeftAt(kStart + hours(5)), Duration::zero());
}

TEST(Deadline, HugeTimeout_IsNever) {
  EXPECT_TRUE(Deadline::After(kStart, Duration::max()).IsNever());
  EXPECT_TRUE(Deadline::After(kStart, kNever - kStart).IsNever());
  EXPECT_FALSE(Deadline::After(kStart, kNever - kStart - Duration(1)).IsNever());
  EXPECT_EQ(Deadline::After(kStart, Duration::max()), Deadline::Never());
}

TEST(Deadline, NegativeTimeout_IsExpired) {
  EXPECT_TRUE(Deadline::After(kStart, seconds(-1)).ExpiredAt(kStart));
}

TEST(Deadline, Order) {
  EXPECT_LT(Deadline::At(kStart), Deadline::At(kStart + seconds(1)));
  EXPECT_LT(Deadline::At(kStart), Deadline::Never());
}

TEST(SystemClock, GoesForwardAndKnowsTheYear) {
  const SystemClock clock;
  const Instant first = clock.Now();
  EXPECT_GE(clock.Now(), first);
  EXPECT_GT(clock.WallSeconds(), 1.7e9);
}

}  // namespace
}  // namespace resilient
