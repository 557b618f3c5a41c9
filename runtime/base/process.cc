#include "runtime/base/process.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <csignal>
#include <deque>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "runtime/base/file.h"
#include "runtime/base/log.h"
#include "runtime/base/numbers.h"

namespace resilient {
namespace {

constexpr std::size_t kProcFileMax = std::size_t{1} << 20;

// Empty when it cannot be read: also one that could be opened is gone with its process.
std::string ReadFile(const std::string& path) {
  Result<FileText> file = ReadSmallFile(path, kProcFileMax);
  return file.ok() ? std::move(file->text) : std::string();
}

std::string HostName() {
  char name[HOST_NAME_MAX + 1] = {};
  if (gethostname(name, HOST_NAME_MAX) != 0) return "unknown-host";
  return name;
}

std::string PidNamespace() {
  struct stat info {};
  if (stat("/proc/self/ns/pid", &info) != 0) return {};
  return std::to_string(info.st_ino);
}

constexpr int kFirstStatField = 3;  // Of those behind the command.
constexpr int kFlagsField = 9;
constexpr int kUserTimeField = 14;
constexpr int kSystemTimeField = 15;
constexpr int kChildUserTimeField = 16;
constexpr int kChildSystemTimeField = 17;
constexpr int kStartTimeField = 22;
constexpr int kPendingSignalsField = 31;  // Of the first thread.
constexpr int kExitCodeField = 52;
constexpr std::size_t kProcessesMax = 257;

// A line of /proc/<pid>/stat. Thread: value type.
struct Stat {
  std::string command;
  char state = 0;
  std::vector<std::uint64_t> fields;  // From kFirstStatField on; what is no number is 0.

  std::uint64_t Field(int number) const {
    const auto index = static_cast<std::size_t>(number - kFirstStatField);
    return index < fields.size() ? fields[index] : 0;
  }
  double OwnSeconds() const { return Seconds(Field(kUserTimeField) + Field(kSystemTimeField)); }
  double ChildSeconds() const {
    return Seconds(Field(kChildUserTimeField) + Field(kChildSystemTimeField));
  }

 private:
  static double Seconds(std::uint64_t ticks) {
    return static_cast<double>(ticks) / static_cast<double>(sysconf(_SC_CLK_TCK));
  }
};

// Without fields when there is no such process or thread.
Stat ReadStat(const std::string& path) {
  Stat stat;
  const std::string line = ReadFile(path);
  // The command in field 2 may hold blanks and brackets; the last bracket ends it.
  const std::size_t begin = line.find('(');
  const std::size_t end = line.rfind(')');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return stat;
  stat.command = line.substr(begin + 1, end - begin - 1);
  std::istringstream fields(line.substr(end + 1));
  stat.fields.reserve(kExitCodeField);
  for (std::string field; stat.fields.size() < kExitCodeField && fields >> field;) {
    if (stat.fields.empty()) stat.state = field[0];
    stat.fields.push_back(ParseNumber<std::uint64_t>(field).value_or(0));
  }
  return stat;
}

void AddBytes(const std::string& path, ProcessUsage* usage) {
  std::istringstream lines(ReadFile(path));
  std::string name;
  std::uint64_t value = 0;
  while (lines >> name >> value) {
    if (name == "rchar:" || name == "wchar:") usage->call_bytes += value;
    if (name == "read_bytes:" || name == "write_bytes:") usage->disk_bytes += value;
  }
}

std::vector<std::string> ThreadsOf(const std::string& process) {
  std::vector<std::string> threads;
  std::error_code error;
  std::filesystem::directory_iterator entry(process + "/task", error);
  while (!error && entry != std::filesystem::directory_iterator()) {
    threads.push_back(entry->path().string());
    entry.increment(error);
  }
  return threads;
}

// A program whose own name begins as our threads' do gives it to its threads.
bool IsOurs(const Stat& thread, const Stat& process) {
  return thread.command.starts_with("res-") && !process.command.starts_with("res-");
}

// What one process has used; its children are appended to `pids`.
ProcessUsage UsageOf(std::int64_t pid, std::deque<std::int64_t>* pids) {
  ProcessUsage usage;
  const std::string process = StrCat("/proc/", pid);
  const Stat stat = ReadStat(process + "/stat");
  if (stat.command == "resilient-store") return usage;
  ProcessUsage ours;
  for (const std::string& thread : ThreadsOf(process)) {
    std::istringstream children(ReadFile(thread + "/children"));
    for (std::int64_t child = 0; children >> child;) pids->push_back(child);
    const Stat thread_stat = ReadStat(thread + "/stat");
    if (!IsOurs(thread_stat, stat)) continue;
    ours.cpu_seconds += thread_stat.OwnSeconds();
    AddBytes(thread + "/io", &ours);
  }
  AddBytes(process + "/io", &usage);
  usage.cpu_seconds = stat.OwnSeconds() + stat.ChildSeconds() - ours.cpu_seconds;
  usage.call_bytes -= std::min(usage.call_bytes, ours.call_bytes);
  usage.disk_bytes -= std::min(usage.disk_bytes, ours.disk_bytes);
  return usage;
}

}  // namespace

ProcessIdentity ThisProcess() {
  ProcessIdentity identity;
  identity.host = HostName();
  identity.boot_id = ReadFile("/proc/sys/kernel/random/boot_id");
  while (!identity.boot_id.empty() && identity.boot_id.back() == '\n') identity.boot_id.pop_back();
  identity.pid_namespace = PidNamespace();
  identity.pid = getpid();
  identity.start_time = StartTimeOf(identity.pid);
  return identity;
}

std::uint64_t StartTimeOf(std::int64_t pid) {
  return ReadStat(StrCat("/proc/", pid, "/stat")).Field(kStartTimeField);
}

ProcessUsage UsageWithoutOurOwn() {
  ProcessUsage sum;
  std::deque<std::int64_t> pids = {getpid()};
  for (std::size_t count = 0; count < kProcessesMax && !pids.empty(); ++count) {
    const std::int64_t pid = pids.front();
    pids.pop_front();
    const ProcessUsage usage = UsageOf(pid, &pids);
    sum.cpu_seconds += usage.cpu_seconds;
    sum.call_bytes += usage.call_bytes;
    sum.disk_bytes += usage.disk_bytes;
  }
  return sum;
}

double SecondsOfThread(int id) {
  const Stat thread = ReadStat(StrCat("/proc/self/task/", id, "/stat"));
  return IsOurs(thread, ReadStat("/proc/self/stat")) ? 0.0 : thread.OwnSeconds();
}

ProcessEnd EndOf(std::int64_t pid, std::uint64_t start_time) {
  const Stat stat = ReadStat(StrCat("/proc/", pid, "/stat"));
  const std::uint64_t began = stat.Field(kStartTimeField);
  if (began == 0 || began != start_time) return {.ending = true};
  // Another thread may be the first to end; that of the process's number hears of it soon.
  constexpr std::uint64_t kExiting = 0x4;  // PF_EXITING of the kernel.
  constexpr std::uint64_t kKill = std::uint64_t{1} << (SIGKILL - 1);
  ProcessEnd end;
  end.ending = stat.state == 'Z' || stat.state == 'X' ||
               (stat.Field(kFlagsField) & kExiting) != 0 ||
               (stat.Field(kPendingSignalsField) & kKill) != 0;
  // 0 also stands for what this process may not know.
  const std::uint64_t exit_code = stat.Field(kExitCodeField);
  if (end.ending && exit_code != 0) end.wait_status = static_cast<int>(exit_code);
  return end;
}

}  // namespace resilient
