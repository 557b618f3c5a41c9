// Goal: a child that is forked while the parent's hooks are in use lets go of them at once. Method:
// forks while a thread runs hooks without a pause, which holds their lock at many of the forks.

#include "torch_plugin/csrc/hooks.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace resilient::plugin {
namespace {

constexpr int kForks = 200;
constexpr unsigned kAlarmSeconds = 10;

TEST(HookTable, InAForkedChild_NothingWaitsForTheParentsThreads) {
  HookTable<int> table;
  std::atomic<std::uint64_t> runs{0};
  table.Add(1, [&runs](int) { ++runs; });
  std::atomic<bool> ends{false};
  std::thread runner([&] {
    while (!ends) table.Run(1);
  });
  while (runs == 0) std::this_thread::yield();
  for (int i = 0; i < kForks; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(kAlarmSeconds);
      const std::uint64_t before = runs;
      table.Remove(1);
      table.Add(2, [&runs](int) { ++runs; });
      table.Run(1);
      _exit(runs == before && table.empty() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0) << "child " << i;
  }
  ends = true;
  runner.join();
  table.Remove(1);
  EXPECT_TRUE(table.empty());
}

}  // namespace
}  // namespace resilient::plugin
