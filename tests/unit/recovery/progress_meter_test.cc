// Goal: progress is what design says it is, in any part of its window, and nothing else.
// Method: tables of samples; no thread, no clock.
#include "runtime/recovery/progress_meter.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace resilient::recovery {
namespace {

using std::chrono::duration_cast;
using std::chrono::seconds;

// A process at a time, in what the meter looks at.
struct Row {
  int at_s = 0;
  double cpu_s = 0;
  std::uint64_t call_bytes = 0;
  std::uint64_t disk_bytes = 0;
  std::uint64_t frame = 1;
  std::uint64_t operations = 0;
  int no_progress_s = 0;  // What the meter says then.
  double main_s = 0;      // Of cpu_s, the main thread's.
  // Where it is not 0, another thread that is watched, with its frame and its part of cpu_s.
  int trainer = 0;
  std::uint64_t trainer_frame = 2;
  double trainer_s = 0;
};

constexpr int kMain = 7;

void ExpectRows(const std::string& name, const std::vector<Row>& rows) {
  ProgressMeter meter;
  EXPECT_EQ(meter.no_progress(), Duration::zero());
  for (const Row& row : rows) {
    ProgressSample sample;
    sample.now = Instant(seconds(1'000'000 + row.at_s));
    sample.cpu_seconds = row.cpu_s;
    sample.call_bytes = row.call_bytes;
    sample.disk_bytes = row.disk_bytes;
    sample.threads.push_back({kMain, row.frame, row.main_s});
    if (row.trainer != 0) {
      sample.threads.insert(sample.threads.begin(),
                            {row.trainer, row.trainer_frame, row.trainer_s});
    }
    sample.operations = row.operations;
    meter.Take(sample);
    EXPECT_EQ(duration_cast<seconds>(meter.no_progress()).count(), row.no_progress_s)
        << name << " at " << row.at_s << " s";
  }
}

TEST(ProgressMeter, NothingHappens_Counts) {
  ExpectRows("idle", {{.at_s = 0, .cpu_s = 100, .call_bytes = 1 << 30, .no_progress_s = 0},
                      {.at_s = 5, .cpu_s = 100, .call_bytes = 1 << 30, .no_progress_s = 5},
                      {.at_s = 15, .cpu_s = 100.05, .call_bytes = 1 << 30, .no_progress_s = 15},
                      {.at_s = 30, .cpu_s = 100.1, .call_bytes = 1 << 30, .no_progress_s = 30}});
}

TEST(ProgressMeter, NewOperation_IsProgress) {
  ExpectRows("operation", {{.at_s = 0, .operations = 7, .no_progress_s = 0},
                           {.at_s = 10, .operations = 7, .no_progress_s = 10},
                           {.at_s = 15, .operations = 8, .no_progress_s = 0},
                           {.at_s = 20, .operations = 8, .no_progress_s = 5}});
}

TEST(ProgressMeter, NewFrame_IsProgressOnceItIsKnown) {
  ExpectRows("frame", {{.at_s = 0, .frame = 11, .no_progress_s = 0},
                       {.at_s = 5, .frame = 0, .no_progress_s = 5},
                       {.at_s = 10, .frame = 11, .no_progress_s = 10},
                       {.at_s = 15, .frame = 12, .no_progress_s = 0},
                       {.at_s = 20, .frame = 0, .no_progress_s = 5},
                       {.at_s = 25, .frame = 13, .no_progress_s = 0}});
}

TEST(ProgressMeter, FirstFrameThatIsKnown_IsNoProgress) {
  ExpectRows("first frame", {{.at_s = 0, .frame = 0, .no_progress_s = 0},
                             {.at_s = 5, .frame = 12, .no_progress_s = 5}});
}

TEST(ProgressMeter, BusyLoop_IsProgressAtEachLook) {
  ExpectRows("busy", {{.at_s = 0, .cpu_s = 5, .no_progress_s = 0},
                      {.at_s = 1, .cpu_s = 6, .no_progress_s = 0},
                      {.at_s = 6, .cpu_s = 11, .no_progress_s = 0},
                      {.at_s = 11, .cpu_s = 11, .no_progress_s = 5}});
}

TEST(ProgressMeter, FivePercentOfACore_IsProgressAndLessIsNot) {
  std::vector<Row> slow;
  std::vector<Row> idle;
  for (int at = 0; at <= 300; at += 5) {
    slow.push_back({.at_s = at, .cpu_s = 0.051 * at, .no_progress_s = 0});
    idle.push_back({.at_s = at, .cpu_s = 0.04 * at, .no_progress_s = at});
  }
  ExpectRows("5.1 %", slow);
  ExpectRows("4 %", idle);
}

// A cudaStreamSynchronize behind a kernel that never ends burns a core.
TEST(ProgressMeter, MainThreadThatSpinsInOneCall_IsNoProgress) {
  ExpectRows("spin", {{.at_s = 0, .cpu_s = 100, .frame = 7, .no_progress_s = 0, .main_s = 50},
                      {.at_s = 5, .cpu_s = 105, .frame = 7, .no_progress_s = 5, .main_s = 55},
                      {.at_s = 10, .cpu_s = 110.1, .frame = 7, .no_progress_s = 10, .main_s = 60}});
}

// Then the call holds the interpreter's lock: no line can have come in between.
TEST(ProgressMeter, MainThreadThatSpinsWithTheLock_IsNoProgressEither) {
  ExpectRows("lock", {{.at_s = 0, .cpu_s = 100, .frame = 7, .no_progress_s = 0, .main_s = 50},
                      {.at_s = 5, .cpu_s = 105, .frame = 0, .no_progress_s = 5, .main_s = 55},
                      {.at_s = 10, .cpu_s = 110, .frame = 0, .no_progress_s = 10, .main_s = 60},
                      {.at_s = 15, .cpu_s = 115, .frame = 8, .no_progress_s = 0, .main_s = 65}});
}

TEST(ProgressMeter, BusyLoopWhoseLineChanges_IsProgress) {
  ExpectRows("loop", {{.at_s = 0, .cpu_s = 0, .frame = 7, .no_progress_s = 0, .main_s = 0},
                      {.at_s = 5, .cpu_s = 5, .frame = 7, .no_progress_s = 5, .main_s = 5},
                      {.at_s = 10, .cpu_s = 10, .frame = 8, .no_progress_s = 0, .main_s = 10},
                      {.at_s = 15, .cpu_s = 15, .frame = 8, .no_progress_s = 5, .main_s = 15},
                      {.at_s = 20, .cpu_s = 20, .frame = 7, .no_progress_s = 0, .main_s = 20}});
}

TEST(ProgressMeter, OtherThreadsBesideASpinningOne_AreProgress) {
  ExpectRows("threads", {{.at_s = 0, .cpu_s = 0, .frame = 7, .no_progress_s = 0, .main_s = 0},
                         {.at_s = 5, .cpu_s = 7, .frame = 7, .no_progress_s = 0, .main_s = 5},
                         {.at_s = 10, .cpu_s = 14, .frame = 7, .no_progress_s = 0, .main_s = 10}});
}

TEST(ProgressMeter, TrainerThatSpinsBesideAMainThreadInJoin_IsNoProgress) {
  ExpectRows("spin",
             {{.at_s = 0, .cpu_s = 100, .trainer = 8, .trainer_s = 50},
              {.at_s = 5, .cpu_s = 105, .no_progress_s = 5, .trainer = 8, .trainer_s = 55},
              {.at_s = 10, .cpu_s = 110.1, .no_progress_s = 10, .trainer = 8, .trainer_s = 60}});
}

TEST(ProgressMeter, BothSpin_IsNoProgress) {
  ExpectRows(
      "both",
      {{.at_s = 0, .cpu_s = 100, .main_s = 50, .trainer = 8, .trainer_s = 50},
       {.at_s = 5, .cpu_s = 110, .no_progress_s = 5, .main_s = 55, .trainer = 8, .trainer_s = 55}});
}

TEST(ProgressMeter, TrainerThatSpinsWithTheLock_IsNoProgressEither) {
  ExpectRows("lock", {{.at_s = 0, .trainer = 8},
                      {.at_s = 5,
                       .cpu_s = 5,
                       .frame = 0,
                       .no_progress_s = 5,
                       .trainer = 8,
                       .trainer_frame = 0,
                       .trainer_s = 5}});
}

TEST(ProgressMeter, TrainerAtAnotherLine_IsProgress) {
  ExpectRows("line", {{.at_s = 0, .trainer = 8, .trainer_frame = 2},
                      {.at_s = 5, .no_progress_s = 5, .trainer = 8, .trainer_frame = 2},
                      {.at_s = 10, .no_progress_s = 0, .trainer = 8, .trainer_frame = 3},
                      {.at_s = 15, .no_progress_s = 5, .trainer = 8, .trainer_frame = 3}});
}

TEST(ProgressMeter, MainThreadAtAnotherLineBesideATrainerThatSpins_IsProgress) {
  ExpectRows("either", {{.at_s = 0, .frame = 1, .trainer = 8},
                        {.at_s = 5, .cpu_s = 5, .frame = 3, .trainer = 8, .trainer_s = 5}});
}

TEST(ProgressMeter, ThirdThreadBesideTwoThatSpin_IsProgress) {
  ExpectRows("third", {{.at_s = 0, .trainer = 8},
                       {.at_s = 5, .cpu_s = 12, .main_s = 5, .trainer = 8, .trainer_s = 5}});
}

// The threads that are watched change when one submits, ends, or begins something: in doubt that is
// progress, once.
TEST(ProgressMeter, AnotherTrainer_IsProgressOnce) {
  ExpectRows("other", {{.at_s = 0},
                       {.at_s = 5, .no_progress_s = 0, .trainer = 8},
                       {.at_s = 10, .no_progress_s = 5, .trainer = 8},
                       {.at_s = 15, .no_progress_s = 0, .trainer = 9},
                       {.at_s = 20, .no_progress_s = 0},
                       {.at_s = 25, .no_progress_s = 5}});
}

// What it has computed before may have been at other lines.
TEST(ProgressMeter, TrainerThatIsNewlyWatched_MayHaveComputedAnywhere) {
  ExpectRows("new", {{.at_s = 0, .cpu_s = 0},
                     {.at_s = 5, .cpu_s = 5, .trainer = 8, .trainer_s = 5},
                     {.at_s = 10, .cpu_s = 10, .no_progress_s = 5, .trainer = 8, .trainer_s = 10}});
}

// A program in C++ shows no line: there a loop cannot be told from a spin.
TEST(ProgressMeter, MainThreadWhoseLineIsNotKnown_CountsAsAnyOther) {
  ExpectRows("no line", {{.at_s = 0, .cpu_s = 0, .frame = 0, .no_progress_s = 0, .main_s = 0},
                         {.at_s = 5, .cpu_s = 5, .frame = 0, .no_progress_s = 0, .main_s = 5}});
}

// Housekeeping now and then: never a share of a core.
TEST(ProgressMeter, MomentOfUse_IsNoProgressHoweverShortTheTime) {
  ExpectRows("moment", {{.at_s = 0, .cpu_s = 1, .no_progress_s = 0},
                        {.at_s = 1, .cpu_s = 1.2, .no_progress_s = 1},
                        {.at_s = 2, .cpu_s = 1.2, .no_progress_s = 2}});
}

TEST(ProgressMeter, Burst_CountsWhenItWas) {
  ExpectRows("burst", {{.at_s = 0, .cpu_s = 1, .no_progress_s = 0},
                       {.at_s = 10, .cpu_s = 1, .no_progress_s = 10},
                       {.at_s = 15, .cpu_s = 5, .no_progress_s = 0},
                       {.at_s = 20, .cpu_s = 5, .no_progress_s = 5},
                       {.at_s = 30, .cpu_s = 5, .no_progress_s = 15}});
}

TEST(ProgressMeter, MebibyteInAWindow_IsProgress) {
  constexpr std::uint64_t kQuarter = 1 << 18;
  ExpectRows("calls", {{.at_s = 0, .call_bytes = 9, .no_progress_s = 0},
                       {.at_s = 10, .call_bytes = 9 + kQuarter, .no_progress_s = 10},
                       {.at_s = 20, .call_bytes = 9 + 3 * kQuarter, .no_progress_s = 20},
                       {.at_s = 30, .call_bytes = 9 + 4 * kQuarter, .no_progress_s = 0}});
  ExpectRows("disk", {{.at_s = 0, .disk_bytes = 0, .no_progress_s = 0},
                      {.at_s = 5, .disk_bytes = 4 * kQuarter - 1, .no_progress_s = 5},
                      {.at_s = 10, .disk_bytes = 4 * kQuarter, .no_progress_s = 0}});
}

TEST(ProgressMeter, MebibyteInMoreThanAWindow_IsNone) {
  std::vector<Row> rows;
  for (int at = 0; at <= 300; at += 10) {
    const auto bytes = static_cast<std::uint64_t>(at) * (1 << 20) / 80;
    rows.push_back({.at_s = at, .call_bytes = bytes, .no_progress_s = at});
  }
  ExpectRows("1 MiB in 80 s", rows);
}

// A child that ends takes what it used with it; the next one begins at nothing.
TEST(ProgressMeter, SumThatShrinks_HidesNothing) {
  ExpectRows("child", {{.at_s = 0, .cpu_s = 1000, .call_bytes = 1 << 30, .no_progress_s = 0},
                       {.at_s = 5, .cpu_s = 2, .call_bytes = 10, .no_progress_s = 5},
                       {.at_s = 10, .cpu_s = 4, .call_bytes = 10, .no_progress_s = 0},
                       {.at_s = 15, .cpu_s = 4, .call_bytes = (1 << 20) + 10, .no_progress_s = 0}});
}

TEST(ProgressMeter, Suspended_CountsAnew) {
  ExpectRows("suspended", {{.at_s = 0, .no_progress_s = 0},
                           {.at_s = 15, .no_progress_s = 15},
                           {.at_s = 31, .no_progress_s = 0},
                           {.at_s = 40, .no_progress_s = 9}});
}

TEST(NextSample, IsEveryFiveSecondsAsLongAsSomebodyAsked) {
  const Instant asked(seconds(1000));
  EXPECT_EQ(NextSample(asked, asked, kSampleEvery), Instant(seconds(1005)));
  EXPECT_EQ(NextSample(Instant(seconds(1115)), asked, kSampleEvery), Instant(seconds(1120)));
  EXPECT_EQ(NextSample(Instant(seconds(1116)), asked, kSampleEvery), kNever);
}

}  // namespace
}  // namespace resilient::recovery
