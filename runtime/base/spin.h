#pragma once

#include <cstddef>

// Waiting awake: for what another thread does within microseconds, a sleep and its end take longer
// than the thing itself. Thread: thread-safe.
namespace resilient {

// One turn of a loop that waits awake: leaves the core to its other hardware thread for a moment.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `threads` can have a core each, of those that the calling thread may run on. Where they
// cannot, who waits awake keeps the awaited one from running.
bool HasCoresFor(std::size_t threads);

}  // namespace resilient
