#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/net/frame.h"

// Encoded messages without needless copies: a value may be of 8 MiB. Pure.
namespace resilient::store {

// As SerializeAsString, with room for `more` bytes and a frame's header.
template <typename Message>
std::string Serialize(const Message& message, std::size_t more = 0) {
  std::string body;
  body.reserve(message.ByteSizeLong() + more + kFrameHeaderBytes);
  message.AppendToString(&body);
  return body;
}

inline constexpr std::size_t kTagAndLengthMax = 16;

// Appends a field of type bytes to an encoded message.
inline void AppendBytes(int field, std::string_view value, std::string* body) {
  constexpr std::uint64_t kLengthDelimited = 2;
  const auto varint = [body](std::uint64_t rest) {
    for (; rest >= 0x80; rest >>= 7) body->push_back(static_cast<char>(rest | 0x80));
    body->push_back(static_cast<char>(rest));
  };
  varint(static_cast<std::uint64_t>(field) << 3 | kLengthDelimited);
  varint(value.size());
  body->append(value);
}

}  // namespace resilient::store
