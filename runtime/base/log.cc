#include "runtime/base/log.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include <resilient/clock.h>
#include <resilient/per_process.h>
#include <resilient/settings.h>

#include "runtime/base/log_flush.h"
#include "runtime/base/log_writer.h"
#include "runtime/base/utf8.h"

namespace resilient {
namespace {

constexpr std::size_t kBacklogBytesMax = std::size_t{1} << 20;

std::atomic<LogLevel> threshold{LogLevel::kWarn};
std::atomic<bool> json_lines{false};
// Earlier ones are kept, as a LogLine of another thread may still read one. Set a few times in a
// life; a forked child has its parent's until it sets one.
struct Tag {
  std::string text;
  const Tag* before = nullptr;
};
// Without a lock, which a fork may leave held. tidy: allow(static)
std::atomic<const Tag*> current_tag{nullptr};

std::string_view TagText() {
  const Tag* const tag = current_tag.load(std::memory_order_acquire);
  return tag != nullptr ? std::string_view(tag->text) : std::string_view();
}

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

// Control characters never reach the terminal raw, and a line stays a line, of UTF-8: bytes that
// are none, as a peer may send them, are told as numbers.
void AppendEscaped(std::string_view text, bool quotes, std::string* out) {
  while (!text.empty()) {
    const std::size_t length = Utf8Length(text);
    const std::string_view one = text.substr(0, std::max<std::size_t>(length, 1));
    text.remove_prefix(one.size());
    if (one == "\n") {
      out->append("\\n");
    } else if (length == 0 || IsControl(one)) {
      char escaped[8];
      const auto byte = static_cast<unsigned char>(one.back());
      std::snprintf(escaped, sizeof escaped, "\\u%04x", byte);
      out->append(escaped);
    } else {
      if (quotes && (one == "\"" || one == "\\")) out->push_back('\\');
      out->append(one);
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
  AppendMember("tag", TagText(), &line);
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
  if (const std::string_view tag = TagText(); !tag.empty()) {
    AppendEscaped(tag, false, &line);
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

constinit PerProcess<LogWriter> current_writer;

void WriteLine(std::string line) {
  current_writer
      .Get([] { return std::make_unique<LogWriter>(STDERR_FILENO, kBacklogBytesMax, &LossLine); })
      .Write(std::move(line));
}

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
  auto* const latest = new Tag{.text = std::move(tag), .before = current_tag.load()};
  while (!current_tag.compare_exchange_weak(latest->before, latest, std::memory_order_acq_rel)) {
  }
}

bool FlushLog(Duration patience) {
  LogWriter* const present = current_writer.Present();
  return present == nullptr || present->Flush(patience);
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
