#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include <resilient/settings.h>
#include <resilient/store/server_process.h>

#include "runtime/base/log.h"
#include "runtime/net/socket.h"

namespace resilient::store {
namespace {

constexpr Duration kStartMax = std::chrono::seconds(10);
constexpr char kArrival[] = "10s";  // Of a member; who has started it has failed otherwise.
constexpr Duration kEndPause = std::chrono::milliseconds(1);
constexpr int kExitAddressInUse = 3;
constexpr std::size_t kToldMax = 4096;
constexpr std::size_t kLastLinesMax = 4096;
constexpr std::array kFileVariables = {"RESILIENT_TOKEN_FILE", "RESILIENT_TLS_CERT",
                                       "RESILIENT_TLS_KEY", "RESILIENT_TLS_CA"};

Status NotStarted(const std::string& what, int error) {
  return {StatusCode::kSetting, StrCat("no store was started: ", what, ": ", std::strerror(error))};
}

// What a server writes: a file of the temporary folder, which it removes at its end, or where there
// is no such folder memory, which goes with it.
struct ServerLog {
  FileDescriptor fd;
  std::string path;  // Empty: in memory.

  std::string Where() const {
    return path.empty() ? "in memory: /proc/PID/fd/2 of its process" : path;
  }
  void Remove() const {
    if (!path.empty()) unlink(path.c_str());
  }
};

Result<ServerLog> OpenLog() {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::temp_directory_path(error);
  if (!error) {
    const std::filesystem::path whole = std::filesystem::absolute(folder, error);
    std::string path = whole / "resilient-store-XXXXXX.log";
    const int fd = error ? -1 : mkostemps(path.data(), 4, O_CLOEXEC | O_APPEND);
    if (fd >= 0) return ServerLog{FileDescriptor(fd), path};
    if (!error) error.assign(errno, std::generic_category());
  }
  const int fd = memfd_create("resilient-store-log", MFD_CLOEXEC);
  if (fd < 0) return NotStarted("its log has no place", errno);
  static std::atomic<bool> told{false};
  if (!told.exchange(true)) {
    RESILIENT_LOG(kWarn, "no file can be made in the temporary folder (TMPDIR: ", error.message(),
                  "): the log of the store is kept in memory");
  }
  return ServerLog{FileDescriptor(fd), ""};
}

// The server's directory is another, so files are named from the root. What is preloaded into a
// trainer is no business of the server.
std::vector<std::string> ServerEnvironment() {
  const auto variables = ProcessEnvironment();
  std::vector<std::string> entries;
  entries.reserve(variables.size());
  for (const auto& [name, value] : variables) {
    if (name == "LD_PRELOAD") continue;
    const bool file =
        std::find(kFileVariables.begin(), kFileVariables.end(), name) != kFileVariables.end();
    std::string text = value;
    if (file && !value.empty()) text = std::filesystem::absolute(value).string();
    entries.push_back(StrCat(name, "=", text));
  }
  return entries;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  pointers.reserve(texts.size() + 1);
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// The pid of the program, which writes to `told` and `log`.
Result<pid_t> Spawn(std::vector<std::string> command, const FileDescriptor& told,
                    const FileDescriptor& log) {
  std::vector<std::string> environment = ServerEnvironment();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, told.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, log.get(), STDERR_FILENO);
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  posix_spawn_file_actions_addchdir_np(&actions, "/");
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigset_t all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t pid = -1;
  const int error = posix_spawn(&pid, command.front().c_str(), &actions, &attributes,
                                Pointers(command).data(), Pointers(environment).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return NotStarted(command.front(), error);
  return pid;
}

std::string LastLine(const FileDescriptor& log) {
  std::string lines(kLastLinesMax, '\0');
  const off_t size = lseek(log.get(), 0, SEEK_END);
  const off_t from = std::max<off_t>(size - static_cast<off_t>(lines.size()), 0);
  const ssize_t got = pread(log.get(), lines.data(), lines.size(), from);
  lines.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  while (!lines.empty() && lines.back() == '\n') lines.pop_back();
  return lines.substr(lines.rfind('\n') + 1);
}

// How the process that was started has ended; nullopt: nobody knows, as another thread of the
// program has waited for any child. At the deadline it is killed.
std::optional<int> AwaitEnd(pid_t pid, const Clock& clock, Deadline deadline) {
  std::vector<PollEntry> nothing;
  int status = 0;
  while (true) {
    const pid_t ended = waitpid(pid, &status, WNOHANG);
    if (ended == pid) return status;
    if (ended < 0 && errno != EINTR) return std::nullopt;
    if (deadline.ExpiredAt(clock.Now())) break;
    PollUntil(nothing, clock, Deadline::After(clock.Now(), kEndPause));
  }
  kill(pid, SIGKILL);
  return waitpid(pid, &status, 0) == pid ? std::optional(status) : std::nullopt;
}

Status Ended(const std::string& program, std::optional<int> status, const FileDescriptor& log) {
  std::string how = "in a way that is not known";
  if (status && WIFSIGNALED(*status)) how = StrCat("with signal ", WTERMSIG(*status));
  if (status && WIFEXITED(*status)) how = StrCat("with exit code ", WEXITSTATUS(*status));
  const bool in_use = !status || (WIFEXITED(*status) && WEXITSTATUS(*status) == kExitAddressInUse);
  return {in_use ? StatusCode::kRefused : StatusCode::kSetting,
          StrCat(program, " ended ", how, ": ", LastLine(log))};
}

// The line that a server writes once it listens; without its end: it has ended before, or says
// nothing until the deadline.
std::string ReadTold(const FileDescriptor& told, const Clock& clock, Deadline deadline) {
  std::string text;
  while (text.size() < kToldMax && !deadline.ExpiredAt(clock.Now())) {
    std::vector<PollEntry> entries{{told.get(), POLLIN, 0}};
    if (PollUntil(entries, clock, deadline) <= 0) continue;
    std::array<char, 256> some{};
    const ssize_t got = read(told.get(), some.data(), some.size());
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) break;
    text.append(some.data(), static_cast<std::size_t>(got));
    if (text.back() == '\n') break;
  }
  return text;
}

Result<ServerProcess> AwaitServer(pid_t pid, const std::string& program, const FileDescriptor& told,
                                  const ServerLog& log, const Clock& clock) {
  const Deadline deadline = Deadline::After(clock.Now(), kStartMax);
  const std::string text = ReadTold(told, clock, deadline);
  const bool late = deadline.ExpiredAt(clock.Now());
  const std::optional<int> status = AwaitEnd(pid, clock, deadline);
  const std::size_t blank = text.find(' ');
  if (blank != std::string::npos && text.back() == '\n') {
    return ServerProcess{.address = text.substr(0, blank),
                         .server_id = text.substr(blank + 1, text.size() - blank - 2),
                         .log_path = log.Where()};
  }
  if (late) return Status(StatusCode::kSetting, StrCat(program, " did not listen within 10 s"));
  return Ended(program, status, log.fd);
}

}  // namespace

Result<ServerProcess> StartServer(const std::string& program, const std::string& listen,
                                  Duration linger, const Clock& clock) {
  Result<ServerLog> log = OpenLog();
  if (!log.ok()) return log.status();
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return NotStarted("no pipe", errno);
  const FileDescriptor told(ends[0]);
  FileDescriptor tells(ends[1]);
  const auto milliseconds = std::chrono::duration_cast<Millis>(linger).count();
  std::vector<std::string> command = {
      program,     "serve",  "--detach",        "--print-address",
      "--listen",  listen,   "--linger",        StrCat(milliseconds, "ms"),
      "--arrival", kArrival, "--tcpstore=auto", "--users=auto"};
  if (!log->path.empty()) command.insert(command.end(), {"--own-log", log->path});
  const Result<pid_t> pid = Spawn(std::move(command), tells, log->fd);
  tells.Reset();
  Result<ServerProcess> started = pid.ok() ? AwaitServer(*pid, program, told, *log, clock)
                                           : Result<ServerProcess>(pid.status());
  if (!started.ok()) log->Remove();
  return started;
}

}  // namespace resilient::store
