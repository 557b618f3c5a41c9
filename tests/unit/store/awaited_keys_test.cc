// Goal: each wait hears of each of its keys once, in the order of the waits, and nothing is left of
// one that is over. Method: the table alone, and a random run against plain sets.

#include "store/core/awaited_keys.h"

#include <map>
#include <memory>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace resilient::store {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr WaitId Id(std::uint64_t number) { return {number, 1}; }

TEST(AwaitedKeys, AWaitIsOverWhenAllItsKeysHaveCome) {
  AwaitedKeys keys;
  AwaitedKeys::Wait wait;
  keys.Begin(Id(1), wait, {"a", "b", "a"});
  EXPECT_THAT(keys.Come("a", nullptr), ElementsAre(Id(1)));
  EXPECT_FALSE(wait.all_have_come());
  EXPECT_THAT(keys.Come("a", nullptr), IsEmpty());
  EXPECT_THAT(keys.Come("b", nullptr), ElementsAre(Id(1)));
  EXPECT_TRUE(wait.all_have_come());
  keys.End(wait);
  keys.End(wait);
  EXPECT_TRUE(keys.empty());
}

TEST(AwaitedKeys, WaitsHearInTheirOrder_AndOnlyThoseThatAreMeant) {
  AwaitedKeys keys;
  AwaitedKeys::Wait waits[4];
  for (const int i : {2, 0, 3, 1}) keys.Begin(Id(static_cast<std::uint64_t>(i)), waits[i], {"k"});
  keys.End(waits[3]);
  const auto meant = [](WaitId id) { return id != Id(0); };
  EXPECT_THAT(keys.Come("k", meant), ElementsAre(Id(2), Id(1)));
  std::set<WaitId> left;
  keys.AddTo(left);
  EXPECT_THAT(left, ElementsAre(Id(0)));
  EXPECT_THAT(keys.Come("k", nullptr), ElementsAre(Id(0)));
  for (AwaitedKeys::Wait& wait : waits) keys.End(wait);
  EXPECT_TRUE(keys.empty());
}

TEST(AwaitedKeys, InALongRun_AreWhatPlainSetsSay) {
  std::mt19937 random(11);
  const auto number = [&random](int most) {
    return std::uniform_int_distribution<int>(0, most)(random);
  };
  AwaitedKeys keys;
  std::map<WaitId, std::unique_ptr<AwaitedKeys::Wait>> waits;
  std::map<WaitId, std::set<std::string>> missing;
  for (int step = 0; step < 20000; ++step) {
    const WaitId id = Id(static_cast<std::uint64_t>(number(30)));
    const std::string key(1, static_cast<char>('a' + number(7)));
    if (!waits.contains(id)) {
      std::vector<std::string> wanted;
      for (int i = number(5); i >= 0; --i)
        wanted.emplace_back(1, static_cast<char>('a' + number(7)));
      missing[id] = {wanted.begin(), wanted.end()};
      waits[id] = std::make_unique<AwaitedKeys::Wait>();
      keys.Begin(id, *waits[id], wanted);
    } else if (number(1) == 0) {
      keys.End(*waits[id]);
      waits.erase(id);
      missing.erase(id);
    } else {
      const bool even_only = number(1) == 0;
      const auto meant = [](WaitId one) { return one.session % 2 == 0; };
      std::set<WaitId> expected;
      for (auto& [one, left] : missing) {
        if ((!even_only || meant(one)) && left.erase(key) > 0) expected.insert(one);
      }
      const std::vector<WaitId> told = even_only ? keys.Come(key, meant) : keys.Come(key, nullptr);
      ASSERT_EQ(std::set<WaitId>(told.begin(), told.end()), expected);
      ASSERT_EQ(told.size(), expected.size());
    }
    for (const auto& [one, left] : missing) {
      ASSERT_EQ(waits.at(one)->all_have_come(), left.empty());
    }
    ASSERT_EQ(keys.empty(), waits.empty());
  }
}

}  // namespace
}  // namespace resilient::store
