// Goal: a log line is one line, in one write, with level, tag and text.
// Method: capture stderr; compare without the time.
#include "runtime/base/log.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <resilient/settings.h>

#include "runtime/base/log_record.h"
#include "runtime/base/printable.h"

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
  EXPECT_THAT(line, testing::MatchesRegex("\\[resilient\\] [0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3} W "
                                          "rank 2: waits for rank 1\n"));
}

TEST_F(LogTest, NoTag_NoColon) {
  const std::string line = Capture(LogLevel::kError, "x");
  EXPECT_THAT(line, testing::MatchesRegex("\\[resilient\\] [0-9:.]+ E x\n"));
}

// What a peer calls itself may come into a text.
TEST_F(LogTest, ControlCharacters_MakeNoSecondLine) {
  const std::string line = Capture(LogLevel::kError, "a\n[resilient] b\x1b[2J");
  EXPECT_THAT(line, testing::EndsWith(" E a\\n[resilient] b\\u001b[2J\n"));
}

TEST_F(LogTest, Json_IsEscaped) {
  SetLogLevel(LogLevel::kInfo, true);
  SetLogTag("store");
  const std::string line = Capture(LogLevel::kInfo, "a \"b\" \\ c\nd\x01");
  const std::string rest = R"(, "level": "info", "tag": "store", "text": "a \"b\" \\ c\nd\u0001"})"
                           "\n";
  EXPECT_THAT(line, testing::StartsWith("{\"time\": 1"));
  EXPECT_THAT(line, testing::EndsWith(rest));
}

// A field of a stranger stays one field, and the line one line.
const LogRecord kOfAStranger = {
    "cut", {{"job", "a:b"}, {"none", ""}, {"host", "a b=\"\n\xff\\"}}, "cut it: slow"};

TEST_F(LogTest, Record_ShowsItsFieldsBeforeTheText) {
  testing::internal::CaptureStderr();
  RESILIENT_LOG_RECORD(kWarn, "join", {{"job", "train"}, {"rank", "3"}}, "it joined");
  RESILIENT_LOG_RECORD(kInfo, "not", {{"shown", "at this level"}}, "");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::EndsWith(" W event=join job=train rank=3: it joined\n"));
  EXPECT_EQ(ToText(kOfAStranger), R"(event=cut job=a:b host="a b=\x22\x0a\xff\\": cut it: slow)");
  const LogRecord endless{"refused", {{"host", std::string(100000, 'x')}}, "no token"};
  EXPECT_LT(ToText(endless).size(), 400u);
}

TEST_F(LogTest, RecordAsJson_HasItsFieldsAsMembers) {
  SetLogLevel(LogLevel::kInfo, true);
  testing::internal::CaptureStderr();
  LogLine(LogLevel::kInfo, kOfAStranger);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::EndsWith(R"("tag": "", "event": "cut", "job": "a:b", )"
                                R"("host": "a b=\"\\x0a\\xff\\\\", "text": "cut it: slow"})"
                                "\n"));
}

// Data for tools: the same object behind the event, or as the member that the event names.
TEST_F(LogTest, RecordWithAnObject_ShowsItAsItIs) {
  const LogRecord data{"incident", {}, "it \"ended\"", R"({"a": "b\\x"})"};
  EXPECT_EQ(ToText(data), R"(incident {"a": "b\\x"})");
  SetLogLevel(LogLevel::kInfo, true);
  testing::internal::CaptureStderr();
  LogLine(LogLevel::kInfo, data);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::EndsWith(R"("event": "incident", "text": "it \"ended\"", )"
                                R"("incident": {"a": "b\\x"}})"
                                "\n"));
}

TEST_F(LogTest, RecordWithoutEvent_IsItsText) {
  const LogRecord text{{}, {}, "it joined"};
  EXPECT_EQ(ToText(text), "it joined");
}

TEST(LogRecord, Value_OfAField) {
  EXPECT_EQ(kOfAStranger.Value("job"), "a:b");
  EXPECT_EQ(kOfAStranger.Value("rank"), "");
}

TEST(Printable, AnyBytes_AreOneLineWithoutLoss) {
  EXPECT_EQ(Printable("a/1 \"b\""), "a/1 \"b\"");
  EXPECT_EQ(Printable(std::string_view("\0\n\\\x7f\xff", 5)), "\\x00\\x0a\\\\\\x7f\\xff");
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
