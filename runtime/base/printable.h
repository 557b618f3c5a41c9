#pragma once

#include <string>
#include <string_view>

namespace resilient {

// Bytes that do not print as \xNN, a backslash as two: any bytes on one line, and none lost. Pure.
std::string Printable(std::string_view bytes);

}  // namespace resilient
