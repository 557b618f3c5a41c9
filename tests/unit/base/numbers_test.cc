// Goal: a text is read as the numbers it is, and as nothing else.
#include "runtime/base/numbers.h"

#include <cstdint>

#include <gtest/gtest.h>

namespace resilient {
namespace {

TEST(ParseNumber, WholeTextInRange_IsTheNumber) {
  EXPECT_EQ(ParseNumber<int>("42"), 42);
  EXPECT_EQ(ParseNumber<int>("-7"), -7);
  EXPECT_EQ(ParseNumber<std::uint64_t>("18446744073709551615"), ~std::uint64_t{0});
}

TEST(ParseNumber, AnythingElse_IsNone) {
  for (const char* text : {"", " ", "x", "4x", " 4", "4 ", "+4", "0x4", "4.0", "70000", "-70000"}) {
    EXPECT_FALSE(ParseNumber<std::int16_t>(text)) << "'" << text << "'";
  }
  EXPECT_FALSE(ParseNumber<std::uint64_t>("-1"));
  EXPECT_FALSE(ParseNumber<int>(std::string_view()));
}

TEST(ReadNumbers, AsManyAsAskedForWithOneBlankBetween_AreRead) {
  int first = 0;
  std::uint64_t second = 0;
  EXPECT_TRUE(ReadNumbers("-3 12", &first, &second));
  EXPECT_EQ(first, -3);
  EXPECT_EQ(second, 12u);
  for (const char* text : {"", "1", "1 ", "1  2", "1,2", "1 2 ", "1 2 3", "1 -2", "a 2", "12"}) {
    EXPECT_FALSE(ReadNumbers(text, &first, &second)) << "'" << text << "'";
  }
}

}  // namespace
}  // namespace resilient
