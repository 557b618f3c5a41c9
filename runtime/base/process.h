#pragma once

#include <cstdint>
#include <string>

namespace resilient {

// What tells one process from every other one, over hosts, containers and pid reuse. Thread: value
// type.
struct ProcessIdentity {
  std::string host;           // Host name, for people.
  std::string boot_id;        // /proc/sys/kernel/random/boot_id
  std::string pid_namespace;  // Inode of /proc/self/ns/pid
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  // Field 22 of /proc/<pid>/stat, clock ticks since boot.

  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

ProcessIdentity ThisProcess();

// Start time of a process of this pid namespace; 0 when it does not exist.
std::uint64_t StartTimeOf(std::int64_t pid);

}  // namespace resilient
