#pragma once

namespace resilient::testing {

// What a test program is instrumented with. Instrumented ones are slow: they get longer bounds and
// fewer rounds; and ThreadSanitizer does not follow a fork of a process with threads.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitized = true;
#else
inline constexpr bool kThreadSanitized = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitized = true;
#else
inline constexpr bool kAddressSanitized = false;
#endif
inline constexpr bool kSanitized = kThreadSanitized || kAddressSanitized;

}  // namespace resilient::testing
