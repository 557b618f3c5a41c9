// Goal: every transport keeps the contract of <resilient/communicator.h> where nothing fails.
// Method: one suite over a list of transports; ranks are fabrics of one process; results are
// compared bit for bit with a serial reference.

#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <random>

#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kFloat64, DataType::kBFloat16,
                               DataType::kInt64,   DataType::kUInt8,   DataType::kBool,
                               DataType::kInt32};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax};

float FromBFloat16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// Round to nearest even by looking at both neighbours; slow and obviously right.
std::uint16_t ToBFloat16(float value) {
  if (value != value) return 0x7fc0;
  const auto low = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  const auto high = static_cast<std::uint16_t>(low + 1);
  const double down = std::abs(double{value} - FromBFloat16(low));
  const double up = std::abs(double{FromBFloat16(high)} - double{value});
  if (down == up) return (low & 1) == 0 ? low : high;
  return down < up ? low : high;
}

template <typename T>
T Element(const Bytes& bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

// The serial reference: one element, ranks in order. Acc is what is accumulated in.
template <typename T, typename Acc, typename In, typename Out>
void ReferenceOf(const std::vector<Bytes>& inputs, ReduceOp op, std::size_t count, Bytes& result,
                 In in, Out out) {
  for (std::size_t i = 0; i < count; ++i) {
    Acc acc = in(Element<T>(inputs[0], i));
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      const Acc next = in(Element<T>(inputs[rank], i));
      if (op == ReduceOp::kSum || op == ReduceOp::kAvg) acc = static_cast<Acc>(acc + next);
      if (op == ReduceOp::kMin && (next < acc || next != next)) acc = next;
      if (op == ReduceOp::kMax && (next > acc || next != next)) acc = next;
    }
    if (op == ReduceOp::kAvg) acc = static_cast<Acc>(acc / static_cast<Acc>(inputs.size()));
    const T value = out(acc);
    std::memcpy(result.data() + i * sizeof(T), &value, sizeof(T));
  }
}

Bytes Reference(const std::vector<Bytes>& inputs, DataType type, ReduceOp op, std::size_t count) {
  Bytes result(count * SizeOf(type));
  const auto same = [](auto value) { return value; };
  switch (type) {
    case DataType::kFloat32:
      ReferenceOf<float, float>(inputs, op, count, result, same, same);
      break;
    case DataType::kFloat64:
      ReferenceOf<double, double>(inputs, op, count, result, same, same);
      break;
    case DataType::kBFloat16:
      ReferenceOf<std::uint16_t, float>(inputs, op, count, result, FromBFloat16, ToBFloat16);
      break;
    case DataType::kInt64:
      ReferenceOf<std::int64_t, std::int64_t>(inputs, op, count, result, same, same);
      break;
    case DataType::kUInt8:
      ReferenceOf<std::uint8_t, unsigned>(
          inputs, op, count, result, [](std::uint8_t v) { return unsigned{v}; },
          [](unsigned v) { return static_cast<std::uint8_t>(v); });
      break;
    case DataType::kBool: {
      // MAX is "or", MIN is "and"; SUM is "or" as well.
      const ReduceOp as = op == ReduceOp::kSum ? ReduceOp::kMax : op;
      ReferenceOf<std::uint8_t, std::uint8_t>(inputs, as, count, result, same, same);
      break;
    }
    case DataType::kInt32:
      ReferenceOf<std::int32_t, std::int32_t>(inputs, op, count, result, same, same);
      break;
  }
  return result;
}

template <typename T>
void Put(Bytes& bytes, std::size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
}

// Values whose sum depends on the order of addition, and which no sum overflows.
Bytes RandomInput(DataType type, std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count * SizeOf(type));
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t bits = random();
    const double unit = static_cast<double>(bits >> 11) / 9007199254740992.0 - 0.5;
    const double wide = unit * (bits & 1 ? 1e6 : 1e-3);
    switch (type) {
      case DataType::kFloat32:
        Put(bytes, i, static_cast<float>(wide));
        break;
      case DataType::kFloat64:
        Put(bytes, i, wide);
        break;
      case DataType::kBFloat16:
        Put(bytes, i, ToBFloat16(static_cast<float>(wide)));
        break;
      case DataType::kInt64:
        Put(bytes, i, static_cast<std::int64_t>(bits) / 16);
        break;
      case DataType::kUInt8:
        Put(bytes, i, static_cast<std::uint8_t>(bits));
        break;
      case DataType::kBool:
        Put(bytes, i, static_cast<std::uint8_t>(bits & 1));
        break;
      case DataType::kInt32:
        Put(bytes, i, static_cast<std::int32_t>(bits) / 16);
        break;
    }
  }
  return bytes;
}

Operation AllReduce(DataType type, ReduceOp reduce, Bytes& data) {
  Operation op;
  op.kind = OpKind::kAllReduce;
  op.dtype = type;
  op.reduce = reduce;
  op.data = data.data();
  op.count = data.size() / SizeOf(type);
  return op;
}

struct Case {
  Transport transport;
  int size = 1;
};

class Conformance : public ::testing::TestWithParam<Case> {
 protected:
  int size() const { return GetParam().size; }
  World world_{GetParam().transport, GetParam().size};
};

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (const Transport& transport : AllTransports()) {
    for (int size = 1; size <= 5; ++size) cases.push_back({.transport = transport, .size = size});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Transports, Conformance, ::testing::ValuesIn(AllCases()),
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

TEST_P(Conformance, AllReduce_EveryTypeAndOp_EqualsTheSerialReferenceBitForBit) {
  const auto n = static_cast<std::size_t>(size());
  std::uint64_t seed = 1;
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{3}, n - 1,
                                  std::size_t{1000}, std::size_t{50'000}}) {
    for (const DataType type : kTypes) {
      for (const ReduceOp op : kOps) {
        if (type == DataType::kBool && op == ReduceOp::kAvg) continue;
        std::vector<Bytes> inputs;
        for (std::size_t r = 0; r < n; ++r) inputs.push_back(RandomInput(type, count, ++seed));
        std::vector<Bytes> data = inputs;
        ExpectAllOk(world_.RunAll(
            [&](int rank) { return AllReduce(type, op, data[static_cast<std::size_t>(rank)]); }));
        const Bytes expected = Reference(inputs, type, op, count);
        for (std::size_t r = 0; r < n; ++r) {
          ASSERT_TRUE(data[r] == expected) << "rank " << r << ": " << DataTypeName(type) << " "
                                           << ReduceOpName(op) << " " << count;
        }
      }
    }
  }
}

TEST_P(Conformance, AllReduce_AMillionElements_EqualsTheSerialReference) {
  constexpr std::size_t kCount = 1'000'003;
  const auto n = static_cast<std::size_t>(size());
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kUInt8}) {
    std::vector<Bytes> inputs;
    for (std::size_t r = 0; r < n; ++r) inputs.push_back(RandomInput(type, kCount, 77 + r));
    std::vector<Bytes> data = inputs;
    ExpectAllOk(world_.RunAll([&](int rank) {
      return AllReduce(type, ReduceOp::kAvg, data[static_cast<std::size_t>(rank)]);
    }));
    const Bytes expected = Reference(inputs, type, ReduceOp::kAvg, kCount);
    for (std::size_t r = 0; r < n; ++r) EXPECT_TRUE(data[r] == expected) << r;
  }
}

TEST_P(Conformance, AllReduce_Nan_WinsMinAndMax) {
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

TEST_P(Conformance, Broadcast_EveryRootAndSize) {
  for (const std::size_t count : {0, 1, 1000, 300'000}) {
    for (int root = 0; root < size(); ++root) {
      std::vector<std::vector<float>> data;
      for (int r = 0; r < size(); ++r) data.emplace_back(count, static_cast<float>(r + 1));
      ExpectAllOk(world_.RunAll(
          [&](int r) { return BroadcastOp(data[static_cast<std::size_t>(r)], root); }));
      for (const auto& result : data)
        EXPECT_EQ(result, std::vector<float>(count, static_cast<float>(root + 1)));
    }
  }
}

TEST_P(Conformance, AllGather_EverySize_AlsoInPlace) {
  const auto n = static_cast<std::size_t>(size());
  for (const std::size_t count : {0, 1, 1000, 300'000}) {
    for (const bool in_place : {false, true}) {
      std::vector<std::vector<float>> data;
      std::vector<std::vector<std::vector<float>>> outputs(n);
      for (std::size_t r = 0; r < n; ++r) {
        data.emplace_back(count, static_cast<float>(r + 1));
        outputs[r].assign(n, std::vector<float>(count));
        if (in_place) outputs[r][r] = data[r];
      }
      ExpectAllOk(world_.RunAll([&](int rank) {
        const auto r = static_cast<std::size_t>(rank);
        return AllGatherOp(in_place ? outputs[r][r] : data[r], outputs[r]);
      }));
      for (const auto& of_rank : outputs) EXPECT_EQ(of_rank, outputs[0]);
      for (std::size_t r = 0; r < n; ++r) EXPECT_EQ(outputs[0][r], data[r]);
    }
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
      pending.push_back(
          Pending::Of(*groups[static_cast<std::size_t>(g)][static_cast<std::size_t>(rank)],
                      AllReduceOp(data.back())));
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
    pending.push_back(Pending::Of(*late[i], AllReduceOp(data[i])));
    // The others are at work meanwhile.
    ExpectAllOk(world_.RunAll([&](int) { return BarrierOp(); }));
    EXPECT_TRUE(r == 0 || !pending.back().IsDone());
  }
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  for (const auto& result : data) EXPECT_EQ(result[0], static_cast<float>(size()));
}

}  // namespace
}  // namespace resilient::testing
