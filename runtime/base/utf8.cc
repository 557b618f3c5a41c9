#include "runtime/base/utf8.h"

namespace resilient {
namespace {

// By its first byte; 0: no code point begins with it.
std::size_t LengthOf(unsigned char first) {
  if (first < 0x80) return 1;
  if (first < 0xC2) return 0;
  if (first < 0xE0) return 2;
  if (first < 0xF0) return 3;
  return first < 0xF5 ? 4 : 0;
}

// Whether `second` may follow `first`: neither longer than need be, nor a surrogate, nor beyond
// U+10FFFF.
bool MayFollow(unsigned char first, unsigned char second) {
  const unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  return second >= low && second <= high;
}

}  // namespace

std::size_t Utf8Length(std::string_view text) {
  if (text.empty()) return 0;
  const auto first = static_cast<unsigned char>(text[0]);
  const std::size_t length = LengthOf(first);
  if (length > text.size()) return 0;
  for (std::size_t k = 1; k < length; ++k) {
    const auto next = static_cast<unsigned char>(text[k]);
    if (!MayFollow(k == 1 ? first : 0, next)) return 0;
  }
  return length;
}

bool IsControl(std::string_view code_point) {
  const auto first = static_cast<unsigned char>(code_point[0]);
  if (code_point.size() == 1) return first < 0x20 || first == 0x7f;
  return first == 0xC2 && static_cast<unsigned char>(code_point[1]) < 0xA0;
}

}  // namespace resilient
