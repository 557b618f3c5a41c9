// Goal: an element is reduced to the same bits whatever operation carries it. Method: the same
// numbers, whose sums depend on the order of addition, cut into operations of random sizes, kinds
// and order, at random offsets in memory, over every transport and with the least shared memory;
// each result is compared bit for bit with one serial reduction of all of them.

#include <algorithm>
#include <cstring>

#include "runtime/base/random.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/fault_points.h"
#include "tests/unit/comm/serial_reference.h"

namespace resilient::testing {
namespace {

constexpr std::size_t kElements = kSanitized ? 40'000 : 150'000;
constexpr int kCuts = kSanitized ? 2 : 4;

struct Case {
  Transport transport;
  int size = 2;
  friend void PrintTo(const Case& one, std::ostream* out) {
    *out << one.transport.name << one.size;
  }
};

std::vector<Case> AllCases() {
  std::vector<Transport> transports = AllTransports();
  for (const Transport& checksummed : ChecksummedTransports()) transports.push_back(checksummed);
  std::vector<Case> cases;
  for (const int size : {2, 3, 5}) {
    if (kThreadSanitized && size > 3) continue;
    for (const Transport& transport : transports)
      cases.push_back({.transport = transport, .size = size});
    const auto least = [size](const Clock& clock, CommunicatorEvents& events) {
      CpuFabricOptions options;
      options.shm_limit = LeastShmLimit(size);
      return MakeCpuFabric(std::move(options), clock, events);
    };
    cases.push_back({.transport = {.name = "shmLeast", .make = least}, .size = size});
  }
  return cases;
}

// Some elements that go in one operation.
struct Bucket {
  std::size_t begin = 0;
  std::size_t count = 0;
  OpKind kind = OpKind::kAllReduce;
  int root = -1;
  std::vector<std::size_t> parts;  // Of a reduce_scatter: what each rank gets.
};

class Buckets : public ::testing::TestWithParam<Case> {
 protected:
  int size() const { return GetParam().size; }

  std::vector<Bucket> RandomBuckets(Random& random) {
    std::vector<Bucket> buckets;
    const auto n = static_cast<std::uint64_t>(size());
    for (std::size_t begin = 0; begin < kElements; begin += buckets.back().count) {
      const std::size_t most = random.Below(2) == 0 ? 1'000 : kElements / 2;
      Bucket& bucket = buckets.emplace_back();
      bucket.begin = begin;
      bucket.count = std::min(kElements - begin, 1 + random.Below(most));
      constexpr OpKind kKinds[] = {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter};
      bucket.kind = kKinds[random.Below(3)];
      if (bucket.kind == OpKind::kReduce) bucket.root = static_cast<int>(random.Below(n));
      std::size_t left = bucket.count;
      for (int rank = 0; rank < size(); ++rank) {
        const std::size_t part = rank + 1 == size() ? left : random.Below(left + 1);
        bucket.parts.push_back(part);
        left -= part;
      }
    }
    for (std::size_t i = buckets.size(); i > 1; --i)
      std::swap(buckets[i - 1], buckets[random.Below(i)]);
    return buckets;
  }

  Random random_{17};
};

INSTANTIATE_TEST_SUITE_P(Cuts, Buckets, ::testing::ValuesIn(AllCases()), [](const auto& info) {
  return info.param.transport.name + std::to_string(info.param.size);
});

// The memory of one rank: it begins anywhere, as far as the type allows.
class Shifted {
 public:
  Shifted(const Bytes& values, std::size_t shift) : values_(shift + values.size()), shift_(shift) {
    std::memcpy(At(0), values.data(), values.size());
  }
  std::byte* At(std::size_t byte) { return values_.data() + shift_ + byte; }

 private:
  Bytes values_;
  std::size_t shift_;
};

TEST_P(Buckets, GiveTheSameBitsHoweverTheyAreCut) {
  World world(GetParam().transport, size());
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    const std::size_t element = SizeOf(type);
    std::vector<Bytes> inputs;
    for (int rank = 0; rank < size(); ++rank)
      inputs.push_back(RandomElements(type, ReduceOp::kSum, kElements, random_));
    const Bytes expected = ReduceSerially(type, ReduceOp::kSum, 1.0, inputs);
    for (int cut = 0; cut < kCuts; ++cut) {
      const std::vector<Bucket> buckets = RandomBuckets(random_);
      std::vector<std::vector<Pending>> pending(buckets.size());
      std::vector<Shifted> memory;
      for (const Bytes& input : inputs) memory.emplace_back(input, random_.Below(64) * element);
      for (std::size_t i = 0; i < buckets.size(); ++i) {
        const Bucket& bucket = buckets[i];
        for (int rank = 0; rank < size(); ++rank) {
          const auto me = static_cast<std::size_t>(rank);
          Operation op;
          op.kind = bucket.kind;
          op.dtype = type;
          op.reduce = ReduceOp::kSum;
          op.root = bucket.root;
          op.data = memory[me].At(bucket.begin * element);
          op.count = bucket.count;
          if (bucket.kind == OpKind::kReduceScatter) {
            std::size_t at = bucket.begin;
            for (const std::size_t part : bucket.parts) {
              op.inputs.push_back({.data = memory[me].At(at * element), .count = part});
              at += part;
            }
            op.data = op.inputs[me].data;  // In place.
            op.count = bucket.parts[me];
          }
          pending[i].push_back(Pending::Of(world.at(rank), std::move(op)));
        }
      }
      for (std::size_t i = 0; i < buckets.size(); ++i) {
        const Bucket& bucket = buckets[i];
        std::size_t of_rank = bucket.begin;
        for (int rank = 0; rank < size(); ++rank) {
          const auto me = static_cast<std::size_t>(rank);
          ASSERT_TRUE(pending[i][me].Wait().ok()) << pending[i][me].Wait().ToString();
          const bool scattered = bucket.kind == OpKind::kReduceScatter;
          const std::size_t begin = scattered ? of_rank : bucket.begin;
          const std::size_t count = scattered ? bucket.parts[me] : bucket.count;
          of_rank += bucket.parts[me];
          if (bucket.kind == OpKind::kReduce && rank != bucket.root) continue;
          ASSERT_EQ(std::memcmp(memory[me].At(begin * element), expected.data() + begin * element,
                                count * element),
                    0)
              << OpKindName(bucket.kind) << " of " << bucket.count << " elements from "
              << bucket.begin << " on rank " << rank;
        }
      }
    }
  }
}

}  // namespace
}  // namespace resilient::testing
