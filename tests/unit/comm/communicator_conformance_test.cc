// Goal: every transport keeps the contract of <resilient/communicator.h> where nothing fails.
// Method: one suite over a list of transports; ranks are fabrics of one process; results are
// compared bit for bit with a serial reference.

#include <cmath>
#include <deque>

#include "runtime/base/random.h"
#include "runtime/comm/reduce.h"
#include "tests/unit/comm/conformance.h"
#include "tests/unit/comm/serial_reference.h"
#include "tests/unit/comm/trial.h"

namespace resilient::testing {
namespace {

class Conformance : public ::testing::TestWithParam<ConformanceCase> {
 protected:
  int size() const { return GetParam().size; }
  bool Supports(OpKind kind, DataType type, ReduceOp reduce) const {
    Operation op;
    op.kind = kind;
    op.dtype = type;
    op.reduce = reduce;
    return GetParam().transport.Supports(op, size());
  }
  void RunAndCheck(const Call& call) {
    Trial trial(call, random_);
    ExpectAllOk(world_.RunAll([&](int rank) { return trial.At(rank); }));
    for (int rank = 0; rank < size(); ++rank) ASSERT_EQ(trial.WhatIsWrong(rank), "");
  }

  World world_{GetParam().transport, GetParam().size};
  Random random_{7};
};

// For every root of a rooted operation, once otherwise.
template <typename Run>
void ForEachRoot(Call call, int size, Run&& run) {
  for (int root = 0; root < (HasRoot(call.kind) ? size : 1); ++root) {
    call.root = HasRoot(call.kind) ? root : -1;
    run(call);
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Conformance, ::testing::ValuesIn(ConformanceCases()),
                         [](const auto& info) {
                           return info.param.transport.name + std::to_string(info.param.size);
                         });

TEST_P(Conformance, EveryRankIsToldThatItIsConnected) {
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_EQ(world_.at(rank).rank(), rank);
    EXPECT_EQ(world_.at(rank).size(), size());
    EXPECT_TRUE(world_.log(rank).WaitFor([](EventLog& log) {
      return log.connected[{"world", 1}] == 1;
    }));
  }
}

TEST_P(Conformance, Reductions_EveryTypeAndOp_EqualTheSerialReferenceBitForBit) {
  const auto n = static_cast<std::size_t>(size());
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter}) {
    for (const DataType type : kTypes) {
      for (const ReduceOp reduce : kReduceOps) {
        if (!CanReduce(type, reduce) || !Supports(kind, type, reduce)) continue;
        for (const std::size_t count : {std::size_t{1}, n - 1, std::size_t{1000}}) {
          Call call{.kind = kind, .dtype = type, .reduce = reduce};
          if (reduce == ReduceOp::kPremulSum) call.factor = 2.0;
          if (kind == OpKind::kReduce) call.root = size() - 1;
          call.in_place = count == 1000;
          SetCounts(call, size(), count);
          RunAndCheck(call);
        }
      }
    }
  }
}

// Far beyond the windows of a reduction, in steps that no window divides. What a type changes is
// its size, which the smaller worlds show.
TEST_P(Conformance, Reductions_Large_EqualTheSerialReferenceBitForBit) {
  std::vector<DataType> types{DataType::kFloat32};
  if (size() < 4) types.insert(types.end(), {DataType::kBFloat16, DataType::kUInt8});
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter}) {
    const std::size_t share = kind == OpKind::kReduceScatter ? static_cast<std::size_t>(size()) : 1;
    for (const DataType type : types) {
      Call call{.kind = kind, .dtype = type, .reduce = ReduceOp::kAvg};
      ForEachRoot(call, size() < 4 ? size() : 1, [&](Call& rooted) {
        SetCounts(rooted, size(), 600'011 / share);
        RunAndCheck(rooted);
      });
    }
  }
}

TEST_P(Conformance, ReduceScatter_EveryRankAnotherCount) {
  for (const std::size_t unit : {1, 30'011}) {
    for (const bool in_place : {false, true}) {
      Call call{.kind = OpKind::kReduceScatter,
                .dtype = DataType::kFloat32,
                .reduce = ReduceOp::kSum,
                .in_place = in_place};
      SetCounts(call, size(), 0);
      for (auto& row : call.counts)
        for (std::size_t to = 0; to < row.size(); ++to) row[to] = to * unit;
      RunAndCheck(call);
    }
  }
}

TEST_P(Conformance, AllReduce_Nan_WinsMinAndMax) {
  if (!GetParam().transport.nan_wins) GTEST_SKIP() << "here it is the library's choice";
  for (const ReduceOp reduce : {ReduceOp::kMin, ReduceOp::kMax}) {
    for (int nan_at = 0; nan_at < size(); ++nan_at) {
      std::vector<std::vector<float>> data;
      for (int r = 0; r < size(); ++r)
        data.push_back({r == nan_at ? std::nanf("") : static_cast<float>(r), 1.0f});
      ExpectAllOk(world_.RunAll(
          [&](int r) { return AllReduceOp(data[static_cast<std::size_t>(r)], reduce); }));
      for (const auto& result : data) {
        EXPECT_TRUE(std::isnan(result[0]));
        EXPECT_EQ(result[1], 1.0f);
      }
    }
  }
}

TEST_P(Conformance, Moves_EveryKindRootAndSize_AlsoInPlace) {
  for (const OpKind kind : {OpKind::kBroadcast, OpKind::kAllGather, OpKind::kGather,
                            OpKind::kScatter, OpKind::kAllToAll}) {
    for (const std::size_t count : {0, 1, 1000, 70'000}) {
      Call call{.kind = kind, .dtype = DataType::kInt32};
      SetCounts(call, size(), count);
      for (const bool in_place : {false, true}) {
        call.in_place = in_place;
        ForEachRoot(call, size(), [&](Call& rooted) { RunAndCheck(rooted); });
      }
    }
  }
}

TEST_P(Conformance, OneBlock_OfEqualParts_AlsoInPlace) {
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kReduceScatter}) {
    for (const std::size_t count : {0, 1, 1000, 70'000}) {
      for (const bool in_place : {false, true}) {
        Call call{.kind = kind, .dtype = DataType::kInt32, .in_place = in_place, .one_block = true};
        if (kind == OpKind::kReduceScatter) call.reduce = ReduceOp::kSum;
        SetCounts(call, size(), count);
        RunAndCheck(call);
      }
    }
  }
}

TEST_P(Conformance, OneBlock_OfOtherParts_IsRefused) {
  if (size() < 2) GTEST_SKIP() << "one part is always a block";
  std::vector<float> data(2);
  std::vector<float> block(static_cast<std::size_t>(2 * size() + 1));
  Operation op = MakeOp(OpKind::kAllGather, DataType::kFloat32, data);
  op.one_block = true;
  for (int rank = 0; rank < size(); ++rank)
    op.outputs.push_back({.data = block.data() + 2 * rank, .count = 2});
  const auto refused = [&](Part last) {
    Operation wrong = op;
    wrong.outputs.back() = last;
    const Status status = Pending::Try(world_.at(0), wrong).Wait();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_NE(refused({.data = op.outputs.back().data, .count = 1}).find("has 1 elements"),
            std::string::npos);
  EXPECT_NE(refused({.data = block.data() + 2 * size() - 1, .count = 2}).find("is not behind"),
            std::string::npos);
  ExpectAllOk(world_.RunAll([&](int) { return BarrierOp(); }));
}

TEST_P(Conformance, Moves_CountsThatDiffer_AlsoZero) {
  for (const OpKind kind :
       {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
    for (int round = 0; round < 8; ++round) {
      Call call{.kind = kind, .dtype = DataType::kComplex64, .in_place = round % 2 == 1};
      SetRandomCounts(call, size(), 20'000, random_);
      ForEachRoot(call, size(), [&](Call& rooted) { RunAndCheck(rooted); });
    }
  }
}

TEST_P(Conformance, RootedOperations_NobodyButTheRootWaitsForTheOthers) {
  // The last rank comes late; those who only send to the root are done before.
  if (size() < 3) GTEST_SKIP() << "needs two ranks beside the root";
  if (!GetParam().transport.roots_run_ahead) GTEST_SKIP() << "here all wait for all";
  for (const OpKind kind : {OpKind::kGather, OpKind::kReduce}) {
    Call call{.kind = kind, .dtype = DataType::kInt32, .root = 0};
    if (kind == OpKind::kReduce) call.reduce = ReduceOp::kSum;
    SetCounts(call, size(), 10);
    Trial trial(call, random_);
    std::vector<Pending> pending;
    for (int rank = 0; rank + 1 < size(); ++rank)
      pending.push_back(Pending::Of(world_.at(rank), trial.At(rank)));
    for (std::size_t rank = 1; rank < pending.size(); ++rank)
      EXPECT_TRUE(pending[rank].Wait().ok());
    EXPECT_FALSE(pending[0].IsDone());
    pending.push_back(Pending::Of(world_.at(size() - 1), trial.At(size() - 1)));
    for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
    for (int rank = 0; rank < size(); ++rank) EXPECT_EQ(trial.WhatIsWrong(rank), "");
  }
}

TEST_P(Conformance, Barrier_NobodyLeavesBeforeTheLastHasCome) {
  std::vector<Pending> early;
  for (int r = 0; r + 1 < size(); ++r) early.push_back(Pending::Of(world_.at(r), BarrierOp()));
  // Something later on other links proves that time has passed.
  for (const Pending& one : early) EXPECT_FALSE(one.IsDone());
  EXPECT_TRUE(Pending::Of(world_.at(size() - 1), BarrierOp()).Wait().ok());
  for (const Pending& one : early) EXPECT_TRUE(one.Wait().ok());
}

TEST_P(Conformance, ManyOperationsInFlight_CompleteInOrderWithTheRightData) {
  constexpr int kOperations = 200;
  std::vector<std::vector<std::vector<float>>> data(kOperations);
  std::vector<Pending> pending;
  for (int rank = 0; rank < size(); ++rank) {
    for (int i = 0; i < kOperations; ++i) {
      auto& mine = data[static_cast<std::size_t>(i)];
      if (rank == 0) mine.resize(static_cast<std::size_t>(size()));
      auto& buffer = mine[static_cast<std::size_t>(rank)];
      buffer.assign(static_cast<std::size_t>(i * 37), static_cast<float>(i + rank));
      const bool reduce = i % 2 == 0;
      pending.push_back(Pending::Of(world_.at(rank), reduce ? AllReduceOp(buffer, ReduceOp::kMax)
                                                            : BroadcastOp(buffer, i % size())));
      EXPECT_EQ(pending.back().seq, static_cast<std::uint64_t>(i + 1));
    }
  }
  for (const Pending& one : pending) ASSERT_TRUE(one.Wait().ok());
  for (int i = 0; i < kOperations; ++i) {
    const int expected = i % 2 == 0 ? i + size() - 1 : i + i % size();
    for (const auto& buffer : data[static_cast<std::size_t>(i)])
      for (const float value : buffer) ASSERT_EQ(value, static_cast<float>(expected)) << i;
  }
}

TEST_P(Conformance, GroupsInOppositeOrder_AsyncOperationsDoNotBlockEachOther) {
  constexpr int kGroups = 4;
  std::vector<std::vector<std::shared_ptr<Communicator>>> groups;
  for (int g = 0; g < kGroups; ++g) groups.push_back(world_.CreateAll("group" + std::to_string(g)));
  std::vector<std::vector<float>> data;
  data.reserve(static_cast<std::size_t>(kGroups * size()));
  std::vector<Pending> pending;
  for (int rank = 0; rank < size(); ++rank) {
    for (int i = 0; i < kGroups; ++i) {
      const int g = rank % 2 == 0 ? i : kGroups - 1 - i;
      data.emplace_back(200'000, static_cast<float>(g));
      Operation op = AllReduceOp(data.back());
      op.stream = world_.NewStream();
      pending.push_back(Pending::Of(
          *groups[static_cast<std::size_t>(g)][static_cast<std::size_t>(rank)], std::move(op)));
    }
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  for (int rank = 0; rank < size(); ++rank) {
    const int last = rank % 2 == 0 ? kGroups - 1 : 0;
    EXPECT_EQ(data[static_cast<std::size_t>(rank * kGroups + kGroups - 1)][7],
              static_cast<float>(last * size()));
  }
}

TEST_P(Conformance, SendRecv_TagsOutOfOrder_MatchByTagThenByOrder) {
  if (!GetParam().transport.has_tags) GTEST_SKIP() << "messages have no tags here";
  if (size() < 2) GTEST_SKIP() << "needs a peer";
  constexpr std::uint32_t kTags = 5;
  constexpr int kEach = 4;
  std::vector<std::vector<float>> sent;
  std::vector<std::vector<float>> got(kTags * kEach, std::vector<float>(100));
  std::vector<Pending> pending;
  sent.reserve(kTags * kEach);
  for (int i = 0; i < kEach; ++i) {
    for (std::uint32_t tag = 0; tag < kTags; ++tag) {
      sent.emplace_back(100, static_cast<float>(tag * 100 + static_cast<unsigned>(i)));
      pending.push_back(Pending::Of(world_.at(0), SendOp(sent.back(), 1, tag)));
    }
  }
  for (std::uint32_t tag = kTags; tag-- > 0;) {
    for (int i = 0; i < kEach; ++i)
      pending.push_back(
          Pending::Of(world_.at(1), RecvOp(got[tag * kEach + static_cast<unsigned>(i)], 0, tag)));
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  for (std::uint32_t tag = 0; tag < kTags; ++tag) {
    for (unsigned i = 0; i < kEach; ++i)
      EXPECT_EQ(got[tag * kEach + i], std::vector<float>(100, static_cast<float>(tag * 100 + i)));
  }
}

TEST_P(Conformance, SendRecv_EveryPairBothWays_DoesNotWaitForACollective) {
  if (!GetParam().transport.has_tags) GTEST_SKIP() << "messages have no tags here";
  // Rank 0 has entered a collective that the others enter last.
  std::vector<std::vector<float>> sums(static_cast<std::size_t>(size()),
                                       std::vector<float>(1'000'000, 1));
  Pending collective = Pending::Of(world_.at(0), AllReduceOp(sums[0]));
  std::vector<std::vector<float>> buffers;
  buffers.reserve(static_cast<std::size_t>(2 * size() * size()));
  std::vector<Pending> pending;
  for (int a = 0; a < size(); ++a) {
    for (int b = 0; b < size(); ++b) {
      if (a == b) continue;
      buffers.emplace_back(100'000, static_cast<float>(a * 10 + b));
      pending.push_back(Pending::Of(world_.at(a), SendOp(buffers.back(), b, 0)));
      buffers.emplace_back(100'000);
      pending.push_back(Pending::Of(world_.at(b), RecvOp(buffers.back(), a, 0)));
    }
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  for (std::size_t i = 0; i + 1 < buffers.size(); i += 2) EXPECT_EQ(buffers[i], buffers[i + 1]);
  pending = {collective};
  for (int r = 1; r < size(); ++r)
    pending.push_back(Pending::Of(world_.at(r), AllReduceOp(sums[static_cast<std::size_t>(r)])));
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
}

// Each rank has the ranks in another order, sends first or last.
TEST_P(Conformance, Batch_EveryPairBothWays_InAnyOrder) {
  const auto n = static_cast<std::size_t>(size());
  for (const std::size_t count : {0u, 1u, 50'000u}) {
    std::vector<std::vector<float>> sent(n * n);
    std::vector<std::vector<float>> got(n * n);
    std::vector<Pending> pending;
    for (std::size_t rank = 0; rank < n; ++rank) {
      std::vector<Operation> sends;
      std::vector<Operation> recvs;
      for (std::size_t step = 1; step < n; ++step) {
        const std::size_t peer = (rank + (rank % 2 == 0 ? step : n - step)) % n;
        sent[rank * n + peer].assign(count, static_cast<float>(rank * n + peer));
        got[rank * n + peer].assign(count, -1);
        sends.push_back(SendOp(sent[rank * n + peer], static_cast<int>(peer), 3));
        recvs.push_back(RecvOp(got[rank * n + peer], static_cast<int>(peer), 3));
      }
      std::vector<Operation>& batch = rank % 3 == 0 ? sends : recvs;
      const std::vector<Operation>& rest = rank % 3 == 0 ? recvs : sends;
      batch.insert(batch.end(), rest.begin(), rest.end());
      const std::vector<Pending> submitted =
          Pending::OfBatch(world_.at(static_cast<int>(rank)), std::move(batch));
      pending.insert(pending.end(), submitted.begin(), submitted.end());
    }
    for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
    for (std::size_t from = 0; from < n; ++from) {
      for (std::size_t to = 0; to < n; ++to) EXPECT_EQ(got[to * n + from], sent[from * n + to]);
    }
  }
}

TEST_P(Conformance, Batch_WithOneThatCannotBe_IsRefusedAsAWhole) {
  if (size() < 2) GTEST_SKIP() << "needs a peer";
  std::vector<float> data(4);
  Operation elsewhere = SendOp(data, 1, 0);
  elsewhere.stream = &data;
  for (const Operation& wrong : {SendOp(data, 0, 0), BarrierOp(), elsewhere}) {
    std::vector<Communicator::Submission> batch(2);
    batch[0] = {.op = SendOp(data, 1, 0), .done = [](const Status&) { ADD_FAILURE() << "ran"; }};
    batch[1] = {.op = wrong, .done = [](const Status&) { ADD_FAILURE() << "ran"; }};
    const auto seqs = world_.at(0).SubmitBatch(std::move(batch));
    ASSERT_FALSE(seqs.ok()) << Describe(wrong);
    EXPECT_EQ(seqs.status().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(Pending::OfBatch(world_.at(0), {}).empty());
  const std::vector<Pending> sends =
      Pending::OfBatch(world_.at(0), {SendOp(data, 1, 0), SendOp(data, 1, 0)});
  EXPECT_EQ(sends[1].seq, 2u);
  std::vector<float> got(4);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(Pending::Of(world_.at(1), RecvOp(got, 0, 0)).Wait().ok());
  for (const Pending& send : sends) EXPECT_TRUE(send.Wait().ok());
}

TEST_P(Conformance, SendRecv_MoreThanTheUnexpectedLimit_WaitsForItsRecvs) {
  if (size() != 2) GTEST_SKIP() << "one pair is enough";
  constexpr std::size_t kFloats = 4u << 20;  // 16 MiB a message, 5 messages: over 64 MiB.
  std::vector<float> sent(kFloats);
  std::iota(sent.begin(), sent.end(), 0.0f);
  std::vector<Pending> sends;
  for (std::uint32_t i = 0; i < 5; ++i)
    sends.push_back(Pending::Of(world_.at(0), SendOp(sent, 1, i)));
  std::vector<float> got(kFloats);
  for (std::uint32_t i = 0; i < 5; ++i) {
    std::fill(got.begin(), got.end(), -1.0f);
    EXPECT_TRUE(Pending::Of(world_.at(1), RecvOp(got, 0, i)).Wait().ok());
    EXPECT_TRUE(got == sent);
  }
  for (const Pending& one : sends) EXPECT_TRUE(one.Wait().ok());
}

TEST_P(Conformance, SendRecv_ZeroElements) {
  if (size() < 2) GTEST_SKIP() << "needs a peer";
  std::vector<float> none;
  const Pending send = Pending::Of(world_.at(0), SendOp(none, 1, 3));
  EXPECT_TRUE(Pending::Of(world_.at(1), RecvOp(none, 0, 3)).Wait().ok());
  EXPECT_TRUE(send.Wait().ok());
}

TEST_P(Conformance, RecvFromAny_TakesWhatCameFirst_AndIsToldFromWhom) {
  if (!GetParam().transport.has_tags) GTEST_SKIP() << "messages have no tags here";
  if (size() < 2) GTEST_SKIP() << "needs a peer";
  // One message after the other is on rank 0: the later recv with another tag proves it.
  std::vector<float> sent(3), mark(1), got(3);
  for (int round = 0; round < 2; ++round) {
    for (int from = size() - 1; from > 0; --from) {
      sent.assign(3, static_cast<float>(10 * round + from));
      EXPECT_TRUE(Pending::Of(world_.at(from), SendOp(sent, 0, 1)).Wait().ok());
      EXPECT_TRUE(Pending::Of(world_.at(from), SendOp(mark, 0, 2)).Wait().ok());
      EXPECT_TRUE(Pending::Of(world_.at(0), RecvOp(mark, from, 2)).Wait().ok());
    }
  }
  for (int round = 0; round < 2; ++round) {
    for (int from = size() - 1; from > 0; --from) {
      int sender = -1;
      Operation op = RecvOp(got, kAnyPeer, 1);
      op.sender = &sender;
      EXPECT_TRUE(Pending::Of(world_.at(0), op).Wait().ok());
      EXPECT_EQ(sender, from);
      EXPECT_EQ(got, std::vector<float>(3, static_cast<float>(10 * round + from)));
    }
  }
}

TEST_P(Conformance, RecvFromAny_SharesATagWithNamedRecvs_InOrderOfSubmission) {
  if (!GetParam().transport.has_tags) GTEST_SKIP() << "messages have no tags here";
  if (size() < 3) GTEST_SKIP() << "needs two peers";
  std::vector<std::vector<float>> got(5, std::vector<float>(50'000));
  std::vector<int> senders(5, -1);
  const int order[] = {kAnyPeer, 1, kAnyPeer, 2, kAnyPeer};
  std::vector<Pending> recvs;
  for (std::size_t i = 0; i < 5; ++i) {
    Operation op = RecvOp(got[i], order[i], 9);
    op.sender = &senders[i];
    recvs.push_back(Pending::Of(world_.at(0), op));
  }
  const auto send = [&](int from, float value) {
    std::vector<float> sent(50'000, value);
    EXPECT_TRUE(Pending::Of(world_.at(from), SendOp(sent, 0, 9)).Wait().ok());
  };
  send(1, 1);  // The first recv of all.
  EXPECT_TRUE(recvs[0].Wait().ok());
  send(2, 2);  // Not the one that names rank 1, but the next.
  EXPECT_TRUE(recvs[2].Wait().ok());
  EXPECT_FALSE(recvs[1].IsDone());
  send(1, 3);
  EXPECT_TRUE(recvs[1].Wait().ok());
  send(1, 4);
  EXPECT_TRUE(recvs[4].Wait().ok());
  send(2, 5);
  EXPECT_TRUE(recvs[3].Wait().ok());
  const float values[] = {1, 3, 2, 5, 4};
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(got[i], std::vector<float>(50'000, values[i]));
  EXPECT_EQ(senders, (std::vector<int>{1, 1, 2, 2, 1}));
}

TEST_P(Conformance, RecvFromAny_OfMessagesBeyondTheUnexpectedLimit_GetsThemAll) {
  if (!GetParam().transport.has_tags) GTEST_SKIP() << "messages have no tags here";
  if (size() != 3) GTEST_SKIP() << "two senders are enough";
  constexpr std::size_t kFloats = 17u << 20;  // 68 MiB: waits in its sender's process.
  constexpr int kEach = 2;
  std::vector<std::vector<float>> sent = {
      {}, std::vector<float>(kFloats, 1.0f), std::vector<float>(kFloats, 2.0f)};
  std::vector<Pending> sends;
  for (int from = 1; from <= 2; ++from) {
    for (int i = 0; i < kEach; ++i) {
      sends.push_back(
          Pending::Of(world_.at(from), SendOp(sent[static_cast<std::size_t>(from)], 0, 4)));
    }
  }
  std::vector<float> got(kFloats);
  std::vector<int> count(3);
  for (int i = 0; i < 2 * kEach; ++i) {
    int sender = -1;
    Operation op = RecvOp(got, kAnyPeer, 4);
    op.sender = &sender;
    ASSERT_TRUE(Pending::Of(world_.at(0), op).Wait().ok());
    ASSERT_TRUE(sender == 1 || sender == 2) << sender;
    ++count[static_cast<std::size_t>(sender)];
    EXPECT_TRUE(got == sent[static_cast<std::size_t>(sender)]);
  }
  EXPECT_EQ(count, (std::vector<int>{0, kEach, kEach}));
  for (const Pending& one : sends) EXPECT_TRUE(one.Wait().ok());
}

TEST_P(Conformance, ImpossibleOperations_AreRefusedAtOnce) {
  std::vector<float> data(4);
  std::vector<std::vector<float>> outputs(static_cast<std::size_t>(size()) + 1,
                                          std::vector<float>(4));
  std::vector<Operation> impossible = {SendOp(data, 0, 0),
                                       RecvOp(data, size(), 0),
                                       BroadcastOp(data, size()),
                                       BroadcastOp(data, -1),
                                       AllReduceOp(data, ReduceOp::kNone),
                                       AllGatherOp(data, outputs)};
  impossible.push_back(AllReduceOp(data));
  impossible.back().data = nullptr;
  impossible.push_back(AllReduceOp(data, ReduceOp::kAvg));
  impossible.back().dtype = DataType::kBool;
  impossible.push_back(AllReduceOp(data));
  impossible.back().count = ~std::size_t{0} / 2;
  if (size() == 1) impossible.push_back(RecvOp(data, kAnyPeer, 0));
  for (const Operation& op : impossible) {
    const auto result = world_.at(0).Submit(op, [](const Status&) { ADD_FAILURE() << "ran"; });
    ASSERT_FALSE(result.ok()) << Describe(op);
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
  }
  ExpectAllOk(world_.RunAll([&](int) { return BarrierOp(); }));
}

TEST_P(Conformance, Completions_MaySubmitTheNextOperation) {
  struct Chain {
    Communicator* communicator;
    std::vector<float> data{1.0f};
    int left = 50;
    std::mutex mutex;
    std::condition_variable changed;
    void Next() {
      const auto result =
          communicator->Submit(AllReduceOp(data, ReduceOp::kMax), [this](const Status& status) {
            EXPECT_TRUE(status.ok());
            std::unique_lock lock(mutex);
            if (--left == 0) return changed.notify_all();
            lock.unlock();
            Next();
          });
      EXPECT_TRUE(result.ok());
    }
  };
  std::deque<Chain> chains;
  for (int r = 0; r < size(); ++r) chains.emplace_back().communicator = &world_.at(r);
  for (Chain& chain : chains) chain.Next();
  for (Chain& chain : chains) {
    std::unique_lock lock(chain.mutex);
    EXPECT_TRUE(chain.changed.wait_for(lock, kBound, [&] { return chain.left == 0; }));
  }
}

TEST_P(Conformance, GroupMadeLateOnOneRank_TheOthersWait) {
  std::vector<std::shared_ptr<Communicator>> late(static_cast<std::size_t>(size()));
  std::vector<std::vector<float>> data(static_cast<std::size_t>(size()), {1.0f});
  std::vector<Pending> pending;
  for (int r = size() - 1; r >= 0; --r) {
    const auto i = static_cast<std::size_t>(r);
    late[i] = world_.Create(r, world_.Spec("late", r));
    Operation op = AllReduceOp(data[i]);
    op.stream = world_.NewStream();
    pending.push_back(Pending::Of(*late[i], std::move(op)));
    // The others are at work meanwhile.
    ExpectAllOk(world_.RunAll([&](int) { return BarrierOp(); }));
    EXPECT_TRUE(r == 0 || !pending.back().IsDone());
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  for (const auto& result : data) EXPECT_EQ(result[0], static_cast<float>(size()));
}

}  // namespace
}  // namespace resilient::testing
