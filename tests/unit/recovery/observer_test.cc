// Goal: questions are answered within their bound whatever the main thread does, announcements
// nest, and nothing runs before the first question or after Close.
// Method: a source of stacks that the test blocks, time that the test moves, events instead of
// sleeps.
#include "runtime/recovery/observer.h"

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <fstream>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/recovery/progress_meter.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/recovery/fakes.h"

namespace resilient::recovery {
namespace {

using std::chrono::hours;
using std::chrono::minutes;
using std::chrono::seconds;

constexpr int kTrainer = 8;  // No thread's id: what it uses is nothing.

// A main thread, and where the test says so a trainer, at lines that the test chooses; or in native
// code until the bound.
class FakeStacks final : public StackSource {
 public:
  explicit FakeStacks(ManualClock& clock) : clock_(clock) {}

  std::optional<ProgramStacks> Look(const std::vector<int>& submitters,
                                    Deadline deadline) override {
    std::unique_lock lock(mutex_);
    submitters_ = submitters;
    ++looks_;
    changed_.notify_all();
    if (held_) {
      changed_.wait_for(lock, kTestBound, [this] { return closed_ || !held_; });
    }
    if (closed_) return std::nullopt;
    if (!native_) {
      ProgramStacks seen;
      seen.main = {main_id_, "", line_, "File \"train.py\"\n" + line_};
      if (!trainers_line_.empty())
        seen.submitter = {kTrainer, "trainer", trainers_line_, "trainer's " + trainers_line_};
      return seen;
    }
    clock_.Advance(deadline.LeftAt(clock_.Now()));
    return std::nullopt;
  }

  void Close(Deadline /*deadline*/) override {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  void At(std::string line) {
    const std::lock_guard lock(mutex_);
    line_ = std::move(line);
    native_ = false;
  }
  void TrainerAt(std::string line) {
    const std::lock_guard lock(mutex_);
    trainers_line_ = std::move(line);
    native_ = false;
  }
  std::vector<int> submitters() {
    const std::lock_guard lock(mutex_);
    return submitters_;
  }
  void EnterNativeCode() {
    const std::lock_guard lock(mutex_);
    native_ = true;
  }
  // Looks do not come back until they are let go, or the source is closed.
  void Hold(bool held) {
    const std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  bool AwaitLooks(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kTestBound, [&] { return looks_ >= count; });
  }
  int looks() {
    const std::lock_guard lock(mutex_);
    return looks_;
  }

 private:
  ManualClock& clock_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string line_ = "train.py:1 main";  // Guarded by mutex_.
  std::string trainers_line_;             // Guarded by mutex_; empty: there is none.
  std::vector<int> submitters_;           // Guarded by mutex_; of the latest look.
  const int main_id_ = gettid();
  bool native_ = false;  // Guarded by mutex_.
  bool held_ = false;    // Guarded by mutex_.
  bool closed_ = false;  // Guarded by mutex_.
  int looks_ = 0;        // Guarded by mutex_.
};

int ObserverThreads() {
  int count = 0;
  DIR* tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return -1;
  while (const dirent* task = readdir(tasks)) {
    std::string name;
    std::ifstream comm(std::string("/proc/self/task/") + task->d_name + "/comm");
    std::getline(comm, name);
    if (name == "res-observer") ++count;
  }
  closedir(tasks);
  return count;
}

// A thread that has been joined may still be listed for a moment.
bool NoObserverThread() {
  const auto give_up = std::chrono::steady_clock::now() + kTestBound;
  while (ObserverThreads() != 0) {
    if (std::chrono::steady_clock::now() > give_up) return false;
    std::this_thread::yield();
  }
  return true;
}

class ObserverTest : public ::testing::Test {
 protected:
  Whereabouts Ask() {
    std::promise<Whereabouts> promise;
    observer_->Ask([&promise](const Whereabouts& seen) { promise.set_value(seen); });
    auto answer = promise.get_future();
    if (answer.wait_for(kTestBound) != std::future_status::ready) {
      ADD_FAILURE() << "no answer";
      observer_->Close(Deadline::After(clock_.Now(), kTestBound));
      return {};
    }
    return answer.get();
  }

  void Close() { observer_->Close(Deadline::After(clock_.Now(), kTestBound)); }

  ManualClock clock_;
  std::shared_ptr<FakeStacks> stacks_ = std::make_shared<FakeStacks>(clock_);
  std::shared_ptr<Observer> observer_ =
      MakeObserverOf(clock_, {.stacks = stacks_, .usage = [] { return ProcessUsage(); }});
};

TEST_F(ObserverTest, Ask_TellsWhereTheMainThreadIs) {
  EXPECT_TRUE(NoObserverThread()) << "none before the first question";
  stacks_->At("train.py:301 step");
  const Whereabouts seen = Ask();
  EXPECT_EQ(ObserverThreads(), 1);
  EXPECT_EQ(seen.at, "train.py:301 step");
  EXPECT_EQ(seen.stack, "File \"train.py\"\ntrain.py:301 step");
  EXPECT_EQ(seen.no_progress, Duration::zero());
  EXPECT_EQ(seen.expected_slow, "");
  EXPECT_EQ(seen.expected_slow_for, Duration::zero());
  Close();
  EXPECT_TRUE(NoObserverThread());
}

TEST_F(ObserverTest, NativeCodeHoldsTheLock_SaysSoAndForHowLong) {
  stacks_->EnterNativeCode();
  EXPECT_EQ(Ask().at, "native code holds the GIL for 2 s");
  stacks_->At("train.py:301 step");
  EXPECT_EQ(Ask().at, "train.py:301 step");
  stacks_->EnterNativeCode();
  Whereabouts seen = Ask();
  EXPECT_EQ(seen.at, "native code holds the GIL for 2 s, last seen at train.py:301 step");
  EXPECT_EQ(seen.stack, "File \"train.py\"\ntrain.py:301 step");
  clock_.Advance(seconds(8));
  seen = Ask();
  EXPECT_EQ(seen.at, "native code holds the GIL for 12 s, last seen at train.py:301 step");
  EXPECT_EQ(seen.no_progress, seconds(12));
  stacks_->At("train.py:302 step");
  EXPECT_EQ(Ask().no_progress, Duration::zero()) << "another line";
}

TEST_F(ObserverTest, ThreadThatSubmittedLast_IsToldOf) {
  stacks_->At("main.py:9 join");
  Whereabouts seen = Ask();
  EXPECT_THAT(stacks_->submitters(), ::testing::IsEmpty());
  EXPECT_EQ(seen.thread, "");
  ASSERT_EQ(seen.submitting.size(), 1u);
  EXPECT_EQ(seen.submitting[0].top, "main.py:9 join");
  stacks_->TrainerAt("train.py:41 step");
  int submitter = 0;
  std::thread([&] {
    observer_->NoteOperation();
    submitter = gettid();
  }).join();
  seen = Ask();
  EXPECT_THAT(stacks_->submitters(), ::testing::ElementsAre(submitter));
  EXPECT_THAT(observer_->Submitters(), ::testing::ElementsAre(submitter));
  EXPECT_EQ(seen.thread, "trainer");
  EXPECT_EQ(seen.at, "train.py:41 step");
  EXPECT_EQ(seen.stack, "trainer's train.py:41 step");
  ASSERT_EQ(seen.submitting.size(), 1u) << "the main thread has submitted nothing";
  EXPECT_EQ(seen.submitting[0].id, kTrainer);
  stacks_->EnterNativeCode();
  seen = Ask();
  EXPECT_EQ(seen.thread, "trainer");
  EXPECT_EQ(seen.at, "native code holds the GIL for 2 s, last seen at train.py:41 step");
}

TEST_F(ObserverTest, MainThreadThatSubmitsAsWell_IsAmongThoseThatSubmit) {
  observer_->NoteOperation();
  stacks_->TrainerAt("train.py:41 step");
  const Whereabouts seen = Ask();
  EXPECT_EQ(seen.thread, "trainer");
  ASSERT_EQ(seen.submitting.size(), 2u);
  EXPECT_EQ(seen.submitting[0].name, "trainer");
  EXPECT_EQ(seen.submitting[1].top, "train.py:1 main");
}

TEST_F(ObserverTest, LineOfEitherThread_IsProgress) {
  stacks_->TrainerAt("train.py:41 step");
  Ask();
  clock_.Advance(seconds(10));
  EXPECT_EQ(Ask().no_progress, seconds(10));
  stacks_->TrainerAt("train.py:42 step");
  EXPECT_EQ(Ask().no_progress, Duration::zero());
  clock_.Advance(seconds(10));
  stacks_->At("main.py:10 poll");
  EXPECT_EQ(Ask().no_progress, Duration::zero());
}

TEST(Observer, WhatTheWatchedThreadsCompute_IsAsked) {
  ManualClock clock;
  const auto stacks = std::make_shared<FakeStacks>(clock);
  stacks->TrainerAt("train.py:41 step");
  double spun = 0;
  const auto observer = MakeObserverOf(
      clock, {.stacks = stacks,
              .usage = [&] { return ProcessUsage{.cpu_seconds = spun}; },
              .seconds_of_thread = [&](int id) { return id == kTrainer ? spun : 0; }});
  const auto ask = [&] {
    std::promise<Duration> answer;
    observer->Ask([&](const Whereabouts& seen) { answer.set_value(seen.no_progress); });
    auto future = answer.get_future();
    return future.wait_for(kTestBound) == std::future_status::ready ? future.get() : Duration(-1);
  };
  EXPECT_EQ(ask(), Duration::zero());
  clock.Advance(seconds(10));
  spun = 10;
  EXPECT_EQ(ask(), seconds(10));
}

TEST_F(ObserverTest, NoProgress_GrowsUntilAnOperation) {
  Ask();
  clock_.Advance(seconds(10));
  EXPECT_EQ(Ask().no_progress, seconds(10));
  observer_->NoteOperation();
  EXPECT_EQ(Ask().no_progress, Duration::zero());
}

TEST(Observer, WatchesBetweenQuestions) {
  const SystemClock clock;
  ManualClock unused;
  const auto stacks = std::make_shared<FakeStacks>(unused);
  const auto observer = MakeObserverOf(clock, {.stacks = stacks,
                                               .usage = [] { return ProcessUsage(); },
                                               .sample_every = std::chrono::milliseconds(1)});
  observer->Ask([](const Whereabouts& /*seen*/) {});
  EXPECT_TRUE(stacks->AwaitLooks(4));
}

TEST_F(ObserverTest, ManyQuestions_AreAnsweredByOneLookAndTheQueueHasALimit) {
  stacks_->Hold(true);
  std::atomic<int> answers{0};
  std::promise<void> all;
  observer_->Ask([](const Whereabouts& /*seen*/) {});
  ASSERT_TRUE(stacks_->AwaitLooks(1));
  for (int i = 0; i < 65; ++i) {
    observer_->Ask([&](const Whereabouts& /*seen*/) {
      if (++answers == 64) all.set_value();
    });
  }
  stacks_->Hold(false);
  ASSERT_EQ(all.get_future().wait_for(kTestBound), std::future_status::ready);
  Ask();  // Behind them: the queue has room again.
  EXPECT_EQ(answers.load(), 64);
  EXPECT_LE(stacks_->looks(), 3);
}

TEST_F(ObserverTest, Expect_TheLongestOfNestedOnesCounts) {
  const std::uint64_t checkpoint = observer_->Expect("checkpoint", minutes(10));
  const std::uint64_t upload = observer_->Expect("upload", minutes(2));
  EXPECT_NE(checkpoint, 0U);
  EXPECT_NE(checkpoint, upload);
  clock_.Advance(minutes(1));
  Whereabouts seen = Ask();
  EXPECT_EQ(seen.expected_slow, "checkpoint");
  EXPECT_EQ(seen.expected_slow_for, minutes(9));
  observer_->EndExpectation(checkpoint);
  seen = Ask();
  EXPECT_EQ(seen.expected_slow, "upload");
  EXPECT_EQ(seen.expected_slow_for, minutes(1));
  observer_->EndExpectation(checkpoint);
  observer_->EndExpectation(0);
  clock_.Advance(minutes(1));
  seen = Ask();
  EXPECT_EQ(seen.expected_slow, "") << "over, although nobody said so";
  EXPECT_EQ(seen.expected_slow_for, Duration::zero());
}

TEST_F(ObserverTest, Expect_HasLimits) {
  std::uint64_t token = observer_->Expect(std::string(255, 'x') + "\u00e9", hours(1000));
  Whereabouts seen = Ask();
  EXPECT_EQ(seen.expected_slow, std::string(255, 'x')) << "not in the midst of a character";
  EXPECT_EQ(seen.expected_slow_for, hours(24));
  for (int i = 1; i < 64; ++i) token = observer_->Expect("more", seconds(10));
  EXPECT_NE(token, 0U);
  EXPECT_EQ(observer_->Expect("too many", hours(23)), 0U);
  clock_.Advance(seconds(10));
  EXPECT_NE(observer_->Expect("room again", hours(23)), 0U) << "those that are over do not count";
}

TEST_F(ObserverTest, Close_EndsALookAndDropsTheQuestions) {
  stacks_->Hold(true);
  const auto asked = std::make_shared<std::atomic<int>>(0);
  observer_->Ask([asked](const Whereabouts& /*seen*/) { ++*asked; });
  ASSERT_TRUE(stacks_->AwaitLooks(1));
  observer_->Ask([asked](const Whereabouts& /*seen*/) { ++*asked; });
  Close();
  EXPECT_TRUE(NoObserverThread());
  observer_->Ask([asked](const Whereabouts& /*seen*/) { ++*asked; });
  EXPECT_EQ(*asked, 0);
  EXPECT_EQ(asked.use_count(), 1) << "nobody keeps a question";
  Close();
}

TEST_F(ObserverTest, DestroyedByItsOwnAnswer_EndsItsThread) {
  std::promise<void> go;
  std::promise<void> destroyed;
  observer_->Ask([owner = observer_, go = go.get_future().share(),
                  &destroyed](const Whereabouts& /*seen*/) mutable {
    go.wait_for(kTestBound);
    owner.reset();
    destroyed.set_value();
  });
  ASSERT_TRUE(stacks_->AwaitLooks(1));
  observer_.reset();
  go.set_value();
  EXPECT_EQ(destroyed.get_future().wait_for(kTestBound), std::future_status::ready);
}

TEST(Observer, CppProgram_KnowsNoMainThreadAndMeasuresItself) {
  const SystemClock clock;
  const auto observer = MakeObserver(clock, nullptr);
  std::promise<Whereabouts> promise;
  observer->Ask([&promise](const Whereabouts& seen) { promise.set_value(seen); });
  auto answer = promise.get_future();
  ASSERT_EQ(answer.wait_for(kTestBound), std::future_status::ready);
  const Whereabouts seen = answer.get();
  EXPECT_EQ(seen.at, "");
  EXPECT_EQ(seen.stack, "");
  EXPECT_EQ(seen.no_progress, Duration::zero());
}

TEST_F(ObserverTest, ForkedChild_BeginsAnew) {
  if (testing::kThreadSanitized) GTEST_SKIP() << "ThreadSanitizer does not follow such a fork";
  observer_->Expect("the parent's", hours(1));
  Ask();
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(30);
    const Whereabouts seen = Ask();
    const bool fresh = seen.expected_slow.empty() && seen.at == "train.py:1 main";
    observer_.reset();
    _exit(fresh && NoObserverThread() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Ask().expected_slow, "the parent's");
}

}  // namespace
}  // namespace resilient::recovery
