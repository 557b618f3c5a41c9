#include "runtime/base/check.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace resilient {

void CheckFailed(const char* file, int line, const char* condition) {
  // No allocation and no lock: the invariant that broke may be the allocator's or the log's.
  char text[512];
  const int length =
      std::snprintf(text, sizeof text,
                    "[resilient] internal error at %s:%d: %s does not hold; please report it\n",
                    file, line, condition);
  if (length > 0) {
    const auto size = static_cast<std::size_t>(length);
    // The process ends next, whatever becomes of the text.
    [[maybe_unused]] const ssize_t written =
        write(STDERR_FILENO, text, size < sizeof text ? size : sizeof text - 1);
  }
  std::abort();
}

}  // namespace resilient
