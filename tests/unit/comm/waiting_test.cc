// Goal: every transport tells which operations of a rank have waited for a second, for whom, and
// nothing else. Method: ranks are fabrics of one process, of which some come late; what must be
// told is waited for, and that nothing is told is looked at after operations of known length.

#include <algorithm>
#include <future>
#include <utility>

#include <gmock/gmock.h>

#include "tests/support/jumping_clock.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/fake_rank.h"

namespace resilient::testing {
namespace {

using Data = std::vector<float>;
using Told = std::vector<WaitingOperation>;
using ::testing::ElementsAre;
using ::testing::IsSupersetOf;

constexpr int kRanks = 4;
// Far more than links hold.
constexpr std::size_t kLarge = 2u << 20;

std::string Text(const Told& told) {
  std::string out;
  for (const WaitingOperation& op : told)
    out += op.what + " misses " + ::testing::PrintToString(op.missing) + "; ";
  return out;
}

// What was told of `group` on a rank, once `enough` says so of it.
std::vector<Told> ToldOf(World& world, int rank, const std::string& group,
                         const std::function<bool(const std::vector<Told>&)>& enough) {
  std::vector<Told> told;
  const bool came = world.log(rank).WaitFor([&](EventLog& log) {
    told = log.waiting[group];
    return enough(told);
  });
  EXPECT_TRUE(came) << "rank " << rank << ", group " << group << ", told " << told.size()
                    << " times, last " << (told.empty() ? "" : Text(told.back()));
  return told;
}

std::vector<std::vector<int>> MissingIn(const Told& told) {
  std::vector<std::vector<int>> missing(told.size());
  std::transform(told.begin(), told.end(), missing.begin(),
                 [](const WaitingOperation& op) { return op.missing; });
  return missing;
}

// What is told once it is these ranks that are missing from the operations that wait; on the way
// there a rank may not be connected yet, or not have been heard.
Told ToldMissing(World& world, int rank, const std::string& group,
                 const std::vector<std::vector<int>>& missing) {
  const std::vector<Told> told = ToldOf(world, rank, group, [&](const std::vector<Told>& all) {
    return !all.empty() && MissingIn(all.back()) == missing;
  });
  return !told.empty() && MissingIn(told.back()) == missing ? told.back() : Told(missing.size());
}

class Waiting : public ::testing::TestWithParam<Transport> {
 protected:
  std::unique_ptr<World> MakeWorld(int size) const {
    auto world = std::make_unique<World>(GetParam(), size);
    ExpectAllOk(world->RunAll([](int) { return BarrierOp(); }));
    return world;
  }
};

std::vector<Transport> WaitingTransports() {
  std::vector<Transport> all = AllTransportsAndOrders();
  all.push_back(StripedTransport(3));
  return all;
}

INSTANTIATE_TEST_SUITE_P(Transports, Waiting, ::testing::ValuesIn(WaitingTransports()),
                         [](const auto& info) { return info.param.name; });

// A group whose ranks are in one collective, some of them late.
struct LateGroup {
  std::string name;
  std::function<Operation(Data& data)> make;
  std::size_t count = 4;
  std::vector<int> late;
  std::vector<std::shared_ptr<Communicator>> ranks = {};
  std::vector<Data> data = {};
  std::vector<Pending> pending = {};

  bool IsLate(int rank) const { return std::find(late.begin(), late.end(), rank) != late.end(); }
  void Submit(bool late_ones) {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (IsLate(rank) != late_ones) continue;
      const auto at = static_cast<std::size_t>(rank);
      Operation op = make(data[at]);
      op.call_site = "train.py:7";
      pending.push_back(Pending::Of(*ranks[at], op));
    }
  }
};

std::vector<LateGroup> LateGroups(World& world) {
  const auto sum = [](Data& data) { return AllReduceOp(data); };
  const auto barrier = [](Data&) { return BarrierOp(); };
  const auto from_late = [](Data& data) { return BroadcastOp(data, 2); };
  std::vector<LateGroup> groups = {
      {.name = "one", .make = sum, .late = {2}},
      {.name = "large", .make = sum, .count = kLarge, .late = {3}},
      {.name = "two", .make = sum, .late = {0, 2}},
      {.name = "barrier", .make = barrier, .late = {1}},
      {.name = "root", .make = from_late, .late = {2}},
  };
  for (LateGroup& group : groups) {
    group.ranks = world.CreateAll(group.name);
    group.data.assign(kRanks, Data(group.count, 1.0f));
  }
  return groups;
}

void ExpectToldOf(World& world, int rank, LateGroup& group) {
  const auto names_them = [&](const Told& told) {
    return told.size() == 1 && told[0].missing == group.late;
  };
  const std::vector<Told> told = ToldOf(world, rank, group.name, [&](const std::vector<Told>& all) {
    return std::count_if(all.begin(), all.end(), names_them) >= 2;
  });
  bool named = false;
  for (std::size_t time = 0; time < told.size(); ++time) {
    ASSERT_EQ(told[time].size(), 1u);
    const WaitingOperation& op = told[time].front();
    EXPECT_EQ(op.seq, 1u);
    EXPECT_FALSE(op.point_to_point);
    EXPECT_EQ(op.what, Describe(group.make(group.data[0])));
    EXPECT_EQ(op.call_site, "train.py:7");
    EXPECT_GE(op.age, static_cast<int>(time + 1) * kWaitTellAfter - Millis(100));
    EXPECT_FALSE(op.any);
    EXPECT_THAT(op.missing, IsSupersetOf(group.late));
    EXPECT_TRUE(!named || names_them(told[time])) << "time " << time;
    named = named || names_them(told[time]);
  }
}

TEST_P(Waiting, LateRanks_AreNamedByAllOthersAfterASecondAndAgain_AndNothingIsToldAfterwards) {
  const auto world = MakeWorld(kRanks);
  std::vector<LateGroup> groups = LateGroups(*world);
  // Here no program waits: it is never told.
  Operation unbound = BarrierOp();
  unbound.binding = false;
  const auto talk = world->CreateAll("talk");
  std::vector<Pending> words = {Pending::Of(*talk[0], unbound)};
  for (LateGroup& group : groups) group.Submit(/*late_ones=*/false);
  for (LateGroup& group : groups) {
    SCOPED_TRACE(group.name);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (group.IsLate(rank)) continue;
      ExpectToldOf(*world, rank, group);
    }
    for (const int rank : group.late) EXPECT_EQ(world->log(rank).WaitingCount(group.name), 0u);
  }
  EXPECT_EQ(world->log(0).WaitingCount("talk"), 0u);
  for (int rank = 1; rank < kRanks; ++rank)
    words.push_back(Pending::Of(*talk[static_cast<std::size_t>(rank)], unbound));
  for (const Pending& word : words) EXPECT_TRUE(word.Wait().ok());
  for (LateGroup& group : groups) group.Submit(/*late_ones=*/true);
  for (const LateGroup& group : groups)
    for (const Pending& one : group.pending) EXPECT_TRUE(one.Wait().ok());
  // What is just being told is told once all have run something on their comm threads.
  Data sent(1), got(1);
  for (int rank = 0; rank < kRanks; ++rank) {
    const int next = (rank + 1) % kRanks;
    const Pending send = Pending::Of(world->at(rank), SendOp(sent, next, 0));
    EXPECT_TRUE(Pending::Of(world->at(next), RecvOp(got, rank, 0)).Wait().ok());
    EXPECT_TRUE(send.Wait().ok());
  }
  std::map<std::pair<int, std::string>, std::size_t> before;
  const auto each = [&](auto&& look) {
    for (int rank = 0; rank < kRanks; ++rank)
      for (const LateGroup& group : groups)
        look(before[{rank, group.name}], world->log(rank).WaitingCount(group.name));
  };
  each([](std::size_t& count, std::size_t now) { count = now; });
  Elapse(*world, 2 * kWaitTellAfter);
  each([](std::size_t& count, std::size_t now) { EXPECT_EQ(count, now); });
}

TEST_P(Waiting, CallerThatRunsItsOperation_IsTold_AndQueuedOnesAreNot) {
  const auto world = MakeWorld(kRanks);
  std::vector<Data> data(kRanks, Data(8, 1.0f)), more = data;
  std::vector<std::future<void>> callers;
  std::vector<Pending> queued;
  const auto run = [&](int rank) {
    std::promise<Status> ended;
    const auto ran = world->at(rank).Run(
        AllReduceOp(data[static_cast<std::size_t>(rank)]),
        [&](const Status& status) { ended.set_value(status); }, [] { return true; });
    ASSERT_TRUE(ran.ok());
    EXPECT_EQ(ran->seq, 2u);
    EXPECT_TRUE(ran->outcome ? ran->outcome->ok() : ended.get_future().get().ok());
  };
  const auto start = [&](int rank) {
    callers.push_back(std::async(std::launch::async, run, rank));
  };
  const auto queue = [&](int rank) {
    for (int i = 0; i < 3; ++i)
      queued.push_back(
          Pending::Of(world->at(rank), AllReduceOp(more[static_cast<std::size_t>(rank)])));
  };
  for (const int rank : {0, 1, 2}) start(rank);
  for (const int rank : {0, 1, 2}) ToldMissing(*world, rank, "world", {{3}});
  for (const int rank : {0, 1, 2}) queue(rank);
  for (const int rank : {0, 1, 2}) {
    const std::vector<Told> told =
        ToldOf(*world, rank, "world", [](const std::vector<Told>& all) { return all.size() >= 3; });
    for (const Told& waiting : told) {
      EXPECT_EQ(waiting.size(), 1u);
      EXPECT_EQ(waiting[0].seq, 2u);
    }
  }
  start(3);
  for (auto& caller : callers) caller.get();
  queue(3);
  for (const Pending& one : queued) EXPECT_TRUE(one.Wait().ok());
}

// Ranks of the group are not those of the world.
GroupSpec Reversed(const World& world, int rank) {
  GroupSpec spec = world.Spec("reversed", rank);
  std::reverse(spec.members.begin(), spec.members.end());
  return spec;
}

TEST_P(Waiting, PointToPoint_NamesWhoDoesNotSendOrTake) {
  const auto world = MakeWorld(kRanks);
  std::vector<std::shared_ptr<Communicator>> group;
  for (int rank = 0; rank < kRanks; ++rank)
    group.push_back(world->Create(kRanks - 1 - rank, Reversed(*world, rank)));
  constexpr std::size_t kBeyondUnexpected = 17u << 20;
  Data large(kBeyondUnexpected), taken(kBeyondUnexpected), one(4), any(4), sent(4);
  std::vector<Pending> pending = {Pending::Of(*group[0], RecvOp(one, 2, 7)),
                                  Pending::Of(*group[0], RecvOp(any, kAnyPeer, 8)),
                                  Pending::Of(*group[0], SendOp(large, 3, 9))};
  // A collective counts apart, and comes first.
  std::vector<Data> sums(kRanks, Data(4));
  pending.push_back(Pending::Of(*group[0], AllReduceOp(sums[0])));
  // Group rank 0 is rank 3 of the world.
  const Told told = ToldMissing(*world, 3, "reversed", {{0, 1, 2}, {1}, {0, 1, 2}, {0}});
  EXPECT_FALSE(told[0].point_to_point);
  EXPECT_EQ(told[0].seq, 1u);
  for (std::size_t i = 1; i < 4; ++i) {
    EXPECT_TRUE(told[i].point_to_point);
    EXPECT_EQ(told[i].seq, i);
    EXPECT_EQ(told[i].any, i == 2);
    EXPECT_GE(told[i].age, kWaitTellAfter);
  }
  EXPECT_EQ(told[1].what, "recv(float32[4], from 2, tag 7)");
  pending.push_back(Pending::Of(*group[2], SendOp(sent, 0, 7)));
  pending.push_back(Pending::Of(*group[1], SendOp(sent, 0, 8)));
  pending.push_back(Pending::Of(*group[3], RecvOp(taken, 0, 9)));
  for (std::size_t rank = 1; rank < kRanks; ++rank)
    pending.push_back(Pending::Of(*group[rank], AllReduceOp(sums[rank])));
  for (const Pending& each : pending) EXPECT_TRUE(each.Wait().ok());
}

// The longest of a thousand, one after the other.
Duration SlowestOfBurst(World& world) {
  Duration slowest{};
  Data sent(100), got(100);
  std::vector<Data> data(static_cast<std::size_t>(world.size()), Data(1000));
  for (int i = 0; i < 500; ++i) {
    const Instant start = world.clock.Now();
    ExpectAllOk(
        world.RunAll([&](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); }));
    const Instant middle = world.clock.Now();
    const int from = i % world.size(), to = (i + 1) % world.size();
    const bool any = i % 3 == 0;
    const Pending send = Pending::Of(world.at(from), SendOp(sent, to, 1));
    const Pending recv = Pending::Of(world.at(to), RecvOp(got, any ? kAnyPeer : from, 1));
    EXPECT_TRUE(recv.Wait().ok() && send.Wait().ok());
    slowest = std::max({slowest, middle - start, world.clock.Now() - middle});
  }
  return slowest;
}

TEST_P(Waiting, OperationsThatEndWithinASecond_AreNotTold) {
  // A machine that stands still for so long gets another chance.
  for (int attempt = 0; attempt < 5; ++attempt) {
    const auto world = MakeWorld(3);
    if (SlowestOfBurst(*world) >= kWaitTellAfter) continue;
    Elapse(*world, 2 * kWaitTellAfter);
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(world->log(rank).WaitingCount("world"), 0u);
    return;
  }
  FAIL() << "operations that have all they need take a second each";
}

TEST_P(Waiting, LinksThatAreBeingMade_AreToldOnlyWhereAnOperationWaits) {
  Data got(1);  // What is in flight when the world ends must be there.
  const auto world = MakeWorld(kRanks);
  std::vector<std::shared_ptr<Communicator>> idle, used;
  for (const int rank : {0, 1}) {
    idle.push_back(world->Create(rank, world->Spec("idle", rank)));
    used.push_back(world->Create(rank, world->Spec("used", rank)));
  }
  const std::vector<Pending> pending = {Pending::Of(*used[0], BarrierOp()),
                                        Pending::Of(*used[0], RecvOp(got, 3, 0)),
                                        Pending::Of(*used[1], BarrierOp())};
  ToldMissing(*world, 0, "used", {{2, 3}, {3}});
  ToldMissing(*world, 1, "used", {{2, 3}});
  for (const int rank : {0, 1}) EXPECT_EQ(world->log(rank).WaitingCount("idle"), 0u);
}

// The account of `rank` once `enough` says so of it; asked again until then.
GroupProgress ProgressOf(World& world, Communicator& communicator, int rank,
                         const std::string& group,
                         const std::function<bool(const GroupProgress&)>& enough) {
  GroupProgress last;
  const bool came = Eventually([&] {
    std::size_t before = 0;
    world.log(rank).WaitFor([&](EventLog& log) {
      before = log.progress[group].size();
      return true;
    });
    EXPECT_EQ(communicator.AskProgress(group), ProgressAnswer::kComing);
    world.log(rank).WaitFor([&](EventLog& log) {
      if (log.progress[group].size() <= before) return false;
      last = log.progress[group].back();
      return true;
    });
    return enough(last);
  });
  EXPECT_TRUE(came) << "rank " << rank << ", group " << group << ", entered " << last.entered;
  return last;
}

TEST_P(Waiting, HowFarARankHasCome_IsSaidWhenItIsAsked) {
  using Answer = ProgressAnswer;
  const auto world = MakeWorld(2);  // One barrier.
  Data sum(4), sent(4), got(4);
  const Pending reduce = Pending::Of(world->at(0), AllReduceOp(sum));
  const auto entered = [](std::uint64_t seq) {
    return [seq](const GroupProgress& progress) { return progress.entered == seq; };
  };
  ProgressOf(*world, world->at(0), 0, "world", entered(2));
  EXPECT_TRUE(ProgressOf(*world, world->at(1), 1, "world", entered(1)).peers.empty());
  // Before the links are there it is in the operation that waits for them.
  const auto early = world->Create(0, world->Spec("early", 0));
  const Pending barrier = Pending::Of(*early, BarrierOp());
  ProgressOf(*world, *early, 0, "early", entered(1));
  EXPECT_EQ(early->AskProgress("other"), Answer::kNotBegun);
  // Messages count from their beginning on both sides, whether a recv is there or not.
  for (int i = 0; i < 3; ++i)
    EXPECT_TRUE(Pending::Of(world->at(0), SendOp(sent, 1, 5)).Wait().ok());
  EXPECT_TRUE(Pending::Of(world->at(1), RecvOp(got, 0, 5)).Wait().ok());
  const auto at_0 = ProgressOf(*world, world->at(0), 0, "world", entered(2)).peers;
  ASSERT_EQ(at_0.size(), 1u);
  EXPECT_EQ(at_0[0].rank, 1);
  EXPECT_EQ(at_0[0].sent, 3u);
  EXPECT_EQ(at_0[0].received, 0u);
  ProgressOf(*world, world->at(1), 1, "world", [](const GroupProgress& progress) {
    return progress.peers.size() == 1 && progress.peers[0].received == 3;
  });
  EXPECT_TRUE(Pending::Of(world->at(1), AllReduceOp(sent)).Wait().ok());
  EXPECT_TRUE(reduce.Wait().ok());
  early->Leave();
  EXPECT_EQ(early->AskProgress("early"), Answer::kOver);
  EXPECT_EQ(barrier.Wait().code(), StatusCode::kCancelled);
}

TEST_P(Waiting, AllHaveEnteredByTheirOwnAccount_AStandstillCounts) {
  const auto world = MakeWorld(2);
  const auto early = world->Create(0, world->Spec("early", 0));
  Operation op = BarrierOp();
  op.stall = Millis(200);
  const Pending barrier = Pending::Of(*early, op);
  early->NoteAllEntered({"early", false, 7});  // Another one.
  early->NoteAllEntered({"early", false, 1});
  const Status status = barrier.Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommStalled) << status.ToString();
  EXPECT_THAT(status.message(), ::testing::AllOf(::testing::HasSubstr("rank 1 (node1, pid 1001)"),
                                                 ::testing::HasSubstr("host node0 (127.0.0.1:"),
                                                 ::testing::HasSubstr("host node1 (127.0.0.1:")));
}

// What was on its way was a message for another recv: its sender may be late with this one.
TEST_P(Waiting, AMessageWithAnotherTag_EndsWhatWasSaidOfARecv) {
  const auto world = MakeWorld(2);
  Data got(4), sent(4);
  Operation op = RecvOp(got, 1, 7);
  op.stall = Millis(700);
  const Pending recv = Pending::Of(world->at(0), op);
  const std::uint64_t seq = 1;
  world->at(0).NoteAllEntered({"world", true, seq});
  EXPECT_TRUE(Pending::Of(world->at(1), SendOp(sent, 0, 8)).Wait().ok());
  Elapse(*world, Millis(1500));
  EXPECT_FALSE(recv.IsDone());
  world->at(0).NoteAllEntered({"world", true, seq});
  EXPECT_EQ(recv.Wait().code(), StatusCode::kCommStalled);
}

TEST_P(Waiting, MoreThanAreTold_TheOldestAre) {
  constexpr std::size_t kMost = kWaitingOperationsMax;
  Data got(1);
  const auto world = MakeWorld(2);
  std::vector<Pending> pending;
  for (std::uint32_t i = 0; i < kMost + 10; ++i)
    pending.push_back(Pending::Of(world->at(0), RecvOp(got, i % 2 == 0 ? 1 : kAnyPeer, i)));
  const auto has_all = [](const std::vector<Told>& told) {
    return !told.empty() && told.back().size() == kMost;
  };
  const Told recvs = ToldOf(*world, 0, "world", has_all).back();
  for (std::size_t i = 0; i < kMost; ++i) EXPECT_EQ(recvs[i].seq, i + 1);
  // The collective has its place.
  pending.push_back(Pending::Of(world->at(0), BarrierOp()));
  const auto has_both = [](const std::vector<Told>& told) {
    return !told.empty() && !told.back().front().point_to_point;
  };
  const Told both = ToldOf(*world, 0, "world", has_both).back();
  ASSERT_EQ(both.size(), kMost);
  EXPECT_THAT(both[0].missing, ElementsAre(1));
  EXPECT_EQ(both[1].seq, 1u);
  EXPECT_EQ(both[kMost - 1].seq, kMost - 1);
}

TEST_P(Waiting, AllHaveEntered_NobodyIsMissing_AndWhoIsSilentIsNamed) {
  if (GetParam().hierarchical || GetParam().name == "striped3")
    GTEST_SKIP() << "a rank of the test's own does not speak so";
  std::vector<Data> data(2, Data(100)), got(2, Data(100));
  const auto world = MakeWorld(2);
  const GroupSpec spec = SpecWithFake(*world, 0);
  const std::vector<std::shared_ptr<Communicator>> group = {
      world->Create(0, spec), world->Create(1, SpecWithFake(*world, 1))};
  FakeRank fake(*world, spec, 2, Lane::kCollective);
  FakeRank sender(*world, spec, 2, Lane::kPointToPoint);
  std::vector<Pending> pending;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    pending.push_back(Pending::Of(*group[rank], AllReduceOp(data[rank])));
    pending.push_back(Pending::Of(*group[rank], RecvOp(got[rank], rank == 0 ? 2 : kAnyPeer, 5)));
  }
  fake.EnterAndStand(AllReduceOp(data[0]), 1, 400, 100);
  sender.EnterAndStand(SendOp(data[0], 0, 5), 1, 400, 100);
  for (int rank = 0; rank < 2; ++rank) {
    for (const WaitingOperation& op : ToldMissing(*world, rank, "faked", {{}, {}}))
      EXPECT_FALSE(op.any) << op.what;
  }
  // Its data has begun to come to rank 0 and stands; a rank that waits for any has no pair.
  const auto names_it = [](const std::vector<Told>& told) {
    return !told.empty() && told.back().size() == 2 && told.back()[0].silent == std::vector{2};
  };
  EXPECT_THAT(ToldOf(*world, 0, "faked", names_it).back()[0].silent, ElementsAre(2));
}

TEST_P(Waiting, ProcessThatWasStopped_CountsAnew) {
  constexpr Duration kStopped = std::chrono::seconds(100);
  testing::JumpingClock clock;
  Transport transport = GetParam();
  transport.make = [&clock, make = GetParam().make](const Clock&, CommunicatorEvents& events) {
    return make(clock, events);
  };
  Data got(1);
  World world(transport, 2);
  ExpectAllOk(world.RunAll([](int) { return BarrierOp(); }));
  const std::vector<Pending> pending = {Pending::Of(world.at(0), BarrierOp()),
                                        Pending::Of(world.at(0), RecvOp(got, 1, 0))};
  clock.Jump(kStopped);
  const auto is_after = [&](const WaitingOperation& op) { return op.age >= kStopped; };
  const auto told = ToldOf(world, 0, "world", [&](const std::vector<Told>& all) {
    return !all.empty() && all.back().size() == 2 && is_after(all.back()[0]);
  });
  for (const Told& waiting : told) {
    for (const WaitingOperation& op : waiting) {
      EXPECT_TRUE(!is_after(op) || op.age >= kStopped + kWaitTellAfter) << op.what;
    }
  }
}

}  // namespace
}  // namespace resilient::testing
