#include "runtime/base/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <ctime>

#include "runtime/base/check.h"

namespace resilient {
namespace {

// Of the kernel's interface, named here so that older headers will do.
constexpr long kFutexWaitvCall = 449;
constexpr std::uint32_t kFutexSizeU32 = 2;
struct WaitvEntry {
  std::uint64_t expected;
  std::uint64_t address;
  std::uint32_t flags;
  std::uint32_t reserved;
};

timespec ToTimespec(Duration duration) {
  const std::int64_t ns = std::max(duration, Duration::zero()).count();
  constexpr std::int64_t kSecond = 1'000'000'000;
  return {static_cast<time_t>(ns / kSecond), static_cast<long>(ns % kSecond)};
}

// False: the kernel does not have it, or does not let this process use it.
bool WaitForAll(std::span<const FutexWord> words, Duration timeout) {
  std::array<WaitvEntry, kFutexWordsMax> entries{};
  for (std::size_t i = 0; i < words.size(); ++i) {
    entries[i] = {words[i].expected, reinterpret_cast<std::uint64_t>(words[i].word), kFutexSizeU32,
                  0};
  }
  timespec now{};
  RESILIENT_CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
  const Duration since_boot = std::chrono::seconds(now.tv_sec) + Duration(now.tv_nsec);
  const timespec until = ToTimespec(since_boot + timeout);
  const long outcome =
      syscall(kFutexWaitvCall, entries.data(), words.size(), 0u, &until, CLOCK_MONOTONIC);
  return outcome >= 0 || errno == EAGAIN || errno == ETIMEDOUT || errno == EINTR;
}

}  // namespace

void FutexWait(const std::uint32_t* word, std::uint32_t expected, Duration timeout) {
  const timespec relative = ToTimespec(timeout);
  // The address may be shared between processes, so no FUTEX_PRIVATE_FLAG.
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &relative, nullptr, 0);
}

void FutexWake(const std::uint32_t* word, int most) {
  syscall(SYS_futex, word, FUTEX_WAKE, most, nullptr, nullptr, 0);
}

void FutexWaitAny(std::span<const FutexWord> words, Duration timeout, FutexSupport support) {
  RESILIENT_CHECK(!words.empty() && words.size() <= kFutexWordsMax);
  if (support == FutexSupport::kAsKernel && WaitForAll(words, timeout)) return;
  FutexWait(words[0].word, words[0].expected, std::min(timeout, kFutexPollInterval));
}

}  // namespace resilient
