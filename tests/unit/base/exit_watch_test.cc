// Goal: a call into a driver that does not return cannot keep a process from ending, and ends none
// that is not ending. Method: the decision alone, in a time of the test's; and real processes that
// exit while such a call blocks one of their handlers.
#include "runtime/base/exit_watch.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <resilient/exit.h>

#include "tests/support/child_process.h"

namespace resilient {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;
using testing::Optional;

constexpr Instant kWatchStart{std::chrono::hours(1)};

ExitWatch WithBudget(Duration budget) {
  ExitWatch watch;
  watch.SetBudget(budget);
  return watch;
}

TEST(ExitWatch, ACallThatHangs_WithoutAnExit_BlocksNothing) {
  ExitWatch watch = WithBudget(seconds(20));
  watch.Begin("a call", kWatchStart);
  EXPECT_EQ(watch.Due(), kNever);
  EXPECT_EQ(watch.Blocked(kWatchStart + std::chrono::hours(10)), std::nullopt);
}

TEST(ExitWatch, AnExit_WithoutACall_IsNotBlocked) {
  ExitWatch watch = WithBudget(seconds(20));
  watch.OnExit(kWatchStart);
  EXPECT_EQ(watch.Due(), kNever);
  watch.End(watch.Begin("a call", kWatchStart));
  EXPECT_EQ(watch.Blocked(kWatchStart + std::chrono::hours(10)), std::nullopt);
}

TEST(ExitWatch, ACallOfBeforeTheExit_CountsFromTheExit) {
  ExitWatch watch = WithBudget(seconds(20));
  watch.Begin("an abort", kWatchStart);
  watch.OnExit(kWatchStart + seconds(100));
  watch.OnExit(kWatchStart + seconds(110));  // The first one counts.
  EXPECT_EQ(watch.Due(), kWatchStart + seconds(120));
  EXPECT_EQ(watch.Blocked(kWatchStart + seconds(119)), std::nullopt);
  EXPECT_THAT(watch.Blocked(kWatchStart + seconds(120)),
              Optional(HasSubstr("an abort has not returned for 120 s")));
}

TEST(ExitWatch, ACallOfTheExit_CountsFromItsBegin) {
  ExitWatch watch = WithBudget(seconds(20));
  watch.OnExit(kWatchStart);
  const auto first = watch.Begin("first", kWatchStart + seconds(1));
  watch.Begin("second", kWatchStart + seconds(5));
  EXPECT_EQ(watch.Due(), kWatchStart + seconds(21));
  watch.End(first);
  EXPECT_EQ(watch.Due(), kWatchStart + seconds(25));
  EXPECT_THAT(watch.Blocked(kWatchStart + seconds(25)), Optional(HasSubstr("second")));
}

TEST(ExitWatch, ABudgetWithoutEnd_NeverIsOver) {
  ExitWatch watch = WithBudget(Duration::max());
  watch.Begin("a call", kWatchStart);
  watch.OnExit(kWatchStart);
  EXPECT_EQ(watch.Blocked(kNever - seconds(1)), std::nullopt);
}

// Blocks whoever calls it, for good.
[[noreturn]] void Hang() {
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock lock(mutex);
  while (true) never.wait(lock);
}

// Exits while a call hangs on another thread; `blocked`: and so does a handler of the exit.
void ExitWhileACallHangs(bool blocked) {
  SetExitBudget(std::chrono::milliseconds(200));
  std::mutex mutex;
  std::condition_variable changed;
  bool begun = false;
  std::thread([&] {
    const DriverCall call("the call of the test");
    {
      const std::lock_guard lock(mutex);
      begun = true;
      changed.notify_all();
    }
    Hang();
  }).detach();
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return begun; });
  }
  ExitBegins();
  if (blocked) Hang();
  std::_Exit(0);
}

TEST(Exit, ThatACallKeepsFromItsEnd_IsEndedWithItsCode) {
  ChildProcess child([](int) { ExitWhileACallHangs(true); });
  const int status = child.Wait();
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), kBlockedExitCode);
}

TEST(Exit, ThatEndsAllTheSame_KeepsItsCode) {
  ChildProcess child([](int) { ExitWhileACallHangs(false); });
  const int status = child.Wait();
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// As a destructor of the program's or a handler of the driver's would.
TEST(Exit, StdExit_IsItsBegin) {
  ChildProcess child([](int) {
    (void)std::atexit([] {
      const DriverCall call("the call of a handler");
      Hang();
    });
    SetExitBudget(std::chrono::milliseconds(200));
    std::exit(0);
  });
  const int status = child.Wait();
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), kBlockedExitCode);
}

TEST(Exit, OfAForkedChild_HasNotBegunWithThatOfItsParent) {
  ChildProcess child([](int) {
    SetExitBudget(std::chrono::hours(1));
    ExitBegins();
    const DriverCall call("a call of the parent");
    ChildProcess grandchild([](int) { std::_Exit(ExitHasBegun() ? 8 : 7); });
    std::_Exit(WEXITSTATUS(grandchild.Wait()));
  });
  EXPECT_EQ(WEXITSTATUS(child.Wait()), 7);
}

TEST(Exit, OfAForkedChild_IsBoundedByItsOwnBudget) {
  ChildProcess child([](int) {
    SetExitBudget(std::chrono::hours(1));
    const DriverCall call("a call of the parent");
    ChildProcess grandchild([](int) { ExitWhileACallHangs(true); });
    std::_Exit(WEXITSTATUS(grandchild.Wait()));
  });
  EXPECT_EQ(WEXITSTATUS(child.Wait()), kBlockedExitCode);
}

}  // namespace
}  // namespace resilient
