#include "runtime/base/process.h"

#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <climits>
#include <fstream>
#include <iterator>
#include <sstream>

#include "runtime/base/log.h"

namespace resilient {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
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
  const std::string stat = ReadFile(StrCat("/proc/", pid, "/stat"));
  // The command in field 2 may hold blanks and brackets; the last bracket ends it.
  const std::size_t command_end = stat.rfind(')');
  if (command_end == std::string::npos) return 0;
  std::istringstream fields(stat.substr(command_end + 1));
  constexpr int kStartTimeField = 22;
  std::string field;
  for (int i = 3; i <= kStartTimeField; ++i) {
    if (!(fields >> field)) return 0;
  }
  std::uint64_t start_time = 0;
  const auto parsed = std::from_chars(field.data(), field.data() + field.size(), start_time);
  return parsed.ec == std::errc() ? start_time : 0;
}

}  // namespace resilient
