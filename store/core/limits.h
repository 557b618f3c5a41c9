#pragma once

#include <cstddef>

#include "store/core/messages.h"

namespace resilient::store {

// Keys, values, items and waits of all jobs together, with what keeping each of them takes.
inline constexpr std::size_t kBytesMax = 1u << 30;
// Seats of the worlds of one job, empty ones too, and of all jobs.
inline constexpr std::size_t kSeatsPerJobMax = 256u << 10;
inline constexpr std::size_t kSeatsMax = 1u << 20;
// Answers that clients may ask for again.
inline constexpr std::size_t kResultBytesPerJobMax = 64u << 20;
inline constexpr std::size_t kResultTotalBytesMax = 256u << 20;
// Changes that watches may ask for, of all jobs.
inline constexpr std::size_t kChangeTotalBytesMax = 256u << 20;

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
  std::size_t seats_per_job = kSeatsPerJobMax;
  std::size_t seats = kSeatsMax;
  std::size_t result_bytes_per_job = kResultBytesPerJobMax;
  std::size_t result_total_bytes = kResultTotalBytesMax;
  std::size_t change_total_bytes = kChangeTotalBytesMax;
};

}  // namespace resilient::store
