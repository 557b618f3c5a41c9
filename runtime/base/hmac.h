#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace resilient {

inline constexpr std::size_t kHmacBytes = 32;

// HMAC with SHA-256 (RFC 2104, FIPS 180-4), by Mbed TLS: the proof of a secret that does not show
// it. kHmacBytes raw bytes. The key may have any length. Thread: thread-safe.
std::string HmacSha256(std::string_view key, std::string_view text);

// Whether the two are equal, in a time that tells nothing of where they differ.
bool SameBytes(std::string_view left, std::string_view right);

}  // namespace resilient
