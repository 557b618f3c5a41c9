#include "runtime/base/json.h"

#include <algorithm>

#include "runtime/base/utf8.h"

namespace resilient {

std::string JsonString(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  while (!text.empty()) {
    const std::size_t length = Utf8Length(text);
    const std::string_view one = text.substr(0, std::max<std::size_t>(length, 1));
    text.remove_prefix(one.size());
    if (length == 0 || IsControl(one)) {
      const auto byte = static_cast<unsigned char>(one.back());
      out += "\\u00";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      if (one == "\"" || one == "\\") out += '\\';
      out += one;
    }
  }
  return out + '"';
}

}  // namespace resilient
