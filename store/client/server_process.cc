#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <utility>
#include <vector>

#include <resilient/settings.h>
#include <resilient/store/server_process.h>

#include "runtime/base/file.h"
#include "runtime/base/log.h"
#include "runtime/net/socket.h"

namespace resilient::store {
namespace {

constexpr Duration kStartMax = std::chrono::seconds(10);
constexpr Duration kPollPause = std::chrono::milliseconds(5);
constexpr int kExitAddressInUse = 3;
constexpr std::size_t kAddressFileMax = 4096;
constexpr std::size_t kLogMax = std::size_t{1} << 20;
constexpr std::array kFileVariables = {"RESILIENT_TOKEN_FILE", "RESILIENT_TLS_CERT",
                                       "RESILIENT_TLS_KEY", "RESILIENT_TLS_CA"};

// Servers started by this process that are not known to have ended.
struct Children {
  std::mutex mutex;
  std::vector<pid_t> pids;
};

Children& AllChildren() {
  static Children children;
  return children;
}

void CollectEnded() {
  Children& children = AllChildren();
  const std::lock_guard lock(children.mutex);
  std::erase_if(children.pids, [](pid_t pid) { return waitpid(pid, nullptr, WNOHANG) != 0; });
}

Status NotStarted(const std::string& what, int error) {
  return {StatusCode::kSetting, StrCat("no store was started: ", what, ": ", std::strerror(error))};
}

// A folder for the address file, removed with what is in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string text = std::filesystem::temp_directory_path() / "resilient-store-XXXXXX";
    if (mkdtemp(text.data()) != nullptr) path_ = text;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

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

// The pid of the detached program.
Result<pid_t> SpawnDetached(std::vector<std::string> command, int log_fd) {
  std::vector<std::string> environment = ServerEnvironment();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, log_fd, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, log_fd, STDERR_FILENO);
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

std::string LastLine(const std::string& path) {
  const Result<FileText> log = ReadSmallFile(path, kLogMax);
  if (!log.ok()) return {};
  std::string_view text = log->text;
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  return std::string(text.substr(text.rfind('\n') + 1));
}

Status Ended(const std::string& program, int status, const std::string& log_path) {
  const bool in_use = WIFEXITED(status) && WEXITSTATUS(status) == kExitAddressInUse;
  const std::string how = WIFSIGNALED(status) ? StrCat("signal ", WTERMSIG(status))
                                              : StrCat("exit code ", WEXITSTATUS(status));
  return {in_use ? StatusCode::kRefused : StatusCode::kSetting,
          StrCat(program, " ended with ", how, ": ", LastLine(log_path))};
}

// Waits for the two lines, address and id, that the server writes once it listens.
Result<ServerProcess> AwaitAddress(pid_t pid, const std::string& program, const std::string& file,
                                   const std::string& log_path, const Clock& clock) {
  const Deadline deadline = Deadline::After(clock.Now(), kStartMax);
  std::vector<PollEntry> nothing;
  while (!deadline.ExpiredAt(clock.Now())) {
    if (const auto found = ReadSmallFile(file, kAddressFileMax); found.ok()) {
      const std::string& text = found->text;
      const std::size_t first = text.find('\n');
      if (first != std::string::npos && text.find('\n', first + 1) == text.size() - 1) {
        return ServerProcess{.address = text.substr(0, first),
                             .server_id = text.substr(first + 1, text.size() - first - 2),
                             .log_path = log_path};
      }
    }
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) == pid) return Ended(program, status, log_path);
    PollUntil(nothing, clock, Deadline::After(clock.Now(), kPollPause));
  }
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  return Status(StatusCode::kSetting, StrCat(program, " did not listen within 10 s"));
}

}  // namespace

Result<ServerProcess> StartServer(const std::string& program, const std::string& listen,
                                  Duration linger, const Clock& clock) {
  CollectEnded();
  const TemporaryFolder folder;
  if (folder.path().empty()) return NotStarted("a temporary folder cannot be made", errno);
  std::string log_path = std::filesystem::temp_directory_path() / "resilient-store-XXXXXX.log";
  const int log_fd = mkostemps(log_path.data(), 4, O_CLOEXEC);
  if (log_fd < 0) return NotStarted(log_path, errno);
  const std::string address_file = folder.path() + "/address";
  const auto milliseconds = std::chrono::duration_cast<Millis>(linger).count();
  const Result<pid_t> pid =
      SpawnDetached({program, "serve", "--listen", listen, "--linger", StrCat(milliseconds, "ms"),
                     "--address-file", address_file},
                    log_fd);
  close(log_fd);
  Result<ServerProcess> started = pid.ok()
                                      ? AwaitAddress(*pid, program, address_file, log_path, clock)
                                      : Result<ServerProcess>(pid.status());
  if (!started.ok()) {
    unlink(log_path.c_str());
    return started;
  }
  Children& children = AllChildren();
  const std::lock_guard lock(children.mutex);
  children.pids.push_back(*pid);
  return started;
}

}  // namespace resilient::store
