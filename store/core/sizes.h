#pragma once

#include <cstddef>
#include <string>

#include <resilient/status.h>

namespace resilient::store {

// kTooLarge beyond kKeyBytesMax. Pure.
Status CheckKeySize(const std::string& key);
// kTooLarge beyond kValueBytesMax; `what` begins the text. Pure.
Status CheckValueSize(std::size_t bytes, const char* what = "a value");

}  // namespace resilient::store
