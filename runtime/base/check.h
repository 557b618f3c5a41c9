#pragma once

#include <string_view>

namespace resilient {

// Prints and aborts: a broken invariant of ours, never bad input.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);

#define RESILIENT_CHECK(condition)                                              \
  do {                                                                          \
    if (!(condition)) ::resilient::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (false)

}  // namespace resilient
