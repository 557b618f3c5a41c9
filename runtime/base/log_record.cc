#include "runtime/base/log_record.h"

#include <algorithm>

#include "runtime/base/printable.h"

namespace resilient {
namespace {

constexpr std::size_t kValueBytesMax = 256;

bool IsPlain(char c) { return c > 0x20 && c < 0x7f && c != '"' && c != '\\' && c != '='; }

}  // namespace

std::string_view LogRecord::Value(std::string_view field) const {
  for (const auto& [name, value] : fields) {
    if (name == field) return value;
  }
  return {};
}

std::string ShownValue(std::string_view value) {
  std::string shown = Printable(value.substr(0, kValueBytesMax));
  if (value.size() > kValueBytesMax) shown += "...";
  return shown;
}

std::string ToText(const LogRecord& record) {
  if (record.event.empty()) return record.text;
  if (!record.object.empty()) return std::string(record.event) + " " + record.object;
  std::string line("event=");
  line += record.event;
  for (const auto& [name, value] : record.fields) {
    if (value.empty()) continue;
    line += ' ';
    line += name;
    line += '=';
    if (std::all_of(value.begin(), value.end(), IsPlain)) {
      line += ShownValue(value);
      continue;
    }
    line += '"';
    for (const char c : ShownValue(value))
      line += c == '"' ? std::string("\\x22") : std::string(1, c);
    line += '"';
  }
  line += ": ";
  line += record.text;
  return line;
}

}  // namespace resilient
