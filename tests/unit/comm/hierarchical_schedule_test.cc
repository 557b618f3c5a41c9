// Goal: the schedule of reductions by hosts ends with the right bits in any order of delivery, and
// sends across hosts what docs/decisions/0015 says. Method: the state machines of all ranks with a
// network of the test's own, which counts bytes and delivers in a random order.

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include <gmock/gmock.h>

#include "runtime/base/random.h"
#include "runtime/comm/collective.h"
#include "runtime/comm/schedule.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/hierarchical_hosts.h"
#include "tests/unit/comm/trial.h"

namespace resilient::testing {
namespace {

using ::testing::ElementsAre;

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
