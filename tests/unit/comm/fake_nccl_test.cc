// Goal: the fake NCCL notices what it is there to notice, and its calls do what NCCL's do.
// Method: the tables are called as the communicator would, and as it must not.

#include <cstddef>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fake_nccl.h"

namespace resilient::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr NcclDataType kFloat = NcclDataType::kFloat32;

// Two ranks on this thread, one stream each.
class FakeNcclTest : public ::testing::Test {
 protected:
  FakeNcclTest() {
    NcclUniqueId id;
    EXPECT_EQ(nccl_.GetUniqueId(&id), NcclResult::kSuccess);
    for (const int rank : {0, 1}) {
      const auto at = static_cast<std::size_t>(rank);
      cuda_.SetDevice(rank);
      NcclConfig config;
      EXPECT_EQ(nccl_.CommInitRankConfig(&comm_[at], 2, id, rank, &config),
                NcclResult::kInProgress);
      EXPECT_EQ(cuda_.StreamCreateWithFlags(&stream_[at], kCudaStreamNonBlocking),
                CudaResult::kSuccess);
    }
    for (const int rank : {0, 1}) Settle(rank);
  }
  ~FakeNcclTest() override {
    for (const std::size_t rank : {0u, 1u}) {
      if (comm_[rank] != nullptr) nccl_.CommAbort(comm_[rank]);
      cuda_.StreamDestroy(stream_[rank]);
    }
    EXPECT_THAT(fake_.TakeMisuse(), IsEmpty());
    EXPECT_EQ(fake_.Counts().communicators, 0);
  }

  // Until what was begun is launched.
  void Settle(int rank) {
    NcclResult state = NcclResult::kInProgress;
    while (state == NcclResult::kInProgress)
      ASSERT_EQ(nccl_.CommGetAsyncError(comm(rank), &state), NcclResult::kSuccess);
    EXPECT_EQ(state, NcclResult::kSuccess);
  }
  // Waits for what is on the stream of `rank`.
  void Synchronize(int rank) {
    CudaEventHandle event = nullptr;
    ASSERT_EQ(cuda_.EventCreateWithFlags(&event, kCudaEventDisableTiming), CudaResult::kSuccess);
    EXPECT_EQ(cuda_.EventRecord(event, stream(rank)), CudaResult::kSuccess);
    EXPECT_EQ(cuda_.EventSynchronize(event), CudaResult::kSuccess);
    EXPECT_EQ(cuda_.EventDestroy(event), CudaResult::kSuccess);
  }
  bool WaitForKernels(int rank, int count) {
    return fake_.WaitFor([&](const NcclCounts& counts) {
      const auto begun = counts.kernels_begun.find(rank);
      return begun != counts.kernels_begun.end() && begun->second >= count;
    });
  }
  void Send(int rank, const std::vector<float>& data, int to) {
    EXPECT_NE(nccl_.Send(data.data(), data.size(), kFloat, to, comm(rank), stream(rank)),
              NcclResult::kInvalidArgument);
  }
  void Recv(int rank, std::vector<float>& data, int from) {
    EXPECT_NE(nccl_.Recv(data.data(), data.size(), kFloat, from, comm(rank), stream(rank)),
              NcclResult::kInvalidArgument);
  }
  NcclResult Sum(int rank, std::vector<float>& data, NcclReduceOp op = NcclReduceOp::kSum) {
    return nccl_.AllReduce(data.data(), data.data(), data.size(), kFloat, op, comm(rank),
                           stream(rank));
  }
  // The calls of one group, launched.
  void Group(int rank, const std::function<void()>& calls) {
    nccl_.GroupStart();
    calls();
    EXPECT_EQ(nccl_.GroupEnd(), NcclResult::kInProgress);
    Settle(rank);
  }
  NcclCommHandle comm(int rank) const { return comm_[static_cast<std::size_t>(rank)]; }
  CudaStreamHandle stream(int rank) const { return stream_[static_cast<std::size_t>(rank)]; }
  void ExpectMisuse(const std::string& text) {
    EXPECT_THAT(fake_.TakeMisuse(), ElementsAre(HasSubstr(text)));
  }

  FakeNccl fake_;
  const NcclApi nccl_ = FakeNccl::nccl();
  const CudaApi cuda_ = FakeNccl::cuda();
  NcclCommHandle comm_[2] = {};
  CudaStreamHandle stream_[2] = {};
  std::vector<float> one_ = {1};
  std::vector<float> two_ = {2, 3};
};

TEST_F(FakeNcclTest, LoneSend_WaitsForItsRecv) {
  Send(0, two_, 1);
  Settle(0);
  ASSERT_TRUE(WaitForKernels(0, 1));
  CudaEventHandle event = nullptr;
  cuda_.EventCreateWithFlags(&event, kCudaEventDisableTiming);
  cuda_.EventRecord(event, stream(0));
  EXPECT_EQ(cuda_.EventQuery(event), CudaResult::kNotReady);
  std::vector<float> got(2);
  Recv(1, got, 0);
  Settle(1);
  Synchronize(1);
  Synchronize(0);
  EXPECT_EQ(cuda_.EventQuery(event), CudaResult::kSuccess);
  cuda_.EventDestroy(event);
  EXPECT_EQ(got, two_);
}

TEST_F(FakeNcclTest, Group_OfMessagesBothWaysAndToItself_NeedsNoOrder) {
  std::vector<std::vector<float>> got(4, std::vector<float>(1));
  std::vector<float> other = {5};
  Group(0, [&] {
    Send(0, one_, 1);
    Recv(0, got[0], 1);
    Send(0, one_, 0);
    Recv(0, got[1], 0);
  });
  Group(1, [&] {
    Send(1, other, 0);
    Recv(1, got[2], 1);
    Send(1, other, 1);
    Recv(1, got[3], 0);
  });
  for (const int rank : {0, 1}) Synchronize(rank);
  EXPECT_THAT(got, ElementsAre(ElementsAre(5), ElementsAre(1), ElementsAre(5), ElementsAre(1)));
}

TEST_F(FakeNcclTest, Messages_OfOnePair_MeetInTheirOrder) {
  std::vector<std::vector<float>> sent = {{1}, {2}, {3}};
  std::vector<std::vector<float>> got(3, std::vector<float>(1));
  Group(0, [&] {
    for (const auto& one : sent) Send(0, one, 1);
  });
  for (auto& one : got) {
    Recv(1, one, 0);
    Settle(1);
  }
  for (const int rank : {0, 1}) Synchronize(rank);
  EXPECT_EQ(got, sent);
}

TEST_F(FakeNcclTest, SendToItself_WithoutItsRecv_IsNoticed) {
  nccl_.GroupStart();
  Send(0, one_, 0);
  EXPECT_EQ(nccl_.GroupEnd(), NcclResult::kInvalidUsage);
  ExpectMisuse("a send to itself without its recv");
}

TEST_F(FakeNcclTest, UnequalCounts_OfAMessage_AreNoticedAndStop) {
  Send(0, two_, 1);
  Settle(0);
  Recv(1, one_, 0);
  Settle(1);
  ASSERT_TRUE(WaitForKernels(0, 1) && WaitForKernels(1, 1));
  ExpectMisuse("rank 0 sends 8 bytes to rank 1, which receives 4");
  EXPECT_THAT(one_, ElementsAre(1));
}

TEST_F(FakeNcclTest, UnequalCollectives_AreNoticedAndStop) {
  std::vector<float> other = {4, 5};
  Sum(0, one_);
  Settle(0);
  Sum(1, two_);
  Settle(1);
  ASSERT_TRUE(WaitForKernels(0, 1) && WaitForKernels(1, 1));
  ExpectMisuse("rank 1 is in another collective than rank 0");
  EXPECT_THAT(two_, ElementsAre(2, 3));
}

TEST_F(FakeNcclTest, AnotherReduction_IsNoticed) {
  std::vector<float> other = {4};
  Sum(0, one_);
  Settle(0);
  Sum(1, other, NcclReduceOp::kMax);
  Settle(1);
  ASSERT_TRUE(WaitForKernels(0, 1) && WaitForKernels(1, 1));
  ExpectMisuse("rank 1 is in another collective than rank 0");
}

TEST_F(FakeNcclTest, Operator_ServesWhatWasCalledBeforeItsEnd) {
  std::vector<float> other = {10};
  float factor = 3;
  for (const int rank : {0, 1}) {
    NcclReduceOp op = NcclReduceOp::kSum;
    ASSERT_EQ(nccl_.RedOpCreatePreMulSum(&op, &factor, kFloat, NcclScalarResidence::kHostImmediate,
                                         comm(rank)),
              NcclResult::kSuccess);
    EXPECT_EQ(Sum(rank, rank == 0 ? one_ : other, op), NcclResult::kInProgress);
    EXPECT_EQ(nccl_.RedOpDestroy(op, comm(rank)), NcclResult::kSuccess);
    Settle(rank);
  }
  for (const int rank : {0, 1}) Synchronize(rank);
  EXPECT_THAT(one_, ElementsAre(33));
  EXPECT_THAT(other, ElementsAre(33));
  EXPECT_EQ(fake_.Counts().reductions, 0);
}

TEST_F(FakeNcclTest, Operator_AfterItsEnd_DestroyedTwice_OrOfAnotherType_IsNoticed) {
  double factor = 3;
  NcclReduceOp op = NcclReduceOp::kSum;
  nccl_.RedOpCreatePreMulSum(&op, &factor, NcclDataType::kFloat64,
                             NcclScalarResidence::kHostImmediate, comm(0));
  EXPECT_EQ(fake_.Counts().reductions, 1);
  EXPECT_EQ(Sum(0, one_, op), NcclResult::kInvalidArgument);
  ExpectMisuse("a reduction of a type by an operator of another");
  EXPECT_EQ(nccl_.RedOpDestroy(op, comm(0)), NcclResult::kSuccess);
  EXPECT_EQ(nccl_.RedOpDestroy(op, comm(0)), NcclResult::kInvalidArgument);
  ExpectMisuse("destroy of an operator that is not there");
  EXPECT_EQ(Sum(0, one_, op), NcclResult::kInvalidArgument);
  ExpectMisuse("a reduction by an operator that is not there");
}

TEST_F(FakeNcclTest, Operator_MadeDuringALaunch_IsNoticed) {
  float factor = 3;
  NcclReduceOp op = NcclReduceOp::kSum;
  Sum(0, one_);
  EXPECT_EQ(nccl_.RedOpCreatePreMulSum(&op, &factor, kFloat, NcclScalarResidence::kHostImmediate,
                                       comm(0)),
            NcclResult::kInvalidArgument);
  ExpectMisuse("while a launch is under way");
}

TEST_F(FakeNcclTest, Launch_DuringALaunch_AndAnEventThere_AreNoticed) {
  CudaEventHandle event = nullptr;
  cuda_.EventCreateWithFlags(&event, kCudaEventDisableTiming);
  Sum(0, one_);
  cuda_.EventRecord(event, stream(0));
  ExpectMisuse("an event on a stream where a collective is being launched");
  Sum(0, one_);
  ExpectMisuse("a launch while the last one is under way");
  cuda_.EventDestroy(event);
}

TEST_F(FakeNcclTest, CallsAfterTheAbort_AreNoticed) {
  const NcclCommHandle gone = std::exchange(comm_[0], nullptr);
  EXPECT_EQ(nccl_.CommAbort(gone), NcclResult::kSuccess);
  NcclResult state = NcclResult::kSuccess;
  EXPECT_EQ(nccl_.CommGetAsyncError(gone, &state), NcclResult::kInvalidArgument);
  ExpectMisuse("ncclCommGetAsyncError on a communicator that is not there");
  EXPECT_EQ(nccl_.Send(one_.data(), 1, kFloat, 1, gone, stream(0)), NcclResult::kInvalidArgument);
  ExpectMisuse("a call that communicates on a communicator that is not there");
  nccl_.CommAbort(gone);
  ExpectMisuse("ncclCommAbort on a communicator that is not there");
  nccl_.CommDestroy(gone);
  ExpectMisuse("ncclCommDestroy on a communicator that is not there");
}

TEST_F(FakeNcclTest, CallsDuringTheAbort_AndOnAnotherThread_AreNoticed) {
  NcclResult state = NcclResult::kSuccess;
  std::thread([&] { nccl_.CommGetAsyncError(comm(1), &state); }).join();
  ExpectMisuse("ncclCommGetAsyncError on another thread");
  fake_.Change(0, [](NcclScript& script) { script.hang_abort = true; });
  const NcclCommHandle aborted = std::exchange(comm_[0], nullptr);
  std::thread aborting([&] { nccl_.CommAbort(aborted); });
  ASSERT_TRUE(fake_.WaitFor([](const NcclCounts& counts) { return counts.aborts_begun == 1; }));
  nccl_.CommGetAsyncError(aborted, &state);
  ExpectMisuse("while the communicator is aborted");
  fake_.Change(0, [](NcclScript& script) { script.hang_abort = false; });
  aborting.join();
}

TEST_F(FakeNcclTest, Kernel_OnFreedMemory_IsNoticed) {
  void* memory = nullptr;
  ASSERT_EQ(cuda_.Malloc(&memory, 16), CudaResult::kSuccess);
  EXPECT_EQ(cuda_.Free(memory), CudaResult::kSuccess);
  EXPECT_EQ(cuda_.Free(memory), CudaResult::kInvalidValue);
  ExpectMisuse("cudaFree of memory that is not there");
  nccl_.Send(static_cast<char*>(memory) + 4, 1, kFloat, 1, comm(0), stream(0));
  Settle(0);
  ASSERT_TRUE(WaitForKernels(0, 1));
  std::vector<float> got(1);
  Recv(1, got, 0);
  Settle(1);
  Synchronize(0);
  EXPECT_THAT(fake_.TakeMisuse(), ::testing::Each(HasSubstr("memory that was freed")));
}

TEST_F(FakeNcclTest, Free_WaitsForTheKernelsOfItsDevice) {
  void* memory = nullptr;
  ASSERT_EQ(cuda_.Malloc(&memory, 16), CudaResult::kSuccess);
  cuda_.SetDevice(1);
  Send(1, one_, 0);
  Settle(1);
  ASSERT_TRUE(WaitForKernels(1, 1));
  std::thread freeing([&] {
    cuda_.SetDevice(1);
    cuda_.Free(memory);
  });
  EXPECT_EQ(fake_.Counts().frees, 0);
  Recv(0, one_, 1);
  Settle(0);
  freeing.join();
  EXPECT_EQ(fake_.Counts().frees, 1);
}

TEST_F(FakeNcclTest, Event_AfterItsEnd_IsNoticed) {
  CudaEventHandle event = nullptr;
  cuda_.EventCreateWithFlags(&event, kCudaEventDisableTiming);
  EXPECT_EQ(cuda_.EventDestroy(event), CudaResult::kSuccess);
  EXPECT_EQ(cuda_.EventQuery(event), CudaResult::kInvalidValue);
  ExpectMisuse("cudaEventQuery of an event that is not there");
  EXPECT_EQ(cuda_.EventDestroy(event), CudaResult::kInvalidValue);
  ExpectMisuse("cudaEventDestroy of an event that is not there");
}

// As in CUDA: the work of a destroyed stream still runs, and a wait is for the record before it.
TEST_F(FakeNcclTest, DestroyedStream_EndsItsWork_WithoutBeingWaitedFor) {
  CudaStreamHandle other = nullptr;
  cuda_.StreamCreateWithFlags(&other, kCudaStreamNonBlocking);
  CudaEventHandle gate = nullptr;
  CudaEventHandle end = nullptr;
  for (CudaEventHandle* event : {&gate, &end})
    cuda_.EventCreateWithFlags(event, kCudaEventDisableTiming);
  Send(0, one_, 1);
  Settle(0);
  cuda_.EventRecord(gate, stream(0));
  cuda_.StreamWaitEvent(other, gate, 0);
  cuda_.EventRecord(gate, stream(1));  // Another record: not the one that is waited for.
  EXPECT_EQ(cuda_.EventSynchronize(gate), CudaResult::kSuccess);
  cuda_.EventRecord(end, other);
  EXPECT_EQ(cuda_.StreamDestroy(other), CudaResult::kSuccess);
  EXPECT_EQ(cuda_.EventQuery(end), CudaResult::kNotReady);
  std::vector<float> got(1);
  Recv(1, got, 0);
  Settle(1);
  EXPECT_EQ(cuda_.EventSynchronize(end), CudaResult::kSuccess);
  EXPECT_EQ(cuda_.StreamDestroy(other), CudaResult::kInvalidValue);
  ExpectMisuse("cudaStreamDestroy of a stream that is not there");
  for (CudaEventHandle event : {gate, end}) cuda_.EventDestroy(event);
}

// Whatever their streams: NCCL orders the kernels of a communicator.
TEST_F(FakeNcclTest, Kernels_OfOneCommunicator_RunInTheOrderOfTheirLaunch) {
  CudaStreamHandle other = nullptr;
  cuda_.StreamCreateWithFlags(&other, kCudaStreamNonBlocking);
  Send(0, one_, 1);
  Settle(0);
  nccl_.Send(two_.data(), 2, kFloat, 1, comm(0), other);
  Settle(0);
  ASSERT_TRUE(WaitForKernels(0, 1));
  std::vector<float> first(1);
  std::vector<float> second(2);
  Recv(1, first, 0);
  Settle(1);
  Recv(1, second, 0);
  Settle(1);
  Synchronize(1);
  EXPECT_THAT(first, ElementsAre(1));
  EXPECT_EQ(second, two_);
  cuda_.StreamDestroy(other);
}

}  // namespace
}  // namespace resilient::testing
