// Goal: a log line is one line, in one write, with level, tag and text.
// Method: capture stderr; compare without the time.
#include "runtime/base/log.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <resilient/settings.h>

#include "runtime/base/log_flush.h"
#include "runtime/base/log_record.h"
#include "runtime/base/printable.h"
#include "tests/support/captured_stderr.h"

namespace resilient {
namespace {

class LogTest : public testing::Test {
 protected:
  void TearDown() override {
    SetLogLevel(LogLevel::kWarn);
    SetLogTag("");
  }
  static std::string Capture(LogLevel level, std::string_view text) {
    BeginToCaptureStderr();
    LogLine(level, text);
    return TakeCapturedStderr();
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

// U+009B begins commands to a terminal, as ESC [ does.
TEST_F(LogTest, WhatIsNoText_IsToldAsNumbers) {
  const std::string line = Capture(LogLevel::kError, "a\u009b2J \u00fc \xff\xc3(");
  EXPECT_THAT(line, testing::EndsWith(" E a\\u009b2J \u00fc \\u00ff\\u00c3(\n"));
  SetLogLevel(LogLevel::kInfo, true);
  const std::string json = Capture(LogLevel::kInfo, "\u009b\xff");
  EXPECT_THAT(json, testing::EndsWith("\"text\": \"\\u009b\\u00ff\"}\n"));
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
  BeginToCaptureStderr();
  RESILIENT_LOG_RECORD(kWarn, "join", {{"job", "train"}, {"rank", "3"}}, "it joined");
  RESILIENT_LOG_RECORD(kInfo, "not", {{"shown", "at this level"}}, "");
  EXPECT_THAT(TakeCapturedStderr(),
              testing::EndsWith(" W event=join job=train rank=3: it joined\n"));
  EXPECT_EQ(ToText(kOfAStranger), R"(event=cut job=a:b host="a b=\x22\x0a\xff\\": cut it: slow)");
  const LogRecord endless{"refused", {{"host", std::string(100000, 'x')}}, "no token"};
  EXPECT_LT(ToText(endless).size(), 400u);
}

TEST_F(LogTest, RecordAsJson_HasItsFieldsAsMembers) {
  SetLogLevel(LogLevel::kInfo, true);
  BeginToCaptureStderr();
  LogLine(LogLevel::kInfo, kOfAStranger);
  EXPECT_THAT(TakeCapturedStderr(),
              testing::EndsWith(R"("tag": "", "event": "cut", "job": "a:b", )"
                                R"("host": "a b=\"\\x0a\\xff\\\\", "text": "cut it: slow"})"
                                "\n"));
}

// Data for tools: the same object behind the event, or as the member that the event names.
TEST_F(LogTest, RecordWithAnObject_ShowsItAsItIs) {
  const LogRecord data{"incident", {}, "it \"ended\"", R"({"a": "b\\x"})"};
  EXPECT_EQ(ToText(data), R"(incident {"a": "b\\x"})");
  SetLogLevel(LogLevel::kInfo, true);
  BeginToCaptureStderr();
  LogLine(LogLevel::kInfo, data);
  EXPECT_THAT(TakeCapturedStderr(),
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
  BeginToCaptureStderr();
  RESILIENT_LOG(kInfo, text());
  RESILIENT_LOG(kWarn, text(), " ", 1);
  SetLogLevel(LogLevel::kOff);
  RESILIENT_LOG(kError, text());
  const std::string output = TakeCapturedStderr();
  EXPECT_EQ(evaluated, 1);
  EXPECT_NE(output.find("text 1\n"), std::string::npos) << output;
  EXPECT_FALSE(LogEnabled(LogLevel::kOff));
}

// The thread that writes the backlog, and whatever its parent's log holds, are not the child's.
TEST_F(LogTest, ForkedChildOfOneWithABacklog_LogsByItself) {
  int unread[2];
  int read_by_us[2];
  ASSERT_EQ(pipe(unread), 0);
  ASSERT_EQ(pipe(read_by_us), 0);
  const int before = dup(STDERR_FILENO);
  ASSERT_GE(dup2(unread[1], STDERR_FILENO), 0);
  for (int i = 0; i < 2000; ++i) LogLine(LogLevel::kError, std::string(100, 'x'));
  const pid_t child = fork();
  if (child == 0) {
    (void)alarm(20);
    (void)dup2(read_by_us[1], STDERR_FILENO);
    LogLine(LogLevel::kError, "of the child");
    _exit(FlushLog() ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  close(unread[0]);  // Ends what the thread waits for.
  EXPECT_TRUE(FlushLog(std::chrono::seconds(20)));
  ASSERT_GE(dup2(read_by_us[1], STDERR_FILENO), 0);
  LogLine(LogLevel::kError, "of the parent");
  ASSERT_GE(dup2(before, STDERR_FILENO), 0);
  char text[1000];
  const ssize_t count = read(read_by_us[0], text, sizeof text);
  ASSERT_GT(count, 0);
  EXPECT_THAT(std::string(text, static_cast<std::size_t>(count)),
              testing::MatchesRegex("[^\n]* E of the child\n[^\n]* W [0-9]+ lines of this log were "
                                    "lost, as [^\n]*: Broken pipe\n[^\n]* E of the parent\n"));
  for (const int fd : {unread[1], read_by_us[0], read_by_us[1], before}) close(fd);
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
