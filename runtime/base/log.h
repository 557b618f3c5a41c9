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

// One line on stderr, in one write: "[resilient] 12:00:01.123 W rank 2: text".
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
