#pragma once

#include <cstdio>
#include <string>

namespace resilient {

// Two digits a byte, in small letters, as documents print what a digest gives.
inline std::string Hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    char pair[3];
    std::snprintf(pair, sizeof pair, "%02x", static_cast<unsigned char>(byte));
    text += pair;
  }
  return text;
}

}  // namespace resilient
