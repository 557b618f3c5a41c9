#include "runtime/base/check.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "runtime/base/try_write.h"

namespace resilient {
namespace {

// The process ends next, whatever becomes of the text. A file on a disk is written to at the risk
// that the disk does not answer: SIGALRM ends the process then.
void WriteLastWords(std::string_view text) {
  const TriedWrite tried = TryWrite(STDERR_FILENO, text);
  struct stat about {};
  if (tried.error != EAGAIN || tried.written > 0) return;
  (void)signal(SIGALRM, SIG_DFL);
  (void)alarm(1);
  if (fstat(STDERR_FILENO, &about) != 0 || !S_ISREG(about.st_mode)) return;
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

void CheckFailed(const char* file, int line, const char* condition) {
  // No allocation and no lock: the invariant that broke may be the allocator's or the log's.
  char text[512];
  const int length =
      std::snprintf(text, sizeof text,
                    "[resilient] internal error at %s:%d: %s does not hold; please report it\n",
                    file, line, condition);
  if (length > 0) {
    const auto size = static_cast<std::size_t>(length);
    WriteLastWords({text, size < sizeof text ? size : sizeof text - 1});
  }
  std::abort();
}

}  // namespace resilient
