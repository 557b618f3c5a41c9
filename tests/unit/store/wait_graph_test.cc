// Goal: a deadlock is found exactly where there is one, and its circle is one.
// Method: situations by hand, and random graphs against a search that follows the definition.
#include "store/core/wait_graph.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "runtime/base/random.h"

namespace resilient::store {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

BlockedCall In(std::string group, std::vector<int> missing, bool any = false) {
  return {.group = std::move(group),
          .seq = 1,
          .what = "barrier()",
          .missing = std::move(missing),
          .any = any};
}

std::vector<std::string> Text(const std::vector<WaitEdge>& circle) {
  std::vector<std::string> text;
  for (const WaitEdge& edge : circle)
    text.push_back(std::to_string(edge.from) + " in " + edge.call.group + " waits for " +
                   std::to_string(edge.to));
  return text;
}

TEST(FindCircle, TwoGroupsInOppositeOrder) {
  EXPECT_THAT(Text(FindCircle({{1, {In("b", {0})}}, {0, {In("a", {1})}}})),
              ElementsAre("0 in a waits for 1", "1 in b waits for 0"));
}

TEST(FindCircle, ALateRank_IsNone) {
  EXPECT_THAT(FindCircle({{1, {In("world", {0, 3})}}, {2, {In("world", {0, 3})}}}), IsEmpty());
  EXPECT_THAT(FindCircle({}), IsEmpty());
}

// Rank 2 waits for the circle, and is not in it.
TEST(FindCircle, WhoLeadsIntoIt_IsLeftOut) {
  EXPECT_THAT(Text(FindCircle({{2, {In("c", {3})}}, {3, {In("a", {4})}}, {4, {In("b", {3})}}})),
              ElementsAre("3 in a waits for 4", "4 in b waits for 3"));
}

TEST(FindCircle, WhereDataMoves_IsNone) {
  EXPECT_THAT(FindCircle({{0, {In("a", {1})}}, {1, {In("b", {})}}}), IsEmpty());
}

TEST(FindCircle, OneOfSeveralSenders_IsEnough) {
  EXPECT_THAT(FindCircle({{0, {In("p", {1, 2}, true)}}, {1, {In("p", {0}, true)}}}), IsEmpty());
  EXPECT_THAT(
      Text(FindCircle({{0, {In("p", {1, 2}, true)}}, {1, {In("p", {0})}}, {2, {In("p", {0})}}})),
      ElementsAre("0 in p waits for 1", "1 in p waits for 0"));
}

TEST(FindCircle, AnotherThreadOfTheRank_MayGoOn) {
  const BlockedRank other{1, {In("b", {0})}};
  EXPECT_THAT(FindCircle({{0, {In("a", {1}), In("z", {5})}}, other}), IsEmpty());
  EXPECT_EQ(FindCircle({{0, {In("a", {1}), In("z", {1})}}, other}).size(), 2u);
}

std::vector<BlockedRank> RandomGraph(Random& random) {
  std::vector<BlockedRank> blocked;
  const int ranks = 2 + static_cast<int>(random.Below(5));
  for (int rank = 0; rank < ranks; ++rank) {
    if (random.Below(6) == 0) continue;  // It is on its way.
    BlockedRank& one = blocked.emplace_back(BlockedRank{rank, {}});
    for (std::uint64_t calls = 1 + random.Below(2); calls > 0; --calls) {
      std::vector<int> missing;
      for (int peer = 0; peer < ranks; ++peer) {
        if (peer != rank && random.Below(3) == 0) missing.push_back(peer);
      }
      one.calls.push_back(In("g" + std::to_string(random.Below(3)), missing, random.Below(3) == 0));
    }
  }
  for (std::size_t i = blocked.size(); i > 1; --i)
    std::swap(blocked[i - 1], blocked[random.Below(i)]);
  return blocked;
}

// The largest set of ranks of which none can go on unless another one of it does.
std::set<int> Deadlocked(const std::vector<BlockedRank>& blocked) {
  std::set<int> largest;
  for (unsigned chosen = 0; chosen < 1u << blocked.size(); ++chosen) {
    std::set<int> ranks;
    for (std::size_t i = 0; i < blocked.size(); ++i) {
      if (chosen & 1u << i) ranks.insert(blocked[i].rank);
    }
    const auto among = [&](int rank) { return ranks.contains(rank); };
    const auto hopeless = [&](const BlockedCall& call) {
      if (call.missing.empty()) return false;
      return call.any ? std::all_of(call.missing.begin(), call.missing.end(), among)
                      : std::any_of(call.missing.begin(), call.missing.end(), among);
    };
    const bool closed = std::all_of(blocked.begin(), blocked.end(), [&](const BlockedRank& one) {
      return !among(one.rank) || std::all_of(one.calls.begin(), one.calls.end(), hopeless);
    });
    if (closed && ranks.size() > largest.size()) largest = ranks;
  }
  return largest;
}

TEST(FindCircle, RandomGraphs_AgreeWithTheDefinition) {
  int circles = 0;
  for (std::uint64_t seed = 1; seed <= 5'000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const std::vector<BlockedRank> blocked = RandomGraph(random);
    const std::vector<WaitEdge> circle = FindCircle(blocked);
    const std::set<int> deadlocked = Deadlocked(blocked);
    ASSERT_EQ(circle.empty(), deadlocked.empty());
    if (!circle.empty()) ++circles;
    for (std::size_t i = 0; i < circle.size(); ++i) {
      const WaitEdge& edge = circle[i];
      ASSERT_TRUE(deadlocked.contains(edge.from));
      ASSERT_EQ(edge.to, circle[(i + 1) % circle.size()].from);
      ASSERT_TRUE(std::count(edge.call.missing.begin(), edge.call.missing.end(), edge.to));
      ASSERT_GE(edge.from, circle.front().from);
    }
  }
  EXPECT_GT(circles, 500);
}

}  // namespace
}  // namespace resilient::store
