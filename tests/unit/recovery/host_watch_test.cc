// Goal: a process that is killed is told of once and at once, to each that watches it; what ends in
// good order, is stopped or only loses a thread is not. Method: neighbours that are real processes,
// with and without the kernel's wait for many words.
#include "runtime/recovery/host_watch.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/base/thread.h"
#include "tests/support/child_process.h"

namespace resilient::recovery {
namespace {

constexpr auto kBound = std::chrono::seconds(30);

enum class Then { kWaits, kLetsGo, kLosesItsThread };

// A rank with a control thread, which tells what it joins with, and goes on after a byte of
// SIGCONT.
void BeARank(int pipe, Then then) {
  const SystemClock clock;
  HostWatch watch(
      true, [](const Neighbour&, const ProcessEnd&) {}, clock);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGUSR1);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  Thread control("control", [&] {
    const SessionEndpoint own = watch.Offer("endpoint");
    WriteLine(pipe, own.token + "|" + own.host_id);
    int signal = 0;
    if (then == Then::kWaits) {
      for (;;) pause();
    }
    sigwait(&signals, &signal);
    if (then == Then::kLetsGo) watch.LetGo();
  });
  control.Join();
  WriteLine(pipe, "thread ended");
  if (then == Then::kLosesItsThread) {
    for (;;) pause();
  }
}

Member MemberOf(int rank, const std::string& line) {
  const std::size_t bar = line.find('|');
  const SessionEndpoint endpoint{"e", line.substr(0, bar), line.substr(bar + 1)};
  return {rank, "i" + std::to_string(rank), "h", 1, EncodeSessionEndpoint(endpoint)};
}

class HostWatchTest : public ::testing::TestWithParam<FutexSupport> {
 protected:
  void Begin(const std::vector<Then>& others) {
    for (const Then then : others) {
      children_.push_back(
          std::make_unique<ChildProcess>([then](int pipe) { BeARank(pipe, then); }));
    }
    watch_ = std::make_unique<HostWatch>(
        true,
        [this](const Neighbour& neighbour, const ProcessEnd& end) {
          std::lock_guard lock(mutex_);
          deaths_.emplace_back(neighbour.rank, end.wait_status);
          changed_.notify_all();
        },
        clock_, GetParam());
    view_.members.push_back({0, "i0", "h", 1, EncodeSessionEndpoint(watch_->Offer("e"))});
    for (const auto& child : children_) {
      view_.members.push_back(MemberOf(static_cast<int>(view_.members.size()), child->ReadLine()));
    }
    watch_->Follow(view_, 0);
  }
  // Of rank.
  ChildProcess& Child(int rank) { return *children_.at(static_cast<std::size_t>(rank) - 1); }
  std::vector<int> AwaitDeaths(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kBound, [&] { return deaths_.size() >= count; });
    std::vector<int> ranks;
    ranks.reserve(deaths_.size());
    for (const auto& [rank, status] : deaths_) ranks.push_back(rank);
    return ranks;
  }
  void TearDown() override {
    if (watch_) {
      watch_->LetGo();
      watch_->Close();
    }
  }

  SystemClock clock_;
  std::vector<std::unique_ptr<ChildProcess>> children_;
  std::unique_ptr<HostWatch> watch_;
  View view_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<int, int>> deaths_;  // Rank and wait status; guarded by mutex_.
};

TEST_P(HostWatchTest, AKilledNeighbour_IsToldOnceWithItsSignal) {
  Begin({Then::kWaits, Then::kWaits});
  Child(2).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(1), std::vector<int>{2});
  Child(1).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(2), (std::vector<int>{2, 1}));
  std::lock_guard lock(mutex_);
  EXPECT_EQ(deaths_[0].second, SIGKILL);
}

// Killed after it joined and before anybody had its token.
TEST_P(HostWatchTest, ANeighbourThatIsGoneAlready_IsToldOnce) {
  ChildProcess gone([](int pipe) { BeARank(pipe, Then::kWaits); });
  Begin({Then::kWaits, Then::kWaits});
  const std::string line = gone.ReadLine();
  gone.Signal(SIGKILL);
  gone.Wait();
  view_.members.push_back(MemberOf(3, line));
  watch_->Follow(view_, 0);
  EXPECT_EQ(AwaitDeaths(1), std::vector<int>{3});
  Child(1).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(2), (std::vector<int>{3, 1}));
}

TEST_P(HostWatchTest, AKilledNeighbourThatIsStillInTheNextView_IsToldOnce) {
  Begin({Then::kWaits, Then::kWaits});
  Child(1).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(1), std::vector<int>{1});
  watch_->Follow(view_, 0);
  Child(2).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(2), (std::vector<int>{1, 2}));
}

TEST_P(HostWatchTest, AStoppedNeighbour_IsToldWhenItIsKilled) {
  Begin({Then::kWaits, Then::kWaits});
  Child(1).Signal(SIGSTOP);
  Child(2).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(1), std::vector<int>{2}) << "the stopped one is not dead";
  Child(1).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(2), (std::vector<int>{2, 1}));
}

TEST_P(HostWatchTest, OneThatLetGo_IsNotToldOfAtItsEnd) {
  Begin({Then::kLetsGo, Then::kWaits, Then::kWaits});
  Child(3).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(1), std::vector<int>{3});  // By now all tokens are there.
  Child(1).Signal(SIGUSR1);
  EXPECT_EQ(Child(1).Wait(), 0);
  Child(2).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(2), (std::vector<int>{3, 2}));
}

TEST_P(HostWatchTest, OneThatLostOnlyItsThread_IsNotDead) {
  Begin({Then::kLosesItsThread, Then::kWaits});
  Child(1).Signal(SIGUSR1);
  EXPECT_EQ(Child(1).ReadLine(), "thread ended");
  Child(2).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(1), std::vector<int>{2});
}

TEST_P(HostWatchTest, OneThatIsNotInTheNextView_IsNotWatchedAnyMore) {
  Begin({Then::kWaits, Then::kWaits, Then::kWaits, Then::kWaits});
  Child(4).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(1), std::vector<int>{4});
  // The others are watched by now.
  View next = view_;
  next.members[1] = {1, "new", "elsewhere", 1, "e"};
  watch_->Follow(next, 0);
  Child(2).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(2), (std::vector<int>{4, 2}));
  // Rank 1 was looked at before rank 2, and what the thread looks at next is the next view.
  Child(1).Signal(SIGKILL);
  Child(1).Wait();
  Child(3).Signal(SIGKILL);
  EXPECT_EQ(AwaitDeaths(3), (std::vector<int>{4, 2, 3}));
}

TEST_P(HostWatchTest, Close_WhileItWatches_Ends) {
  Begin({Then::kWaits});
  watch_->Close();
  watch_->Close();
  watch_->Follow(view_, 0);  // Nothing any more.
  std::lock_guard lock(mutex_);
  EXPECT_TRUE(deaths_.empty());
}

INSTANTIATE_TEST_SUITE_P(Kernels, HostWatchTest,
                         ::testing::Values(FutexSupport::kAsKernel, FutexSupport::kFirstOnly),
                         [](const auto& info) {
                           return info.param == FutexSupport::kAsKernel ? "Present" : "Older";
                         });

TEST(HostWatch, SwitchedOff_OffersNothing) {
  const SystemClock clock;
  HostWatch watch(
      false, [](const Neighbour&, const ProcessEnd&) {}, clock);
  const SessionEndpoint own = watch.Offer("e");
  EXPECT_EQ(EncodeSessionEndpoint(own), "e");
}

TEST(SessionEndpoint, IsReadAsItWasWritten) {
  const SessionEndpoint full{"1.2.3.4:5 rank 1 id/of host", "1 2 3 4", "boot/ns/7"};
  const SessionEndpoint read = DecodeSessionEndpoint(EncodeSessionEndpoint(full));
  EXPECT_EQ(read.communicator, full.communicator);
  EXPECT_EQ(read.token, full.token);
  EXPECT_EQ(read.host_id, full.host_id);
  for (const char* text : {"plain", "plain\nhalf"}) {
    EXPECT_EQ(DecodeSessionEndpoint(text).communicator, "plain");
    EXPECT_TRUE(DecodeSessionEndpoint(text).host_id.empty());
  }
}

TEST(ShortHostId, DiffersForDifferentHosts) {
  EXPECT_EQ(ShortHostId(""), "");
  EXPECT_EQ(ShortHostId("a"), "af63dc4c8601ec8c") << "of the published test vectors";
  EXPECT_NE(ShortHostId("boot/1/net/0"), ShortHostId("boot/1/net/1"));
}

TEST(NeighboursOf, AreTheOtherProcessesOfTheHostFromTheNextRankOn) {
  const auto endpoint = [](int pid, const char* host) {
    return SessionEndpoint{"e", RobustToken::EncodeOffer({.pid = pid, .start_time = 1, .fd = 1}),
                           host};
  };
  View view;
  const auto add = [&view](const SessionEndpoint& of) {
    const int rank = static_cast<int>(view.members.size());
    view.members.push_back({rank, "i", "h", 1, EncodeSessionEndpoint(of)});
  };
  add(endpoint(10, "a"));
  add(endpoint(11, "b"));             // Another host.
  add(endpoint(12, "a"));             // This rank.
  add(SessionEndpoint{"e", {}, {}});  // Cannot be watched.
  add(endpoint(12, "a"));             // In the same process.
  add(endpoint(14, "a"));
  const auto ranks_for = [&view](int rank, const SessionEndpoint& own) {
    std::vector<int> ranks;
    for (const Neighbour& neighbour : NeighboursOf(view, rank, own)) {
      ranks.push_back(neighbour.rank);
    }
    return ranks;
  };
  EXPECT_EQ(ranks_for(2, endpoint(12, "a")), (std::vector<int>{5, 0}));
  EXPECT_TRUE(ranks_for(1, endpoint(11, "b")).empty());
  EXPECT_TRUE(ranks_for(3, {"e", {}, {}}).empty());
  View many;
  for (int i = 0; i < 200; ++i) many.members.push_back({i, "i", "h", 1, {}});
  for (int i = 0; i < 200; ++i) {
    many.members[static_cast<std::size_t>(i)].endpoint =
        EncodeSessionEndpoint(endpoint(1000 + i, "a"));
  }
  const std::vector<Neighbour> most = NeighboursOf(many, 150, endpoint(1150, "a"));
  ASSERT_EQ(most.size(), kNeighboursMax);
  EXPECT_EQ(most.front().rank, 151);
  EXPECT_EQ(most.back().rank, 77);
}

TEST(Judge, ADeathIsADeadHolderOfAnEndingProcess) {
  constexpr std::uint32_t kHeld = 0x80000000u | 123;
  constexpr std::uint32_t kDied = 0xc0000000u;
  EXPECT_EQ(Judge(kHeld, false, {}), TokenVerdict::kWatch);
  EXPECT_EQ(Judge(0, false, {}), TokenVerdict::kForget);
  EXPECT_EQ(Judge(kDied, true, {}), TokenVerdict::kDied);
  EXPECT_EQ(Judge(kDied, false, {}), TokenVerdict::kLookAgain);
  EXPECT_EQ(Judge(kDied, false, kEndShownWithin - Millis(1)), TokenVerdict::kLookAgain);
  EXPECT_EQ(Judge(kDied, false, kEndShownWithin), TokenVerdict::kForget);
}

}  // namespace
}  // namespace resilient::recovery
