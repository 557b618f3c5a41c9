#pragma once

#include <string>
#include <string_view>

namespace resilient {

// `text` as a JSON string with its quotes, in UTF-8: a byte that is none is told as U+0080 to
// U+00FF, as control characters are. Pure.
std::string JsonString(std::string_view text);

}  // namespace resilient
