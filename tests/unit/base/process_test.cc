// Goal: the identity of a process is stable, complete, and differs from that of its child.
// Method: this process and a real child.
#include "runtime/base/process.h"

#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace resilient
