#include "runtime/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/base/log.h"

namespace resilient {
namespace {

constexpr std::size_t kChunkBytes = 4096;

Status Failed(const std::string& path, int error) {
  return {StatusCode::kSetting, StrCat("cannot read ", path, ": ", std::strerror(error))};
}

Result<FileText> ReadOpened(int fd, const std::string& path, std::size_t bytes_max) {
  struct stat about {};
  if (fstat(fd, &about) != 0) return Failed(path, errno);
  if (!S_ISREG(about.st_mode)) {
    return Status(StatusCode::kSetting, StrCat("cannot read ", path, ": it is not a regular file"));
  }
  FileText file;
  file.open_to_others = (about.st_mode & S_IROTH) != 0;
  char chunk[kChunkBytes];
  while (true) {
    const ssize_t got = read(fd, chunk, sizeof chunk);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Failed(path, errno);
    if (got == 0) return file;
    file.text.append(chunk, static_cast<std::size_t>(got));
    if (file.text.size() > bytes_max) {
      return Status(StatusCode::kSetting, StrCat(path, " is larger than ", bytes_max, " bytes"));
    }
  }
}

}  // namespace

Result<FileText> ReadSmallFile(const std::string& path, std::size_t bytes_max) {
  // Not blocking, for the case that it is a pipe.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return Failed(path, errno);
  Result<FileText> file = ReadOpened(fd, path, bytes_max);
  close(fd);
  return file;
}

}  // namespace resilient
