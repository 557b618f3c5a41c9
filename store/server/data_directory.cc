#include "store/server/data_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "runtime/base/log.h"
#include "runtime/base/process.h"

namespace resilient::store {
namespace {

constexpr char kLockFile[] = "lock";
constexpr mode_t kDirectoryMode = 0700;
constexpr mode_t kFileMode = 0600;
constexpr mode_t kModeOfOthers = 0077;

// The entry of a new directory is on disk only when its parent is.
void SyncDirectory(const std::string& directory) {
  const int fd = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  (void)fsync(fd);  // Some file systems cannot; SQLite treats it alike.
  close(fd);
}

std::string ReadHolder(int fd) {
  char text[256];
  const ssize_t count = pread(fd, text, sizeof(text), 0);
  std::string holder(text, count > 0 ? static_cast<std::size_t>(count) : 0);
  while (!holder.empty() && holder.back() == '\n') holder.pop_back();
  return holder.empty() ? "a server that has just started" : holder;
}

// What others may write there they may put in place of the data.
Status CheckDirectory(const std::string& directory, const struct stat& info) {
  if (!S_ISDIR(info.st_mode)) {
    return Status(StatusCode::kSetting, StrCat("--data ", directory, " is not a directory"));
  }
  if ((info.st_mode & S_IWOTH) != 0) {
    return Status(
        StatusCode::kSetting,
        StrCat("every user of this host may write in --data ", directory,
               "; name a directory of its own, or take that right away: chmod o-w ", directory));
  }
  return Status::Ok();
}

}  // namespace

Status DataError(const std::string& path, const std::string& doing, int error) {
  const std::string what = StrCat("cannot ", doing, " ", path, ": ", std::strerror(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return Status(StatusCode::kSetting,
                    StrCat(what,
                           "; make room, then start the store again: everything that was "
                           "acknowledged is kept"));
    case EACCES:
    case EPERM:
    case EROFS:
      return Status(StatusCode::kSetting,
                    StrCat(what, "; --data names a directory that the server may write"));
    case ENOENT:
    case ENOTDIR:
    case ENAMETOOLONG:
    case ELOOP:
      return Status(StatusCode::kSetting, what);
    default:
      return Status(StatusCode::kInternal, what);
  }
}

Status MakeDataDirectory(const std::string& directory) {
  struct stat info {};
  if (stat(directory.c_str(), &info) == 0) return CheckDirectory(directory, info);
  std::error_code failed;
  std::filesystem::path path = std::filesystem::absolute(directory, failed).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // "data/" is "data".
  std::filesystem::create_directories(path.parent_path(), failed);
  if (failed) return DataError(directory, "make the data directory", failed.value());
  if (mkdir(path.c_str(), kDirectoryMode) != 0 && errno != EEXIST) {
    return DataError(directory, "make the data directory", errno);
  }
  SyncDirectory(path.parent_path());
  return Status::Ok();
}

Status ProtectFile(const std::string& path, bool make) {
  const int flags = O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | (make ? O_CREAT : 0);
  const FileDescriptor file(open(path.c_str(), flags, kFileMode));
  if (!file.valid()) {
    return !make && errno == ENOENT ? Status::Ok() : DataError(path, "open", errno);
  }
  struct stat info {};
  if (fstat(file.get(), &info) != 0) return DataError(path, "read", errno);
  if (!S_ISREG(info.st_mode)) {
    return Status(StatusCode::kSetting, StrCat(path, " is not a file"));
  }
  // One of another user, which this one may use, keeps its mode.
  if ((info.st_mode & kModeOfOthers) != 0) (void)fchmod(file.get(), kFileMode);
  return Status::Ok();
}

Result<FileDescriptor> LockDataDirectory(const std::string& directory) {
  const std::string path = StrCat(directory, "/", kLockFile);
  const int opened = open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, kFileMode);
  if (opened < 0) return DataError(path, "open", errno);
  FileDescriptor lock(opened);
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return DataError(path, "lock", errno);
    return Status(StatusCode::kSetting,
                  StrCat("the data directory ", directory, " is in use by another server: ",
                         ReadHolder(lock.get()), "; end it, or name another directory"));
  }
  const ProcessIdentity self = ThisProcess();
  const std::string text = StrCat("pid ", self.pid, " on host ", self.host, "\n");
  if (ftruncate(lock.get(), 0) != 0 ||
      pwrite(lock.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    return DataError(path, "write", errno);
  }
  return lock;
}

}  // namespace resilient::store
