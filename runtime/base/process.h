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

// What processes have used since they began. Thread: value type.
struct ProcessUsage {
  double cpu_seconds = 0;
  std::uint64_t call_bytes = 0;  // Read and written by calls, on files, pipes and terminals.
  std::uint64_t disk_bytes = 0;  // Read from and written to storage, also through mapped files.
};

// Of this process and of its living and ended descendants, less our own part: threads named "res-*"
// and store processes. What /proc does not tell counts as nothing; of the descendants at most 256
// are read. Some ten microseconds a thread.
ProcessUsage UsageWithoutOurOwn();

// What a thread of this process has of `cpu_seconds` of UsageWithoutOurOwn; 0 where there is none
// of that id. `id`: the kernel's.
double SecondsOfThread(int id);

// How far a process has come with ending. Thread: value type.
struct ProcessEnd {
  bool ending = false;   // No instruction of the user's will run in it any more, or it is gone.
  int wait_status = -1;  // As of waitpid, where the system tells it; -1: it does not.
};
// Of the process of this pid namespace that began at `start_time`. True of one that is killed from
// the signal on, long before its memory is given back and its parent hears of it.
ProcessEnd EndOf(std::int64_t pid, std::uint64_t start_time);

}  // namespace resilient
