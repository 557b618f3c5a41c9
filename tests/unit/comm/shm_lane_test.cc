// Goal: a group inside one host takes shared memory when all its ranks can and TCP when one cannot,
// and whoever runs its collectives ends in time with the right cause. Method: ranks are fabrics of
// one process; callers run on threads of the test.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <future>

#include "runtime/base/random.h"
#include "runtime/comm/step_observer.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/fault_points.h"

namespace resilient::testing {
namespace {

constexpr Millis kLaneAbortBound(kSanitized ? 1000 : 100);

const Status kLaneLost(StatusCode::kRankLost, "rank 9 was killed");

using Data = std::vector<float>;

// Rank r takes limits[r] bytes.
Transport WithLimits(std::vector<std::size_t> limits) {
  auto next = std::make_shared<std::size_t>(0);
  return {
      .name = "limits",
      .make = [limits = std::move(limits), next](const Clock& clock, CommunicatorEvents& events) {
        CpuFabricOptions options;
        options.shm_limit = limits[(*next)++ % limits.size()];
        return MakeCpuFabric(std::move(options), clock, events);
      }};
}

constexpr std::size_t kPlenty = 16u << 20;

bool Always() { return true; }

// One call of Run.
struct RunCall {
  Result<Communicator::Ran> ran = Status(StatusCode::kInternal, "not yet");
  Instant ended;
  Duration processor_time{};
};

class ShmLaneTest : public ::testing::Test {
 protected:
  void Make(int size, std::size_t limit = kPlenty) {
    world_ = std::make_unique<World>(WithLimits({limit}), size);
    Open();
  }
  // Until collectives go to the lane.
  void Open() {
    ExpectAllOk(world_->RunAll([](int) { return BarrierOp(); }));
    // The lane's thread is still on its way out of the completion.
    for (const auto& one : world_->group) EXPECT_TRUE(Eventually([&] { return one->IsQuiet(); }));
  }

  std::future<RunCall> Run(int rank, Operation op, Completion done = nullptr,
                           Communicator::KeepWaiting keep_waiting = Always) {
    return std::async(std::launch::async, [this, rank, op = std::move(op), done = std::move(done),
                                           keep_waiting = std::move(keep_waiting)]() mutable {
      RunCall call;
      call.ran = world_->at(rank).Run(std::move(op), std::move(done), keep_waiting);
      call.ended = world_->clock.Now();
      timespec used{};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
      call.processor_time = std::chrono::seconds(used.tv_sec) + Duration(used.tv_nsec);
      return call;
    });
  }
  static Completion Never() {
    return [](const Status&) { ADD_FAILURE() << "ran though the outcome was returned"; };
  }
  // A Run of rank 0 that nobody joins, waiting; it counts how often it was asked.
  std::future<RunCall> RunAlone(Data& data) {
    asked_ = 0;
    auto call = Run(0, AllReduceOp(data), Never(), [this] {
      ++asked_;
      return true;
    });
    EXPECT_TRUE(ComesTo(asked_, 1));
    return call;
  }

  std::unique_ptr<World> world_;
  std::atomic<int> asked_ = 0;
};

TEST_F(ShmLaneTest, Run_EndsInTheCall) {
  Make(3);
  for (int i = 0; i < 100; ++i) {
    std::vector<Data> data(3, Data(100, 1.0f));
    std::vector<std::future<RunCall>> calls;
    for (int r = 0; r < 3; ++r)
      calls.push_back(Run(r, AllReduceOp(data[static_cast<std::size_t>(r)]), Never()));
    for (auto& one : calls) {
      const RunCall call = one.get();
      ASSERT_TRUE(call.ran.ok()) << call.ran.status().ToString();
      ASSERT_TRUE(call.ran->outcome && call.ran->outcome->ok());
      EXPECT_EQ(call.ran->seq, static_cast<std::uint64_t>(i) + 2);
    }
    EXPECT_EQ(data[2], Data(100, 3.0f));
    EXPECT_TRUE(world_->at(0).IsQuiet());
  }
}

TEST_F(ShmLaneTest, Run_BehindQueuedOperations_IsQueuedAsWell) {
  Make(2);
  Data first(10, 1.0f), second(10, 5.0f), a(10, 2.0f), b(10, 7.0f);
  std::atomic<int> order = 0;
  std::promise<int> ended;
  const Pending queued = Pending::Of(world_->at(0), AllReduceOp(first));
  const RunCall call = Run(0, AllReduceOp(second), [&](const Status& status) {
                         EXPECT_TRUE(status.ok());
                         ended.set_value(++order);
                       }).get();
  ASSERT_TRUE(call.ran.ok());
  EXPECT_FALSE(call.ran->outcome);
  EXPECT_EQ(call.ran->seq, queued.seq + 1);
  const Pending other = Pending::Of(world_->at(1), AllReduceOp(a));
  const Pending last = Pending::Of(world_->at(1), AllReduceOp(b));
  EXPECT_TRUE(queued.Wait().ok());
  EXPECT_EQ(ended.get_future().get(), 1);
  EXPECT_TRUE(other.Wait().ok() && last.Wait().ok());
  EXPECT_EQ(first, Data(10, 3.0f));
  EXPECT_EQ(second, Data(10, 12.0f));
}

TEST_F(ShmLaneTest, Run_GivenUp_GoesOnByItself) {
  Make(2);
  for (int i = 0; i < 5; ++i) {
    Data mine(50'000, 1.0f), theirs(50'000, 2.0f), more(10, 1.0f), others(10, 1.0f);
    std::promise<Status> completed;  // Set twice it throws.
    const RunCall call =
        Run(
            0, AllReduceOp(mine), [&](const Status& status) { completed.set_value(status); },
            [] { return false; })
            .get();
    ASSERT_TRUE(call.ran.ok());
    ASSERT_FALSE(call.ran->outcome);
    EXPECT_FALSE(world_->at(0).IsQuiet());
    const Pending next = Pending::Of(world_->at(0), AllReduceOp(more));
    const Pending peer = Pending::Of(world_->at(1), AllReduceOp(theirs));
    const Pending last = Pending::Of(world_->at(1), AllReduceOp(others));
    EXPECT_TRUE(completed.get_future().get().ok());
    EXPECT_TRUE(peer.Wait().ok() && next.Wait().ok() && last.Wait().ok());
    EXPECT_EQ(mine, Data(50'000, 3.0f));
    EXPECT_EQ(more, Data(10, 2.0f));
  }
}

TEST_F(ShmLaneTest, Run_GivenUpWhileTheGroupEnds_CompletesOnce) {
  for (int i = 0; i < 20; ++i) {
    Make(2);
    Data data(10, 1.0f);
    std::atomic<int> completions = 0;
    std::atomic<int> asked = 0;
    auto call = Run(
        0, AllReduceOp(data), [&](const Status&) { ++completions; },
        [&] {
          ++asked;
          return false;
        });
    ASSERT_TRUE(ComesTo(asked, 1));
    i % 2 == 0 ? world_->at(0).Abort(kLaneLost) : world_->at(0).Leave();
    world_->fabrics[0]->Close(Deadline::After(world_->clock.Now(), kBound));
    const RunCall ended = call.get();
    ASSERT_TRUE(ended.ran.ok());
    EXPECT_EQ(completions.load() + (ended.ran->outcome ? 1 : 0), 1);
    EXPECT_TRUE(world_->at(0).IsQuiet());
  }
}

TEST_F(ShmLaneTest, Run_OfALongOperationThatNeverWaits_AsksItsCaller) {
  // Alone in its group a rank waits for nobody; each step takes a millisecond.
  const auto make = [](const Clock& clock, CommunicatorEvents& events) {
    CpuFabricOptions options;
    options.shm_limit = LeastShmLimit(1);
    return MakeObservedCpuFabric(std::move(options), clock, events,
                                 [&clock](const GroupSpec&, std::uint64_t) {
                                   const Instant until = clock.Now() + Millis(1);
                                   while (clock.Now() < until) {
                                   }
                                 });
  };
  world_ = std::make_unique<World>(Transport{.name = "slow", .make = make}, 1);
  Open();
  Data data(std::size_t{1} << 20);  // Hundreds of steps.
  std::atomic<int> asked = 0;
  const auto keep_waiting = [&] {
    ++asked;
    return true;
  };
  const RunCall call = Run(
                           0, AllReduceOp(data), [](const Status&) {}, keep_waiting)
                           .get();
  EXPECT_TRUE(call.ran.ok() && call.ran->outcome && call.ran->outcome->ok());
  EXPECT_GT(asked.load(), 0);
}

TEST_F(ShmLaneTest, Submit_CompletesInOrder) {
  Make(3);
  std::vector<std::vector<Data>> data(3, std::vector<Data>(200, Data(64, 1.0f)));
  std::vector<std::vector<int>> order(3);
  std::vector<Pending> last;
  for (std::size_t r = 0; r < 3; ++r) {
    for (int i = 0; i < 200; ++i) {
      auto& mine = data[r][static_cast<std::size_t>(i)];
      ASSERT_TRUE(
          world_->at(static_cast<int>(r))
              .Submit(AllReduceOp(mine), [&order, r, i](const Status&) { order[r].push_back(i); })
              .ok());
    }
    last.push_back(Pending::Of(world_->at(static_cast<int>(r)), BarrierOp()));
  }
  for (const Pending& one : last) ASSERT_TRUE(one.Wait().ok());
  std::vector<int> expected(200);
  std::iota(expected.begin(), expected.end(), 0);
  for (const auto& one : order) EXPECT_EQ(one, expected);
}

TEST_F(ShmLaneTest, AWait_TakesNoProcessorTimeAndAsksItsCaller) {
  Make(2);
  Data mine(10, 1.0f), theirs(10, 1.0f);
  auto call = RunAlone(mine);
  EXPECT_TRUE(ComesTo(asked_, 6));
  const Pending peer = Pending::Of(world_->at(1), AllReduceOp(theirs));
  const RunCall ended = call.get();
  ASSERT_TRUE(ended.ran.ok() && ended.ran->outcome && ended.ran->outcome->ok());
  EXPECT_TRUE(peer.Wait().ok());
  EXPECT_LT(ended.processor_time, Millis(60)) << "of at least 250 ms";
}

enum class Ending { kAbort, kCell, kLeave, kPeerLeaves, kClose };

TEST_F(ShmLaneTest, Run_IsEndedAtOnceByWhateverEndsTheGroup) {
  for (const Ending ending :
       {Ending::kAbort, Ending::kCell, Ending::kLeave, Ending::kPeerLeaves, Ending::kClose}) {
    SCOPED_TRACE(static_cast<int>(ending));
    world_ = std::make_unique<World>(WithLimits({kPlenty}), 2);
    const auto cell = std::make_shared<AbortCell>();
    world_->group = world_->CreateAll("cell", 2, cell);
    Open();
    Data data(10, 1.0f), more(10);
    auto call = RunAlone(data);
    const Pending behind = Pending::Of(world_->at(0), AllReduceOp(more));
    const Instant start = world_->clock.Now();
    StatusCode expected = StatusCode::kRankLost;
    switch (ending) {
      case Ending::kAbort:
        world_->at(0).Abort(kLaneLost);
        break;
      case Ending::kCell:
        cell->Set(kLaneLost);
        break;
      case Ending::kLeave:
        expected = StatusCode::kCancelled;
        world_->at(0).Leave();
        break;
      case Ending::kPeerLeaves:
        expected = StatusCode::kLeft;
        world_->at(1).Leave();
        break;
      case Ending::kClose:
        expected = StatusCode::kCancelled;
        world_->fabrics[0]->Close(Deadline::After(start, Millis(1000)));
        break;
    }
    const RunCall ended = call.get();
    EXPECT_LT(ended.ended - start, kLaneAbortBound);
    ASSERT_TRUE(ended.ran.ok() && ended.ran->outcome);
    EXPECT_EQ(ended.ran->outcome->code(), expected) << ended.ran->outcome->ToString();
    EXPECT_EQ(behind.Wait().code(), expected);
    if (ending == Ending::kPeerLeaves) {
      EXPECT_EQ(ended.ran->outcome->detail().rank, 1);
      const RunCall later = Run(0, AllReduceOp(more), Never()).get();
      if (later.ran.ok() && later.ran->outcome) {
        EXPECT_EQ(later.ran->outcome->code(), StatusCode::kLeft);
      }
    } else {
      EXPECT_EQ(Run(0, AllReduceOp(more), Never()).get().ran.status().code(), expected);
    }
  }
}

// Nothing but a goodbye passes between ranks whose lanes sleep.
TEST_F(ShmLaneTest, APeerThatEndsAllItsRounds_MayLeaveBeforeTheOthersHaveRead) {
  Make(3);
  for (int i = 0; i < 50; ++i) {
    world_->group = world_->CreateAll("leave", static_cast<std::uint64_t>(i) + 2);
    std::vector<Data> data(3, Data(20'000, 1.0f));
    std::vector<Pending> pending;
    for (int r = 0; r < 3; ++r)
      pending.push_back(Pending::Of(world_->at(r), AllReduceOp(data[static_cast<std::size_t>(r)])));
    const auto leaver = static_cast<std::size_t>(i % 3);
    EXPECT_TRUE(pending[leaver].Wait().ok());
    world_->at(i % 3).Leave();
    for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok()) << one.Wait().ToString();
  }
}

TEST_F(ShmLaneTest, Limits_ThatDifferOrAreTooLittle_TakeAllRanksToTcp) {
  ASSERT_EQ(MappedSegments(), 0u);
  constexpr std::size_t kLittle = 4096;
  const std::vector<std::vector<std::size_t>> all = {
      {kLittle, kPlenty, kPlenty}, {kPlenty, kLittle, kPlenty},     {kPlenty, kPlenty, kLittle},
      {kLittle, kLittle, kLittle}, {kPlenty, kPlenty, kPlenty / 4}, {0, kPlenty, kPlenty},
      {kPlenty, 0, kPlenty},       {kPlenty / 4, kPlenty, kPlenty}};
  for (const std::vector<std::size_t>& limits : all) {
    // Slots are no larger than is of use: these two limits must give different ones.
    std::vector<std::size_t> scaled = limits;
    for (std::size_t& limit : scaled)
      if (limit > kLittle) limit = limit / 16 + LeastShmLimit(3);
    SCOPED_TRACE(::testing::PrintToString(scaled));
    world_ = std::make_unique<World>(WithLimits(scaled), 3);
    std::vector<Data> data(3, Data(50'000, 1.0f));
    ExpectAllOk(world_->RunAll(
        [&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); }));
    EXPECT_EQ(data[1], Data(50'000, 3.0f));
    // Who takes no shared memory at all is as on another host: the other two have a link.
    const bool spans = std::count(limits.begin(), limits.end(), 0u) > 0;
    EXPECT_EQ(MappedSegments(), spans ? 2u : 0u) << "one rank is in shared memory";
    world_.reset();
  }
  Make(3);
  EXPECT_EQ(MappedSegments(), 3u);
  world_.reset();
  EXPECT_EQ(MappedSegments(), 0u);
}

TEST_F(ShmLaneTest, ARankThatLeavesWhileTheGroupForms_HoldsNobodyUp) {
  world_ = std::make_unique<World>(WithLimits({kPlenty}), 4);
  Open();
  Random random(5);
  for (std::uint64_t generation = 2; generation < 102; ++generation) {
    const int leaver = static_cast<int>(generation % 4);
    std::vector<int> order = {0, 1, 2, 3};
    for (std::size_t i = 3; i > 0; --i) std::swap(order[i], order[random.Below(i + 1)]);
    std::vector<std::shared_ptr<Communicator>> group(4);
    std::vector<Data> data(4, Data(10, 1.0f));
    std::vector<Pending> pending;
    for (const int rank : order) {
      auto& mine = group[static_cast<std::size_t>(rank)];
      mine = world_->Create(rank, world_->Spec("forming", rank, generation));
      if (rank == leaver) {
        mine->Leave();
        // Its goodbye is on its way before the last one comes.
        if (generation % 3 == 0) ExpectAllOk(world_->RunAll([](int) { return BarrierOp(); }));
      } else {
        pending.push_back(Pending::Of(*mine, AllReduceOp(data[static_cast<std::size_t>(rank)])));
      }
    }
    for (const Pending& one : pending) {
      const Status status = one.Wait();
      EXPECT_EQ(status.code(), StatusCode::kLeft) << status.ToString();
    }
    if (HasFailure()) break;
  }
}

// The memory of its parent's groups is not there; what would touch it must know.
TEST_F(ShmLaneTest, AForkedChild_MaySetTheAbortCell) {
  if (kThreadSanitized) GTEST_SKIP() << "ThreadSanitizer does not follow a fork with threads";
  world_ = std::make_unique<World>(WithLimits({kPlenty}), 2);
  const auto cell = std::make_shared<AbortCell>();
  world_->group = world_->CreateAll("cell", 2, cell);
  Open();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(static_cast<unsigned>(kBound.count()));
    cell->Set(kLaneLost);
    _exit(MappedSegments() == 0 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  Open();
}

}  // namespace
}  // namespace resilient::testing
