#include "runtime/base/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "runtime/base/check.h"

namespace resilient {
namespace {

// One bit a descriptor, so that the child handler neither allocates nor locks. Far above the
// kernel's own default ceiling (fs.nr_open, 2^20); untouched pages cost no memory.
constexpr std::size_t kDescriptorsMax = std::size_t{1} << 24;
constexpr std::size_t kBitsPerWord = 64;

std::atomic<std::uint64_t> registered[kDescriptorsMax / kBitsPerWord];
std::atomic<std::size_t> words_used{0};  // No bit is set at or beyond this word.
std::atomic<unsigned long> forks{0};     // Forks between the first process and this one.

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// Runs in the child, where only async-signal-safe calls are allowed.
void CloseInChild() {
  forks.fetch_add(1, std::memory_order_relaxed);
  const std::size_t used = words_used.load(std::memory_order_relaxed);
  for (std::size_t word = 0; word < used; ++word) {
    std::uint64_t bits = registered[word].exchange(0, std::memory_order_relaxed);
    while (bits != 0) {
      const auto bit = static_cast<std::size_t>(__builtin_ctzll(bits));
      bits &= bits - 1;
      close(static_cast<int>(word * kBitsPerWord + bit));
    }
  }
}

// When the library is loaded: so nobody needs a lock to be the first, and no descriptor is
// registered before it.
struct Handler {
  Handler() noexcept { RESILIENT_CHECK(pthread_atfork(nullptr, nullptr, &CloseInChild) == 0); }
};
[[maybe_unused]] const Handler kHandler;

}  // namespace

void ForkGuard::Register(int fd) {
  RESILIENT_CHECK(fd >= 0);
  const auto index = static_cast<std::size_t>(fd);
  RESILIENT_CHECK(index < kDescriptorsMax);
  const std::size_t word = index / kBitsPerWord;
  std::size_t used = words_used.load(std::memory_order_relaxed);
  while (used <= word && !words_used.compare_exchange_weak(used, word + 1)) {
  }
  registered[word].fetch_or(std::uint64_t{1} << (index % kBitsPerWord));
}

void ForkGuard::Unregister(int fd) {
  if (fd < 0) return;
  const auto index = static_cast<std::size_t>(fd);
  if (index >= kDescriptorsMax) return;
  registered[index / kBitsPerWord].fetch_and(~(std::uint64_t{1} << (index % kBitsPerWord)));
}

ProcessMark::ProcessMark() : fork_count_(forks.load(std::memory_order_relaxed)) {}

bool ProcessMark::InChild() const { return forks.load(std::memory_order_relaxed) != fork_count_; }

}  // namespace resilient
