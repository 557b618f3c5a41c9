// Goal: the operations that NCCL has not by itself are what the contract says, and what it cannot
// do is refused in words before anything is submitted. Method: ranks of one process over the fake
// NCCL, which tells of every call that does not fit. Beside it the suites of conformance.h run on
// the same fake.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/random.h"
#include "runtime/comm/nccl_launch.h"
#include "runtime/comm/reduce.h"
#include "tests/unit/comm/nccl_world.h"
#include "tests/unit/comm/trial.h"

namespace resilient::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr NcclAbilities kAll{.premul_sum = true, .float8 = true};

Operation Reduction(DataType type, ReduceOp reduce, double factor = 1.0) {
  Operation op;
  op.kind = OpKind::kAllReduce;
  op.dtype = type;
  op.reduce = reduce;
  op.factor = factor;
  op.count = 1;
  return op;
}

int Begun(const NcclCounts& counts, int rank) {
  const auto found = counts.kernels_begun.find(rank);
  return found == counts.kernels_begun.end() ? 0 : found->second;
}

Status Lost() { return Status(StatusCode::kRankLost, "rank 1 was lost"); }

TEST(NcclReductions, EachThatIsDefined_IsReducedOrRefusedWithTheReason) {
  int refused = 0;
  for (const DataType type : kTypes) {
    for (const ReduceOp reduce : kReduceOps) {
      if (!CanReduce(type, reduce)) continue;
      const Operation op = Reduction(type, reduce, 2.0);
      const bool bits =
          reduce == ReduceOp::kBitAnd || reduce == ReduceOp::kBitOr || reduce == ReduceOp::kBitXor;
      const bool complex = type == DataType::kComplex64 || type == DataType::kComplex128;
      const bool cannot = type == DataType::kInt16 || type == DataType::kUInt16 ||
                          (complex && reduce == ReduceOp::kProduct) ||
                          (bits && (type != DataType::kBool || reduce == ReduceOp::kBitXor));
      const Status status = CheckNcclSupports(op, 2, kAll);
      EXPECT_EQ(status.code(), cannot ? StatusCode::kUnimplemented : StatusCode::kOk)
          << Describe(op);
      refused += cannot ? 1 : 0;
    }
  }
  EXPECT_GT(refused, 20);
  EXPECT_THAT(CheckNcclSupports(Reduction(DataType::kInt16, ReduceOp::kSum), 2, kAll).message(),
              AllOf(HasSubstr("all_reduce(int16[1], sum) does not run over NCCL"),
                    HasSubstr("does not reduce integers of 16 bits")));
  EXPECT_THAT(CheckNcclSupports(Reduction(DataType::kInt32, ReduceOp::kBitAnd), 2, kAll).message(),
              HasSubstr("NCCL does not have this reduction"));
  EXPECT_THAT(
      CheckNcclSupports(Reduction(DataType::kComplex64, ReduceOp::kProduct), 2, kAll).message(),
      HasSubstr("does not multiply complex numbers"));
}

TEST(NcclReductions, Abilities_AreAskedForByName) {
  EXPECT_THAT(CheckNcclSupports(Reduction(DataType::kFloat32, ReduceOp::kPremulSum), 2,
                                {.premul_sum = false, .float8 = true})
                  .message(),
              HasSubstr("has no ncclRedOpCreatePreMulSum"));
  EXPECT_THAT(CheckNcclSupports(Reduction(DataType::kFloat8E5M2, ReduceOp::kSum), 2,
                                {.premul_sum = true, .float8 = false})
                  .message(),
              HasSubstr("NCCL 2.24 and a device of compute capability 9.0"));
  NcclApi nccl = FakeNccl::nccl();
  CudaApi cuda = FakeNccl::cuda();
  NcclAbilities abilities = AbilitiesOf(nccl, cuda, 0);
  EXPECT_TRUE(abilities.premul_sum && abilities.float8);
  nccl.RedOpDestroy = nullptr;
  nccl.GetVersion = [](int* version) {
    *version = 22307;
    return NcclResult::kSuccess;
  };
  abilities = AbilitiesOf(nccl, cuda, 0);
  EXPECT_FALSE(abilities.premul_sum || abilities.float8);
  cuda.DeviceGetAttribute = [](int* value, CudaDeviceAttribute, int) {
    *value = 8;
    return CudaResult::kSuccess;
  };
  EXPECT_FALSE(AbilitiesOf(FakeNccl::nccl(), cuda, 0).float8) << "an Ampere does not";
  cuda.DeviceGetAttribute = [](int*, CudaDeviceAttribute, int) {
    return CudaResult::kInvalidValue;
  };
  EXPECT_FALSE(AbilitiesOf(FakeNccl::nccl(), cuda, 0).float8);
}

// NCCL copies what one rank sums up, and multiplies the rest by a kernel that lacks float8.
TEST(NcclReductions, OfOneRank_AMeanIsASum_AndFloat8IsNotMultiplied) {
  for (const DataType type : {DataType::kFloat32, DataType::kFloat8E4M3, DataType::kInt8}) {
    EXPECT_EQ(ReductionOf(Reduction(type, ReduceOp::kAvg), 1).op, NcclReduceOp::kSum);
    EXPECT_EQ(ReductionOf(Reduction(type, ReduceOp::kAvg), 2).op, NcclReduceOp::kAvg);
  }
  EXPECT_TRUE(
      CheckNcclSupports(Reduction(DataType::kFloat32, ReduceOp::kPremulSum, 2.0), 1, kAll).ok());
  const Operation multiplied = Reduction(DataType::kFloat8E5M2, ReduceOp::kPremulSum, 2.0);
  EXPECT_TRUE(CheckNcclSupports(multiplied, 2, kAll).ok());
  EXPECT_THAT(CheckNcclSupports(multiplied, 1, kAll).message(),
              HasSubstr("NCCL does not multiply float8 in a communicator of one rank"));
}

TEST(NcclReductions, Factor_IsReadInTheTypeOfTheNumbers) {
  const auto as = [](DataType type, double factor, auto number) {
    const auto bytes = PremulScalar(Reduction(type, ReduceOp::kPremulSum, factor));
    std::memcpy(&number, bytes.data(), sizeof(number));
    return number;
  };
  EXPECT_EQ(as(DataType::kFloat64, 0.1, 0.0), 0.1);
  EXPECT_EQ(as(DataType::kComplex128, 0.1, 0.0), 0.1);
  EXPECT_EQ(as(DataType::kFloat32, 0.1, 0.0F), 0.1F);
  EXPECT_EQ(as(DataType::kFloat16, 0.5, std::uint16_t{}), 0x3800);
  EXPECT_EQ(as(DataType::kBFloat16, 0.5, std::uint16_t{}), 0x3f00);
  EXPECT_EQ(as(DataType::kFloat8E4M3, 0.5, std::uint8_t{}), 0x30);
  EXPECT_EQ(as(DataType::kFloat8E5M2, 0.5, std::uint8_t{}), 0x38);
  EXPECT_EQ(as(DataType::kInt64, -3.0, std::int64_t{}), -3);
  EXPECT_EQ(as(DataType::kInt8, -3.0, std::int8_t{}), -3);
  EXPECT_EQ(as(DataType::kUInt32, 7.9, std::uint32_t{}), 7u);
  for (const double factor : {1e19, -1e19, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(CheckNcclSupports(Reduction(DataType::kInt32, ReduceOp::kPremulSum, factor), 2, kAll)
                  .code(),
              StatusCode::kInvalidArgument);
    EXPECT_TRUE(
        CheckNcclSupports(Reduction(DataType::kFloat32, ReduceOp::kPremulSum, factor), 2, kAll)
            .ok());
  }
}

TEST_F(NcclTest, Refused_InWords_TakesNoNumber) {
  World& world = Start(2);
  std::vector<float> data = {1};
  std::vector<std::int16_t> small = {1};
  Operation sum = MakeOp(OpKind::kAllReduce, DataType::kInt16, small);
  sum.reduce = ReduceOp::kSum;
  const std::vector<std::pair<Operation, std::string>> refused = {
      {sum, "all_reduce(int16[1], sum) does not run over NCCL: NCCL does not reduce"},
      {RecvOp(data, kAnyPeer, 0), "NCCL receives only from a rank that is named"}};
  for (const auto& [op, text] : refused) {
    const Status status = Pending::Try(world.at(0), op).Wait();
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented) << text;
    EXPECT_THAT(status.message(), HasSubstr(text));
  }
  EXPECT_EQ(Pending::Try(world.at(0), BroadcastOp(data, 9)).Wait().code(),
            StatusCode::kInvalidArgument);
  std::vector<float> other = {2};
  const Pending first = Pending::Of(world.at(0), AllReduceOp(data));
  const Pending same = Pending::Of(world.at(1), AllReduceOp(other));
  EXPECT_EQ(first.seq, 1u);
  ExpectAllOk({first.Wait(), same.Wait()});
}

TEST_F(NcclTest, Bools_OfAnyByte_AreTrueOrFalse) {
  World& world = Start(2);
  const auto run = [&](ReduceOp reduce) {
    std::vector<std::vector<std::uint8_t>> data = {{0, 16, 0, 200}, {0, 16, 1, 100}};
    ExpectAllOk(world.RunAll([&](int rank) {
      Operation op =
          MakeOp(OpKind::kAllReduce, DataType::kBool, data[static_cast<std::size_t>(rank)]);
      op.reduce = reduce;
      return op;
    }));
    EXPECT_EQ(data[0], data[1]);
    std::vector<bool> truth;
    for (const std::uint8_t byte : data[0]) truth.push_back(byte != 0);
    return truth;
  };
  for (const ReduceOp any : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBitOr})
    EXPECT_THAT(run(any), ElementsAre(false, true, true, true));
  for (const ReduceOp all : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBitAnd})
    EXPECT_THAT(run(all), ElementsAre(false, true, false, true));
}

TEST_F(NcclTest, PremulSums_WithAFactorEach_LeaveNoOperatorBehind) {
  World& world = Start(2);
  std::vector<std::vector<float>> data(20, std::vector<float>{1});
  std::vector<Pending> pending;
  for (std::size_t i = 0; i < data.size(); ++i) {
    Operation op = AllReduceOp(data[i], ReduceOp::kPremulSum);
    op.factor = static_cast<double>(i / 2);
    pending.push_back(Pending::Of(world.at(static_cast<int>(i % 2)), op));
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  for (std::size_t i = 0; i < data.size(); ++i)
    EXPECT_THAT(data[i], ElementsAre(2.0F * static_cast<float>(i / 2)));
  EXPECT_EQ(fake_.Counts().reductions, 0);
}

// One message behind the other, though the tags are others.
TEST_F(NcclTest, Messages_GoByOrderOfSubmission_WhateverTheirTags) {
  World& world = Start(2);
  std::vector<std::vector<float>> sent = {{1}, {2}, {3}};
  std::vector<std::vector<float>> got(3, std::vector<float>{0});
  std::vector<Pending> pending;
  for (std::uint32_t i = 0; i < 3; ++i) {
    int sender = -1;
    pending.push_back(Pending::Of(world.at(0), SendOp(sent[i], 1, i)));
    Operation recv = RecvOp(got[i], 0, 2 - i);
    recv.sender = &sender;
    EXPECT_TRUE(Pending::Of(world.at(1), recv).Wait().ok());
    EXPECT_EQ(sender, 0);
  }
  ExpectAllOk({pending[0].Wait(), pending[1].Wait(), pending[2].Wait()});
  EXPECT_EQ(got, sent);
}

TEST_F(NcclTest, LoneSend_WaitsForItsRecv_AndHoldsUpWhatIsBehindIt) {
  World& world = Start(2);
  std::vector<float> sent = {1, 2};
  std::vector<float> got(2);
  std::vector<std::vector<float>> sums = {{1}, {2}};
  const Pending send = Pending::Of(world.at(0), SendOp(sent, 1, 0));
  Operation behind = AllReduceOp(sums[0]);
  behind.stream = NewStream();  // Another stream is of no help.
  const Pending waiting = Pending::Of(world.at(0), behind);
  ASSERT_TRUE(WaitForKernels(0, 1));
  // Both are launched.
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.events == 2 * 3; }));
  EXPECT_FALSE(send.IsDone() || waiting.IsDone());
  EXPECT_EQ(fake_.Counts().kernels_begun[0], 1);
  ExpectAllOk({Pending::Of(world.at(1), RecvOp(got, 0, 0)).Wait(),
               Pending::Of(world.at(1), AllReduceOp(sums[1])).Wait(), send.Wait(), waiting.Wait()});
  EXPECT_EQ(got, sent);
  EXPECT_THAT(sums, Each(ElementsAre(3)));
}

// What a batch is for: one by one each rank waits in its send.
TEST_F(NcclTest, SendThenRecvOnBothRanks_StandsStill_UnlessItIsABatch) {
  World& world = Start(2);
  std::vector<std::vector<float>> data = {{1}, {2}, {0}, {0}};
  const auto side = world.CreateAll("side");
  std::vector<Pending> stuck;
  for (const std::size_t rank : {0u, 1u}) {
    const ExecutionStream stream = NewStream();
    for (Operation op : {SendOp(data[rank], static_cast<int>(1 - rank), 0),
                         RecvOp(data[2 + rank], static_cast<int>(1 - rank), 0)}) {
      op.stream = stream;
      stuck.push_back(Pending::Of(*side[rank], op));
    }
  }
  std::vector<Pending> batches;
  for (const std::size_t rank : {0u, 1u}) {
    for (const Pending& one :
         Pending::OfBatch(world.at(static_cast<int>(rank)),
                          {SendOp(data[rank], static_cast<int>(1 - rank), 0),
                           RecvOp(data[2 + rank], static_cast<int>(1 - rank), 0)}))
      batches.push_back(one);
  }
  for (const Pending& one : batches) EXPECT_TRUE(one.Wait().ok());
  EXPECT_THAT(data, ElementsAre(ElementsAre(1), ElementsAre(2), ElementsAre(2), ElementsAre(1)));
  for (const Pending& one : stuck) EXPECT_FALSE(one.IsDone());
  for (const auto& communicator : side) communicator->Abort(Lost());
  for (const Pending& one : stuck) EXPECT_EQ(one.Wait().code(), StatusCode::kRankLost);
}

TEST_F(NcclTest, Batch_BeyondTheLimitOfLaunches_IsOneGroup) {
  constexpr int kMessages = 200;
  World& world = Start(2);
  std::vector<std::vector<float>> data(4 * kMessages, std::vector<float>{0});
  std::vector<Pending> pending;
  for (const std::size_t rank : {0u, 1u}) {
    std::vector<Operation> batch;
    for (std::size_t i = 0; i < kMessages; ++i) {
      std::vector<float>& sent = data[2 * kMessages * rank + i];
      sent = {static_cast<float>(i)};
      batch.push_back(SendOp(sent, static_cast<int>(1 - rank), 0));
      batch.push_back(
          RecvOp(data[2 * kMessages * rank + kMessages + i], static_cast<int>(1 - rank), 0));
    }
    for (const Pending& one : Pending::OfBatch(world.at(static_cast<int>(rank)), std::move(batch)))
      pending.push_back(one);
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  EXPECT_EQ(fake_.Counts().kernels_begun[0], 1);
  for (std::size_t i = 0; i < kMessages; ++i)
    EXPECT_THAT(data[kMessages + i], ElementsAre(static_cast<float>(i)));
}

TEST_F(NcclTest, Batch_OfMoreThanAGroupMayHaveInFlight_IsRefused) {
  constexpr std::size_t kTooMany = (1u << 16) + 1;
  World& world = Start(2);
  std::vector<float> data = {1};
  std::vector<Communicator::Submission> batch;
  for (std::size_t i = 0; i < kTooMany; ++i)
    batch.push_back({.op = SendOp(data, 1, 0), .done = [](const Status&) { ADD_FAILURE(); }});
  EXPECT_EQ(world.at(0).SubmitBatch(std::move(batch)).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_TRUE(world.at(0).IsQuiet());
}

// The operator ends with its communicator.
TEST_F(NcclTest, PremulSum_WhoseLaunchHangs_AbortEndsIt) {
  Change(0, [](NcclScript& script) { script.hang_launch = true; });
  World& world = Start(1);
  std::vector<float> data = {1};
  const Pending launching = Pending::Of(world.at(0), AllReduceOp(data, ReduceOp::kPremulSum));
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.events == 3; }));
  EXPECT_EQ(fake_.Counts().reductions, 1);
  world.at(0).Abort(Lost());
  EXPECT_EQ(launching.Wait().code(), StatusCode::kRankLost);
}

TEST_F(NcclTest, Batch_TheShortestTimeoutOfIt_EndsTheGroup) {
  World& world = Start(2);
  std::vector<float> data = {1};
  const std::vector<Pending> batch = Pending::OfBatch(
      world.at(0), {SendOp(data, 1, 0), Bounded(SendOp(data, 1, 7), Millis(50), {})});
  EXPECT_EQ(batch[0].Wait().code(), StatusCode::kCommFailed);
  EXPECT_THAT(batch[1].Wait().message(), AllOf(HasSubstr("send(float32[1], to 1, tag 7)"),
                                               HasSubstr("0.05 s"), HasSubstr("operation 2")));
}

TEST_F(NcclTest, Recv_OfAnotherSize_WaitsForTheAbort) {
  World& world = Start(2);
  std::vector<float> sent = {1, 2};
  std::vector<float> got(3, -1);
  const Pending send = Pending::Of(world.at(0), SendOp(sent, 1, 0));
  const Pending recv = Pending::Of(world.at(1), RecvOp(got, 0, 0));
  EXPECT_THAT(AwaitMisuse(),
              ElementsAre(HasSubstr("rank 0 sends 8 bytes to rank 1, which receives 12")));
  EXPECT_FALSE(send.IsDone() || recv.IsDone());
  for (const int rank : {0, 1}) world.at(rank).Abort(Lost());
  EXPECT_EQ(send.Wait().code(), StatusCode::kRankLost);
  EXPECT_EQ(recv.Wait().code(), StatusCode::kRankLost);
  EXPECT_THAT(got, Each(-1));
  EXPECT_TRUE(Eventually([&] { return world.at(0).IsQuiet() && world.at(1).IsQuiet(); }));
}

TEST_F(NcclTest, Barriers_HaveMemoryFromTheFirstOn_UntilTheEnd) {
  World& world = Start(2);
  std::vector<float> data = {1};
  ExpectAllOk(world.RunAll([&](int) { return AllReduceOp(data); }));
  EXPECT_EQ(fake_.Counts().allocations, 0);
  for (int i = 0; i < 3; ++i) ExpectAllOk(world.RunAll([](int) { return BarrierOp(); }));
  EXPECT_EQ(fake_.Counts().allocations, 2) << "once for each communicator";
  world.at(0).Abort(Lost());
  world.group[1].reset();
  EXPECT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.allocations == 0; }));
}

TEST_F(NcclTest, Barrier_WithoutMemory_EndsTheGroup) {
  Change(0, [](NcclScript& script) { script.refuse_memory = true; });
  World& world = Start(1);
  const Status status = Pending::Try(world.at(0), BarrierOp()).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  EXPECT_THAT(status.message(), HasSubstr("cudaMalloc failed on rank 0"));
}

// A driver that waits for a kernel that hangs.
TEST_F(NcclTest, Barrier_WhoseMemoryDoesNotCome_HoldsUpNobodyElse) {
  Change(0, [](NcclScript& script) { script.hang_memory = true; });
  World& world = Start(2);
  const auto side = world.CreateAll("side");
  const Pending waiting = Pending::Of(*side[0], BarrierOp());
  std::vector<std::vector<float>> data = {{1}, {2}};
  ExpectAllOk(
      world.RunAll([&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); }));
  // Who still connects asks for no memory, and ends when the other one goes.
  for (int rank : {0, 1}) {
    ASSERT_TRUE(world.log(rank).WaitFor([](EventLog& log) {
      return log.connected[{"side", 1}] == 1;
    }));
  }
  EXPECT_FALSE(waiting.IsDone());
  side[0]->Abort(Lost());
  EXPECT_EQ(waiting.Wait().code(), StatusCode::kRankLost);
  world.fabrics[0]->Close(Deadline::After(world.clock.Now(), Millis(30)));
  Change(0, [](NcclScript& script) { script.hang_memory = false; });
  EXPECT_TRUE(fake_.WaitFor(
      [](const NcclCounts& counts) { return counts.frees == 1 && counts.communicators == 2; }));
}

// Of each kind, in the midst: rank 1 does not come, or it comes and everybody is held on the
// device.
TEST_F(NcclTest, Abort_InTheMidstOfEachKind_EndsItAndTheNextGenerationRuns) {
  World& world = Start(3);
  Random random(3);
  std::uint64_t generation = 2;
  for (const bool all_come : {false, true}) {
    for (const OpKind kind : kCollectives) {
      Call call{.kind = kind, .dtype = DataType::kFloat32, .root = HasRoot(kind) ? 0 : -1};
      if (Reduces(kind)) call.reduce = ReduceOp::kPremulSum;
      SetCounts(call, 3, 100);
      const auto group = world.CreateAll("world", generation);
      for (int rank = 0; rank < 3; ++rank)
        Change(rank, [&](NcclScript& script) { script.hold_kernels = all_come; });
      Trial trial(call, random);
      std::vector<Pending> pending;
      const NcclCounts before = fake_.Counts();
      for (const int rank : {0, 2, 1}) {
        if (rank != 1 || all_come)
          pending.push_back(Pending::Of(*group[static_cast<std::size_t>(rank)], trial.At(rank)));
      }
      // Rank 0 is part of all, and is the root that the others need.
      ASSERT_TRUE(fake_.WaitFor(
          [&](const NcclCounts& counts) { return Begun(counts, 0) > Begun(before, 0); }));
      for (const auto& communicator : group) communicator->Abort(Lost());
      // A rank that had nothing to wait for may be done.
      EXPECT_EQ(pending[0].Wait().code(), StatusCode::kRankLost) << OpKindName(kind);
      for (const Pending& one : pending) (void)one.Wait();
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_TRUE(Eventually([&] { return group[static_cast<std::size_t>(rank)]->IsQuiet(); }));
        EXPECT_EQ(trial.WhatWasWritten(rank), "");
      }
      ++generation;
    }
  }
  for (int rank = 0; rank < 3; ++rank)
    Change(rank, [](NcclScript& script) { script.hold_kernels = false; });
  ExpectAllOk(world.RunAll([](int) { return BarrierOp(); }));
}

TEST_F(NcclTest, Abort_InTheMidstOfABatch_EndsAllOfIt) {
  World& world = Start(3);
  std::vector<float> data = {1};
  std::vector<float> got(1, -1);
  const std::vector<Pending> batch =
      Pending::OfBatch(world.at(0), {SendOp(data, 1, 0), RecvOp(got, 2, 0), SendOp(data, 2, 0)});
  std::vector<float> late(1);
  const Pending recv = Pending::Of(world.at(2), RecvOp(late, 0, 0));
  // As in NCCL, a part of a group may have been done.
  EXPECT_TRUE(recv.Wait().ok());
  for (const Pending& one : batch) EXPECT_FALSE(one.IsDone());
  world.at(0).Abort(Lost());
  for (const Pending& one : batch) EXPECT_EQ(one.Wait().code(), StatusCode::kRankLost);
  EXPECT_TRUE(Eventually([&] { return world.at(0).IsQuiet(); }));
}

}  // namespace
}  // namespace resilient::testing
