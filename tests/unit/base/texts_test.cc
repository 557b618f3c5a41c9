// Goal: parts of texts read well for none, one and many. Method: by example.
#include "runtime/base/texts.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace resilient {
namespace {

TEST(Texts, ListOf_NamesTheFirstAndCountsTheRest) {
  const auto quoted = [](const std::string& item) { return "'" + item + "'"; };
  const std::vector<std::string> items = {"a", "b", "c"};
  EXPECT_EQ(ListOf(std::vector<std::string>(), 2, quoted), "");
  EXPECT_EQ(ListOf(items, 3, quoted), "'a', 'b', 'c'");
  EXPECT_EQ(ListOf(items, 2, quoted), "'a', 'b' and 1 more");
}

TEST(Texts, Ranks) {
  EXPECT_EQ(RanksText({3}), "rank 3");
  EXPECT_EQ(RanksText({2, 5}), "ranks 2, 5");
  EXPECT_EQ(RanksText({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
}

TEST(Texts, ACallWithAndWithoutItsLine) {
  WaitingCall call;
  call.group = "world";
  call.operation.seq = 9;
  call.operation.what = "barrier()";
  EXPECT_EQ(CallText(call), "barrier() #9 of group 'world'");
  call.operation.call_site = "train.py:7";
  EXPECT_EQ(CallText(call), "barrier() #9 of group 'world' at train.py:7");
}

}  // namespace
}  // namespace resilient
