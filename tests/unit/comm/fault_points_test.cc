// Goal: whatever step of a collective a rank is at when things end, all waits end at once, nothing
// wrong is returned, nothing is left behind, and the same processes can go on in a new group.
// Method: the steps of rank 1 are counted; one after the other, rank 1 is aborted exactly there, or
// stands still there while all are aborted.

#include <algorithm>
#include <atomic>
#include <cstdio>

#include "runtime/base/random.h"
#include "runtime/comm/step_observer.h"
#include "tests/support/descriptors.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/fault_points.h"

namespace resilient::testing {
namespace {

constexpr Millis kAbortBound(kSanitized ? 1000 : 100);

const Status kLost(StatusCode::kRankLost, "rank 1 was killed");

// Stops rank 1 at one step of one generation. Thread: thread-safe.
class FaultPoint {
 public:
  // `act` runs at that step, on the thread that takes it.
  void Arm(std::uint64_t generation, std::uint64_t step, std::function<void()> act) {
    std::lock_guard lock(mutex_);
    generation_ = generation;
    step_ = step;
    act_ = std::move(act);
    reached_ = released_ = false;
    steps_after_ = 0;
  }
  void Observe(const GroupSpec& group, std::uint64_t step) {
    std::unique_lock lock(mutex_);
    if (group.rank != 1 || group.generation != generation_) return;
    if (reached_) ++steps_after_;
    if (step != step_) return;
    lock.unlock();
    act_();
    lock.lock();
    reached_ = true;
    changed_.notify_all();
  }
  // For an `act`: stands still until Release.
  void Stand() {
    std::unique_lock lock(mutex_);
    reached_ = true;
    changed_.notify_all();
    EXPECT_TRUE(changed_.wait_for(lock, kBound, [this] { return released_; }));
    steps_after_ = 0;
  }
  void Release() {
    std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }
  // True once the step is reached; false when `rank1` ends without it.
  bool Wait(const Pending& rank1) {
    std::unique_lock lock(mutex_);
    const Instant give_up = clock_.Now() + kBound;
    while (!reached_ && !rank1.IsDone() && clock_.Now() < give_up)
      changed_.wait_for(lock, Millis(1));
    return reached_;
  }
  int StepsAfter() {
    std::lock_guard lock(mutex_);
    return steps_after_;
  }

 private:
  SystemClock clock_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t generation_ = 0;
  std::uint64_t step_ = 0;
  std::function<void()> act_;
  bool reached_ = false;
  bool released_ = false;
  int steps_after_ = 0;
};

class FaultPoints : public ::testing::TestWithParam<FaultCase> {
 protected:
  FaultPoints()
      : world_({.name = "observed",
                .make =
                    [this](const Clock& clock, CommunicatorEvents& events) {
                      CpuFabricOptions options;
                      options.shm_limit = GetParam().shm_limit;
                      options.hierarchical = GetParam().hierarchical;
                      return MakeObservedCpuFabric(
                          options, clock, events,
                          [this](const GroupSpec& group, std::uint64_t step) {
                            point_.Observe(group, step);
                          });
                    },
                .host_of = [](int rank) { return GetParam().HostOf(rank); }},
               kFaultRanks) {
    // The outcomes of the group "world" say that its descriptors and memory are all there.
    ExpectAllOk(world_.RunAll([](int) { return BarrierOp(); }));
    descriptors_ = OpenDescriptors();
    segments_ = MappedSegments();
  }

  void Await(const Pending& pending, Instant since) {
    const Status status = pending.Wait();
    longest_ = std::max(longest_, world_.clock.Now() - since);
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kRankLost) << status.ToString();
  }
  // False: rank 1 has no step `step`.
  bool AbortAt(std::uint64_t step, bool stands);
  void ExpectNewGroupWorks() {
    const auto group = world_.CreateAll("next", ++generation_);
    std::vector<std::vector<float>> data(kFaultRanks, std::vector<float>(100, 1.0f));
    std::vector<Pending> pending;
    for (std::size_t r = 0; r < kFaultRanks; ++r)
      pending.push_back(Pending::Of(*group[r], AllReduceOp(data[r])));
    for (const Pending& one : pending) ASSERT_TRUE(one.Wait().ok());
    EXPECT_EQ(data[1], std::vector<float>(100, 3.0f));
    for (const auto& one : group) one->Abort(kLost);
  }

  FaultPoint point_;
  World world_;
  Random random_{11};
  std::uint64_t generation_ = 1;
  Duration longest_{};
  std::size_t descriptors_ = 0;
  std::size_t segments_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Collectives, FaultPoints, ::testing::ValuesIn(AllFaultCases()),
                         [](const auto& info) { return info.param.name; });

bool FaultPoints::AbortAt(std::uint64_t step, bool stands) {
  Trial trial(GetParam().call, random_);
  ++generation_;
  std::vector<std::shared_ptr<Communicator>> group;
  std::atomic<bool> made = false;
  const auto act = [&] {
    if (stands) return point_.Stand();
    while (!made.load()) std::this_thread::yield();
    group[1]->Abort(kLost);
  };
  point_.Arm(generation_, step, act);
  group = world_.CreateAll("trial", generation_);
  made.store(true);
  std::vector<Pending> pending;
  for (int r = 0; r < kFaultRanks; ++r)
    pending.push_back(Pending::Of(*group[static_cast<std::size_t>(r)], trial.At(r)));
  const bool reached = point_.Wait(pending[1]);
  Instant since = world_.clock.Now();
  if (reached && !stands) {
    Await(pending[1], since);
    // What the membership service would do next.
    since = world_.clock.Now();
  }
  if (reached) {
    for (const auto& one : group) one->Abort(kLost);
  }
  Await(pending[0], since);
  Await(pending[2], since);
  if (stands && reached) {
    point_.Release();
    since = world_.clock.Now();
  }
  Await(pending[1], since);
  if (GetParam().shm_limit > 0 && !GetParam().spans_hosts) {
    EXPECT_EQ(point_.StepsAfter(), 0) << "goes on after an abort";
  }
  for (int r = 0; r < kFaultRanks; ++r) {
    const bool ok = pending[static_cast<std::size_t>(r)].Wait().ok();
    EXPECT_EQ(ok ? trial.WhatIsWrong(r) : trial.WhatWasWritten(r), "");
    EXPECT_TRUE(ok || reached);
  }
  for (const auto& one : group) one->Abort(kLost);
  return reached;
}

TEST_P(FaultPoints, AnAbortAtEachStep_EndsAllWaitsAndLeavesNothing) {
  std::uint64_t steps = 0;
  for (const bool stands : {false, true}) {
    for (std::uint64_t step = 1;; ++step) {
      SCOPED_TRACE("step " + std::to_string(step) + (stands ? ", all aborted" : ", rank 1 aborts"));
      const bool reached = AbortAt(step, stands);
      ExpectNewGroupWorks();
      if (!reached || HasFailure()) break;
      steps = step;
    }
  }
  EXPECT_GE(steps, 2u);
  EXPECT_LT(longest_, kAbortBound);
  std::printf("%s: %llu steps; the longest wait after an abort took %.2f ms\n",
              GetParam().name.c_str(), static_cast<unsigned long long>(steps),
              std::chrono::duration<double, std::milli>(longest_).count());
  // Closing goes on behind the last abort.
  const Instant give_up = world_.clock.Now() + kBound;
  while ((OpenDescriptors() > descriptors_ || MappedSegments() > segments_) &&
         world_.clock.Now() < give_up)
    std::this_thread::yield();
  EXPECT_EQ(OpenDescriptors(), descriptors_);
  EXPECT_EQ(MappedSegments(), segments_);
}

}  // namespace
}  // namespace resilient::testing
