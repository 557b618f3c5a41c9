#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <resilient/status.h>

#include "store/core/limits.h"

namespace resilient::store {

inline constexpr std::size_t kConnectionsMax = 65536;  // Or what the descriptor limit leaves.
inline constexpr std::size_t kBeforeHelloMax = 1024;   // Further ones wait in the kernel's queue.
inline constexpr std::size_t kHelloSeconds = 5;
inline constexpr std::size_t kOutputBytesMax = 32u << 20;
inline constexpr std::size_t kOutputTotalBytesMax = 512u << 20;
inline constexpr std::size_t kInputTotalBytesMax = 256u << 20;
inline constexpr std::size_t kSlowSeconds = 10;
// What may be under way to the disk, together with the messages that wait for it. Above it requests
// are left unread; above twice as much control connections, too.
inline constexpr std::size_t kHeldBytesMax = 64u << 20;

// What a server takes on, as its operator chose. Thread: value type.
struct ServerLimits {
  CoreLimits core;
  std::size_t connections = kConnectionsMax;
  std::size_t before_hello = kBeforeHelloMax;
  std::size_t hello_seconds = kHelloSeconds;
  std::size_t output_bytes = kOutputBytesMax;  // That one client leaves unread.
  std::size_t output_total_bytes = kOutputTotalBytesMax;
  std::size_t input_total_bytes = kInputTotalBytesMax;  // Of requests that are not whole.
  // A client that leaves more than kOutputSoftLimit unread and reads nothing for so long is cut.
  std::size_t slow_seconds = kSlowSeconds;
  std::size_t held_bytes = kHeldBytesMax;
};

// Reads "name=value" into `limits`; bytes may end in KiB, MiB or GiB. kSetting names what is
// accepted: the names, or the range of this one.
Status SetLimit(std::string_view text, ServerLimits& limits);

// "name (least to most, default): meaning", one line each, for --help.
std::string DescribeLimits();

// Names and values, those that are constants of the protocol among them.
std::vector<std::pair<std::string_view, double>> ListLimits(const ServerLimits& limits);

}  // namespace resilient::store
