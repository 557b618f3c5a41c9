#pragma once

#include <cstddef>
#include <string_view>

namespace resilient {

// The bytes of the code point that `text` begins with, by RFC 3629; 0: it begins with none. Pure.
std::size_t Utf8Length(std::string_view text);

// Whether these are the bytes of a control character: U+0000 to U+001F, U+007F to U+009F. A
// terminal acts on them. REQUIRES: one code point.
bool IsControl(std::string_view code_point);

}  // namespace resilient
