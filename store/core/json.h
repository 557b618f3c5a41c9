#pragma once

#include <string>
#include <string_view>

namespace resilient::store {

// `text` as a JSON string with its quotes.
std::string JsonString(std::string_view text);

}  // namespace resilient::store
