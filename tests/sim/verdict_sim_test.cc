// Goal: whatever the links between ranks do, no verdict is said of ranks of which it is not true,
// and each that is true is found in time. Method: many seeds of VerdictSim; and the same with ranks
// that give a wrong account of themselves, which must be found. --seeds and --seed as for Sim.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "tests/sim/sim_seeds.h"
#include "tests/sim/verdict_sim.h"

namespace resilient::store::sim {
namespace {

TEST(VerdictSim, EverySeed_SaysWhatIsTrueAndNothingElse) {
  VerdictSim::Count sum;
  const Seeds seeds = TheSeeds();
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    VerdictSim sim({.seed = seed});
    ASSERT_EQ(sim.Run(), "");
    sum.deadlocks += sim.count().deadlocks;
    sum.suspected += sim.count().suspected > 0 ? 1 : 0;
    sum.silences += sim.count().silences;
    sum.entered += sim.count().entered;
    sum.ended += sim.count().ended;
    sum.devices += sim.count().devices;
    sum.stalls += sim.count().stalls;
    sum.other_ranks += sim.count().other_ranks;
  }
  std::printf(
      "%llu seeds: %d circles, %d with questions, %d silent links, %d calls that all had "
      "entered, %d ranks at their end, %d devices that hang, %d ranks that stand still, %d groups "
      "of other ranks\n",
      static_cast<unsigned long long>(seeds.count), sum.deadlocks, sum.suspected, sum.silences,
      sum.entered, sum.ended, sum.devices, sum.stalls, sum.other_ranks);
  if (seeds.count < 50) return;  // Too few for each to have come up.
  EXPECT_GT(sum.deadlocks, 0);
  EXPECT_GT(sum.suspected, 0);
  EXPECT_GT(sum.entered, 0);
  EXPECT_GT(sum.ended, 0);
  EXPECT_GT(sum.devices, 0);
  EXPECT_GT(sum.stalls, 0);
  EXPECT_GT(sum.other_ranks, 0);
}

struct WrongAccount {
  PlantedAccount planted;
  const char* name;
  const char* text;
};

class VerdictSimPlanted : public ::testing::TestWithParam<WrongAccount> {};

TEST_P(VerdictSimPlanted, IsFound) {
  constexpr std::uint64_t kSeedsMost = 2000;
  for (std::uint64_t seed = 1; seed <= kSeedsMost; ++seed) {
    VerdictSim sim({.seed = seed, .planted = GetParam().planted});
    const std::string violation = sim.Run();
    if (violation.find(GetParam().text) == std::string::npos) continue;
    std::printf("found by %s\n", violation.c_str());
    return;
  }
  FAIL() << "not found in " << kSeedsMost << " seeds";
}

INSTANTIATE_TEST_SUITE_P(
    Accounts, VerdictSimPlanted,
    ::testing::Values(
        WrongAccount{PlantedAccount::kNothingEntered, "NoCrossCheck", "no circle is there"},
        WrongAccount{PlantedAccount::kOutdated, "Outdated", "no circle is there"},
        WrongAccount{PlantedAccount::kLastNotCounted, "EdgeKeptAfterAnEntry", "no circle is there"},
        WrongAccount{PlantedAccount::kSentNotCounted, "SentNotCounted", "no circle is there"},
        WrongAccount{PlantedAccount::kAlwaysEntered, "AlwaysEntered", "has not entered it"},
        WrongAccount{PlantedAccount::kNoDevice, "DeviceStageLeftOut", "has not entered it"},
        WrongAccount{PlantedAccount::kDeviceNotStill, "StandstillOfADeviceLeftOut",
                     "hangs was not found"},
        WrongAccount{PlantedAccount::kDeviceNotMoved, "WhatADeviceFinishesLeftOut",
                     "the device works"},
        WrongAccount{PlantedAccount::kSpinCounts, "SpinCountedAsProgress", "spins was not found"},
        WrongAccount{PlantedAccount::kRanksSorted, "OrderOfRanksLeftOut",
                     "is in a group of other ranks, and was not found"},
        WrongAccount{PlantedAccount::kRanksOfALine, "LineOfTheProgramCompared",
                     "the ranks of the group are the same"}),
    [](const ::testing::TestParamInfo<WrongAccount>& info) { return info.param.name; });

}  // namespace
}  // namespace resilient::store::sim
