// Goal: whoever needs a name waits until his own deadline and no longer, whatever the system's
// resolver does; what a name was holds while it does not answer; numbers are asked of nobody; a
// process that ends or forks is not kept by a lookup. Method: a resolver of the test's, which
// answers when the test says so; real forks.
#include "runtime/net/resolver.h"

#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/child_process.h"
#include "tests/support/sanitizers.h"

namespace resilient {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Duration kPatience = std::chrono::seconds(20);

// The system's resolver as the test wants it. Owner: the test and the threads that ask.
class Script {
 public:
  Found Answer(const std::string& host) {
    std::unique_lock lock(mutex_);
    ++asked_[host];
    changed_.notify_all();
    changed_.wait(lock, [&] { return !stuck_; });
    return answer_;
  }
  void Set(Found answer, bool stuck = false) {
    const std::lock_guard lock(mutex_);
    answer_ = std::move(answer);
    stuck_ = stuck;
    changed_.notify_all();
  }
  void Stick() {
    const std::lock_guard lock(mutex_);
    stuck_ = true;
  }
  int asked(const std::string& host) {
    const std::lock_guard lock(mutex_);
    return asked_[host];
  }
  bool AwaitAsked(const std::string& host, int times) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return asked_[host] >= times; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, int> asked_;
  Found answer_{Addresses{"10.0.0.1"}};
  bool stuck_ = false;
};

class ResolverTest : public ::testing::Test {
 protected:
  ~ResolverTest() override { script_->Set({Addresses{"10.0.0.9"}}); }

  Result<Addresses> Within(Duration time, const std::string& host = "a-name",
                           const InterruptCheck& interrupt = {}) {
    return ResolveWithin(*resolver_, host, interrupt, clock_, Deadline::After(clock_.Now(), time));
  }

  const SystemClock clock_;
  const std::shared_ptr<Script> script_ = std::make_shared<Script>();
  std::unique_ptr<Resolver> resolver_ =
      MakeResolver([script = script_](const std::string& host) { return script->Answer(host); });
};

TEST(NumericForm, Numbers_AreNoNames) {
  EXPECT_EQ(NumericForm("10.1.2.3"), "10.1.2.3");
  EXPECT_EQ(NumericForm("0"), "0.0.0.0");
  EXPECT_EQ(NumericForm("::1"), "::1");
  EXPECT_EQ(NumericForm("0:0::2"), "::2");
  EXPECT_EQ(NumericForm("localhost"), std::nullopt);
  EXPECT_EQ(NumericForm("10.1.2.3.example"), std::nullopt);
}

TEST_F(ResolverTest, Number_IsAskedOfNobody) {
  script_->Stick();
  EXPECT_THAT(*Within(Duration::zero(), "10.1.2.3"), ElementsAre("10.1.2.3"));
  EXPECT_EQ(script_->asked("10.1.2.3"), 0);
}

TEST_F(ResolverTest, Name_IsItsAddresses) {
  script_->Set({Addresses{"10.0.0.1", "::1"}});
  EXPECT_THAT(*Within(kPatience), ElementsAre("10.0.0.1", "::1"));
}

TEST_F(ResolverTest, NoAnswer_EndsAtTheDeadlineAndSaysWhat) {
  script_->Stick();
  const Instant began = clock_.Now();
  const Status status = Within(Millis(200)).status();
  EXPECT_GE(clock_.Now() - began, Millis(200));
  EXPECT_LT(clock_.Now() - began, kPatience / 2);
  EXPECT_EQ(status.code(), StatusCode::kResolve);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("'a-name'"), HasSubstr("not answered for "),
                                      HasSubstr("/etc/resolv.conf")));
}

TEST_F(ResolverTest, NoAnswer_EndsByTheInterrupt) {
  script_->Stick();
  const Status status = Within(kPatience, "a-name", [] {
                          return Status(StatusCode::kInterrupted, "Ctrl-C");
                        }).status();
  EXPECT_EQ(status.code(), StatusCode::kInterrupted);
}

TEST_F(ResolverTest, WhoeverAsksMeanwhile_JoinsTheOneLookup) {
  script_->Stick();
  const auto first = resolver_->Begin("a-name", clock_.Now());
  ASSERT_TRUE(script_->AwaitAsked("a-name", 1));
  EXPECT_EQ(resolver_->Begin("a-name", clock_.Now()), first);
  const auto other = resolver_->Begin("another", clock_.Now());
  EXPECT_NE(other, first);
  ASSERT_TRUE(script_->AwaitAsked("another", 1));
  EXPECT_EQ(script_->asked("a-name"), 1);
  script_->Set({Addresses{"10.0.0.2"}});
  EXPECT_THAT(*Within(kPatience), ElementsAre("10.0.0.2"));
}

TEST_F(ResolverTest, NextLookup_IsAnotherOne) {
  EXPECT_THAT(*Within(kPatience), ElementsAre("10.0.0.1"));
  script_->Set({Addresses{"10.0.0.2"}});
  EXPECT_THAT(*Within(kPatience), ElementsAre("10.0.0.2"));
}

TEST_F(ResolverTest, NoAnswer_WhatTheNameWasHolds) {
  ASSERT_TRUE(Within(kPatience).ok());
  script_->Stick();
  const Instant began = clock_.Now();
  EXPECT_THAT(*Within(kPatience), ElementsAre("10.0.0.1"));
  EXPECT_LT(clock_.Now() - began, kPatience / 2);
  // Nobody waits for that lookup twice.
  EXPECT_THAT(*Within(Duration::zero()), ElementsAre("10.0.0.1"));
  EXPECT_EQ(script_->asked("a-name"), 2);
}

TEST_F(ResolverTest, Failure_ThatMayPass_LeavesWhatTheNameWas) {
  const Status why(StatusCode::kResolve, "no");
  script_->Set({why, /*temporary=*/true});
  EXPECT_EQ(Within(kPatience).status().code(), StatusCode::kResolve);
  script_->Set({Addresses{"10.0.0.1"}});
  ASSERT_TRUE(Within(kPatience).ok());
  script_->Set({why, /*temporary=*/true});
  EXPECT_THAT(*Within(kPatience), ElementsAre("10.0.0.1"));
  script_->Set({why, /*temporary=*/false});
  EXPECT_EQ(Within(kPatience).status().code(), StatusCode::kResolve);
}

TEST_F(ResolverTest, LookupUnderWay_OutlivesItsResolver) {
  script_->Stick();
  const auto lookup = resolver_->Begin("a-name", clock_.Now());
  ASSERT_TRUE(script_->AwaitAsked("a-name", 1));
  resolver_.reset();
  script_->Set({Addresses{"10.0.0.3"}});
  ASSERT_TRUE(
      AwaitReadable(lookup->fd(), {}, clock_, Deadline::After(clock_.Now(), kPatience)).ok());
  ASSERT_TRUE(lookup->done());
  EXPECT_THAT(*lookup->result(), ElementsAre("10.0.0.3"));
}

TEST(ResolverOfProcess, UnknownName_HasNoAddress) {
  const SystemClock clock;
  const Status status = ResolveWithin(Resolver::OfProcess(), "no-such-host.invalid", {}, clock,
                                      Deadline::After(clock.Now(), kPatience))
                            .status();
  EXPECT_EQ(status.code(), StatusCode::kResolve);
  EXPECT_THAT(status.message(), HasSubstr("'no-such-host.invalid' does not resolve"));
}

TEST(ResolverOfProcess, ForkedChild_HasOneOfItsOwn) {
  // The threads of lookups before may still be ending.
  if (testing::kThreadSanitized) GTEST_SKIP() << "TSan follows no fork of a process with threads";
  const Resolver* const mine = &Resolver::OfProcess();
  EXPECT_EQ(&Resolver::OfProcess(), mine);
  const ChildProcess child([&](int pipe) {
    Resolver& own = Resolver::OfProcess();
    const SystemClock clock;
    const auto found =
        ResolveWithin(own, "localhost", {}, clock, Deadline::After(clock.Now(), kPatience));
    const bool right = &own != mine && &Resolver::OfProcess() == &own && found.ok();
    RESILIENT_CHECK(write(pipe, right ? "+\n" : "-\n", 2) == 2);
  });
  EXPECT_EQ(child.ReadLine(), "+");
}

TEST(ResolverOfProcess, LookupUnderWay_KeepsNoProcess) {
  // The threads of lookups before may still be ending.
  if (testing::kThreadSanitized) GTEST_SKIP() << "TSan follows no fork of a process with threads";
  ChildProcess child([](int pipe) {
    const auto script = std::make_shared<Script>();
    script->Stick();
    const auto resolver =
        MakeResolver([script](const std::string& host) { return script->Answer(host); });
    const SystemClock clock;
    static_cast<void>(resolver->Begin("a-name", clock.Now()));
    const bool asked = script->AwaitAsked("a-name", 1);
    RESILIENT_CHECK(write(pipe, asked ? "+\n" : "-\n", 2) == 2);
    std::exit(asked ? 0 : 1);
  });
  EXPECT_EQ(child.ReadLine(), "+");
  const int status = child.Wait();  // The bound of this test is its bound.
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace resilient
