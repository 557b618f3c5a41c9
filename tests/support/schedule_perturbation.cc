// Preloaded into a test, delays threads at random where schedules are decided: after a mutex is
// given up, before and after a wake-up is sent. A test that passes only because one thread is
// usually faster than another fails under it, within a few seeds:
//   PERTURB_SEED=7 LD_PRELOAD=build/tests/libschedule_perturbation.so build/bin/recovery_world_test
// The method is the noise making of Edelstein et al., "Multithreaded Java program test generation"
// (IBM Systems Journal 41(1), 2002). Delays are 0 to 2 ms, at one call in 8.
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr std::uint64_t kOneCallIn = 8;
constexpr std::uint64_t kDelayMaxNs = 2'000'000;

std::uint64_t FirstState() {
  static std::atomic<std::uint64_t> threads{0};
  static const char* const seed = std::getenv("PERTURB_SEED");
  const std::uint64_t base = seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10);
  // Zero would stay zero.
  return (base * 1'000'003 + ++threads) * 0x9E3779B97F4A7C15u | 1;
}

// Marsaglia's xorshift64, one stream a thread.
std::uint64_t Next() {
  thread_local std::uint64_t state = FirstState();
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

void Delay() {
  if (Next() % kOneCallIn != 0) return;
  const timespec pause{0, static_cast<long>(Next() % kDelayMaxNs)};
  nanosleep(&pause, nullptr);
}

template <typename Function>
Function* Real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  static auto* const real = Real<int(pthread_mutex_t*)>("pthread_mutex_unlock");
  const int result = real(mutex);
  Delay();
  return result;
}

int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  static auto* const real = Real<int(pthread_cond_t*)>("pthread_cond_signal");
  Delay();
  const int result = real(condition);
  Delay();
  return result;
}

int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  static auto* const real = Real<int(pthread_cond_t*)>("pthread_cond_broadcast");
  Delay();
  const int result = real(condition);
  Delay();
  return result;
}

}  // extern "C"
