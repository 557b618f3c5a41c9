// Goal: two accounts of a group are told apart when they differ, whatever came before and between,
// and what is kept of a rank has a limit. Method: accounts of ranks, one after the other.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "store/core/group_book.h"
#include "store/core/messages.h"

namespace resilient::store {
namespace {

GroupMade Made(std::string group, const std::vector<int>& ranks, bool used = true) {
  return {std::move(group), RanksOfGroup(ranks, "train.py:1"), used};
}

TEST(GroupBook, TwoAccounts_AreComparedByTheirRanks) {
  GroupBook book;
  book.Note(0, {Made("1", {0, 1}), Made("2", {0, 2})});
  EXPECT_FALSE(book.MayDiffer());
  EXPECT_FALSE(book.Compare(0, 1, "1", true)) << "rank 1 has said nothing";
  book.Note(1, {Made("1", {0, 1})});
  EXPECT_FALSE(book.MayDiffer());
  EXPECT_FALSE(book.Compare(0, 1, "1", true));
  book.Note(2, {Made("2", {2, 0})});
  EXPECT_TRUE(book.MayDiffer());
  const auto difference = book.Compare(0, 2, "2", true);
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->group, "2");
  EXPECT_EQ(difference->one, 0);
  EXPECT_EQ(difference->of_one.text, "0,2");
  EXPECT_EQ(difference->other, 2);
  EXPECT_EQ(difference->of_other.text, "2,0");
  EXPECT_FALSE(book.Compare(0, 2, "1", true));
  EXPECT_NE(book.DigestOf(0, "2"), book.DigestOf(2, "2"));
  EXPECT_EQ(book.DigestOf(1, "2"), 0u);
}

TEST(GroupBook, WhatIsNotUsed_CountsOnRequestAlone) {
  GroupBook book;
  book.Note(0, {Made("1", {0, 1})});
  book.Note(1, {Made("1", {1, 2}, false)});
  EXPECT_FALSE(book.Compare(0, 1, "1", true));
  EXPECT_TRUE(book.Compare(0, 1, "1", false));
  book.Note(1, {Made("1", {1, 2})});
  EXPECT_TRUE(book.Compare(0, 1, "1", true));
}

TEST(GroupBook, OfARankThatIsForgotten_NothingIsKnown) {
  GroupBook book;
  book.Note(0, {Made("1", {0, 1})});
  book.Note(1, {Made("1", {1, 2})});
  book.Forget({0});
  EXPECT_FALSE(book.Compare(0, 1, "1", false));
  EXPECT_NE(book.DigestOf(0, "1"), 0u);
}

TEST(GroupBook, AnAccountWithoutADigest_HidesNoOther) {
  GroupBook book;
  book.Note(0, {{"1", {}, true}});
  book.Note(1, {Made("1", {0, 1})});
  book.Note(2, {Made("1", {0, 2})});
  EXPECT_TRUE(book.MayDiffer());
  EXPECT_TRUE(book.Compare(1, 2, "1", true));
  EXPECT_FALSE(book.Compare(0, 1, "1", true));
}

// A rank that names ever more groups: the latest are kept, and no difference is overlooked.
TEST(GroupBook, MoreGroupsThanAreKept_AreComparedAllTheSame) {
  GroupBook book;
  book.Note(0, {Made("first", {0, 1})});
  for (std::size_t i = 0; i < 5000; ++i) book.Note(0, {Made("g" + std::to_string(i), {0, 1})});
  EXPECT_EQ(book.DigestOf(0, "first"), 0u);
  EXPECT_NE(book.DigestOf(0, "g4999"), 0u);
  EXPECT_TRUE(book.MayDiffer());
  book.Note(1, {Made("g4999", {1, 0})});
  EXPECT_TRUE(book.Compare(0, 1, "g4999", true));
}

}  // namespace
}  // namespace resilient::store
