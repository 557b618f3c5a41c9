#include "store/core/audit.h"

#include <algorithm>
#include <cstddef>

namespace resilient::store {
namespace {

constexpr std::size_t kFieldBytesMax = 256;
constexpr std::string_view kHexDigits = "0123456789abcdef";

bool IsPlain(char c) { return c > 0x20 && c < 0x7f && c != '"' && c != '\\' && c != '='; }

void AppendValue(std::string_view value, std::string& line) {
  const std::string_view shown = value.substr(0, kFieldBytesMax);
  if (std::all_of(shown.begin(), shown.end(), IsPlain)) {
    line += shown;
  } else {
    line += '"';
    for (const char c : shown) {
      const auto byte = static_cast<unsigned char>(c);
      if (IsPlain(c) || c == ' ' || c == '=') {
        line += c;
      } else {
        line += "\\x";
        line += kHexDigits[byte >> 4];
        line += kHexDigits[byte & 15];
      }
    }
    line += '"';
  }
  if (shown.size() < value.size()) line += "...";
}

}  // namespace

std::string AuditLine(std::string_view event,
                      std::initializer_list<std::pair<std::string_view, std::string>> fields,
                      std::string_view text) {
  std::string line("event=");
  line += event;
  for (const auto& [name, value] : fields) {
    if (value.empty()) continue;
    line += ' ';
    line += name;
    line += '=';
    AppendValue(value, line);
  }
  line += ": ";
  line += text;
  return line;
}

}  // namespace resilient::store
