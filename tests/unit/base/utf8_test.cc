// Goal: a code point is told from bytes that are none, and a control character from others. Method:
// the borders of each length, of the surrogates, and of the last plane.
#include "runtime/base/utf8.h"

#include <string>

#include <gtest/gtest.h>

#include "runtime/base/json.h"

namespace resilient {
namespace {

TEST(Utf8, LengthsOfCodePoints) {
  for (const auto& [text, length] :
       {std::pair("a", 1u), std::pair("\xc2\x80", 2u), std::pair("\xdf\xbf rest", 2u),
        std::pair("\xe0\xa0\x80", 3u), std::pair("\xed\x9f\xbf", 3u),
        std::pair("\xf0\x90\x80\x80", 4u), std::pair("\xf4\x8f\xbf\xbf", 4u)}) {
    EXPECT_EQ(Utf8Length(text), length) << text;
  }
  EXPECT_EQ(Utf8Length(std::string_view("\0", 1)), 1u);
}

TEST(Utf8, WhatIsNoCodePoint) {
  for (const char* text : {"", "\x80", "\xc1\xbf", "\xc2", "\xc2 ", "\xe0\x9f\xbf", "\xed\xa0\x80",
                           "\xe2\x82", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5", "\xff"}) {
    EXPECT_EQ(Utf8Length(text), 0u) << JsonString(text);
  }
}

TEST(Utf8, ControlCharacters) {
  for (const char* text : {"\x01", "\x1f", "\x7f", "\xc2\x80", "\xc2\x9f"}) {
    EXPECT_TRUE(IsControl(text)) << JsonString(text);
  }
  for (const char* text : {" ", "~", "\xc2\xa0", "\xc3\xbc"}) EXPECT_FALSE(IsControl(text)) << text;
}

TEST(Json, StringsAreUtf8WithoutControlCharacters) {
  EXPECT_EQ(JsonString("a\"\\\n\xc2\x9b\xff\xc3\xbc"),
            "\"a\\\"\\\\\\u000a\\u009b\\u00ff\xc3\xbc\"");
}

}  // namespace
}  // namespace resilient
