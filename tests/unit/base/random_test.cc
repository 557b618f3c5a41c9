// Goal: the generator is reproducible, within bounds and not visibly skewed; ids do not repeat.
// Method: known values of splitmix64; counting.
#include "runtime/base/random.h"

#include <array>
#include <cstdint>
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

// The state of the generator after it has returned `drawn`.
std::uint64_t StateAfter(std::uint64_t drawn) {
  drawn ^= drawn >> 31 ^ drawn >> 62;
  drawn *= 0x319642b2d24d8ec3ULL;  // The inverse of the factor.
  drawn ^= drawn >> 27 ^ drawn >> 54;
  drawn *= 0x96de1b173f119089ULL;
  return drawn ^ drawn >> 30 ^ drawn >> 60;
}

TEST(Random, OneNumberGivesAllThatFollow) {
  Random random(7);
  random.Next();
  Random guessed(StateAfter(random.Next()));
  for (int i = 0; i < 10; ++i) EXPECT_EQ(guessed.Next(), random.Next());
}

TEST(RandomHex, OneSecretSaysNothingOfOthers) {
  std::set<std::uint64_t> drawn;
  std::set<std::uint64_t> guessed;
  for (int i = 0; i < 1000; ++i) {
    const std::string secret = RandomHex(32);
    ASSERT_EQ(secret.size(), 64U);
    for (std::size_t at = 0; at < secret.size(); at += 16) {
      const std::uint64_t part = std::stoull(secret.substr(at, 16), nullptr, 16);
      EXPECT_TRUE(drawn.insert(part).second);
      // What a secret of that generator would be followed by.
      Random next(StateAfter(part));
      for (int k = 0; k < 8; ++k) guessed.insert(next.Next());
    }
  }
  for (const std::uint64_t guess : guessed) EXPECT_FALSE(drawn.contains(guess));
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
