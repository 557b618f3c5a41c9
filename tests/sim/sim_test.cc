// Goal: whatever the network, the server's pauses and the deaths of processes do, the rules of
// membership and of exactly-once hold in each step, and all ranks run again once the faults are
// over. Method: many seeds of Sim; and the same with bugs planted, which must be found.
//
// --seeds=N (or RESILIENT_SIM_SEEDS) says how many, --first=S from which on; --seed=S runs one and
// prints what the server logs.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include <resilient/clock.h>
#include <resilient/settings.h>

#include "tests/sim/sim.h"
#include "tests/sim/sim_seeds.h"

namespace resilient::store::sim {

Seeds& TheSeeds() {
  static Seeds seeds;
  return seeds;
}

namespace {

// What many runs were made of, and the first that broke a rule. Thread: one to a thread, then
// joined.
struct Sum {
  Sim::Count count;
  std::string violation;

  void Add(const Sim::Count& more) {
    count.crashes += more.crashes;
    count.cuts += more.cuts;
    count.fences += more.fences;
    count.losses += more.losses;
    count.views += more.views;
    count.adds += more.adds;
    count.repeats += more.repeats;
    count.barriers += more.barriers;
    count.pops += more.pops;
    count.restarts += more.restarts;
    count.commits += more.commits;
    count.changes += more.changes;
    count.snapshots += more.snapshots;
    count.holds += more.holds;
    count.deaths_seen += more.deaths_seen;
    count.waits_told += more.waits_told;
    count.late_told += more.late_told;
    count.silences += more.silences;
    count.progress_asked += more.progress_asked;
    count.deadlocks += more.deadlocks;
    count.stalls += more.stalls;
    count.openings += more.openings;
    count.rebuilds += more.rebuilds;
    count.given_up += more.given_up;
    count.refused += more.refused;
    count.operations += more.operations;
    count.aborted += more.aborted;
    count.closes += more.closes;
    count.exhausted += more.exhausted;
    count.kept_commits += more.kept_commits;
    count.stale_commits += more.stale_commits;
    count.shrinks += more.shrinks;
    count.shrinks_again += more.shrinks_again;
    count.first_shrinks += more.first_shrinks;
    count.contents += more.contents;
    count.shrink_crashes += more.shrink_crashes;
    count.shrink_restarts += more.shrink_restarts;
    count.late_replacements += more.late_replacements;
    count.spares_waited += more.spares_waited;
    count.spares_seated += more.spares_seated;
    count.spares_taken_back += more.spares_taken_back;
    count.spares_in_smaller += more.spares_in_smaller;
    count.growths += more.growths;
    count.newcomers += more.newcomers;
    count.growths_taken_back += more.growths_taken_back;
    count.heals += more.heals;
    count.replays += more.replays;
    count.replayed += more.replayed;
    count.replayed_for += more.replayed_for;
    count.vetoed += more.vetoed;
    count.strangers += more.strangers;
    count.dropped += more.dropped;
    count.too_late += more.too_late;
    for (std::size_t blow = 0; blow < kBlows; ++blow) {
      for (std::size_t heal = 0; heal < kHeals; ++heal) {
        count.heal_blows[blow][heal] += more.heal_blows[blow][heal];
      }
      for (std::size_t state = 0; state < kStates; ++state) {
        count.blows[blow][state] += more.blows[blow][state];
      }
    }
  }
};

constexpr const char* kNames[kBlows] = {"fences", "losses of others", "restarts of the server",
                                        "closes", "crashes"};

// What came to processes in each state of their recovery did come.
void CheckBlows(Sim::Count sum) {
  for (std::size_t blow = 0; blow < kBlows; ++blow) {
    std::string line;
    for (std::size_t i = 0; i < kStates; ++i) {
      const auto state = static_cast<SessionState>(i);
      line += " " + std::string(SessionStateName(state)) + " " + std::to_string(sum.blows[blow][i]);
    }
    std::printf("%s:%s\n", kNames[blow], line.c_str());
  }
  if (TheSeeds().count < 2000) return;
  EXPECT_GT(sum.exhausted, 20);
  for (const Blow blow : {Blow::kFence, Blow::kLoss, Blow::kRestart, Blow::kClose, Blow::kCrash}) {
    for (const SessionState state : {SessionState::kAborting, SessionState::kJoining,
                                     SessionState::kBuilding, SessionState::kReady}) {
      // Who has not joined again is in no generation that could end.
      if (blow == Blow::kFence && state == SessionState::kAborting) continue;
      EXPECT_GT(sum.Of(blow, state), 20)
          << kNames[static_cast<std::size_t>(blow)] << " in " << SessionStateName(state);
    }
  }
}

void CheckShrinks(const Sim::Count& sum) {
  std::printf(
      "%d worlds became smaller, %d of them not for the first time, %d ranks of them were refused "
      "a larger one, %d crashes and %d restarts of the server meanwhile, %d replacements later; %d "
      "worlds began with some of the ranks that ran before\n",
      sum.shrinks, sum.shrinks_again, sum.contents, sum.shrink_crashes, sum.shrink_restarts,
      sum.late_replacements, sum.first_shrinks);
  if (TheSeeds().count < 2000) return;
  for (const int count : {sum.shrinks, sum.shrinks_again, sum.contents, sum.shrink_crashes,
                          sum.shrink_restarts, sum.late_replacements, sum.first_shrinks}) {
    EXPECT_GT(count, 20);
  }
}

void CheckSpares(const Sim::Count& sum) {
  std::printf(
      "%d processes waited as spares, %d seats were given to one, %d taken back, %d spares began "
      "in a world that became smaller\n",
      sum.spares_waited, sum.spares_seated, sum.spares_taken_back, sum.spares_in_smaller);
  if (TheSeeds().count < 2000) return;
  for (const int count : {sum.spares_waited, sum.spares_seated, sum.spares_taken_back}) {
    EXPECT_GT(count, 20);
  }
}

void CheckGrowths(const Sim::Count& sum) {
  std::printf("%d worlds took in %d spares, %d more were what they had been before\n", sum.growths,
              sum.newcomers, sum.growths_taken_back);
  if (TheSeeds().count < 2000) return;
  for (const int count : {sum.growths, sum.newcomers, sum.growths_taken_back}) {
    EXPECT_GT(count, 20);
  }
}

// Broken links were got over, and not, for each reason; and each blow has met ranks on their way.
void CheckReplays(const Sim::Count& sum) {
  std::printf(
      "%d ranks met a broken link, %d ran %d operations again, %d of them for others; not so %d by "
      "an objection, %d by a stranger, %d by an input that was dropped, %d by the time\n",
      sum.heals, sum.replays, sum.replayed, sum.replayed_for, sum.vetoed, sum.strangers,
      sum.dropped, sum.too_late);
  for (std::size_t blow = 0; blow < kBlows; ++blow) {
    const auto& met = sum.heal_blows[blow];
    std::printf("%s behind a broken link: %d on the way, %d in the meeting, %d running again\n",
                kNames[blow], met[1], met[2], met[3]);
  }
  if (TheSeeds().count < 2000) return;
  for (const int count : {sum.replays, sum.replayed, sum.replayed_for, sum.vetoed, sum.strangers,
                          sum.dropped, sum.too_late}) {
    EXPECT_GT(count, 20);
  }
  for (std::size_t blow = 0; blow < kBlows; ++blow) {
    for (const Heal heal : {Heal::kComing, Heal::kMeeting, Heal::kRunning}) {
      EXPECT_GT(sum.heal_blows[blow][static_cast<std::size_t>(heal)], 20)
          << kNames[blow] << " in " << static_cast<int>(heal);
    }
  }
}

// Every `step`-th seed from `first` on.
Sum RunSeeds(std::uint64_t first, std::uint64_t end, std::uint64_t step) {
  Sum sum;
  for (std::uint64_t seed = first; seed < end && sum.violation.empty(); seed += step) {
    Sim sim({.seed = seed, .trace = TheSeeds().trace});
    sum.violation = sim.Run();
    sum.Add(sim.count());
  }
  return sum;
}

TEST(StoreSim, RandomFaults_BreakNoRule) {
  const std::uint64_t first = TheSeeds().first;
  const std::uint64_t end = first + TheSeeds().count;
  // Runs share nothing.
  const std::uint64_t workers =
      std::clamp<std::uint64_t>(std::thread::hardware_concurrency(), 1, TheSeeds().count);
  const SystemClock clock;
  const Instant began = clock.Now();
  std::vector<std::future<Sum>> running;
  for (std::uint64_t i = 0; i < workers; ++i) {
    running.push_back(std::async(std::launch::async, RunSeeds, first + i, end, workers));
  }
  Sum all;
  for (std::future<Sum>& run : running) {
    const Sum sum = run.get();
    EXPECT_EQ(sum.violation, "");
    all.Add(sum.count);
  }
  const std::chrono::duration<double> took = clock.Now() - began;
  std::printf("%.0f schedules per second, on %llu threads\n",
              static_cast<double>(TheSeeds().count) / std::max(took.count(), 0.001),
              static_cast<unsigned long long>(workers));
  const Sim::Count& sum = all.count;
  std::printf(
      "%llu seeds: %d crashes, %d cuts, %d losses, %d fences, %d views, %d adds, %d pops, %d "
      "barriers, %d repeats, %d restarts of the server, %d commits, %d watched changes, %d "
      "snapshots, %d holds, %d deaths seen by neighbours, %d waits told, %d answers to them, %d "
      "deadlocks, %d standstills\n",
      static_cast<unsigned long long>(TheSeeds().count), sum.crashes, sum.cuts, sum.losses,
      sum.fences, sum.views, sum.adds, sum.pops, sum.barriers, sum.repeats, sum.restarts,
      sum.commits, sum.changes, sum.snapshots, sum.holds, sum.deaths_seen, sum.waits_told,
      sum.late_told, sum.deadlocks, sum.stalls);
  std::printf(
      "%d openings of gates, %d rebuilds, %d given up, %d operations, %d aborted, %d refused, %d "
      "commits of the program, %d refused, %d closes, %d exhausted\n",
      sum.openings, sum.rebuilds, sum.given_up, sum.operations, sum.aborted, sum.refused,
      sum.kept_commits, sum.stale_commits, sum.closes, sum.exhausted);
  CheckShrinks(sum);
  CheckSpares(sum);
  CheckGrowths(sum);
  CheckReplays(sum);
  CheckBlows(sum);
  if (TheSeeds().count < 200) return;
  // The faults did happen.
  for (const int count :
       {sum.crashes,      sum.cuts,          sum.losses,      sum.fences,     sum.views,
        sum.pops,         sum.barriers,      sum.repeats,     sum.restarts,   sum.changes,
        sum.snapshots,    sum.holds,         sum.deaths_seen, sum.waits_told, sum.late_told,
        sum.deadlocks,    sum.stalls,        sum.given_up,    sum.aborted,    sum.refused,
        sum.kept_commits, sum.stale_commits, sum.closes}) {
    EXPECT_GT(count, 20);
  }
}

TEST(StoreSim, SameSeed_IsTheSameRun) {
  Sim first({.seed = 7});
  Sim second({.seed = 7});
  EXPECT_EQ(first.Run(), second.Run());
  EXPECT_EQ(first.count().adds, second.count().adds);
  EXPECT_EQ(first.count().views, second.count().views);
  EXPECT_EQ(first.count().operations, second.count().operations);
  EXPECT_EQ(first.count().blows, second.count().blows);
}

// A bug that is planted, and a part of the text of what finds it.
struct Bug {
  Planted planted;
  const char* name;
  const char* text;
};

class StoreSimPlanted : public ::testing::TestWithParam<Bug> {};

TEST_P(StoreSimPlanted, IsFound) {
  constexpr std::uint64_t kSeedsMost = 2000;
  for (std::uint64_t seed = 1; seed <= kSeedsMost; ++seed) {
    Sim sim({.seed = seed, .planted = GetParam().planted});
    const std::string violation = sim.Run();
    if (violation.empty() || violation.find(GetParam().text) == std::string::npos) continue;
    std::printf("found by seed %llu: %s\n", static_cast<unsigned long long>(seed),
                violation.c_str());
    return;
  }
  FAIL() << "not found in " << kSeedsMost << " seeds";
}

INSTANTIATE_TEST_SUITE_P(
    Bugs, StoreSimPlanted,
    ::testing::Values(
        Bug{Planted::kRetryUnderNewSeq, "RetryUnderANewNumber", "applied twice"},
        Bug{Planted::kAlwaysDrained, "TickBeforeTheInputIsRead", "lost"},
        Bug{Planted::kFenceDropped, "LossOfAFence", "not all ranks run"},
        Bug{Planted::kReadyForAll, "ReadyAheadOfTheView", "was not ready"},
        Bug{Planted::kAckTooEarly, "AcknowledgedTooEarly", "failed"},
        Bug{Planted::kWatchFromLast, "WatchFromTheLastRevision", "are due"},
        Bug{Planted::kCompactedIgnored, "CompactionIgnored", "missed"},
        Bug{Planted::kReleasedBeforeCommit, "SaidBeforeItIsKept", "adds, and they are not kept"},
        Bug{Planted::kResultsNotKept, "ResultsNotKept", "applied twice"},
        Bug{Planted::kResultsNotRestored, "ResultsNotRestored", "applied twice"},
        Bug{Planted::kJobNotKept, "GenerationNotKept", "cannot be read"},
        Bug{Planted::kRemovalsNotKept, "RemovalsNotKept", ""},
        Bug{Planted::kTornCommit, "TornCommit", ""},
        Bug{Planted::kStaleLeases, "NoGraceAfterARestart", "lost before its lease ended"},
        Bug{Planted::kChangeNotNoted, "ChangeNotNoted", "not written"},
        Bug{Planted::kHoldsForgotten, "HeldRankExpired", "while it is held"},
        Bug{Planted::kWaitsOutliveTheirCalls, "ToldOfACallThatIsOver", "no circle is there"},
        Bug{Planted::kWaitsNotTold, "WaitsNotTold", "a circle was not found"},
        Bug{Planted::kProgressNotSeen, "ProgressNotSeen", "did not stand still"},
        Bug{Planted::kNeedsNotTold, "NeedOfALeaverNotTold", "not all ranks run"},
        Bug{Planted::kNeedsUnasked, "LostGoodbyeTakenForANeed", "no operation needs the rank"},
        Bug{Planted::kQuietUnchecked, "QuietOfOneCountsForAll", "are in flight"},
        Bug{Planted::kBuildsBeforeQuiet, "BuildsBeforeQuiet", "are in flight"},
        Bug{Planted::kOpensUnasked, "OpensUnasked", "no caller has acknowledged"},
        Bug{Planted::kNotWithdrawn, "NotWithdrawn", "no caller has acknowledged"},
        Bug{Planted::kGateNotAsked, "GateNotAsked", "before its fence was acknowledged"},
        Bug{Planted::kFenceIgnoredInBuilding, "FenceIgnoredWhileBuilding", "behind its fence"},
        Bug{Planted::kOldOperationCompletes, "OldOperationCompletes", "completed on rank"},
        Bug{Planted::kCommitsWithoutGeneration, "CommitsWithoutGeneration", "two generations"},
        Bug{Planted::kWishInvented, "SmallerWithoutAWish", "did not want"},
        Bug{Planted::kSeatWaitNotTold, "SeatWaitNotTold", "before its wait was over"},
        Bug{Planted::kWishKept, "WishOfAnEarlierRecovery", "nobody asked for"},
        Bug{Planted::kNumberedAnew, "NumberedInAnotherOrder", "in another order"},
        Bug{Planted::kOldNumberKept, "OldNumberKept", "takes the place of"},
        Bug{Planted::kRefusalOfAnyJoin, "RefusalOfAnyJoin", "ended a rebuild"},
        Bug{Planted::kClaimKept, "ClaimKept", "takes the place of"},
        Bug{Planted::kOffersAhead, "OffersAhead", "has not made"},
        Bug{Planted::kDroppedIgnored, "DroppedInputsIgnored", "is kept no more"},
        Bug{Planted::kReplacedTakenForSame, "ReplacedTakenForTheSame", "began with others"},
        Bug{Planted::kPlansAlone, "PlansAlone", "another one goes on from"},
        Bug{Planted::kVetoIgnored, "VetoIgnored", "another one began anew"}),
    [](const auto& info) { return std::string(info.param.name); });

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
    } else if (std::strncmp(argv[i], "--first=", 8) == 0) {
      TheSeeds().first = std::strtoull(argv[i] + 8, nullptr, 10);
    } else if (std::strncmp(argv[i], "--seed=", 7) == 0) {
      TheSeeds() = {std::strtoull(argv[i] + 7, nullptr, 10), 1, true};
    } else {
      std::fprintf(stderr, "unknown argument %s; known: --seeds=N, --first=S, --seed=S\n", argv[i]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
