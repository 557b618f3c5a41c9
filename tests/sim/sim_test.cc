// Goal: whatever the network, the server's pauses and the deaths of processes do, the rules of
// membership and of exactly-once hold in each step, and all ranks run again once the faults are
// over. Method: many seeds of Sim; and the same with bugs planted, which must be found.
//
// --seeds=N (or RESILIENT_SIM_SEEDS) says how many, --seed=S runs one and prints what the server
// logs.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <resilient/settings.h>

#include "tests/sim/sim.h"

namespace resilient::store::sim {
namespace {

struct Seeds {
  std::uint64_t first = 1;
  std::uint64_t count = 200;
  bool trace = false;
};

Seeds& TheSeeds() {
  static Seeds seeds;
  return seeds;
}

TEST(StoreSim, RandomFaults_BreakNoRule) {
  Sim::Count sum;
  for (std::uint64_t i = 0; i < TheSeeds().count; ++i) {
    Sim sim({.seed = TheSeeds().first + i, .trace = TheSeeds().trace});
    ASSERT_EQ(sim.Run(), "");
    sum.crashes += sim.count().crashes;
    sum.cuts += sim.count().cuts;
    sum.fences += sim.count().fences;
    sum.losses += sim.count().losses;
    sum.views += sim.count().views;
    sum.adds += sim.count().adds;
    sum.repeats += sim.count().repeats;
  }
  std::printf(
      "%llu seeds: %d crashes, %d cuts, %d losses, %d fences, %d views, %d adds, %d repeats\n",
      static_cast<unsigned long long>(TheSeeds().count), sum.crashes, sum.cuts, sum.losses,
      sum.fences, sum.views, sum.adds, sum.repeats);
  if (TheSeeds().count < 50) return;
  // The faults did happen.
  for (const int count : {sum.crashes, sum.cuts, sum.losses, sum.fences, sum.views, sum.repeats}) {
    EXPECT_GT(count, 20);
  }
}

TEST(StoreSim, SameSeed_IsTheSameRun) {
  Sim first({.seed = 7});
  Sim second({.seed = 7});
  EXPECT_EQ(first.Run(), second.Run());
  EXPECT_EQ(first.count().adds, second.count().adds);
  EXPECT_EQ(first.count().views, second.count().views);
}

// How many of 30 seeds find it.
int Found(Planted planted, const char* text) {
  int found = 0;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    Sim sim({.seed = seed, .planted = planted});
    found += sim.Run().find(text) != std::string::npos ? 1 : 0;
  }
  return found;
}

TEST(StoreSim, PlantedRetryUnderANewNumber_IsFound) {
  EXPECT_GT(Found(Planted::kRetryUnderNewSeq, "applied twice"), 0);
}

TEST(StoreSim, PlantedTickBeforeTheInputIsRead_IsFound) {
  EXPECT_GT(Found(Planted::kAlwaysDrained, "lost"), 0);
}

TEST(StoreSim, PlantedLossOfAFence_IsFound) {
  EXPECT_GT(Found(Planted::kFenceDropped, "not all ranks run"), 0);
}

TEST(StoreSim, PlantedReadyAheadOfTheView_IsFound) {
  EXPECT_GT(Found(Planted::kReadyForAll, "was not ready"), 0);
}

}  // namespace
}  // namespace resilient::store::sim

int main(int argc, char** argv) {
  using resilient::store::sim::TheSeeds;
  ::testing::InitGoogleTest(&argc, argv);
  for (const auto& [name, value] : resilient::ProcessEnvironment()) {
    if (name == "RESILIENT_SIM_SEEDS") TheSeeds().count = std::strtoull(value.c_str(), nullptr, 10);
  }
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--seeds=", 8) == 0) {
      TheSeeds().count = std::strtoull(argv[i] + 8, nullptr, 10);
    } else if (std::strncmp(argv[i], "--seed=", 7) == 0) {
      TheSeeds() = {std::strtoull(argv[i] + 7, nullptr, 10), 1, true};
    } else {
      std::fprintf(stderr, "unknown argument %s; known: --seeds=N, --seed=S\n", argv[i]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
