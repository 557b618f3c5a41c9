// Goal: two lists of ranks are told apart whenever they differ, in members or in order, and never
// for another reason; what is said of them is short. Method: lists that differ in one thing.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <resilient/group_ranks.h>

#include "runtime/base/texts.h"

namespace resilient {
namespace {

GroupRanks Of(const std::vector<int>& ranks, std::string made_at = "") {
  return RanksOfGroup(ranks, std::move(made_at));
}

TEST(GroupRanks, ListsThatDiffer_Contradict) {
  const std::vector<std::vector<int>> lists = {{},     {0},       {1},       {0, 1}, {1, 0},
                                               {0, 2}, {0, 1, 2}, {0, 2, 1}, {256},  {0, 256}};
  std::set<std::uint64_t> digests;
  for (const auto& list : lists) {
    digests.insert(Of(list).digest);
    for (const auto& other : lists)
      EXPECT_EQ(Of(list).Contradicts(Of(other)), list != other) << Of(list).text;
  }
  EXPECT_EQ(digests.size(), lists.size());
}

TEST(GroupRanks, TheLineOfTheProgram_MayDiffer) {
  EXPECT_FALSE(Of({0, 1}, "a.py:1").Contradicts(Of({0, 1}, "b.py:2")));
}

TEST(GroupRanks, WhatIsNotKnown_ContradictsNothing) {
  EXPECT_FALSE(GroupRanks().Contradicts(Of({0, 1})));
  EXPECT_FALSE(Of({0, 1}).Contradicts(GroupRanks()));
}

TEST(GroupRanks, Text_KeepsTheOrderAndShortensRuns) {
  EXPECT_EQ(Of({}).text, "");
  EXPECT_EQ(Of({3}).text, "3");
  EXPECT_EQ(Of({0, 1}).text, "0,1");
  EXPECT_EQ(Of({0, 1, 2, 5, 6, 7, 8, 3}).text, "0-2,5-8,3");
  EXPECT_EQ(Of({2, 1, 0}).text, "2,1,0");
  std::vector<int> all(4096);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(Of(all).text, "0-4095");
}

TEST(GroupRanks, WhatIsTooLong_IsCutAndSaysSo) {
  std::vector<int> even(5000);
  for (std::size_t i = 0; i < even.size(); ++i) even[i] = static_cast<int>(2 * i);
  const GroupRanks ranks = Of(even, std::string(1000, 'x'));
  EXPECT_LE(ranks.text.size(), kRanksTextMax);
  EXPECT_TRUE(ranks.text.ends_with(",... (5000 ranks)")) << ranks.text;
  EXPECT_TRUE(ranks.text.starts_with("0,2,4,6,"));
  EXPECT_EQ(ranks.made_at.size(), kMadeAtMax);
  even.back() = 1;  // Where the text does not say it any more.
  EXPECT_TRUE(Of(even).Contradicts(ranks));
  EXPECT_EQ(Of(even).text, ranks.text);
}

TEST(GroupRanks, TheTextOfADifference_NamesBothSides) {
  const std::string text = OtherRanksText("1", 7, "rank 2 (b, pid 8)", Of({0, 2}, "b.py:3 main"),
                                          "rank 0 (a, pid 7)", Of({0, 1}));
  EXPECT_TRUE(
      text.starts_with("rank 2 (b, pid 8) has made group '1' of ranks [0,2] at b.py:3 main "
                       "where rank 0 (a, pid 7) has made it of ranks [0,1], in generation "
                       "7; "))
      << text;
}

}  // namespace
}  // namespace resilient
