// Goal: a thread that may still submit an operation is never overlooked, and one that cannot is
// none. Method: the rule on made samples; the shell on real threads in each kind of sleep.
#include "runtime/recovery/thread_census.h"

#include <gmock/gmock.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <semaphore>
#include <thread>

#include "runtime/base/texts.h"
#include "runtime/base/thread.h"
#include "tests/support/sanitizers.h"

namespace resilient::recovery {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Instant kStart{std::chrono::hours(1)};
constexpr std::uint64_t kPrivateWait = FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG;
constexpr std::uint64_t kSharedWait = FUTEX_WAIT_BITSET;

ThreadSample In(int id, long number, std::uint64_t operation = 0, std::uint64_t expected = 0,
                std::uint64_t timeout = 0) {
  ThreadSample thread{.id = id, .name = "worker", .call = {}, .switches = 5};
  thread.call = ThreadSample::Call{number, {0x1000, operation, expected, timeout, 0, 0}};
  return thread;
}

ThreadSample Parked(int id) { return In(id, SYS_futex, kPrivateWait); }
ThreadSample Running(int id) { return {.id = id, .name = "worker", .call = {}, .switches = 5}; }

ThreadSample Named(ThreadSample thread, std::string name) {
  thread.name = std::move(name);
  return thread;
}

std::string MayAct(std::vector<ThreadSample> threads, std::vector<int> blocked = {},
                   const ProgramThreads* program = nullptr) {
  return JudgeThreads({.threads = std::move(threads), .timer = {}}, blocked, program).may_act;
}

std::uint64_t Token(std::vector<ThreadSample> threads, std::vector<int> blocked = {}) {
  return JudgeThreads({.threads = std::move(threads), .timer = {}}, blocked, nullptr).token;
}

TEST(ACall, IsReadAsTheKernelWritesIt) {
  const auto call = ParseCall("202 0x7fd4 0x189 0x0 0x10 0x0 0xffffffff 0x7fd47c 0x7fd47d\n");
  ASSERT_TRUE(call);
  EXPECT_EQ(call->number, 202);
  EXPECT_EQ(call->arguments[0], 0x7fd4u);
  EXPECT_EQ(call->arguments[1], 0x189u);
  EXPECT_EQ(call->arguments[3], 0x10u);
  EXPECT_EQ(call->arguments[5], 0xffffffffu);
  for (const char* text :
       {"running\n", "", "-1 0x7f 0x7f\n", "202", "202 0x1 0x2", "202 1 2 3 4 5"})
    EXPECT_FALSE(ParseCall(text)) << text;
}

TEST(TheRule, AParkedThreadIsNoActor_AnyOtherIs) {
  EXPECT_THAT(MayAct({Parked(1), Parked(2)}), IsEmpty());
  EXPECT_THAT(MayAct({Parked(1), Running(2)}), HasSubstr("thread 'worker' (tid 2) runs"));
  EXPECT_THAT(MayAct({In(1, SYS_futex, kPrivateWait, 0, 0x7f00)}), HasSubstr("until a time"));
  EXPECT_THAT(MayAct({In(1, SYS_futex, kSharedWait)}), HasSubstr("another process"));
  EXPECT_THAT(MayAct({In(1, SYS_clock_nanosleep)}), HasSubstr("clock_nanosleep"));
  EXPECT_THAT(MayAct({In(1, SYS_read)}), HasSubstr("from outside (read)"));
  EXPECT_THAT(MayAct({In(1, SYS_restart_syscall)}), HasSubstr("until a time"));
  EXPECT_THAT(MayAct({In(1, 99999)}), HasSubstr("system call 99999"));
  // Whoever sleeps is named rather than who happens to run.
  EXPECT_THAT(MayAct({Running(1), In(2, SYS_read)}), HasSubstr("tid 2"));
}

TEST(TheRule, AnUnmarkedFutexOfOwnMemoryIsParked) {
  ThreadSample joiner = In(1, SYS_futex, kSharedWait, 2);
  EXPECT_THAT(MayAct({joiner, Parked(2)}), HasSubstr("tid 1"));
  joiner.call->of_own_memory = true;
  EXPECT_THAT(MayAct({joiner, Parked(2)}), IsEmpty());
  joiner.call->arguments[3] = 0x7f00;
  EXPECT_THAT(MayAct({joiner, Parked(2)}), HasSubstr("until a time"));
}

TEST(TheRule, WhoIsBlockedInOurCallsIsNoActor_NorAreOurThreads) {
  EXPECT_THAT(MayAct({Running(1), Parked(2)}, {1}), IsEmpty());
  EXPECT_THAT(MayAct({Running(1), Running(2)}, {1}), HasSubstr("tid 2"));
  EXPECT_THAT(MayAct({Named(Running(1), "res-comm")}), IsEmpty());
  EXPECT_THAT(MayAct({Named(Running(1), "res-callback")}), HasSubstr("res-callback"));
  EXPECT_THAT(MayAct({Named(Parked(1), "res-callback")}), IsEmpty());
}

TEST(TheRule, ThreadsOfLibrariesWaitForTheOutsideForEver) {
  ProgramThreads program{.run_code = {{1, "train.py:3 main", false}}, .present = {1, 2, 3}};
  const ThreadSample reader = In(2, SYS_read);
  EXPECT_THAT(MayAct({Parked(1), reader}), HasSubstr("tid 2"));
  EXPECT_THAT(MayAct({Parked(1), reader}, {}, &program), IsEmpty());
  EXPECT_THAT(MayAct({In(1, SYS_read), reader}, {}, &program),
              AllOf(HasSubstr("tid 1, train.py:3 main"), HasSubstr("(read)")));
  EXPECT_THAT(MayAct({Parked(1), Running(2)}, {}, &program), HasSubstr("tid 2"));
  EXPECT_THAT(MayAct({Parked(1), In(2, SYS_nanosleep)}, {}, &program), HasSubstr("tid 2"));
  // It has come since the interpreter was asked.
  EXPECT_THAT(MayAct({Parked(1), In(4, SYS_read)}, {}, &program), HasSubstr("tid 4"));
  program.run_code.push_back({3, "tqdm/_monitor.py:60 run", true});
  EXPECT_THAT(MayAct({Parked(1), In(3, SYS_nanosleep)}, {}, &program), IsEmpty());
}

TEST(TheToken, TellsWhetherAParkedThreadHasRun) {
  const std::vector<ThreadSample> before = {Parked(1), Parked(2), Running(3)};
  EXPECT_EQ(Token(before, {3}), Token(before, {3}));
  std::vector<ThreadSample> after = before;
  after[2].switches += 1;
  EXPECT_EQ(Token(before, {3}), Token(after, {3}));  // It is blocked in ours.
  after[1].switches += 1;
  EXPECT_NE(Token(before, {3}), Token(after, {3}));
  EXPECT_NE(Token({Parked(1), Parked(2)}), Token({Parked(1)}));
}

TEST(TheRule, ATimerMayAct) {
  EXPECT_THAT(JudgeThreads({.threads = {Parked(1)}, .timer = "a handler"}, {}, nullptr).may_act,
              HasSubstr("a handler"));
}

// A real thread of this process in one kind of sleep. Owner: the test, which lets it end.
class RealThread {
 public:
  explicit RealThread(std::function<void()> body)
      : thread_("worker", [this, body = std::move(body)] {
          id_ = gettid();
          body();
        }) {}

  // What is judged of it once it sleeps in `call`.
  std::string MayActOnceIn(long call, bool parked) {
    const auto end = std::chrono::steady_clock::now() + seconds(20);
    while (std::chrono::steady_clock::now() < end) {
      const ProcessSample process = SampleProcess();
      for (const ThreadSample& thread : process.threads) {
        if (thread.id != id_ || !thread.call || thread.call->number != call) continue;
        const std::string said = MayAct({thread, Running(gettid())}, {gettid()});
        // A thread that starts, or takes a lock, is in other calls for a moment.
        if (said.empty() == parked) return said;
      }
      std::this_thread::yield();
    }
    return "it does not come to sleep";
  }

 private:
  std::atomic<int> id_{0};
  Thread thread_;
};

TEST(RealThreads, AConditionWithoutATimeIsParked) {
  std::mutex mutex;
  std::condition_variable wake;
  bool over = false;
  {
    RealThread thread([&] {
      std::unique_lock lock(mutex);
      wake.wait(lock, [&] { return over; });
    });
    EXPECT_THAT(thread.MayActOnceIn(SYS_futex, true), IsEmpty());
    const std::lock_guard lock(mutex);
    over = true;
    wake.notify_all();
  }
  over = false;
  RealThread thread([&] {
    std::unique_lock lock(mutex);
    wake.wait_for(lock, seconds(100), [&] { return over; });
  });
  EXPECT_THAT(thread.MayActOnceIn(SYS_futex, false), HasSubstr("until a time has come (futex)"));
  const std::lock_guard lock(mutex);
  over = true;
  wake.notify_all();
}

TEST(RealThreads, ALockAndAJoinAreParked) {
  // Its own thread sleeps until a time has come.
  if (testing::kThreadSanitized) GTEST_SKIP() << "ThreadSanitizer has a thread that may act";
  std::mutex mutex;
  std::unique_lock held(mutex);
  std::atomic<bool> joined{false};
  RealThread joiner([&] {
    std::thread inner([&] { const std::lock_guard lock(mutex); });
    inner.join();
    joined = true;
  });
  const auto end = std::chrono::steady_clock::now() + seconds(20);
  std::string said = "not looked";
  while (!said.empty() && std::chrono::steady_clock::now() < end) {
    ProcessSample process = SampleProcess();
    said = JudgeThreads(process, {gettid()}, nullptr).may_act;
    if (process.threads.size() < 2) said = "not yet";  // The joiner and who it joins.
  }
  EXPECT_THAT(said, IsEmpty());
  EXPECT_FALSE(joined);
  held.unlock();
}

TEST(RealThreads, AFutureAndASemaphoreOfTheLanguageAreParked) {
  std::promise<void> promise;
  {
    RealThread waiter([future = promise.get_future().share()] { future.wait(); });
    EXPECT_THAT(waiter.MayActOnceIn(SYS_futex, true), IsEmpty());
    promise.set_value();
  }
  std::binary_semaphore semaphore(0);
  RealThread waiter([&] { semaphore.acquire(); });
  EXPECT_THAT(waiter.MayActOnceIn(SYS_futex, true), IsEmpty());
  semaphore.release();
}

TEST(RealThreads, WhatComesFromOutsideMayWakeThem) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  {
    RealThread reader([&] {
      char byte = 0;
      EXPECT_EQ(read(ends[0], &byte, 1), 1);
    });
    EXPECT_THAT(reader.MayActOnceIn(SYS_read, false), HasSubstr("from outside (read)"));
    ASSERT_EQ(write(ends[1], "x", 1), 1);
  }
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  auto* semaphore = static_cast<sem_t*>(page);
  ASSERT_EQ(sem_init(semaphore, 1, 0), 0);
  {
    RealThread waiter([&] { EXPECT_EQ(sem_wait(semaphore), 0); });
    EXPECT_THAT(waiter.MayActOnceIn(SYS_futex, false), HasSubstr("another process"));
    ASSERT_EQ(sem_post(semaphore), 0);
  }
  munmap(page, 4096);
  close(ends[0]);
  close(ends[1]);
}

TEST(RealThreads, AHandlerThatATimerWillRunMayAct) {
  struct sigaction before {};
  struct sigaction action {};
  action.sa_handler = [](int) {};
  ASSERT_EQ(sigaction(SIGALRM, &action, &before), 0);
  EXPECT_THAT(SampleProcess().timer, IsEmpty());
  alarm(100);
  EXPECT_THAT(SampleProcess().timer, HasSubstr("SIGALRM"));
  ASSERT_EQ(sigaction(SIGALRM, &before, nullptr), 0);
  EXPECT_THAT(SampleProcess().timer, IsEmpty());  // It would end the process.
  alarm(0);
}

TEST(ACensus, IsKeptForAMomentAndAsksOnceASecond) {
  int looks = 0;
  ThreadCensus census([&looks] {
    ++looks;
    return ProcessSample{.threads = {In(7, SYS_read)}, .timer = {}};
  });
  EXPECT_TRUE(census.Look({}, kStart).wants_program_threads);
  EXPECT_THAT(census.Look({}, kStart + Millis(100)).may_act, HasSubstr("read"));
  EXPECT_EQ(looks, 1);
  EXPECT_THAT(census.Look({7}, kStart + Millis(100)).may_act, IsEmpty());
  EXPECT_EQ(looks, 2);
  EXPECT_THAT(census.Look({}, kStart + seconds(1)).may_act, HasSubstr("read"));
  EXPECT_TRUE(census.MayAsk(kStart + seconds(1)));
  EXPECT_FALSE(census.MayAsk(kStart + Millis(1500)));
  census.Learn(std::vector<ProgramThread>{{1, "train.py:3 main", false}}, kStart + seconds(1));
  EXPECT_THAT(census.Look({}, kStart + seconds(1)).may_act, IsEmpty());
  EXPECT_THAT(census.Look({}, kStart + seconds(4)).may_act, HasSubstr("read"));  // Too old.
  census.Learn(std::nullopt, kStart + seconds(5));
  EXPECT_THAT(census.Look({}, kStart + seconds(5)).may_act, HasSubstr("read"));
  EXPECT_TRUE(census.MayAsk(kStart + seconds(5)));
}

TEST(ThreadCensus, ThreadIsCalledAsTheProgramCallsIt) {
  ThreadSample runs;
  runs.id = 7;
  runs.name = "python";
  const ProcessSample process{.threads = {runs}, .timer = {}};
  const ProgramThreads named{{{7, "train.py:41 step", false, "trainer"}}, {7}};
  EXPECT_EQ(JudgeThreads(process, {}, &named).may_act,
            "thread 'trainer' (tid 7, train.py:41 step) runs");
  const ProgramThreads unnamed{{{7, "train.py:41 step", false}}, {7}};
  EXPECT_THAT(JudgeThreads(process, {}, &unnamed).may_act, HasSubstr("thread 'python'"));
}

}  // namespace
}  // namespace resilient::recovery
