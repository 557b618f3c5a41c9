#include "runtime/base/try_write.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace resilient {
namespace {

// The type of the file, 0 when it is not known. A server of files is not asked: its answer may
// never come.
mode_t TypeOf(int fd) {
  struct statx about {};
  constexpr int kCached = AT_EMPTY_PATH | AT_STATX_DONT_SYNC;
  if (statx(fd, "", kCached, STATX_TYPE, &about) != 0) return 0;
  return about.stx_mode & S_IFMT;
}

// Only files in memory have seals.
bool IsInMemory(int fd) { return fcntl(fd, F_GET_SEALS) >= 0; }

template <typename Put>
TriedWrite PutAll(std::string_view text, Put put) {
  TriedWrite tried;
  while (tried.written < text.size()) {
    const ssize_t count = put(text.substr(tried.written));
    if (count > 0) {
      tried.written += static_cast<std::size_t>(count);
    } else if (count == 0 || errno != EINTR) {
      tried.error = count == 0 ? EIO : errno;
      return tried;
    }
  }
  return tried;
}

TriedWrite WriteTo(int fd, std::string_view text) {
  return PutAll(text, [fd](std::string_view rest) { return write(fd, rest.data(), rest.size()); });
}

TriedWrite WriteReopened(int fd, bool is_pipe, std::string_view text) {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  const int own = open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  // A named pipe without a reader says ENXIO. Any other refusal says nothing of the descriptor.
  if (own < 0) return {.written = 0, .error = is_pipe && errno == ENXIO ? EPIPE : EAGAIN};
  // A write to a pipe without a reader would raise SIGPIPE.
  pollfd entry{.fd = own, .events = POLLOUT, .revents = 0};
  const bool unread = is_pipe && poll(&entry, 1, 0) == 1 && (entry.revents & POLLERR) != 0;
  const TriedWrite tried = unread ? TriedWrite{.error = EPIPE} : WriteTo(own, text);
  close(own);
  return tried;
}

}  // namespace

TriedWrite TryWrite(int fd, std::string_view text) {
  switch (TypeOf(fd)) {
    case S_IFIFO:
      return WriteReopened(fd, true, text);
    case S_IFCHR:
      return WriteReopened(fd, false, text);
    case S_IFSOCK:
      return PutAll(text, [fd](std::string_view rest) {
        return send(fd, rest.data(), rest.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      });
    case S_IFREG:
      if (IsInMemory(fd)) return WriteTo(fd, text);
      return {.written = 0, .error = EAGAIN};
    default:
      return {.written = 0, .error = EAGAIN};
  }
}

}  // namespace resilient
