#pragma once

#include <cstdint>
#include <span>

#include <resilient/clock.h>

// Sleeping on words of memory that processes share. Thread: thread-safe.
namespace resilient {

// Sleeps while `*word` is `expected`, until it is woken, a signal comes or `timeout` has passed.
void FutexWait(const std::uint32_t* word, std::uint32_t expected, Duration timeout);
// Wakes at most `most` of those who sleep on `word`.
void FutexWake(const std::uint32_t* word, int most);

// A word and what it is as long as there is nothing to look at. Thread: value type.
struct FutexWord {
  const std::uint32_t* word = nullptr;
  std::uint32_t expected = 0;
};
// The kernel's limit for one wait.
inline constexpr std::size_t kFutexWordsMax = 128;

enum class FutexSupport : std::uint8_t {
  kAsKernel,   // All words at once where the kernel can (5.16 and later), else the first of them.
  kFirstOnly,  // As on an older kernel, for tests.
};

// As FutexWait, for several words. Where only the first can be slept on, that is for
// kFutexPollInterval at most: the caller looks at the others as often. REQUIRES: 1 to
// kFutexWordsMax words.
void FutexWaitAny(std::span<const FutexWord> words, Duration timeout,
                  FutexSupport support = FutexSupport::kAsKernel);
inline constexpr Duration kFutexPollInterval = Millis(50);

}  // namespace resilient
