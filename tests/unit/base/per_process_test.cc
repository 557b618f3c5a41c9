// Goal: each process has an object of its own, whatever the threads of its parent were doing at the
// fork. Method: real forks, also while other threads hold the lock of the object, and while they
// make it; a child that hangs ends by an alarm.
#include <resilient/per_process.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "tests/support/child_process.h"
#include "tests/support/sanitizers.h"

namespace resilient {
namespace {

constexpr unsigned kChildSeconds = 30;

struct Counter {
  std::mutex mutex;
  int value = 0;  // Guarded by mutex.

  int Next() {
    const std::lock_guard lock(mutex);
    return ++value;
  }
};

TEST(PerProcess, HasNoneBeforeTheFirstGet) {
  static constinit PerProcess<Counter> counter;
  EXPECT_EQ(counter.Present(), nullptr);
  Counter* const mine = &counter.Get();
  EXPECT_EQ(&counter.Get(), mine);
  EXPECT_EQ(counter.Present(), mine);
}

TEST(PerProcess, IsMadeAsTheFirstGetSays) {
  static constinit PerProcess<std::string> text;
  EXPECT_EQ(text.Get([] { return std::make_unique<std::string>("first"); }), "first");
  EXPECT_EQ(text.Get([] { return std::make_unique<std::string>("second"); }), "first");
}

TEST(PerProcess, AForkedChild_HasOneOfItsOwn) {
  static constinit PerProcess<Counter> counter;
  EXPECT_EQ(counter.Get().Next(), 1);
  const ChildProcess child([](int pipe) {
    const bool none = counter.Present() == nullptr;
    const int first = counter.Get().Next();
    const ChildProcess grandchild([](int ours) {
      const bool none_of_its_own = counter.Present() == nullptr;
      WriteLine(ours, StrCat(none_of_its_own, counter.Get().Next()));
    });
    WriteLine(pipe, StrCat(none, first, " ", grandchild.ReadLine()));
  });
  EXPECT_EQ(child.ReadLine(), "11 11");
  EXPECT_EQ(counter.Get().Next(), 2);
}

TEST(PerProcess, AForkWhileAnotherThreadHoldsItsLock_HangsNoChild) {
  if (testing::kThreadSanitized) GTEST_SKIP() << "TSan follows no fork of a process with threads";
  static constinit PerProcess<Counter> counter;
  std::promise<void> held;
  std::promise<void> release;
  std::thread holder([&] {
    const std::lock_guard lock(counter.Get().mutex);
    held.set_value();
    release.get_future().wait();
  });
  held.get_future().wait();
  const ChildProcess child([](int pipe) {
    alarm(kChildSeconds);
    WriteLine(pipe, StrCat(counter.Get().Next()));
  });
  EXPECT_EQ(child.ReadLine(), "1");
  release.set_value();
  holder.join();
}

TEST(PerProcess, AForkWhileAnotherThreadMakesIt_HangsNoChild) {
  if (testing::kThreadSanitized) GTEST_SKIP() << "TSan follows no fork of a process with threads";
  static constinit PerProcess<Counter> counter;
  std::promise<void> making;
  std::promise<void> release;
  std::thread maker([&] {
    counter.Get([&] {
      making.set_value();
      release.get_future().wait();
      return std::make_unique<Counter>();
    });
  });
  making.get_future().wait();
  const ChildProcess child([](int pipe) {
    alarm(kChildSeconds);
    WriteLine(pipe, StrCat(counter.Get().Next()));
  });
  EXPECT_EQ(child.ReadLine(), "1");
  release.set_value();
  maker.join();
}

TEST(PerProcess, ThreadsThatRaceForTheFirstGet_HaveTheSame) {
  constexpr int kThreads = 8;
  static constinit PerProcess<Counter> counter;
  std::atomic<int> ready{0};
  std::array<Counter*, kThreads> got{};
  std::vector<std::thread> threads;
  for (Counter*& mine : got) {
    threads.emplace_back([&mine, &ready] {
      ++ready;
      while (ready.load() < kThreads) std::this_thread::yield();
      mine = &counter.Get();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(got.begin(), got.end(), counter.Present()), kThreads);
}

}  // namespace
}  // namespace resilient
