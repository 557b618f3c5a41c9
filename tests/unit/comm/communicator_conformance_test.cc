// Goal: every transport keeps the contract of <resilient/communicator.h> where nothing fails.
// Method: one suite over a list of transports; ranks are fabrics of one process; results are
// compared bit for bit with a serial reference.

#include <bit>
#include <cstring>
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
  const Transport tcp{.name = "tcp", .make = [](const Clock& clock, CommunicatorEvents& events) {
                        return MakeCpuFabric({}, clock, events);
                      }};
  std::vector<Case> cases;
  for (int size = 1; size <= 5; ++size) cases.push_back({.transport = tcp, .size = size});
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

}  // namespace
}  // namespace resilient::testing
