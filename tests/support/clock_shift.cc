// Preloaded into a process, shifts its wall clock by as many seconds as stand in the file that
// CLOCK_SHIFT_FILE names, anew at each reading; so a test jumps the clock of a program that runs.
// The monotonic clocks, which a jump of the system's time leaves alone, are as they are. (Time
// namespaces shift only those.)
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>

namespace {

long Shift() {
  static const char* const path = std::getenv("CLOCK_SHIFT_FILE");
  if (path == nullptr) return 0;
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  char text[32] = {};
  const ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  return size > 0 ? std::strtol(text, nullptr, 10) : 0;
}

bool OfTheWall(clockid_t clock) {
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

template <typename Function>
Function Real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, struct timespec* now) {
  static const auto real = Real<int (*)(clockid_t, struct timespec*)>("clock_gettime");
  const int failed = real(clock, now);
  if (failed == 0 && OfTheWall(clock)) now->tv_sec += Shift();
  return failed;
}

int gettimeofday(struct timeval* now, void* zone) {
  static const auto real = Real<int (*)(struct timeval*, void*)>("gettimeofday");
  const int failed = real(now, zone);
  if (failed == 0) now->tv_sec += Shift();
  return failed;
}

time_t time(time_t* now) {
  struct timespec precise;
  if (clock_gettime(CLOCK_REALTIME, &precise) != 0) return -1;
  if (now != nullptr) *now = precise.tv_sec;
  return precise.tv_sec;
}

}  // extern "C"
