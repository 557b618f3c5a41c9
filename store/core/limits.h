#pragma once

#include <cstddef>

#include "store/core/messages.h"

namespace resilient::store {

// Keys, values, items and waits of all jobs together.
inline constexpr std::size_t kBytesMax = 1u << 30;

// What one store takes on, where its operator may choose. Beyond: kResourceExhausted as an answer;
// the connection lives on and what is there can be read. Sizes of single things are constants of
// the protocol (messages.h), as clients know them. Thread: value type.
struct CoreLimits {
  std::size_t sessions = kSessionsMax;
  std::size_t jobs = kJobsMax;
  std::size_t worlds_per_job = kWorldsPerJobMax;
  std::size_t keys_per_job = kKeysPerJobMax;
  std::size_t bytes_per_job = kBytesPerJobMax;
  std::size_t queue_items = kQueueItemsMax;
  std::size_t bytes = kBytesMax;
};

// A number of bytes that counts for a total as well, for as long as it lives. Owner: whatever the
// bytes belong to. Thread: caller-synchronised.
class SharedCount {
 public:
  // `total` outlives this, or is null.
  explicit SharedCount(std::size_t* total) : total_(total) {}
  ~SharedCount() { *this -= own_; }
  SharedCount(const SharedCount&) = delete;
  SharedCount& operator=(const SharedCount&) = delete;

  SharedCount& operator+=(std::size_t bytes) {
    own_ += bytes;
    if (total_ != nullptr) *total_ += bytes;
    return *this;
  }
  SharedCount& operator-=(std::size_t bytes) {
    own_ -= bytes;
    if (total_ != nullptr) *total_ -= bytes;
    return *this;
  }
  std::size_t own() const { return own_; }
  std::size_t total() const { return total_ != nullptr ? *total_ : own_; }

 private:
  std::size_t* const total_;
  std::size_t own_ = 0;
};

}  // namespace resilient::store
