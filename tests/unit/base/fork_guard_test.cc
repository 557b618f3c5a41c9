// Goal: a forked child keeps no registered descriptor and knows that it is a child.
// Method: real forks; the child answers with its exit code and does nothing else.
#include "runtime/base/fork_guard.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace resilient {
namespace {

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) != -1; }

// The exit code of a child that runs `body`.
int InFork(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ForkGuard, RegisteredDescriptor_IsClosedInTheChildOnly) {
  const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int other = open("/dev/null", O_RDONLY | O_CLOEXEC);
  ForkGuard::Register(fd);
  EXPECT_EQ(InFork([&] { return (IsOpen(fd) ? 1 : 0) + (IsOpen(other) ? 2 : 0); }), 2);
  EXPECT_TRUE(IsOpen(fd));
  ForkGuard::Unregister(fd);
  EXPECT_EQ(InFork([&] { return IsOpen(fd) ? 1 : 0; }), 1);
  close(fd);
  close(other);
}

TEST(ForkGuard, Child_MayReuseTheNumber) {
  const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  ForkGuard::Register(fd);
  // In the child the number is free again and no longer registered, so a grandchild keeps it.
  EXPECT_EQ(InFork([&] {
              const int reused = open("/dev/null", O_RDONLY);
              if (reused != fd) return 10;
              return InFork([&] { return IsOpen(reused) ? 0 : 11; });
            }),
            0);
  ForkGuard::Unregister(fd);
  close(fd);
}

TEST(ForkGuard, HighDescriptorNumber_IsClosedToo) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const int highest = static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 1 << 20)) - 1;
  const int low = open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int high = fcntl(low, F_DUPFD_CLOEXEC, highest);
  ASSERT_EQ(high, highest);
  ForkGuard::Register(high);
  EXPECT_EQ(InFork([&] { return IsOpen(high) ? 1 : 0; }), 0);
  ForkGuard::Unregister(high);
  close(high);
  close(low);
}

TEST(ForkGuard, UnregisterOfNothing_IsHarmless) {
  ForkGuard::Unregister(-1);
  ForkGuard::Unregister(12345);
}

TEST(ForkGuard, RegisterFromManyThreads_LosesNone) {
  constexpr int kThreads = 4;
  constexpr int kEach = 50;
  std::vector<std::vector<int>> opened(kThreads);
  std::vector<std::thread> threads;
  for (std::vector<int>& mine : opened) {
    threads.emplace_back([&mine] {
      for (int i = 0; i < kEach; ++i) {
        mine.push_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
        ForkGuard::Register(mine.back());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(InFork([&] {
              int open_fds = 0;
              for (const auto& fds : opened) {
                for (const int fd : fds) open_fds += IsOpen(fd) ? 1 : 0;
              }
              return open_fds;
            }),
            0);
  for (const auto& fds : opened) {
    for (const int fd : fds) {
      ForkGuard::Unregister(fd);
      close(fd);
    }
  }
}

TEST(ProcessMark, KnowsAChildOfAnyDepth) {
  const ProcessMark mark;
  EXPECT_FALSE(mark.InChild());
  EXPECT_EQ(InFork([&] {
              if (!mark.InChild()) return 1;
              if (ProcessMark().InChild()) return 2;
              return InFork([&] { return mark.InChild() ? 0 : 3; });
            }),
            0);
  EXPECT_FALSE(mark.InChild());
}

}  // namespace
}  // namespace resilient
