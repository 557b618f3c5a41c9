// Preloaded into a process, makes its resolver and its file system hang for as long as the file
// that STUCK_WHILE names exists: lookups of names (not of numbers), and opening what begins with
// STUCK_FILES, where that is set. The first call that hangs makes STUCK_WHILE with ".hit" behind
// it, for a test to wait for.
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace {

template <typename Function>
Function Real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

using Open = int (*)(const char*, int, ...);

int RealOpen(const char* path, int flags, mode_t mode) {
  static const auto real = Real<Open>("open");
  return real(path, flags, mode);
}

void Hang() {
  static const char* const path = std::getenv("STUCK_WHILE");
  if (path == nullptr || access(path, F_OK) != 0) return;
  const std::string hit = std::string(path) + ".hit";
  close(RealOpen(hit.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  while (access(path, F_OK) == 0) {
    const timespec pause{0, 5'000'000};
    nanosleep(&pause, nullptr);  // tidy: allow(sleep): to hang is what it is for.
  }
}

void HangAt(const char* path) {
  static const char* const prefix = std::getenv("STUCK_FILES");
  if (prefix != nullptr && strncmp(path, prefix, strlen(prefix)) == 0) Hang();
}

mode_t ModeOf(int flags, va_list arguments) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

extern "C" {

int getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** found) {
  static const auto real =
      Real<int (*)(const char*, const char*, const addrinfo*, addrinfo**)>("getaddrinfo");
  const bool number = hints != nullptr && (hints->ai_flags & AI_NUMERICHOST) != 0;
  if (name != nullptr && !number) Hang();
  return real(name, service, hints, found);
}

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  HangAt(path);
  return RealOpen(path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  HangAt(path);
  return RealOpen(path, flags | O_LARGEFILE, mode);
}

FILE* fopen(const char* path, const char* mode) {
  static const auto real = Real<FILE* (*)(const char*, const char*)>("fopen");
  HangAt(path);
  return real(path, mode);
}

FILE* fopen64(const char* path, const char* mode) {
  static const auto real = Real<FILE* (*)(const char*, const char*)>("fopen64");
  HangAt(path);
  return real(path, mode);
}

}  // extern "C"
