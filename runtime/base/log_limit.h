#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <resilient/clock.h>

namespace resilient {

// For lines that strangers can cause: at most one in each interval, and the number of those that
// were left out since the last.
//
// Pure. Owner: who writes the lines. Thread: caller-synchronised.
class LogLimit {
 public:
  static constexpr Duration kInterval = std::chrono::seconds(1);

  explicit LogLimit(Duration interval = kInterval) : interval_(interval) {}

  // Empty: no line now. Else how many have been left out since the last one.
  std::optional<std::uint64_t> May(Instant now) {
    if (last_ && now - *last_ < interval_) {
      ++left_out_;
      return std::nullopt;
    }
    last_ = now;
    const std::uint64_t left_out = left_out_;
    left_out_ = 0;
    return left_out;
  }

 private:
  Duration interval_;
  std::optional<Instant> last_;
  std::uint64_t left_out_ = 0;
};

// For the end of such a line; empty where none was left out.
inline std::string MoreLikeIt(std::uint64_t left_out) {
  if (left_out == 0) return "";
  return " (and " + std::to_string(left_out) + " more like it since the last such line)";
}

}  // namespace resilient
