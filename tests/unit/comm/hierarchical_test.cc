// Goal: reductions by hosts give what a serial program gives that combines host by host, whatever
// the layout, and send across hosts what docs/decisions/0015 says. Method: worlds whose ranks
// believe to be on several hosts, compared bit for bit with the serial reference; and the state
// machines of all ranks with a network of the test's own, which counts bytes and delivers in a
// random order.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include <gmock/gmock.h>

#include "runtime/base/random.h"
#include "runtime/comm/collective.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/schedule.h"
#include "runtime/comm/step_observer.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/trial.h"

namespace resilient::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Hosts {
  std::string name;
  std::vector<int> of_rank;
  friend void PrintTo(const Hosts& hosts, std::ostream* out) { *out << hosts.name; }

  int size() const { return static_cast<int>(of_rank.size()); }
  std::vector<std::string> Ids() const {
    std::vector<std::string> ids;
    for (const int host : of_rank) ids.push_back("host" + std::to_string(host));
    return ids;
  }
  // For the reference; by hand, as the code under test has its own way.
  std::vector<std::vector<std::size_t>> Ranks() const {
    std::vector<std::vector<std::size_t>> ranks;
    std::set<int> seen;
    for (const int host : of_rank) {
      if (!seen.insert(host).second) continue;
      ranks.emplace_back();
      for (std::size_t rank = 0; rank < of_rank.size(); ++rank)
        if (of_rank[rank] == host) ranks.back().push_back(rank);
    }
    return ranks;
  }
};

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

constexpr OpKind kReductions[] = {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter};

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
    pending.push_back(Pending::Of(world.at(rank), op));
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

TEST(HostLayout, HostsByTheirLowestRank_WithoutAnIdAlone) {
  const HostLayout layout = LayoutOf({"b", "", "a", "b", ""});
  EXPECT_THAT(layout.hosts,
              ElementsAre(ElementsAre(0, 3), ElementsAre(1), ElementsAre(2), ElementsAre(4)));
  EXPECT_THAT(layout.host_of, ElementsAre(0, 1, 2, 0, 3));
  EXPECT_TRUE(layout.HasLevels());
  EXPECT_FALSE(LayoutOf({"", ""}).HasLevels());
  EXPECT_FALSE(LayoutOf({"a", "a"}).HasLevels());
}

TEST(HostLayout, OwnersAreSharedOut) {
  const HostLayout layout = LayoutOf({"a", "a", "a", "b", "b", "b", "b", "b", "b"});
  std::map<int, int> homes;
  for (int home = 0; home < 9; ++home) ++homes[layout.OwnerIn(0, home)];
  EXPECT_THAT(homes, ElementsAre(std::pair(0, 3), std::pair(1, 3), std::pair(2, 3)));
  for (int home = 0; home < 3; ++home) EXPECT_EQ(layout.OwnerIn(0, home), home);
}

// All ranks of one operation, without sockets. Thread: one.
class Network {
 public:
  Network(Trial& trial, const HostLayout& layout, std::uint64_t seed)
      : layout_(layout), random_(seed) {
    const int size = trial.call().size();
    for (int rank = 0; rank < size; ++rank) ops_.push_back(trial.At(rank));
    for (int rank = 0; rank < size; ++rank) {
      hosts_.push_back(std::make_unique<Host>(*this, rank));
      ranks_.push_back(MakeCollective(ops_[static_cast<std::size_t>(rank)], rank, size,
                                      *hosts_.back(), &layout));
    }
  }

  // All enter the operation; nothing is delivered.
  void Start() {
    for (const auto& rank : ranks_) {
      const auto scratch = scratch_.emplace_back().Get(rank->ScratchBytes());
      ASSERT_TRUE(scratch);
      rank->Start(*scratch);
    }
  }

  // False: nothing moves though not all are done.
  bool Run() {
    Start();
    while (DeliverSome()) {
    }
    return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& one) { return one->Done(); });
  }

  std::size_t CrossBytes(int host) { return cross_bytes_[host]; }
  // Whether `from` has sent `to` a message or a note.
  bool HasTold(int from, int to) const { return told_.contains({from, to}); }

 private:
  struct Message {
    std::uint8_t phase = 0;
    std::span<const std::byte> left;
    bool begun = false;
    PayloadSink* sink = nullptr;
  };
  struct Host final : CollectiveHost {
    Host(Network& owner, int from) : network(owner), rank(from) {}
    void SendPart(int peer, std::uint8_t phase, std::span<const std::byte> payload) override {
      network.told_.emplace(rank, peer);
      std::deque<Message>& link = network.links_[{rank, peer}];
      if (link.empty()) network.busy_.emplace_back(rank, peer);
      link.push_back({.phase = phase, .left = payload});
      const auto host = [&](int one) {
        return network.layout_.host_of[static_cast<std::size_t>(one)];
      };
      if (host(rank) != host(peer)) network.cross_bytes_[host(rank)] += payload.size();
    }
    void SendNote(int peer) override { network.told_.emplace(rank, peer); }
    void SpaceFreed(int) override {}
    Network& network;
    const int rank;
  };

  // Some bytes of one link, chosen at random. False: none can take any.
  bool DeliverSome() {
    const std::size_t links = busy_.size();
    const std::size_t first = links > 0 ? random_.Below(links) : 0;
    for (std::size_t i = 0; i < links; ++i) {
      const std::size_t at = (first + i) % links;
      if (!Deliver(busy_[at])) continue;
      if (links_[busy_[at]].empty()) {
        busy_[at] = busy_.back();
        busy_.pop_back();
      }
      return true;
    }
    return false;
  }

  bool Deliver(std::pair<int, int> link) {
    const auto [from, to] = link;
    Message& message = links_[link].front();
    Collective& receiver = *ranks_[static_cast<std::size_t>(to)];
    if (!message.begun) {
      const auto due = receiver.NextFrom(from);
      EXPECT_TRUE(due && due->phase == message.phase && due->bytes == message.left.size());
      if (!due) return false;
      message.sink = receiver.Accept(from);
      message.begun = true;
    }
    if (!message.left.empty()) {
      const std::span<std::byte> space = message.sink->Space();
      if (space.empty()) return false;
      const std::size_t bytes =
          std::min({space.size(), message.left.size(), 1 + random_.Below(100'000)});
      std::copy_n(message.left.begin(), bytes, space.begin());
      message.left = message.left.subspan(bytes);
      message.sink->Commit(bytes);
    }
    if (!links_[link].front().left.empty()) return true;
    links_[link].pop_front();
    receiver.OnMessage(from);
    ranks_[static_cast<std::size_t>(from)]->OnSent(to);
    return true;
  }

  const HostLayout& layout_;
  Random random_;
  std::deque<Operation> ops_;
  std::deque<Scratch> scratch_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::vector<std::unique_ptr<Collective>> ranks_;
  std::map<std::pair<int, int>, std::deque<Message>> links_;
  std::vector<std::pair<int, int>> busy_;  // Links that carry something.
  std::map<int, std::size_t> cross_bytes_;
  std::set<std::pair<int, int>> told_;
};

Hosts RandomHosts(Random& random) {
  Hosts hosts{"Random", {}};
  do {
    hosts.of_rank.clear();
    const std::uint64_t ranks = 3 + random.Below(10);
    const std::uint64_t different = 2 + random.Below(4);
    for (std::uint64_t i = 0; i < ranks; ++i)
      hosts.of_rank.push_back(static_cast<int>(random.Below(different)));
  } while (!LayoutOf(hosts.Ids()).HasLevels());
  return hosts;
}

TEST(HierarchicalSchedule, RandomLayoutsCallsAndOrdersOfDelivery_EndWithTheRightBits) {
  for (std::uint64_t seed = 1; seed <= (kSanitized ? 10u : 150u); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const Hosts hosts = RandomHosts(random);
    const HostLayout layout = LayoutOf(hosts.Ids());
    Call call;
    do {
      call = RandomCall(hosts.size(), 300'000 / static_cast<std::size_t>(hosts.size()), random);
    } while (!Reduces(call.kind));
    call.hosts = hosts.Ranks();
    Trial trial(call, random);
    ASSERT_TRUE(Network(trial, layout, seed).Run()) << Describe(call);
    for (int rank = 0; rank < hosts.size(); ++rank) ASSERT_EQ(trial.WhatIsWrong(rank), "");
  }
}

// Whoever waits must know of all that they have entered: a standstill counts from there on. Nobody
// but the root waits for the others of a reduce.
TEST(HierarchicalSchedule, WhoEnters_TellsAllAtOnce) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    const Hosts hosts = RandomHosts(random);
    const HostLayout layout = LayoutOf(hosts.Ids());
    for (const OpKind kind : kReductions) {
      for (const std::size_t count : {std::size_t{1}, std::size_t{20'003}}) {
        SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(OpKindName(kind)));
        Call call{.kind = kind, .dtype = DataType::kFloat32, .reduce = ReduceOp::kSum};
        if (kind == OpKind::kReduce) call.root = hosts.size() - 1;
        call.hosts = hosts.Ranks();
        SetCounts(call, hosts.size(), count);
        Trial trial(call, random);
        Network network(trial, layout, seed);
        network.Start();
        for (int from = 0; from < hosts.size(); ++from) {
          for (int to = 0; to < hosts.size(); ++to) {
            if (from == to) continue;
            if (kind == OpKind::kReduce && from != call.root && to != call.root) continue;
            ASSERT_TRUE(network.HasTold(from, to)) << from << " to " << to;
          }
        }
      }
    }
  }
}

TEST(HierarchicalSchedule, EachByteCrossesOnceAHost) {
  constexpr std::size_t kCount = 24'000;  // Divisible by all that it is divided by.
  struct {
    int hosts;
    int ranks;  // Of each.
  } cases[] = {{2, 4}, {3, 2}, {4, 3}, {2, 8}};
  for (const auto& one : cases) {
    Hosts hosts{"", {}};
    for (int rank = 0; rank < one.hosts * one.ranks; ++rank)
      hosts.of_rank.push_back(rank / one.ranks);
    const HostLayout layout = LayoutOf(hosts.Ids());
    Random random(3);
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
      Call call{.kind = OpKind::kAllReduce, .dtype = type, .reduce = ReduceOp::kSum};
      call.hosts = hosts.Ranks();
      SetCounts(call, hosts.size(), kCount);
      Trial trial(call, random);
      Network network(trial, layout, 1);
      ASSERT_TRUE(network.Run());
      // B (h - 1) / h of partial results, which are float32, and as much of results.
      const std::size_t each = 4 + SizeOf(type);
      const auto h = static_cast<std::size_t>(one.hosts);
      for (int host = 0; host < one.hosts; ++host)
        EXPECT_EQ(network.CrossBytes(host), each * kCount * (h - 1) / h);
    }
  }
}

TEST(HierarchicalSchedule, ReduceAndReduceScatter_SendOnePartialAHost) {
  const Hosts hosts{"", {0, 0, 0, 1, 1, 2}};
  const HostLayout layout = LayoutOf(hosts.Ids());
  Random random(3);
  for (const OpKind kind : {OpKind::kReduce, OpKind::kReduceScatter}) {
    Call call{.kind = kind, .dtype = DataType::kInt32, .reduce = ReduceOp::kSum};
    if (kind == OpKind::kReduce) call.root = 4;
    call.hosts = hosts.Ranks();
    SetCounts(call, hosts.size(), 6'000);
    Trial trial(call, random);
    Network network(trial, layout, 1);
    ASSERT_TRUE(network.Run());
    const std::size_t part = 6'000 * 4;
    const bool rooted = kind == OpKind::kReduce;
    EXPECT_EQ(network.CrossBytes(0), rooted ? part : 3 * part);  // Parts of other hosts' ranks.
    EXPECT_EQ(network.CrossBytes(1), rooted ? 0 : 4 * part);
    EXPECT_EQ(network.CrossBytes(2), rooted ? part : 5 * part);
  }
}

// More messages between two ranks than phases have numbers.
TEST(HierarchicalSchedule, MoreMessagesThanAPhaseCanNumber) {
  constexpr int kAlone = 260;
  std::vector<std::string> ids(kAlone + 2);
  ids[0] = ids[1] = "pair";
  const HostLayout layout = LayoutOf(ids);
  Hosts hosts{"", {0, 0}};
  for (int rank = 1; rank <= kAlone; ++rank) hosts.of_rank.push_back(rank);
  Random random(3);
  Call call{.kind = OpKind::kAllReduce, .dtype = DataType::kUInt8, .reduce = ReduceOp::kSum};
  call.hosts = hosts.Ranks();
  SetCounts(call, hosts.size(), 400);
  Trial trial(call, random);
  ASSERT_TRUE(Network(trial, layout, 1).Run());
  for (int rank = 0; rank < hosts.size(); ++rank) ASSERT_EQ(trial.WhatIsWrong(rank), "");
}

}  // namespace
}  // namespace resilient::testing
