#pragma once

#include <cstdint>
#include <cstdlib>

namespace resilient {

// The number in the environment variable `name`, else `otherwise`.
inline std::uint64_t FromEnvironment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace resilient
