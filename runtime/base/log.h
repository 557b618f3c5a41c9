#pragma once

#include <sstream>
#include <string>
#include <string_view>

#include "runtime/base/log_record.h"

namespace resilient {

enum class LogLevel : int { kDebug = 0, kInfo = 1, kWarn = 2, kError = 3, kOff = 4 };

// Process-wide like stderr itself, which it writes to: set once by main or the plugin, as is the
// tag (SetLogTag of <resilient/settings.h>). `json`: each line is a JSON object. Thread:
// thread-safe.
void SetLogLevel(LogLevel level, bool json = false);
bool LogEnabled(LogLevel level);

// The log waits for nobody: these functions return at once, whether or not anybody reads stderr,
// and however slow its disk is. A line is on its way when they return, and written already where
// stderr is a pipe or a terminal that has room for it. Up to 1 MiB waits for a reader; lines beyond
// that, and lines whose write fails, are lost and counted, and the count is logged when a write
// succeeds again (LogWriter). So threads that beat, fence or decide may log, with a lock held.

// One line on stderr: "[resilient] 12:00:01.123 W rank 2: text".
void LogLine(LogLevel level, std::string_view text);
// The same of a record: ToText, or its event and fields as members of the JSON object.
void LogLine(LogLevel level, const LogRecord& record);

// "warn" -> kWarn; false for an unknown name.
bool ParseLogLevel(std::string_view name, LogLevel* level);

#define RESILIENT_LOG(LEVEL, ...)                                                           \
  do {                                                                                      \
    if (::resilient::LogEnabled(::resilient::LogLevel::LEVEL))                              \
      ::resilient::LogLine(::resilient::LogLevel::LEVEL, ::resilient::StrCat(__VA_ARGS__)); \
  } while (false)

// RESILIENT_LOG_RECORD(kInfo, "join", {{"job", job}, {"rank", rank}}, "it joined")
#define RESILIENT_LOG_RECORD(LEVEL, ...)                                                       \
  do {                                                                                         \
    if (::resilient::LogEnabled(::resilient::LogLevel::LEVEL))                                 \
      ::resilient::LogLine(::resilient::LogLevel::LEVEL, ::resilient::LogRecord{__VA_ARGS__}); \
  } while (false)

// Joins the pieces as operator<< would print them.
template <typename... Pieces>
std::string StrCat(const Pieces&... pieces) {
  std::ostringstream out;
  (out << ... << pieces);
  return std::move(out).str();
}

}  // namespace resilient
