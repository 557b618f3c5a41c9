// Goal: the identity of a process is stable, complete, and differs from that of its child.
// Method: this process and a real child.
#include "runtime/base/process.h"

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/base/thread.h"

namespace resilient {
namespace {

TEST(ThisProcess, IsCompleteAndStable) {
  const ProcessIdentity self = ThisProcess();
  EXPECT_FALSE(self.host.empty());
  EXPECT_EQ(self.boot_id.size(), 36U) << self.boot_id;
  EXPECT_FALSE(self.pid_namespace.empty());
  EXPECT_EQ(self.pid, getpid());
  EXPECT_GT(self.start_time, 0U);
  EXPECT_EQ(self, ThisProcess());
}

TEST(StartTimeOf, NoProcess_IsZero) {
  EXPECT_EQ(StartTimeOf(0), 0U);
  EXPECT_EQ(StartTimeOf(-1), 0U);
  EXPECT_EQ(StartTimeOf(std::int64_t{1} << 40), 0U);
}

// The kernel puts the command of a process in brackets and does not escape it.
TEST(StartTimeOf, CommandWithBrackets_IsReadPast) {
  const pid_t pid = fork();
  if (pid == 0) {
    std::ofstream("/proc/self/comm") << "a) 1 (b 2";
    _exit(StartTimeOf(getpid()) >= 1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(StartTimeOf(pid), 0U) << "reaped";
}

// Between the opening of its file and the reading.
TEST(StartTimeOf, ProcessThatEndsMeanwhile_IsZero) {
  for (int i = 0; i < 100; ++i) {
    const pid_t pid = fork();
    if (pid == 0) {
      for (;;) pause();
    }
    std::promise<void> seen;
    auto reading = std::async(std::launch::async, [pid, &seen] {
      bool told = false;
      while (StartTimeOf(pid) != 0) {
        if (!std::exchange(told, true)) seen.set_value();
      }
    });
    seen.get_future().wait();
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    ASSERT_EQ(waitpid(pid, nullptr, 0), pid);
    reading.get();
  }
}

TEST(StartTimeOf, Child_IsNotOlderThanItsParent) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    char byte = 0;
    close(pipe_fds[1]);
    _exit(read(pipe_fds[0], &byte, 1) == 0 ? 0 : 1);
  }
  EXPECT_GE(StartTimeOf(pid), StartTimeOf(getpid()));
  close(pipe_fds[1]);
  close(pipe_fds[0]);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
}

// More than the kernel's ticks and the rest of this program need.
constexpr double kBusySeconds = 0.3;
constexpr std::uint64_t kWrittenBytes = 8 << 20;

// Uses a core for kBusySeconds and writes kWrittenBytes.
void Work() {
  std::ofstream file("/dev/null");
  file << std::string(kWrittenBytes, 'x') << std::flush;
  timespec used{};
  const auto seconds = [&used] {
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
  };
  for (const double until = seconds() + kBusySeconds; seconds() < until;) {
  }
}

struct Used {
  double cpu_seconds = 0;
  std::uint64_t call_bytes = 0;
};

Used UsedSince(const ProcessUsage& before) {
  const ProcessUsage after = UsageWithoutOurOwn();
  return {after.cpu_seconds - before.cpu_seconds, after.call_bytes - before.call_bytes};
}

TEST(UsageWithoutOurOwn, CountsThreadsButNotOurs) {
  std::promise<void> worked;
  std::promise<void> seen;
  const auto body = [&] {
    Work();
    worked.set_value();
    seen.get_future().wait();
  };
  ProcessUsage before = UsageWithoutOurOwn();
  {
    const Thread thread("loader", body);
    worked.get_future().wait();
    const Used used = UsedSince(before);
    EXPECT_GT(used.cpu_seconds, kBusySeconds / 2);
    EXPECT_GE(used.call_bytes, kWrittenBytes);
    seen.set_value();
  }
  worked = {};
  seen = {};
  before = UsageWithoutOurOwn();
  const Thread thread("res-comm", body);
  worked.get_future().wait();
  const Used used = UsedSince(before);
  EXPECT_LT(used.cpu_seconds, kBusySeconds / 2);
  EXPECT_LT(used.call_bytes, kWrittenBytes / 2);
  seen.set_value();
}

TEST(SecondsOfThread, AreWhatThatThreadHasUsed) {
  const double before = SecondsOfThread(getpid());
  std::promise<int> worked;
  std::promise<void> seen;
  const auto body = [&] {
    Work();
    worked.set_value(gettid());
    seen.get_future().wait();
  };
  {
    const Thread thread("loader", body);
    EXPECT_GT(SecondsOfThread(worked.get_future().get()), kBusySeconds / 2);
    EXPECT_LT(SecondsOfThread(getpid()) - before, kBusySeconds / 2);
    seen.set_value();
  }
  Work();
  EXPECT_GT(SecondsOfThread(getpid()) - before, kBusySeconds / 2);
  EXPECT_EQ(SecondsOfThread(0), 0) << "there is none";
  worked = {};
  seen = {};
  const Thread ours("res-comm", body);
  EXPECT_EQ(SecondsOfThread(worked.get_future().get()), 0) << "no part of what the process has";
  seen.set_value();
}

TEST(UsageWithoutOurOwn, CountsChildrenWhileTheyLiveAndAfterwards) {
  int worked[2];
  int seen[2];
  ASSERT_EQ(pipe(worked), 0);
  ASSERT_EQ(pipe(seen), 0);
  const ProcessUsage before = UsageWithoutOurOwn();
  const pid_t pid = fork();
  if (pid == 0) {
    char byte = 0;
    close(seen[1]);
    Work();
    if (write(worked[1], "w", 1) != 1) _exit(1);
    _exit(read(seen[0], &byte, 1) == 0 ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(read(worked[0], &byte, 1), 1);
  const Used living = UsedSince(before);
  EXPECT_GT(living.cpu_seconds, kBusySeconds / 2);
  EXPECT_GE(living.call_bytes, kWrittenBytes);
  close(seen[1]);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  EXPECT_GT(UsedSince(before).cpu_seconds, kBusySeconds / 2) << "what it used is its parent's now";
  for (const int fd : {worked[0], worked[1], seen[0]}) close(fd);
}

}  // namespace
}  // namespace resilient
