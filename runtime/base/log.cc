#include "runtime/base/log.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <list>
#include <mutex>
#include <utility>

#include <resilient/clock.h>
#include <resilient/settings.h>

#include "runtime/base/log_flush.h"
#include "runtime/base/log_writer.h"

namespace resilient {
namespace {

constexpr std::size_t kBacklogBytesMax = std::size_t{1} << 20;

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

std::string LossLine(std::uint64_t lines, int error) {
  const std::string why = error == EAGAIN
                              ? "nobody read them in time"
                              : StrCat("they could not be written: ", std::strerror(error));
  const std::string text = StrCat(lines, lines == 1 ? " line" : " lines", " of this log ",
                                  lines == 1 ? "was" : "were", " lost, as ", why);
  const bool json = json_lines.load(std::memory_order_relaxed);
  const LogRecord record{.event = "lost", .fields = {{"lines", StrCat(lines)}}, .text = text};
  return json ? FormatJson(LogLevel::kWarn, record) : FormatText(LogLevel::kWarn, text);
}

// One for each process: a forked child has neither the thread of its parent's nor, perhaps, the
// lock. Made without a lock, for the same reason, and never destroyed.
struct ProcessWriter {
  LogWriter writer{STDERR_FILENO, kBacklogBytesMax, &LossLine};
  const ProcessWriter* parents = nullptr;  // Left as it is.
};
std::atomic<ProcessWriter*> current_writer{nullptr};

LogWriter& Writer() {
  ProcessWriter* present = current_writer.load(std::memory_order_acquire);
  while (present == nullptr || present->writer.InChild()) {
    auto* const mine = new ProcessWriter{.parents = present};
    if (current_writer.compare_exchange_strong(present, mine, std::memory_order_acq_rel)) {
      return mine->writer;
    }
    delete mine;
  }
  return present->writer;
}

void WriteLine(std::string line) { Writer().Write(std::move(line)); }

// Made when the library is loaded, so that it runs after the destructors of what logs.
struct FlushAtExit {
  ~FlushAtExit() { FlushLog(kLogExitPatience); }
};
[[maybe_unused]] const FlushAtExit kFlushAtExit;

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

bool FlushLog(Duration patience) {
  ProcessWriter* const present = current_writer.load(std::memory_order_acquire);
  if (present == nullptr || present->writer.InChild()) return true;
  return present->writer.Flush(patience);
}

void WriteToStderr(std::string text) { WriteLine(std::move(text)); }

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
