// Goal: our threads have names, take no signals, and are joined.
// Method: look at a thread from inside; fork for the child's side.
#include "runtime/base/thread.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <future>
#include <string>

#include <gtest/gtest.h>

namespace resilient {
namespace {

TEST(Thread, Name_IsCutToTheKernelsLimit) {
  std::string name;
  Thread thread("a-very-long-thread-name", [&name] {
    char buffer[32] = {};
    pthread_getname_np(pthread_self(), buffer, sizeof buffer);
    name = buffer;
  });
  thread.Join();
  EXPECT_EQ(name, "a-very-long-thr");
}

TEST(Thread, Signals_AreBlockedButNotFaults) {
  sigset_t inside;
  Thread thread("signals", [&inside] { pthread_sigmask(SIG_BLOCK, nullptr, &inside); });
  thread.Join();
  for (const int blocked : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD, SIGALRM, SIGPROF}) {
    EXPECT_TRUE(sigismember(&inside, blocked)) << blocked;
  }
  for (const int open : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT}) {
    EXPECT_FALSE(sigismember(&inside, open)) << open;
  }
  sigset_t mine;
  pthread_sigmask(SIG_BLOCK, nullptr, &mine);
  EXPECT_FALSE(sigismember(&mine, SIGTERM)) << "the creator's mask is as before";
}

TEST(Thread, Destructor_Joins) {
  bool done = false;
  {
    const Thread thread("joined", [&done] { done = true; });
  }
  EXPECT_TRUE(done);
}

TEST(Thread, IsCurrent_OnlyInside) {
  std::promise<bool> inside;
  std::promise<Thread*> self;
  Thread thread("current", [&] { inside.set_value(self.get_future().get()->IsCurrent()); });
  self.set_value(&thread);
  EXPECT_TRUE(inside.get_future().get());
  EXPECT_FALSE(thread.IsCurrent());
  thread.Join();
  EXPECT_FALSE(thread.Joinable());
  thread.Join();  // Again: nothing to do.
}

TEST(Thread, ForkedChild_ForgetsItAndExits) {
  std::promise<void> stop;
  Thread thread("left-behind", [&stop] { stop.get_future().wait(); });
  const pid_t pid = fork();
  if (pid == 0) {
    thread.AbandonInChild();
    _exit(thread.Joinable() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  stop.set_value();
  thread.Join();
}

}  // namespace
}  // namespace resilient
