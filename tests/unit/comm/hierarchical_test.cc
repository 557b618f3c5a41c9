// Goal: reductions by hosts give what a serial program gives that combines host by host, whatever
// the layout, and fail on all ranks alike. Method: worlds whose ranks believe to be on several
// hosts, compared bit for bit with the serial reference.

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include <gmock/gmock.h>

#include "runtime/comm/collective.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/step_observer.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/hierarchical_hosts.h"
#include "tests/unit/comm/trial.h"

namespace resilient::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<Hosts> Layouts() {
  const Hosts least{"TwoAndOne", {0, 0, 1}};
  const Hosts interleaved{"Interleaved", {0, 1, 0, 1}};
  if (kThreadSanitized) return {least, interleaved};
  return {least,       {"TwoAndTwo", {0, 0, 1, 1}},         {"OneAndThree", {0, 1, 1, 1}},
          interleaved, {"ThreeOneTwo", {0, 0, 0, 1, 2, 2}}, {"Mixed", {2, 0, 1, 0, 2, 2, 1}}};
}

Transport ByHosts(std::function<int(int)> host_of, bool hierarchical = true) {
  return {.name = "hierarchical",
          .make =
              [hierarchical](const Clock& clock, CommunicatorEvents& events) {
                CpuFabricOptions options;
                options.hierarchical = hierarchical;
                return MakeCpuFabric(std::move(options), clock, events);
              },
          .host_of = std::move(host_of)};
}

class Hierarchical : public ::testing::TestWithParam<Hosts> {
 protected:
  int size() const { return GetParam().size(); }
  void RunAndCheck(Call call) {
    call.hosts = GetParam().Ranks();
    Trial trial(call, random_);
    ExpectAllOk(world_.RunAll([&](int rank) { return trial.At(rank); }));
    for (int rank = 0; rank < size(); ++rank) ASSERT_EQ(trial.WhatIsWrong(rank), "");
  }
  Call Of(OpKind kind, DataType type, ReduceOp reduce, std::size_t count) const {
    Call call{.kind = kind, .dtype = type, .reduce = reduce};
    if (reduce == ReduceOp::kPremulSum) call.factor = 2.0;
    if (kind == OpKind::kReduce) call.root = size() - 1;
    SetCounts(call, size(), count);
    return call;
  }

  World world_{ByHosts([hosts = GetParam().of_rank](int rank) {
                 return hosts[static_cast<std::size_t>(rank)];
               }),
               GetParam().size()};
  Random random_{17};
};

INSTANTIATE_TEST_SUITE_P(Layouts, Hierarchical, ::testing::ValuesIn(Layouts()),
                         [](const auto& info) { return info.param.name; });

TEST_P(Hierarchical, EveryTypeAndOp_EqualTheSerialReferenceBitForBit) {
  const auto n = static_cast<std::size_t>(size());
  for (const OpKind kind : kReductions) {
    for (const DataType type : kTypes) {
      for (const ReduceOp reduce : kReduceOps) {
        if (!CanReduce(type, reduce)) continue;
        // One home, and one a rank.
        for (const std::size_t count : {std::size_t{1}, n - 1, std::size_t{20'003}}) {
          if (count > n && kind == OpKind::kReduceScatter) continue;
          Call call = Of(kind, type, reduce, count);
          call.in_place = count == 1;
          RunAndCheck(call);
        }
      }
    }
  }
}

TEST_P(Hierarchical, Large_EqualTheSerialReferenceBitForBit) {
  for (const OpKind kind : kReductions) {
    const std::size_t share = kind == OpKind::kReduceScatter ? static_cast<std::size_t>(size()) : 1;
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kUInt8}) {
      Call call = Of(kind, type, ReduceOp::kAvg, 600'011 / share);
      const bool rooted = kind == OpKind::kReduce;
      for (const int root : rooted ? std::vector<int>{0, size() - 1} : std::vector<int>{-1}) {
        call.root = root;
        RunAndCheck(call);
      }
    }
  }
}

TEST_P(Hierarchical, ReduceScatter_EveryRankAnotherCount_AlsoZero) {
  for (const std::size_t unit : {1, 30'011}) {
    for (const bool in_place : {false, true}) {
      Call call = Of(OpKind::kReduceScatter, DataType::kFloat32, ReduceOp::kSum, 0);
      call.in_place = in_place;
      for (auto& row : call.counts)
        for (std::size_t to = 0; to < row.size(); ++to) row[to] = to * unit;
      RunAndCheck(call);
    }
  }
}

TEST_P(Hierarchical, NothingToReduce_StillWaitsForEachOther) {
  for (const OpKind kind : kReductions)
    RunAndCheck(Of(kind, DataType::kFloat32, ReduceOp::kSum, 0));
}

// What would overflow or lose its last bits if partial results had the type of the data.
TEST_P(Hierarchical, PartialResults_AreWiderThanSmallTypes) {
  const auto n = static_cast<std::size_t>(size());
  std::vector<std::vector<std::uint16_t>> halves(n, {0x7bff, 0x3c00});  // 65504, 1
  std::vector<std::vector<std::int8_t>> bytes(n, {127, -128});
  ExpectAllOk(world_.RunAll([&](int r) {
    Operation op = MakeOp(OpKind::kAllReduce, DataType::kFloat16, halves[static_cast<size_t>(r)]);
    op.reduce = ReduceOp::kAvg;
    return op;
  }));
  ExpectAllOk(world_.RunAll([&](int r) {
    Operation op = MakeOp(OpKind::kAllReduce, DataType::kInt8, bytes[static_cast<size_t>(r)]);
    op.reduce = ReduceOp::kAvg;
    return op;
  }));
  for (const auto& half : halves) EXPECT_THAT(half, ElementsAre(0x7bff, 0x3c00));
  for (const auto& byte : bytes) EXPECT_THAT(byte, ElementsAre(127, -128));
}

// Sums of which the order can be seen: with the other one the small numbers are lost.
std::vector<float> SumOf(World& world, const std::vector<float>& values) {
  std::vector<std::vector<float>> data;
  for (const float value : values) data.push_back({value});
  ExpectAllOk(
      world.RunAll([&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); }));
  std::vector<float> sums;
  for (const auto& sum : data) sums.push_back(sum[0]);
  return sums;
}

TEST(ReductionOrder, GoesByHostsOnlyWhereSomeButNotAllShareOne) {
  const std::vector<float> values = {1e8f, 1.0f, -1e8f, 1.0f};
  const float in_rank_order = 1.0f;  // ((1e8 + 1) - 1e8) + 1
  const float by_pairs = 0.0f;       // (1e8 + 1) + (-1e8 + 1)
  const float interleaved = 2.0f;    // (1e8 - 1e8) + (1 + 1)
  struct {
    std::vector<int> hosts;
    bool hierarchical;
    float sum;
  } cases[] = {{{0, 0, 1, 1}, true, by_pairs},       {{0, 1, 0, 1}, true, interleaved},
               {{5, 5, 2, 2}, true, by_pairs},       {{0, 0, 1, 1}, false, in_rank_order},
               {{0, 1, 2, 3}, true, in_rank_order},  {{0, 0, 0, 0}, true, in_rank_order},
               {{0, 1, 0, 1}, false, in_rank_order}, {{0, 0, 0, 1}, true, in_rank_order}};
  for (const auto& one : cases) {
    World world(ByHosts([&](int rank) { return one.hosts[static_cast<std::size_t>(rank)]; },
                        one.hierarchical),
                4);
    for (const float sum : SumOf(world, values)) EXPECT_EQ(sum, one.sum);
  }
}

// Two ranks of each order in one group.
TEST(ReductionOrder, ThatDiffersBetweenRanks_IsAMismatchOnAllOfThem) {
  for (const bool one_host : {false, true}) {
    int made = 0;
    Transport transport = ByHosts([one_host](int rank) { return one_host ? 0 : rank / 2; });
    transport.make = [&made](const Clock& clock, CommunicatorEvents& events) {
      CpuFabricOptions options;
      options.hierarchical = made++ % 2 == 1;
      return MakeCpuFabric(std::move(options), clock, events);
    };
    World world(transport, 4);
    std::vector<std::vector<float>> data(4, std::vector<float>(10, 1.0f));
    for (const Status& status : world.RunAll(
             [&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); })) {
      EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.ToString();
      EXPECT_THAT(status.message(), HasSubstr("RESILIENT_REDUCTION_ORDER="));
      EXPECT_THAT(status.message(), HasSubstr("set it to the same value on all ranks"));
    }
    for (const auto& untouched : data) EXPECT_EQ(untouched, std::vector<float>(10, 1.0f));
  }
}

// Rank 2, which owns what its host has for rank 0, stands still when it has it. All hear of all:
// that they have entered, and so that nothing moves. `judge` is to find it, and tells the others.
void ExpectStandstillIsFoundBy(std::size_t judge, const std::string& awaited) {
  std::mutex mutex;
  std::condition_variable changed;
  bool released = false;
  Transport transport = ByHosts([](int rank) { return rank / 2; });
  transport.make = [&](const Clock& clock, CommunicatorEvents& events) {
    CpuFabricOptions options;
    options.hierarchical = true;
    return MakeObservedCpuFabric(
        options, clock, events, [&](const GroupSpec& group, std::uint64_t) {
          std::unique_lock lock(mutex);
          if (group.rank != 2 || group.name != "stands") return;
          EXPECT_TRUE(changed.wait_for(lock, kBound, [&] { return released; }));
        });
  };
  World world(transport, 4);
  ExpectAllOk(world.RunAll([](int) { return BarrierOp(); }));
  const auto group = world.CreateAll("stands");
  std::vector<std::vector<float>> data(4, std::vector<float>(10, 1.0f));
  std::vector<Pending> pending;
  for (std::size_t rank = 0; rank < 4; ++rank) {
    Operation op = AllReduceOp(data[rank]);
    op.stall = rank == judge ? Millis(300) : 2 * kBound;
    pending.push_back(Pending::Of(*group[rank], op));
  }
  for (const std::size_t rank : {0, 1, 3}) {
    EXPECT_EQ(pending[rank].Wait().code(), StatusCode::kCommStalled);
    EXPECT_THAT(pending[rank].Wait().message(), HasSubstr(awaited));
  }
  {
    std::lock_guard lock(mutex);
    released = true;
  }
  changed.notify_all();
  EXPECT_EQ(pending[2].Wait().code(), StatusCode::kCommStalled);
}

TEST(ReductionOrder, StandstillOfAnOwner_IsFoundByEachThatWaits) {
  ExpectStandstillIsFoundBy(0, "rank 2 (node2, pid 1002) and rank 0 (node0, pid 1000) have");
  ExpectStandstillIsFoundBy(1, "rank 0 (node0, pid 1000) and rank 1 (node1, pid 1001) have");
  ExpectStandstillIsFoundBy(3, "rank 2 (node2, pid 1002) and rank 3 (node3, pid 1003) have");
}

bool IsMapped(std::byte* page) {
  unsigned char resident = 0;
  return mincore(page, 1, &resident) == 0;
}

TEST(Scratch, KeepsABoundedPartOfWhatWasUsed) {
  Scratch scratch;
  const auto kept = scratch.Get(Scratch::kKeptBytes);
  ASSERT_TRUE(kept);
  kept->front() = kept->back() = std::byte{1};
  scratch.Trim();
  const auto again = scratch.Get(100);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->size(), 100u);
  EXPECT_EQ(again->data(), kept->data());
  EXPECT_EQ(again->front(), std::byte{1});
  const auto more = scratch.Get(Scratch::kKeptBytes + 1);
  ASSERT_TRUE(more);
  EXPECT_EQ(more->size(), Scratch::kKeptBytes + 1);
  EXPECT_TRUE(IsMapped(more->data()));
  scratch.Trim();
  EXPECT_EQ(scratch.size(), 0u);
  EXPECT_FALSE(IsMapped(more->data()));
}

// What the address space of no process has, and all that an operation may be.
constexpr std::size_t kTooMuch = std::size_t{1} << 48;

TEST(Scratch, WhatCannotBeHad_IsAnAnswer) {
  Scratch scratch;
  ASSERT_TRUE(scratch.Get(100));
  EXPECT_FALSE(scratch.Get(kTooMuch));
  EXPECT_EQ(scratch.size(), 0u);
  EXPECT_TRUE(scratch.Get(0));
  EXPECT_TRUE(scratch.Get(100));
}

// Ranks 0 and 2 each combine what their host has for rank 0. Rank 1 has not entered, and is told.
TEST(ReductionMemory, ThatCannotBeHad_FailsTheGroupOnAllRanks) {
  World world(ByHosts([](int rank) { return rank / 2; }), 3);
  std::vector<std::uint8_t> untouched(1);
  const auto part = [&](std::size_t count) {
    return Part{.data = untouched.data(), .count = count};
  };
  std::vector<Pending> pending;
  for (const int rank : {0, 2}) {
    Operation op = MakeOp(OpKind::kReduceScatter, DataType::kUInt8, untouched);
    op.reduce = ReduceOp::kSum;
    op.inputs = {part(kTooMuch), part(0), part(0)};
    op.count = rank == 0 ? kTooMuch : 0;
    op.call_site = "train.py:7";
    pending.push_back(Pending::Try(world.at(rank), op));
  }
  ASSERT_TRUE(world.log(1).WaitFor([](EventLog& log) { return log.stalls.size() == 1; }));
  pending.push_back(Pending::Try(world.at(1), BarrierOp()));
  for (const Pending& one : pending) {
    const Status status = one.Wait();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.ToString();
    const std::string rank = std::to_string(status.detail().rank);
    EXPECT_THAT(status.message(), HasSubstr("rank " + rank + " (node" + rank + ", pid 100" + rank +
                                            ") has no memory for reduce_scatter(uint8["));
    // A window for each rank of the host, at home one for each host as well.
    const std::size_t windows = (rank == "0" ? 4 : 1) * (std::size_t{256} << 10);
    EXPECT_THAT(status.message(),
                HasSubstr("at train.py:7, which takes " + std::to_string(kTooMuch + windows)));
    EXPECT_THAT(status.message(),
                HasSubstr("(group world, operation 1): free memory on that host"));
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(world.at(rank).Submit(BarrierOp(), nullptr).status().code(),
              StatusCode::kResourceExhausted);
  }
  world.group = world.CreateAll("next");
  std::vector<std::vector<float>> data(3, {1.0f});
  ExpectAllOk(
      world.RunAll([&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); }));
  for (const auto& sum : data) EXPECT_THAT(sum, ElementsAre(3.0f));
}

std::size_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t all = 0;
  std::size_t resident = 0;
  statm >> all >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// Averages of 8 bits have partial results of 32.
TEST(ReductionMemory, OfALargeOperation_IsGivenBackBehindIt) {
  if (kThreadSanitized) GTEST_SKIP() << "ThreadSanitizer keeps what it knows of each page";
  World world(ByHosts([](int rank) { return rank / 2; }), 3);
  constexpr std::size_t kCount = Scratch::kKeptBytes / 4 + 1;
  std::vector<std::vector<std::uint8_t>> data(3, std::vector<std::uint8_t>(kCount, 7));
  const std::size_t before = ResidentBytes();
  ExpectAllOk(world.RunAll([&](int rank) {
    Operation op = MakeOp(OpKind::kReduce, DataType::kUInt8, data[static_cast<std::size_t>(rank)]);
    op.reduce = ReduceOp::kAvg;
    op.root = 0;
    return op;
  }));
  // Two ranks had more than kKeptBytes each.
  EXPECT_LT(ResidentBytes(), before + Scratch::kKeptBytes);
  EXPECT_EQ(data[0], std::vector<std::uint8_t>(kCount, 7));
}

}  // namespace
}  // namespace resilient::testing
