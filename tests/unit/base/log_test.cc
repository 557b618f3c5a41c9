// Goal: a log line is one line, in one write, with level, tag and text.
// Method: capture stderr; compare without the time.
#include "runtime/base/log.h"

#include <regex>
#include <string>

#include <gtest/gtest.h>

namespace resilient {
namespace {

class LogTest : public testing::Test {
 protected:
  void TearDown() override {
    SetLogLevel(LogLevel::kWarn);
    SetLogTag("");
  }
  static std::string Capture(LogLevel level, std::string_view text) {
    testing::internal::CaptureStderr();
    LogLine(level, text);
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, Line_HasTimeLevelTagAndText) {
  SetLogTag("rank 2");
  const std::string line = Capture(LogLevel::kWarn, "waits for rank 1");
  const std::regex form(R"(\[resilient\] \d\d:\d\d:\d\d\.\d\d\d W rank 2: waits for rank 1\n)");
  EXPECT_TRUE(std::regex_match(line, form)) << line;
}

TEST_F(LogTest, NoTag_NoColon) {
  const std::string line = Capture(LogLevel::kError, "x");
  EXPECT_TRUE(std::regex_match(line, std::regex(R"(\[resilient\] [0-9:.]+ E x\n)"))) << line;
}

TEST_F(LogTest, Json_IsEscaped) {
  SetLogLevel(LogLevel::kInfo, true);
  SetLogTag("store");
  const std::string line = Capture(LogLevel::kInfo, "a \"b\" \\ c\nd\x01");
  const std::regex form(R"rx(\{"time": \d+\.\d{3}, "level": "info", "tag": "store", )rx"
                        R"rx("text": "a \\"b\\" \\\\ c\\nd\\u0001"\}\n)rx");
  EXPECT_TRUE(std::regex_match(line, form)) << line;
}

TEST_F(LogTest, Threshold_DecidesWhatIsEvaluated) {
  int evaluated = 0;
  const auto text = [&evaluated] {
    ++evaluated;
    return "text";
  };
  testing::internal::CaptureStderr();
  RESILIENT_LOG(kInfo, text());
  RESILIENT_LOG(kWarn, text(), " ", 1);
  SetLogLevel(LogLevel::kOff);
  RESILIENT_LOG(kError, text());
  const std::string output = testing::internal::GetCapturedStderr();
  EXPECT_EQ(evaluated, 1);
  EXPECT_NE(output.find("text 1\n"), std::string::npos) << output;
  EXPECT_FALSE(LogEnabled(LogLevel::kOff));
}

TEST_F(LogTest, LevelNames_Table) {
  const std::pair<std::string_view, LogLevel> kNames[] = {{"debug", LogLevel::kDebug},
                                                          {"info", LogLevel::kInfo},
                                                          {"warn", LogLevel::kWarn},
                                                          {"error", LogLevel::kError},
                                                          {"off", LogLevel::kOff}};
  for (const auto& [name, expected] : kNames) {
    LogLevel level{};
    EXPECT_TRUE(ParseLogLevel(name, &level)) << name;
    EXPECT_EQ(level, expected) << name;
  }
  LogLevel level = LogLevel::kInfo;
  for (const std::string_view bad : {"", "Warn", "warning", "2"}) {
    EXPECT_FALSE(ParseLogLevel(bad, &level)) << bad;
  }
  EXPECT_EQ(level, LogLevel::kInfo);
}

}  // namespace
}  // namespace resilient
