// Goal: ranks that have made a group of different ranks hear so when they meet, with both lists and
// both places of the program, and no operation of theirs ever returns a number; whoever has no part
// in the job cannot bring that about. Method: ranks are fabrics of one process whose specs differ
// in one thing; callers that a test plays say hello on a connection of their own.
#include <poll.h>
#include <sys/socket.h>

#include <gmock/gmock.h>

#include "runtime/comm/mismatch.h"
#include "runtime/comm/wire.h"
#include "runtime/net/socket.h"
#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Data = std::vector<float>;

// The group "g" as one rank has made it: of these ranks of the world.
struct Made {
  int by = 0;
  std::vector<int> ranks;
  std::string at;
};

GroupSpec SpecOf(const World& world, const Made& made) {
  GroupSpec spec = world.Spec("g", 0);
  const std::vector<GroupMember> all = std::move(spec.members);
  spec.members.clear();
  spec.made_at = made.at;
  for (const int rank : made.ranks) {
    if (rank == made.by) spec.rank = static_cast<int>(spec.members.size());
    spec.members.push_back(all[static_cast<std::size_t>(rank)]);
  }
  return spec;
}

class OtherRanksTest : public ::testing::TestWithParam<Transport> {
 protected:
  // Each of them enters an all_reduce there, which ends with MISMATCH on those that are `told`, and
  // on none with a number.
  void ExpectMismatch(World& world, const std::vector<Made>& all, const std::vector<int>& told) {
    std::vector<std::shared_ptr<Communicator>> groups;
    std::vector<Data> data(all.size(), Data(50'000, 1.0f));
    std::vector<Pending> pending;
    for (const Made& made : all) groups.push_back(world.Create(made.by, SpecOf(world, made)));
    for (std::size_t i = 0; i < all.size(); ++i)
      pending.push_back(Pending::Try(*groups[i], AllReduceOp(data[i])));
    for (const int rank : told) {
      EXPECT_TRUE(world.log(rank).WaitFor([](EventLog& log) { return !log.mismatches.empty(); }))
          << rank;
      const auto own = std::ranges::find(all, rank, &Made::by) - all.begin();
      EXPECT_EQ(pending[static_cast<std::size_t>(own)].Wait().code(), StatusCode::kMismatch);
    }
    for (const auto& group : groups) group->Abort(Status(StatusCode::kStaleGeneration, "fenced"));
    for (const Pending& one : pending) EXPECT_FALSE(one.Wait().ok());
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, OtherRanksTest, ::testing::ValuesIn(AllTransports()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Striped, OtherRanksTest, ::testing::Values(StripedTransport(3)),
                         [](const auto& info) { return info.param.name; });

TEST_P(OtherRanksTest, FewerRanksOnOneSide_IsAMismatchOnBothWithBothLists) {
  World world(GetParam(), 3);
  ExpectMismatch(world,
                 {{0, {0, 1}, "a.py:1 pair"}, {1, {0, 1, 2}, "b.py:2 all"}, {2, {0, 1, 2}, ""}},
                 {0, 1});
  for (const int rank : {0, 1}) {
    const Status& mismatch = world.log(rank).mismatches.front();
    EXPECT_THAT(mismatch.message(),
                AllOf(HasSubstr("has made group 'g' of ranks [0-2]"),
                      HasSubstr("where rank 0 (node0, pid 1000) has made it of ranks [0,1] at "
                                "a.py:1 pair, in generation 1")));
    EXPECT_NE(mismatch.detail().rank, 0);
    EXPECT_EQ(mismatch.detail().group, "g");
    EXPECT_EQ(mismatch.detail().generation, 1u);
  }
}

TEST_P(OtherRanksTest, AnotherOrder_IsAMismatch) {
  World world(GetParam(), 3);
  ExpectMismatch(world, {{0, {0, 1, 2}, ""}, {1, {0, 1, 2}, ""}, {2, {1, 0, 2}, "c.py:3"}}, {2});
  EXPECT_THAT(world.log(2).mismatches.front().message(),
              HasSubstr("rank 2 (node2, pid 1002) has made group 'g' of ranks [1,0,2] at c.py:3"));
}

TEST_P(OtherRanksTest, ARankThatIsNoMemberHere_IsAMismatch) {
  World world(GetParam(), 3);
  ExpectMismatch(world, {{0, {0, 1}, ""}, {2, {0, 2}, ""}}, {0, 2});
  EXPECT_THAT(world.log(0).mismatches.front().message(),
              HasSubstr("rank 2 has made group 'g' of ranks [0,2]"));
}

TEST_P(OtherRanksTest, GroupsOfOneNameWithoutACommonRank_GoOnSideBySide) {
  World world(GetParam(), 4);
  const std::vector<Made> all = {
      {0, {0, 3}, ""}, {1, {1, 2}, ""}, {2, {1, 2}, ""}, {3, {0, 3}, ""}};
  std::vector<std::shared_ptr<Communicator>> groups;
  std::vector<Data> data;
  std::vector<Pending> pending;
  for (const Made& made : all) groups.push_back(world.Create(made.by, SpecOf(world, made)));
  for (const Made& made : all) data.emplace_back(100, static_cast<float>(made.by));
  for (std::size_t i = 0; i < all.size(); ++i)
    pending.push_back(Pending::Of(*groups[i], AllReduceOp(data[i])));
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  for (const Data& sum : data) EXPECT_EQ(sum, Data(100, 3.0f));
}

TEST_P(OtherRanksTest, OtherLinesOfTheProgram_AreNone) {
  World world(GetParam(), 2);
  std::vector<std::shared_ptr<Communicator>> groups = {
      world.Create(0, SpecOf(world, {0, {0, 1}, "a.py:1"})),
      world.Create(1, SpecOf(world, {1, {0, 1}, "b.py:2"}))};
  const Pending first = Pending::Of(*groups[0], BarrierOp());
  EXPECT_TRUE(Pending::Of(*groups[1], BarrierOp()).Wait().ok());
  EXPECT_TRUE(first.Wait().ok());
}

// A caller of which there is nothing but its hello.
class Caller {
 public:
  Caller(World& world, const Hello& hello, std::string_view secret = kSecret) : world_(world) {
    auto socket = ConnectTcp(*ParseHostPort(DecodeEndpoint(world.endpoint(0)).address), world.clock,
                             Deadline::After(world.clock.Now(), kBound), -1);
    EXPECT_TRUE(socket.ok()) << socket.status().ToString();
    if (socket.ok()) socket_ = std::move(*socket);
    const std::string bytes = SayHello(hello, secret);
    EXPECT_EQ(send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  // What comes, up to `bytes`, or until the connection is closed.
  std::string Read(std::size_t bytes) {
    std::string text;
    while (text.size() < bytes) {
      std::vector<PollEntry> entries{{.fd = socket_.get(), .events = POLLIN}};
      std::string part(bytes - text.size(), 0);
      const Deadline deadline = Deadline::After(world_.clock.Now(), kBound);
      EXPECT_EQ(PollUntil(entries, world_.clock, deadline), 1);
      const ssize_t n = recv(socket_.get(), part.data(), part.size(), MSG_DONTWAIT);
      if (n <= 0) return text;
      text.append(part, 0, static_cast<std::size_t>(n));
    }
    return text;
  }
  // Null: the connection was closed without one.
  std::optional<HelloVerdict> Verdict() {
    const std::string bytes = Read(kHelloReplyBytes);
    if (bytes.size() < kHelloReplyBytes) return std::nullopt;
    const auto reply = DecodeHelloReply(bytes);
    EXPECT_TRUE(reply.ok());
    if (reply->verdict == HelloVerdict::kOtherRanks) fault = DecodeFault(Read(reply->fault_bytes));
    return reply->verdict;
  }

  std::optional<Status> fault;

 private:
  World& world_;
  FileDescriptor socket_;
};

// Rank 1 of the world, which has made "g" of `ranks`.
Hello HelloOf(const World& world, const std::vector<int>& ranks, Lane lane = Lane::kCollective) {
  const GroupSpec spec = SpecOf(world, {1, ranks, "far.py:9"});
  return {.generation = spec.generation,
          .attempt = spec.attempt,
          .from = spec.rank,
          .to = static_cast<int>(std::ranges::find(ranks, 0) - ranks.begin()),
          .lane = lane,
          .group = spec.name,
          .made = RanksOf(spec),
          .from_world = 1};
}

class Callers : public ::testing::Test {
 protected:
  std::shared_ptr<Communicator> MakeHere(const std::vector<int>& ranks) {
    return world_.Create(0, SpecOf(world_, {0, ranks, "near.py:4"}));
  }
  World world_{AllTransports()[0], 3};
};

TEST_F(Callers, WhoCameBeforeTheGroupWasMade_IsComparedWhenItIs) {
  Caller early(world_, HelloOf(world_, {1, 0, 2}));
  // Read after it, and refused at once: by then it has been put aside.
  Hello stranger = HelloOf(world_, {0, 1});
  stranger.group = "world";
  EXPECT_EQ(Caller(world_, stranger, "guess").Verdict(), std::nullopt);
  const auto group = MakeHere({0, 1});
  EXPECT_EQ(Pending::Try(*group, BarrierOp()).Wait().code(), StatusCode::kMismatch);
  EXPECT_EQ(early.Verdict(), HelloVerdict::kOtherRanks);
  ASSERT_TRUE(early.fault);
  EXPECT_EQ(early.fault->code(), StatusCode::kMismatch);
  EXPECT_THAT(early.fault->message(),
              AllOf(HasSubstr("rank 1 (node1, pid 1001) has made group 'g' of ranks [1,0,2] at "
                              "far.py:9"),
                    HasSubstr("has made it of ranks [0,1] at near.py:4")));
}

TEST_F(Callers, OnALaneForMessages_AreComparedToo) {
  const auto group = MakeHere({0, 1});
  Caller caller(world_, HelloOf(world_, {0, 1, 2}, Lane::kPointToPoint));
  EXPECT_EQ(caller.Verdict(), HelloVerdict::kOtherRanks);
  EXPECT_EQ(Pending::Try(*group, BarrierOp()).Wait().code(), StatusCode::kMismatch);
}

TEST_F(Callers, WithoutTheSecretOrOfAnotherGeneration_BringNothingAbout) {
  const auto group = MakeHere({0, 1});
  Hello hello = HelloOf(world_, {0, 2, 1});
  EXPECT_EQ(Caller(world_, hello, "guess").Verdict(), std::nullopt);
  hello = HelloOf(world_, {0, 2, 1});
  hello.generation = 0;
  EXPECT_EQ(Caller(world_, hello).Verdict(), std::nullopt);
  const auto peer = world_.Create(1, SpecOf(world_, {1, {0, 1}, ""}));
  const Pending first = Pending::Of(*group, BarrierOp());
  EXPECT_TRUE(Pending::Of(*peer, BarrierOp()).Wait().ok());
  EXPECT_TRUE(first.Wait().ok());
  EXPECT_EQ(world_.log(0).MismatchCount(), 0u);
}

TEST_F(Callers, OfAGroupThatThisRankHasLeft_HearWhichOneItWas) {
  const auto group = MakeHere({0, 1});
  const Pending ended = Pending::Of(*group, BarrierOp());
  group->Leave();
  EXPECT_FALSE(ended.Wait().ok());  // By then its thread has left the group.
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Caller(world_, HelloOf(world_, {0, 1})).Verdict(), HelloVerdict::kLeft);
    Caller other(world_, HelloOf(world_, {0, 2, 1}));
    EXPECT_EQ(other.Verdict(), HelloVerdict::kOtherRanks);
    ASSERT_TRUE(other.fault);
    EXPECT_THAT(other.fault->message(), HasSubstr("has made it of ranks [0,1] at near.py:4"));
    Elapse(world_, Millis(400));  // It does not linger so long.
  }
  EXPECT_EQ(world_.log(0).MismatchCount(), 0u);  // Whoever needs it hears, and says so.
}

}  // namespace
}  // namespace resilient::testing
