// Goal: the reason of an abort is written once, and everybody who listens hears it exactly once.
// Method: direct calls, then many threads that set and listen at the same time.
#include <resilient/abort.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace resilient {
namespace {

Status Cause(const std::string& text) { return {StatusCode::kRankLost, text}; }

TEST(AbortCell, Fresh_IsNotSet) {
  const AbortCell cell;
  EXPECT_FALSE(cell.IsSet());
  EXPECT_TRUE(cell.cause().ok());
}

TEST(AbortCell, SetTwice_FirstCauseWins) {
  AbortCell cell;
  EXPECT_TRUE(cell.Set(Cause("first")));
  EXPECT_FALSE(cell.Set(Cause("second")));
  EXPECT_TRUE(cell.IsSet());
  EXPECT_EQ(cell.cause().message(), "first");
}

TEST(AbortCell, Listeners_RunOnceWhenSet) {
  AbortCell cell;
  int calls = 0;
  cell.Listen([&calls] { ++calls; });
  cell.Listen([&calls] { ++calls; });
  EXPECT_EQ(calls, 0);
  cell.Set(Cause("x"));
  EXPECT_EQ(calls, 2);
  cell.Set(Cause("y"));
  EXPECT_EQ(calls, 2);
}

TEST(AbortCell, ListenAfterSet_RunsAtOnce) {
  AbortCell cell;
  cell.Set(Cause("x"));
  int calls = 0;
  cell.Listen([&calls] { ++calls; });
  EXPECT_EQ(calls, 1);
}

// A listener that asks the cell, or listens again, would deadlock if it ran under the lock.
TEST(AbortCell, Listener_MayUseTheCell) {
  AbortCell cell;
  std::string seen;
  bool nested = false;
  cell.Listen([&] {
    seen = cell.cause().message();
    cell.Listen([&] { nested = true; });
  });
  cell.Set(Cause("why"));
  EXPECT_EQ(seen, "why");
  EXPECT_TRUE(nested);
}

TEST(AbortCell, SetOk_IsABrokenInvariant) {
  AbortCell cell;
  EXPECT_DEATH(cell.Set(Status()), "internal error");
}

TEST(AbortCell, ManyThreads_OneWinsAndEveryListenerRunsOnce) {
  constexpr int kRounds = 200;
  constexpr int kThreads = 4;
  for (int round = 0; round < kRounds; ++round) {
    AbortCell cell;
    std::atomic<int> winners{0};
    std::atomic<int> heard{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        cell.Listen([&heard] { ++heard; });
        if (cell.Set(Cause(std::to_string(i)))) ++winners;
        // Whoever sees the flag sees the cause.
        EXPECT_TRUE(cell.IsSet());
        EXPECT_FALSE(cell.cause().ok());
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(winners, 1);
    EXPECT_EQ(heard, kThreads);
  }
}

}  // namespace
}  // namespace resilient
