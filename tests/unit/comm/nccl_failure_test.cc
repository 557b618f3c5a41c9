// Goal: whatever NCCL does not do, every operation completes once with the cause, an abort returns
// at once, and memory is let go when the device is done with it and not before.
// Method: ranks of one process over the fake NCCL, which is told what goes wrong and when.

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/sanitizers.h"
#include "tests/unit/comm/nccl_world.h"

namespace resilient::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class NcclFailure : public NcclTest {
 protected:
  static Status Lost() { return Status(StatusCode::kRankLost, "rank 1 was lost"); }

  // An operation of rank 0 that waits on the device for rank 1.
  Pending LaunchAlone(std::vector<float>& data) {
    const Pending waiting = Pending::Of(world().at(0), AllReduceOp(data));
    EXPECT_TRUE(WaitForKernels(0, 1));
    return waiting;
  }

  std::vector<float> data_ = {1, 2};
};

TEST_F(NcclFailure, Init_FailsAtOnce_EndsTheGroupInItsWords) {
  Change(0, [](NcclScript& script) { script.init_result = NcclResult::kInternalError; });
  World& world = Start(2);
  const Status status = Pending::Try(world.at(0), AllReduceOp(data_)).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("ncclCommInitRankConfig failed on rank 0 (device 0) of group "
                              "'world', generation 1: internal error"),
                    HasSubstr("the fake was told to")));
  EXPECT_EQ(status.detail().generation, 1u);
  EXPECT_EQ(fake_.Counts().unique_ids, 2) << "an id of an attempt that failed is not used again";
  const Status other = Pending::Try(world.at(1), AllReduceOp(data_)).Wait();
  EXPECT_EQ(other.code(), StatusCode::kCommFailed);
  EXPECT_THAT(other.message(), AllOf(HasSubstr("failed on rank 0"), HasSubstr("attempt 2")))
      << "all ranks hear which one could not connect";
  EXPECT_TRUE(WaitForAborts(4)) << "a handle that came with the failure is released";
}

TEST_F(NcclFailure, Init_FailsOnce_TheNextAttemptConnects) {
  Change(1, [](NcclScript& script) {
    script.init_result = NcclResult::kSystemError;
    script.init_once = true;
  });
  World& world = Start(2);
  std::vector<std::vector<float>> data = {{1}, {2}};
  std::vector<Pending> pending;
  for (int rank : {0, 1})
    pending.push_back(
        Pending::Of(world.at(rank), AllReduceOp(data[static_cast<std::size_t>(rank)])));
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  EXPECT_EQ(fake_.Counts().unique_ids, 2);
}

TEST_F(NcclFailure, Init_FailsLater_EndsTheGroup) {
  Change(1, [](NcclScript& script) { script.async_error = NcclResult::kSystemError; });
  World& world = Start(2);
  const Status status = Pending::Try(world.at(1), AllReduceOp(data_)).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  EXPECT_THAT(status.message(), HasSubstr("connecting failed on rank 1 (device 1)"));
  EXPECT_EQ(Pending::Try(world.at(0), AllReduceOp(data_)).Wait().code(), StatusCode::kCommFailed);
}

TEST_F(NcclFailure, Init_Hangs_EndsAtItsDeadline) {
  Change(0, [](NcclScript& script) { script.hang_init = true; });
  World& world = Start(2, Millis(50));
  const Status status = Pending::Try(world.at(0), AllReduceOp(data_)).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommStalled);
  EXPECT_THAT(status.message(), HasSubstr("was not connected by NCCL within 50 ms"));
  EXPECT_TRUE(WaitForAborts(4));
}

TEST_F(NcclFailure, Init_HangsWhileARankIsHeld_IsWaitedFor) {
  Change(0, [](NcclScript& script) { script.hang_init = true; });
  World& world = Start(2, Millis(50));
  const Instant until = world.clock.Now() + Millis(500);
  for (const auto& fabric : world.fabrics) fabric->Hold(until);
  const Status status = Pending::Try(world.at(0), AllReduceOp(data_)).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommStalled);
  EXPECT_GE(world.clock.Now(), until);
  EXPECT_TRUE(WaitForAborts(4));
}

TEST_F(NcclFailure, Init_Hangs_AbortEndsIt) {
  Change(0, [](NcclScript& script) { script.hang_init = true; });
  World& world = Start(2);
  const Pending waiting = Pending::Of(world.at(0), AllReduceOp(data_));
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.communicators == 2; }));
  world.at(0).Abort(Lost());
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kRankLost);
  EXPECT_TRUE(WaitForAborts(1));
  EXPECT_TRUE(Eventually([&] { return world.at(0).IsQuiet(); }));
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) {
    return log.connected.count({"world", 1}) == 0;
  }));
}

TEST_F(NcclFailure, Init_WhilePeerLeaves_EndsWithThat) {
  Change(0, [](NcclScript& script) { script.hang_init = true; });
  World& world = Start(2);
  const Pending waiting = Pending::Of(world.at(0), AllReduceOp(data_));
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.communicators == 2; }));
  world.at(1).Leave();
  const Status status = waiting.Wait();  // Long before the time that connecting has.
  EXPECT_EQ(status.code(), StatusCode::kLeft);
  EXPECT_THAT(status.message(), HasSubstr("rank 1"));
}

TEST_F(NcclFailure, Operation_NeverCompletes_AbortEndsItWithTheCause) {
  World& world = Start(2);
  const Pending waiting = LaunchAlone(data_);
  EXPECT_FALSE(waiting.IsDone());
  world.at(0).Abort(Lost());
  world.at(0).Abort(Status(StatusCode::kCancelled, "too late"));
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kRankLost);
  // Its event has fired by now, as the kernel left the device; that is no success.
  EXPECT_TRUE(Eventually([&] { return world.at(0).IsQuiet(); }));
  EXPECT_EQ(Pending::Try(world.at(0), AllReduceOp(data_)).Wait().code(), StatusCode::kRankLost);
  EXPECT_THAT(data_, ElementsAre(1, 2));
}

TEST_F(NcclFailure, Launch_NeverEnds_AbortEndsIt) {
  Change(0, [](NcclScript& script) { script.hang_launch = true; });
  World& world = Start(1);
  std::vector<float> second = {3};
  const Pending launching = Pending::Of(world.at(0), AllReduceOp(data_));
  const Pending behind = Pending::Of(world.at(0), AllReduceOp(second));
  // Of the first start and end, of both what came before.
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.events == 4; }));
  world.at(0).Abort(Lost());
  EXPECT_EQ(launching.Wait().code(), StatusCode::kRankLost);
  EXPECT_EQ(behind.Wait().code(), StatusCode::kRankLost);
  EXPECT_TRUE(Eventually([&] { return world.at(0).IsQuiet(); }));
}

// NCCL may connect for an operation only when it is launched, and so wait for a peer that waits for
// the one before.
TEST_F(NcclFailure, Launch_ThatHangs_HoldsUpNothingBeforeIt) {
  World& world = Start(2);
  std::vector<std::vector<float>> data = {{1}, {2}, {3}};
  Change(0, [](NcclScript& script) { script.hold_kernels = true; });
  const Pending first = Pending::Of(world.at(0), AllReduceOp(data[0]));
  ASSERT_TRUE(WaitForKernels(0, 1));
  Change(0, [](NcclScript& script) { script.hang_launch = true; });
  const Pending second = Pending::Of(world.at(0), AllReduceOp(data[1]));
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.events == 2 * 3; }));
  Change(0, [](NcclScript& script) { script.hold_kernels = false; });
  const Pending other = Pending::Of(world.at(1), AllReduceOp(data[2]));
  ExpectAllOk({first.Wait(), other.Wait()});
  EXPECT_FALSE(second.IsDone());
  world.at(0).Abort(Lost());
  EXPECT_EQ(second.Wait().code(), StatusCode::kRankLost);
}

TEST_F(NcclFailure, Launch_Fails_EndsTheGroup) {
  Change(0, [](NcclScript& script) { script.launch_result = NcclResult::kInvalidUsage; });
  World& world = Start(1);
  const Status status = Pending::Try(world.at(0), AllReduceOp(data_)).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  EXPECT_THAT(status.message(), HasSubstr("launching all_reduce(float32[2], sum) #1 failed"));
}

TEST_F(NcclFailure, Launch_FailsInAGroupOfCalls_TheNextOneIsNotInIt) {
  Change(0, [](NcclScript& script) { script.launch_result = NcclResult::kInvalidArgument; });
  World& world = Start(1);
  std::vector<std::vector<float>> outputs = {{0, 0}};
  const Status status = Pending::Try(world.at(0), AllGatherOp(data_, outputs)).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  Change(0, [](NcclScript& script) { script.launch_result = NcclResult::kInProgress; });
  const auto next = world.CreateAll("world", 2);
  EXPECT_TRUE(Pending::Of(*next[0], AllGatherOp(data_, outputs)).Wait().ok());
  EXPECT_THAT(outputs[0], ElementsAre(1, 2));
}

// The two moments: the failure is told at once, memory is let go when NCCL has.
TEST_F(NcclFailure, Abort_Hangs_TheCauseIsToldAtOnceAndMemoryKeptUntilItReturns) {
  Change(0, [](NcclScript& script) { script.hang_abort = true; });
  World& world = Start(2);
  auto tensor = std::make_shared<std::vector<float>>(data_);
  std::weak_ptr<std::vector<float>> memory = tensor;
  std::mutex mutex;
  std::optional<Status> outcome;
  Operation op = AllReduceOp(*tensor);
  ASSERT_TRUE(world.at(0)
                  .Submit(op,
                          [&, tensor](const Status& status) {
                            std::lock_guard lock(mutex);
                            outcome = status;
                          })
                  .ok());
  tensor.reset();
  ASSERT_TRUE(WaitForKernels(0, 1));
  world.at(0).Abort(Lost());  // Returns, though ncclCommAbort does not.
  ASSERT_TRUE(Eventually([&] {
    std::lock_guard lock(mutex);
    return outcome.has_value();
  }));
  EXPECT_EQ(outcome->code(), StatusCode::kRankLost);
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.aborts_begun == 1; }));
  EXPECT_FALSE(world.at(0).IsQuiet());
  EXPECT_FALSE(memory.expired());

  // The next generation does not wait for it.
  const auto next = world.CreateAll("world", 2);
  std::vector<std::vector<float>> again = {{1}, {2}};
  std::vector<Pending> pending;
  for (std::size_t rank : {0u, 1u}) {
    Operation sum = AllReduceOp(again[rank]);
    sum.stream = NewStream();
    pending.push_back(Pending::Of(*next[rank], sum));
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  EXPECT_FALSE(world.at(0).IsQuiet());

  Change(0, [](NcclScript& script) { script.hang_abort = false; });
  EXPECT_TRUE(Eventually([&] { return world.at(0).IsQuiet(); }));
  EXPECT_TRUE(memory.expired());
}

TEST_F(NcclFailure, Abort_HangsForEver_CloseReturnsAtItsDeadline) {
  Change(0, [](NcclScript& script) { script.hang_abort = true; });
  World& world = Start(2);
  auto tensor = std::make_shared<std::vector<float>>(data_);
  std::weak_ptr<std::vector<float>> memory = tensor;
  Operation op = AllReduceOp(*tensor);
  ASSERT_TRUE(world.at(0).Submit(op, [tensor](const Status&) {}).ok());
  tensor.reset();
  ASSERT_TRUE(WaitForKernels(0, 1));
  world.at(0).Abort(Lost());
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.aborts_begun == 1; }));
  world.fabrics[0]->Close(Deadline::After(world.clock.Now(), Millis(30)));
  world.fabrics[0].reset();
  EXPECT_FALSE(world.at(0).IsQuiet());
  EXPECT_FALSE(memory.expired()) << "the device may still write to it";
  Change(0, [](NcclScript& script) { script.hang_abort = false; });
  EXPECT_TRUE(Eventually([&] { return memory.expired(); }));
}

TEST_F(NcclFailure, AsyncError_EndsWhatIsInFlightAndWhatComes) {
  World& world = Start(2);
  const Pending waiting = LaunchAlone(data_);
  Change(0, [](NcclScript& script) { script.async_error = NcclResult::kRemoteError; });
  const Status status = waiting.Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  EXPECT_THAT(status.message(), HasSubstr("remote process exited or there was a network error"));
  EXPECT_EQ(Pending::Try(world.at(0), AllReduceOp(data_)).Wait().code(), StatusCode::kCommFailed);
  EXPECT_TRUE(Eventually([&] { return world.at(0).IsQuiet(); }));
}

// As when NCCL stops its kernels by itself: their events fire, with nothing done.
TEST_F(NcclFailure, AsyncError_BeforeTheEventFires_IsNoSuccess) {
  Change(0, [](NcclScript& script) { script.hold_kernels = true; });
  World& world = Start(1);
  const Pending held = LaunchAlone(data_);
  Change(0, [](NcclScript& script) {
    script.async_error = NcclResult::kSystemError;
    script.hold_kernels = false;
  });
  EXPECT_EQ(held.Wait().code(), StatusCode::kCommFailed);
  EXPECT_TRUE(Eventually([&] { return world.at(0).IsQuiet(); }));
}

TEST_F(NcclFailure, AsyncError_WhileNothingMoves_IsNoticed) {
  World& world = Start(2);
  ASSERT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.connected[{"world", 1}] == 1; }));
  Change(0, [](NcclScript& script) { script.async_error = NcclResult::kRemoteError; });
  EXPECT_TRUE(WaitForAborts(1));
  EXPECT_EQ(Pending::Try(world.at(0), AllReduceOp(data_)).Wait().code(), StatusCode::kCommFailed);
}

// With a bound for a standstill as well, which nobody can judge here.
TEST_F(NcclFailure, Timeout_OfWhatWaitsForARank_EndsTheGroup) {
  World& world = Start(2);
  std::vector<float> second = {3};
  Operation op = AllReduceOp(data_);
  op.timeout = Millis(300);
  op.stall = Millis(10);
  const Instant start = world.clock.Now();
  const Pending waiting = Pending::Of(world.at(0), op);
  const Pending behind = Pending::Of(world.at(0), AllReduceOp(second));
  const Status status = waiting.Wait();
  EXPECT_GE(world.clock.Now() - start, Millis(300));
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("all_reduce(float32[2], sum)"),
                                      HasSubstr("rank 1 (node1, pid 1001)")));
  EXPECT_EQ(status.detail().seq, 1u);
  EXPECT_NEAR(status.detail().since_unix_s, world.clock.WallSeconds(), 30);
  EXPECT_EQ(behind.Wait().code(), StatusCode::kCommFailed);
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.stalls.size() == 1; }));
  EXPECT_TRUE(Eventually([&] { return world.at(0).IsQuiet(); }));
  EXPECT_TRUE(WaitForAborts(1));
}

TEST_F(NcclFailure, Timeout_BeforeTheRanksAreConnected_EndsTheGroup) {
  World& world = Start(2);
  for (const int rank : {0, 1}) {  // One waits for the other, one for the unique id.
    const auto side = world.Create(rank, world.Spec(rank == 0 ? "side" : "other side", rank));
    Operation op = AllReduceOp(data_);
    op.timeout = Millis(50);
    const Status status = Pending::Of(*side, op).Wait();
    EXPECT_EQ(status.code(), StatusCode::kCommFailed) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("its timeout of 0.05 s"));
  }
}

// NCCL waits for ever: the ranks find out by what they tell each other.
TEST_F(NcclFailure, RanksInOperationsOfDifferentSizes_AreToldSo) {
  World& world = Start(2);
  std::vector<float> longer = {1, 2, 3};
  const Instant start = world.clock.Now();
  Operation op = AllReduceOp(data_);
  op.call_site = "train.py:7";
  const Pending one = Pending::Of(world.at(0), op);
  const Pending other = Pending::Of(world.at(1), AllReduceOp(longer));
  for (const Pending& pending : {one, other}) {
    const Status status = pending.Wait();
    EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.ToString();
    EXPECT_THAT(status.message(),
                AllOf(HasSubstr("all_reduce(float32[2], sum)"),
                      HasSubstr("all_reduce(float32[3], sum)"), HasSubstr("train.py:7")));
  }
  EXPECT_LT(world.clock.Now() - start, std::chrono::seconds(2) * (kThreadSanitized ? 10 : 1));
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.mismatches.size() == 1; }));
  EXPECT_THAT(AwaitMisuse(), ElementsAre(HasSubstr("rank 1 is in another collective")));
}

// As many bytes: NCCL does not notice, and nobody waits.
TEST_F(NcclFailure, RanksInOperationsThatDoNotWait_AreToldBehindTheFact) {
  World& world = Start(2);
  std::vector<float> other = {3, 4};
  const Pending sum = Pending::Of(world.at(0), AllReduceOp(data_, ReduceOp::kSum));
  const Pending max = Pending::Of(world.at(1), AllReduceOp(other, ReduceOp::kMax));
  ASSERT_TRUE(world.log(1).WaitFor([](EventLog& log) { return !log.mismatches.empty(); }) ||
              world.log(0).WaitFor([](EventLog& log) { return !log.mismatches.empty(); }));
  EXPECT_THAT(AwaitMisuse(), ElementsAre(HasSubstr("rank 1 is in another collective")));
  world.at(0).Abort(Lost());
  world.at(1).Abort(Lost());
  (void)sum.Wait();
  (void)max.Wait();
}

// The fence names the rank; NCCL's own words do not.
TEST_F(NcclFailure, AsyncError_WaitsForTheFence) {
  verdict_wait_ = kBound;
  World& world = Start(2);
  const Pending waiting = LaunchAlone(data_);
  Change(0, [](NcclScript& script) { script.async_error = NcclResult::kRemoteError; });
  std::vector<float> behind = {3};
  const Pending later = Pending::Of(world.at(0), AllReduceOp(behind));
  EXPECT_FALSE(waiting.IsDone());
  world.at(0).Abort(Lost());
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kRankLost);
  EXPECT_EQ(later.Wait().code(), StatusCode::kRankLost);
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.stalls.empty(); }));
}

// Over sockets NCCL tells the others of a rank's end as of a failure.
TEST_F(NcclFailure, AsyncError_OfWhatARankHasLeftWithoutItsPart_IsThat) {
  verdict_wait_ = kBound;
  World& world = Start(2);
  const Pending waiting = LaunchAlone(data_);
  Change(0, [](NcclScript& script) { script.async_error = NcclResult::kRemoteError; });
  world.at(1).Leave();
  const Status status = waiting.Wait();
  EXPECT_EQ(status.code(), StatusCode::kLeft) << status.ToString();
  EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 1 (node1, pid 1001) has left the group"),
                                      HasSubstr("all_reduce(float32[2], sum)")));
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.stalls.empty(); }));
}

TEST_F(NcclFailure, AsyncError_OfAMessageForARankThatHasLeft_IsThat) {
  verdict_wait_ = kBound;
  World& world = Start(3);
  const Pending recv = Pending::Of(world.at(0), RecvOp(data_, 1, 0));
  ASSERT_TRUE(WaitForKernels(0, 1));
  Change(0, [](NcclScript& script) { script.async_error = NcclResult::kRemoteError; });
  world.at(2).Leave();  // Of which it needs nothing.
  world.at(1).Leave();
  const Status status = recv.Wait();
  EXPECT_EQ(status.code(), StatusCode::kLeft) << status.ToString();
  EXPECT_THAT(status.message(), HasSubstr("rank 1 (node1, pid 1001) has left the group"));
}

TEST_F(NcclFailure, AsyncError_WhileNothingMovesAndARankHasLeft_FencesNobody) {
  verdict_wait_ = kBound;
  World& world = Start(2);
  ASSERT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.connected[{"world", 1}] == 1; }));
  world.at(1).Leave();
  Change(0, [](NcclScript& script) { script.async_error = NcclResult::kRemoteError; });
  EXPECT_TRUE(WaitForAborts(1));
  EXPECT_EQ(Pending::Try(world.at(0), AllReduceOp(data_)).Wait().code(), StatusCode::kLeft);
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.stalls.empty(); }));
}

TEST_F(NcclFailure, RankThatHasDoneItsPart_MayLeave) {
  World& world = Start(3);
  std::vector<std::vector<float>> data = {{1}, {2}, {3}};
  const auto reduce = [&](int rank) {
    Operation op = AllReduceOp(data[static_cast<std::size_t>(rank)]);
    return op;
  };
  ExpectAllOk(world.RunAll(reduce));
  world.at(2).Leave();
  // The others have a message between them.
  const Pending send = Pending::Of(world.at(0), SendOp(data[0], 1, 0));
  EXPECT_TRUE(Pending::Of(world.at(1), RecvOp(data[1], 0, 0)).Wait().ok());
  EXPECT_TRUE(send.Wait().ok());
  const Status left = Pending::Of(world.at(0), reduce(0)).Wait();
  EXPECT_EQ(left.code(), StatusCode::kLeft) << left.ToString();
  EXPECT_THAT(left.message(), HasSubstr("rank 2 (node2, pid 1002) has left the group"));
}

TEST_F(NcclFailure, LateRank_IsNamed) {
  World& world = Start(3);
  std::vector<std::vector<float>> data = {{1}, {2}, {3}};
  std::vector<Pending> pending;
  for (const int rank : {0, 1})
    pending.push_back(
        Pending::Of(world.at(rank), AllReduceOp(data[static_cast<std::size_t>(rank)])));
  ASSERT_TRUE(world.log(0).WaitFor([](EventLog& log) {
    const auto& told = log.waiting["world"];
    return !told.empty() && told.back().front().missing == std::vector<int>{2};
  })) << "rank 1 has told that it has entered, rank 2 that it has not";
  pending.push_back(Pending::Of(world.at(2), AllReduceOp(data[2])));
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
}

// A kernel of a rank's that ends when the test says so, and what that rank says of its device.
class NcclHungDevice : public NcclFailure {
 protected:
  ~NcclHungDevice() override { EndKernel(); }

  // On a stream of rank 2's.
  CudaStreamHandle StreamBehindAKernel() {
    const CudaStreamHandle stream = NewStream();
    EXPECT_EQ(fake_.LaunchHostFunction(
                  stream, [ended = ended_.get_future().share()] { ended.wait_for(kBound); }),
              CudaResult::kSuccess);
    return stream;
  }
  void EndKernel() {
    if (!std::exchange(has_ended_, true)) ended_.set_value();
  }
  // Asks rank 2 until `accepts` does; that account.
  DeviceProgress AccountOf(const std::function<bool(const GroupProgress&)>& accepts) {
    GroupProgress told;
    EXPECT_TRUE(Eventually([&] {
      std::size_t before = 0;
      EventLog& log = world().log(2);
      log.WaitFor([&](EventLog& all) {
        before = all.progress["world"].size();
        return true;
      });
      if (world().at(2).AskProgress("world") != ProgressAnswer::kComing) return false;
      const bool came = log.WaitFor([&](EventLog& all) {
        if (all.progress["world"].size() <= before) return false;
        told = all.progress["world"].back();
        return true;
      });
      return came && told.device && accepts(told);
    }));
    return told.device.value_or(DeviceProgress{});
  }
  static bool StandsFor(const GroupProgress& told, Duration time) {
    return told.entered == 1 && told.device->begun == 0 && told.device->still >= time;
  }

  std::promise<void> ended_;
  bool has_ended_ = false;
};

TEST_F(NcclHungDevice, DeviceThatDoesNotBegin_IsToldFromARankThatIsLate) {
  World& world = Start(3);
  std::vector<std::vector<float>> data = {{1}, {2}, {3}};
  std::vector<Pending> pending;
  Operation hung = AllReduceOp(data[2]);
  hung.stream = StreamBehindAKernel();
  pending.push_back(Pending::Of(world.at(2), hung));
  for (const int rank : {0, 1})
    pending.push_back(
        Pending::Of(world.at(rank), AllReduceOp(data[static_cast<std::size_t>(rank)])));
  ASSERT_TRUE(world.log(0).WaitFor([](EventLog& log) {
    const auto& told = log.waiting["world"];
    return !told.empty() && told.back().front().missing.empty() &&
           told.back().front().not_begun == std::vector<int>{2};
  })) << "rank 1's device has begun it, and rank 2 has submitted it";
  const DeviceProgress account =
      AccountOf([](const GroupProgress& told) { return StandsFor(told, Millis(300)); });
  EXPECT_EQ(account.name, "GPU 2 (GPU-2)");
  EXPECT_FALSE(account.runs);
  EXPECT_EQ(account.last, "");
  EndKernel();
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  const DeviceProgress after =
      AccountOf([](const GroupProgress& told) { return !told.device->last.empty(); });
  EXPECT_EQ(after.begun, 1u);
  EXPECT_EQ(after.still, Duration::zero());
  EXPECT_EQ(after.last, "all_reduce(float32[1], sum) #1 of group 'world'");
}

// What is behind an operation may wait for another rank by that one.
TEST_F(NcclHungDevice, DeviceThatRunsAnOperation_SaysSo) {
  World& world = Start(3);
  std::vector<std::vector<float>> data = {{1}, {2}, {3}};
  std::vector<float> other = {4};
  Operation hung = AllReduceOp(data[2]);
  hung.stream = StreamBehindAKernel();
  const Pending behind = Pending::Of(world.at(2), hung);
  const auto side = world.CreateAll("side");
  const Pending running = Pending::Of(*side[2], AllReduceOp(other));
  ASSERT_TRUE(WaitForKernels(2, 1));
  EXPECT_TRUE(AccountOf([](const GroupProgress& told) { return told.device->runs; }).runs);
  world.at(2).Abort(Lost());
  side[2]->Abort(Lost());
  EndKernel();
  EXPECT_EQ(behind.Wait().code(), StatusCode::kRankLost);
  EXPECT_EQ(running.Wait().code(), StatusCode::kRankLost);
}

// Of its later operations it has reached what comes before one: it works.
TEST_F(NcclHungDevice, DeviceThatReachesALaterOperation_StartsItsTimeAgain) {
  World& world = Start(3);
  std::vector<float> first = {1};
  std::vector<float> second = {2};
  Operation hung = AllReduceOp(first);
  hung.stream = StreamBehindAKernel();
  const Pending one = Pending::Of(world.at(2), hung);
  AccountOf([](const GroupProgress& told) { return StandsFor(told, Millis(1500)); });
  const Pending two = Pending::Of(world.at(2), AllReduceOp(second));
  const DeviceProgress again = AccountOf([](const GroupProgress& told) {
    return told.device->begun == 0 && told.device->still < Millis(1000);
  });
  EXPECT_GE(again.still, Duration::zero());
  world.at(2).Abort(Lost());
  EndKernel();
  EXPECT_EQ(one.Wait().code(), StatusCode::kRankLost);
  EXPECT_EQ(two.Wait().code(), StatusCode::kRankLost);
}

TEST_F(NcclFailure, AllHaveEntered_AndNothingEnds_IsAStandstill) {
  Change(1, [](NcclScript& script) { script.hold_kernels = true; });
  World& world = Start(2);
  Operation op = AllReduceOp(data_);
  op.stall = Millis(300);
  std::vector<float> other = {3, 4};
  const Pending one = Pending::Of(world.at(0), op);
  const Pending two = Pending::Of(world.at(1), AllReduceOp(other));
  const Status status = one.Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommStalled) << status.ToString();
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.stalls.size() == 1; }));
  world.at(1).Abort(Lost());
  EXPECT_EQ(two.Wait().code(), StatusCode::kRankLost);
}

TEST_F(NcclFailure, DeviceLost_SaysSoAndEndsTheGroup) {
  World& world = Start(2);
  const Pending waiting = LaunchAlone(data_);
  Change(0, [](NcclScript& script) { script.lose_device = true; });
  const Status status = waiting.Wait();
  EXPECT_EQ(status.code(), StatusCode::kDeviceLost);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("cudaErrorLaunchFailure"),
                                      HasSubstr("the device is lost to this process")));
  EXPECT_TRUE(Eventually([&] { return world.at(0).IsQuiet(); }));
}

// NCCL's word for it is that of any failure of CUDA's.
TEST_F(NcclFailure, DeviceLost_AsNcclSeesIt_IsSaidAsSuch) {
  World& world = Start(2);
  const Pending waiting = LaunchAlone(data_);
  Change(0, [](NcclScript& script) {
    script.async_error = NcclResult::kUnhandledCudaError;
    script.lose_device = true;
  });
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kDeviceLost);
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.stalls.size() == 1; }));
}

// Before it is known to the communicator's thread: the others would wait for it.
TEST_F(NcclFailure, NoEvent_RefusesTheOperation_AndSaysSo) {
  World& world = Start(1);
  Change(0, [](NcclScript& script) { script.refuse_events = true; });
  const Status status = Pending::Try(world.at(0), AllReduceOp(data_)).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  EXPECT_THAT(status.message(),
              HasSubstr("cudaEventRecord failed on all_reduce(float32[2], sum) on "
                        "rank 0 (device 0) of group 'world', generation 1"));
  EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.stalls.size() == 1; }));
  Change(0, [](NcclScript& script) { script.refuse_events = false; });
  EXPECT_TRUE(Pending::Of(world.at(0), AllReduceOp(data_)).Wait().ok());
}

TEST_F(NcclFailure, AbortCell_EndsTheGroupsThatWatchIt) {
  World& world = Start(2);
  auto cell = std::make_shared<AbortCell>();
  const auto side = world.CreateAll("side", 1, cell);
  const Pending waiting = Pending::Of(*side[0], AllReduceOp(data_));
  ASSERT_TRUE(WaitForKernels(0, 1));
  cell->Set(Lost());
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kRankLost);
  EXPECT_TRUE(WaitForAborts(2));
  std::vector<std::vector<float>> data = {{1}, {2}};
  ExpectAllOk(
      world.RunAll([&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); }));
}

TEST_F(NcclFailure, Rebuild_FiftyTimes_LeavesNothing) {
  World& world = Start(2);
  // Kept: what was aborted may still read it.
  std::vector<std::vector<std::vector<float>>> kept;
  for (std::uint64_t generation = 2; generation < 52; ++generation) {
    const auto group = world.CreateAll("world", generation);
    std::vector<std::vector<float>>& data = kept.emplace_back();
    data = {{1}, {2}};
    const Pending one = Pending::Of(*group[0], AllReduceOp(data[0]));
    const Pending other = Pending::Of(*group[1], AllReduceOp(data[1]));
    ExpectAllOk({one.Wait(), other.Wait()});
    const Pending last = Pending::Of(*group[0], AllReduceOp(data[0]));
    for (const auto& communicator : group) communicator->Abort(Lost());
    EXPECT_EQ(last.Wait().code(), StatusCode::kRankLost);
  }
  EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) {
    return counts.communicators == 2 && counts.aborts_ended == 100;
  }));
  EXPECT_LE(fake_.Counts().events, 2 * 3 * 2) << "events are used again";
  EXPECT_EQ(fake_.Counts().unique_ids, 51) << "an id is used for one attempt";
}

}  // namespace
}  // namespace resilient::testing
