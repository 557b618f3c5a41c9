// Goal: the generator is reproducible, within bounds and not visibly skewed; ids do not repeat.
// Method: known values of splitmix64; counting.
#include "runtime/base/random.h"

#include <array>
#include <limits>
#include <set>
#include <string>

#include <gtest/gtest.h>

namespace resilient {
namespace {

TEST(Random, KnownSequence) {
  // Reference values of splitmix64 from seed 1234567.
  Random random(1234567);
  EXPECT_EQ(random.Next(), 6457827717110365317ULL);
  EXPECT_EQ(random.Next(), 3203168211198807973ULL);
  EXPECT_EQ(random.Next(), 9817491932198370423ULL);
}

TEST(Random, Below_StaysBelowAndReachesAll) {
  Random random(1);
  std::array<int, 5> seen{};
  for (int i = 0; i < 5000; ++i) ++seen.at(random.Below(seen.size()));
  for (const int count : seen) EXPECT_NEAR(count, 1000, 150);
  EXPECT_EQ(random.Below(1), 0U);
  constexpr std::uint64_t kHuge = std::numeric_limits<std::uint64_t>::max();
  EXPECT_LT(random.Below(kHuge), kHuge);
  EXPECT_DEATH(random.Below(0), "bound > 0");
}

TEST(Random, Unit_IsInRange) {
  Random random(2);
  double sum = 0;
  for (int i = 0; i < 1000; ++i) {
    const double drawn = random.Unit();
    ASSERT_GE(drawn, 0.0);
    ASSERT_LT(drawn, 1.0);
    sum += drawn;
  }
  EXPECT_NEAR(sum / 1000, 0.5, 0.05);
}

TEST(RandomHexId, IsHexAndNew) {
  std::set<std::string> ids;
  for (int i = 0; i < 100; ++i) {
    const std::string id = RandomHexId();
    EXPECT_EQ(id.size(), 32U);
    EXPECT_EQ(id.find_first_not_of("0123456789abcdef"), std::string::npos) << id;
    EXPECT_TRUE(ids.insert(id).second);
  }
  EXPECT_NE(RandomSeed(), RandomSeed());
}

}  // namespace
}  // namespace resilient
