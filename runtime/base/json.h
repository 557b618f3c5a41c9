#pragma once

#include <string>
#include <string_view>

namespace resilient {

// `text` as a JSON string with its quotes. Pure.
std::string JsonString(std::string_view text);

}  // namespace resilient
