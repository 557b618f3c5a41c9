// Goal: whatever a few ranks have started and ended when links break, the plan lets all of them go
// on, never mixes collectives of different numbers, and never asks for an input that is gone.
// Method: seeded random steps of ranks with the real logs and the real plan; each generation has
// lanes of contributions by position, as a communicator counts them. Two planted errors are found.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/recovery/replay_log.h"

namespace resilient::recovery {
namespace {

constexpr std::uint64_t kOperations = 25;
constexpr std::uint64_t kAhead = 3;  // Collectives that a rank has in flight at most.
constexpr std::uint64_t kSeeds = 2000;

enum class Planted { kNothing, kOwnSummaryAlone, kForgetsCompleted };

// One group over all its generations. Thread: one.
class Model {
 public:
  Model(std::uint64_t seed, Planted planted)
      : planted_(planted), state_(seed * 2654435761 + 1), size_(2 + Draw(4)) {
    const ReplayLimits none{.operations = 0, .bytes = 0};
    for (std::size_t rank = 0; rank < size_; ++rank) {
      ranks_.push_back(
          {.log = planted == Planted::kForgetsCompleted ? ReplayLog(none) : ReplayLog()});
    }
    for (std::uint64_t number = 0; number <= kOperations; ++number) {
      synchronises_.push_back(Draw(3) != 0);
    }
  }

  // What went wrong; empty: nothing.
  std::string Run() {
    for (int step = 0; step < 20000 && wrong_.empty(); ++step) {
      const bool over = std::all_of(ranks_.begin(), ranks_.end(),
                                    [](const Rank& rank) { return rank.ended == kOperations; });
      if (over) return {};
      if (step < 2000 && Draw(25) == 0) {
        Cut();
      } else {
        Step(ranks_[Draw(size_)]);
      }
    }
    return wrong_.empty() ? "it did not end" : wrong_;
  }

 private:
  struct Rank {
    ReplayLog log;
    std::uint64_t ended = 0;
    std::vector<std::uint64_t> given = {};  // By position at this generation's communicator.
    std::size_t running = 0;                // The position there.
    std::uint64_t untold = 0;               // It has ended, and the fence may be faster.
  };

  std::uint64_t Draw(std::uint64_t below) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ % below;
  }

  void Step(Rank& rank) {
    const std::uint64_t next = rank.log.next();
    if (next <= kOperations && next - rank.ended <= kAhead && Draw(2) == 0) {
      rank.log.Add(next, 8, synchronises_[next]);
      rank.given.push_back(next);
      return;
    }
    Tell(rank);  // At the latest before the next one ends.
    const std::size_t position = rank.running;
    if (rank.given.size() <= position) return;
    const std::uint64_t number = rank.given[position];
    // A broadcast of rank 0 ends there at once, elsewhere with its part.
    const std::size_t needed = synchronises_[number] ? size_ : 1;
    for (std::size_t other = 0; other < needed; ++other) {
      const Rank& peer = ranks_[other];
      // A communicator runs one at a time: what is queued behind that gives nothing yet.
      if (peer.given.size() <= position || peer.running < position) return;
      if (peer.given[position] != number) wrong_ = "collectives of different numbers met";
    }
    ++rank.running;
    rank.untold = number;
    if (Draw(2) == 0) Tell(rank);
  }

  // The program hears of the end of what has ended last.
  static void Tell(Rank& rank) {
    const std::uint64_t number = std::exchange(rank.untold, 0);
    if (number != rank.ended + 1) return;  // Nothing, or it knows the result already.
    rank.log.Complete(number);
    rank.ended = number;
  }

  void Cut() {
    std::vector<ReplaySummary> all;
    for (const Rank& rank : ranks_) {
      ReplaySummary summary{.epoch = 1, .veto = "", .groups = {}};
      GroupSummary& group = summary.groups["world"];
      group = rank.log.Summary();
      for (std::size_t member = 0; member < size_; ++member) {
        group.ranks.push_back(static_cast<int>(member));
      }
      all.push_back(std::move(summary));
    }
    const ReplayPlan plan = PlanReplay(all);
    if (!plan.refusal.empty()) {
      wrong_ = plan.refusal;
      return;
    }
    for (Rank& rank : ranks_) {
      std::uint64_t from = plan.from.at("world");
      if (planted_ == Planted::kOwnSummaryAlone) from = rank.log.Summary().first_pending;
      rank.given.clear();
      rank.running = 0;
      rank.untold = 0;
      for (std::uint64_t number = from; number < rank.log.next(); ++number) {
        rank.given.push_back(number);
      }
    }
  }

  const Planted planted_;
  std::uint64_t state_;
  const std::size_t size_;
  std::vector<bool> synchronises_;
  std::vector<Rank> ranks_;
  std::string wrong_;
};

std::uint64_t Found(Planted planted) {
  std::uint64_t found = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    if (!Model(seed, planted).Run().empty()) ++found;
  }
  return found;
}

TEST(ReplayModel, Random) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    ASSERT_EQ(Model(seed, Planted::kNothing).Run(), "") << "seed " << seed;
  }
}

TEST(ReplayModel, AMemberThatDecidesAlone_IsFound) {
  EXPECT_GT(Found(Planted::kOwnSummaryAlone), kSeeds / 2);
}

TEST(ReplayModel, AWindowThatForgetsWhatHasCompleted_IsFound) {
  EXPECT_GT(Found(Planted::kForgetsCompleted), kSeeds / 2);
}

}  // namespace
}  // namespace resilient::recovery
