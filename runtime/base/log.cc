#include "runtime/base/log.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <list>
#include <mutex>

#include <resilient/clock.h>
#include <resilient/settings.h>

namespace resilient {
namespace {

std::atomic<LogLevel> threshold{LogLevel::kWarn};
std::atomic<bool> json_lines{false};
// Read without a lock, because a line may be logged in a forked child whose parent held it.
std::atomic<const std::string*> current_tag{nullptr};

struct LevelEntry {
  LogLevel level;
  std::string_view name;
  char letter;
};
constexpr std::array kLevels = {
    LevelEntry{LogLevel::kDebug, "debug", 'D'}, LevelEntry{LogLevel::kInfo, "info", 'I'},
    LevelEntry{LogLevel::kWarn, "warn", 'W'},   LevelEntry{LogLevel::kError, "error", 'E'},
    LevelEntry{LogLevel::kOff, "off", '-'},
};

const LevelEntry& EntryOf(LogLevel level) { return kLevels[static_cast<std::size_t>(level)]; }

// Control characters never reach the terminal raw, and a line stays a line.
void AppendEscaped(std::string_view text, bool quotes, std::string* out) {
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (quotes && (c == '"' || c == '\\')) {
      out->push_back('\\');
      out->push_back(c);
    } else if (byte < 0x20 || byte == 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, c == '\n' ? "\\n" : "\\u%04x", byte);
      out->append(escaped);
    } else {
      out->push_back(c);
    }
  }
}

// By hand, in UTC: the C library's conversions take a lock that a fork may leave held.
std::string TimeOfDay(double wall_seconds) {
  const auto millis = static_cast<std::int64_t>(std::floor(wall_seconds * 1000));
  const std::int64_t of_day = millis % (24LL * 3600 * 1000);
  char text[32];
  std::snprintf(text, sizeof text, "%02d:%02d:%02d.%03d", static_cast<int>(of_day / 3600000),
                static_cast<int>(of_day / 60000 % 60), static_cast<int>(of_day / 1000 % 60),
                static_cast<int>(of_day % 1000));
  return text;
}

void AppendMember(std::string_view name, std::string_view value, std::string* line) {
  *line += StrCat(", \"", name, "\": \"");
  AppendEscaped(value, true, line);
  *line += '"';
}

std::string FormatJson(LogLevel level, const LogRecord& record) {
  char seconds[40];
  std::snprintf(seconds, sizeof seconds, "%.3f", SystemClock().WallSeconds());
  std::string line = StrCat("{\"time\": ", seconds);
  AppendMember("level", EntryOf(level).name, &line);
  const std::string* tag = current_tag.load(std::memory_order_acquire);
  AppendMember("tag", tag != nullptr ? *tag : "", &line);
  if (!record.event.empty()) AppendMember("event", record.event, &line);
  for (const auto& [name, value] : record.fields) {
    if (!value.empty()) AppendMember(name, ShownValue(value), &line);
  }
  AppendMember("text", record.text, &line);
  if (!record.object.empty()) line += StrCat(", \"", record.event, "\": ", record.object);
  return line + "}\n";
}

std::string FormatText(LogLevel level, std::string_view text) {
  std::string line = StrCat("[resilient] ", TimeOfDay(SystemClock().WallSeconds()), " ",
                            EntryOf(level).letter, " ");
  const std::string* tag = current_tag.load(std::memory_order_acquire);
  if (tag != nullptr && !tag->empty()) {
    AppendEscaped(*tag, false, &line);
    line += ": ";
  }
  AppendEscaped(text, false, &line);
  line += '\n';
  return line;
}

void WriteLine(std::string_view line) {
  while (!line.empty()) {
    const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
    if (written > 0) {
      line.remove_prefix(static_cast<std::size_t>(written));
    } else if (written == 0 || errno != EINTR) {
      return;  // Nowhere left to say it.
    }
  }
}

}  // namespace

void SetLogLevel(LogLevel level, bool json) {
  threshold.store(level, std::memory_order_relaxed);
  json_lines.store(json, std::memory_order_relaxed);
}

void SetLogTag(std::string tag) {
  // Earlier tags are kept: a concurrent LogLine may still read one. Set a few times in a life.
  static std::mutex mutex;
  static auto* tags = new std::list<std::string>();
  std::lock_guard lock(mutex);
  tags->push_back(std::move(tag));
  current_tag.store(&tags->back(), std::memory_order_release);
}

bool LogEnabled(LogLevel level) {
  return level != LogLevel::kOff && level >= threshold.load(std::memory_order_relaxed);
}

void LogLine(LogLevel level, std::string_view text) {
  const bool json = json_lines.load(std::memory_order_relaxed);
  WriteLine(json ? FormatJson(level, {.event = {}, .fields = {}, .text = std::string(text)})
                 : FormatText(level, text));
}

void LogLine(LogLevel level, const LogRecord& record) {
  const bool json = json_lines.load(std::memory_order_relaxed);
  WriteLine(json ? FormatJson(level, record) : FormatText(level, ToText(record)));
}

bool ParseLogLevel(std::string_view name, LogLevel* level) {
  for (const LevelEntry& entry : kLevels) {
    if (entry.name == name) {
      *level = entry.level;
      return true;
    }
  }
  return false;
}

}  // namespace resilient
