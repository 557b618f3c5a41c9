// Goal: a message that waits for its recv holds up no other, and ends as any other does. Method:
// small eager limits, so that every path is taken with little data; ranks are fabrics of one
// process, or one of them is the bytes that the test reads and writes.

#include <algorithm>
#include <numeric>
#include <set>

#include <gmock/gmock.h>

#include "runtime/base/random.h"
#include "runtime/comm/point_to_point.h"
#include "tests/unit/comm/fake_rank.h"

namespace resilient::testing {
namespace {

using ::testing::HasSubstr;
using Data = std::vector<float>;

const Status kNinthLost(StatusCode::kRankLost, "rank 9 (nowhere, pid 9) was killed");
// Far more than a link holds, in sockets or in shared memory.
constexpr std::size_t kLargeSend = 4u << 20;

class AnnouncedSends : public ::testing::TestWithParam<Transport> {
 protected:
  std::unique_ptr<World> MakeWorld(int size) { return std::make_unique<World>(GetParam(), size); }
};

INSTANTIATE_TEST_SUITE_P(Transports, AnnouncedSends, ::testing::ValuesIn(AnnouncingTransports()),
                         [](const auto& info) { return info.param.name; });

// The kind: whatever is sent first, and whatever is received first.
TEST_P(AnnouncedSends, TagsAreReceivedInAnyOrder) {
  const auto world = MakeWorld(2);
  Random random(11);
  for (int round = 0; round < 20; ++round) {
    const std::size_t messages = 1 + random.Below(12);
    std::vector<Data> sent;
    std::vector<Pending> sends;
    for (std::uint32_t tag = 0; tag < messages; ++tag)
      sent.emplace_back(random.Below(2) == 0 ? random.Below(4) : random.Below(60'000),
                        static_cast<float>(tag));
    for (std::uint32_t tag = 0; tag < messages; ++tag)
      sends.push_back(Pending::Of(world->at(0), SendOp(sent[tag], 1, tag)));
    std::vector<std::uint32_t> order(messages);
    std::iota(order.begin(), order.end(), 0u);
    for (std::size_t i = messages; i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
    for (const std::uint32_t tag : order) {
      Data got(sent[tag].size(), -1);
      ASSERT_TRUE(Pending::Of(world->at(1), RecvOp(got, 0, tag)).Wait().ok());
      ASSERT_EQ(got, sent[tag]);
    }
    for (const Pending& send : sends) ASSERT_TRUE(send.Wait().ok());
  }
}

TEST_P(AnnouncedSends, MessagesWithOneTag_KeepTheirOrder_WhateverTheirSizes) {
  const auto world = MakeWorld(2);
  const std::size_t sizes[] = {60'000, 1, 0, 60'000, 2, 30'000, 1, 0};
  std::vector<Data> sent;
  std::vector<Pending> sends;
  for (const std::size_t size : sizes) sent.emplace_back(size, static_cast<float>(sent.size()));
  for (Data& data : sent) sends.push_back(Pending::Of(world->at(0), SendOp(data, 1, 5)));
  // All of them have come, in one way or the other.
  Data mark(1), got_mark(1);
  const Pending last = Pending::Of(world->at(0), SendOp(mark, 1, 6));
  EXPECT_TRUE(Pending::Of(world->at(1), RecvOp(got_mark, 0, 6)).Wait().ok());
  for (const Data& data : sent) {
    Data got(data.size(), -1);
    ASSERT_TRUE(Pending::Of(world->at(1), RecvOp(got, 0, 5)).Wait().ok());
    EXPECT_EQ(got, data);
  }
  EXPECT_TRUE(last.Wait().ok());
  for (const Pending& send : sends) EXPECT_TRUE(send.Wait().ok());
}

TEST_P(AnnouncedSends, ManySmallMessagesWithoutRecvs_HoldUpNone) {
  const auto world = MakeWorld(2);
  constexpr std::size_t kMessages = 1000;
  std::vector<Data> sent;
  std::vector<Pending> sends;
  for (std::size_t i = 0; i < kMessages; ++i) sent.emplace_back(20, static_cast<float>(i));
  for (Data& data : sent) sends.push_back(Pending::Of(world->at(0), SendOp(data, 1, 1)));
  for (std::uint32_t tag = 2; tag < 5; ++tag) {
    Data got(20);
    sends.push_back(Pending::Of(world->at(0), SendOp(sent[tag], 1, tag)));
    EXPECT_TRUE(Pending::Of(world->at(1), RecvOp(got, 0, tag)).Wait().ok());
    EXPECT_EQ(got, sent[tag]);
  }
  EXPECT_FALSE(sends[kMessages - 1].IsDone()) << "1000 are more than the limit";
  for (const Data& data : sent) {
    Data got(20);
    ASSERT_TRUE(Pending::Of(world->at(1), RecvOp(got, 0, 1)).Wait().ok());
    ASSERT_EQ(got, data);
  }
  for (const Pending& send : sends) EXPECT_TRUE(send.Wait().ok());
}

// Both ranks wait for the sends only after all recvs are there.
TEST_P(AnnouncedSends, BothWays_AtOnce) {
  const auto world = MakeWorld(2);
  std::vector<Data> sent(40), got(40);
  std::vector<Pending> pending;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    sent[i].assign(i % 3 == 0 ? 50'000 : 10, static_cast<float>(i));
    got[i].resize(sent[i].size());
    pending.push_back(
        Pending::Of(world->at(i % 2), SendOp(sent[i], 1 - i % 2, static_cast<std::uint32_t>(i))));
  }
  for (std::size_t i = sent.size(); i-- > 0;)
    pending.push_back(
        Pending::Of(world->at(1 - i % 2), RecvOp(got[i], i % 2, static_cast<std::uint32_t>(i))));
  for (const Pending& one : pending) EXPECT_TRUE(one.Wait().ok());
  EXPECT_EQ(got, sent);
}

TEST_P(AnnouncedSends, ASendEndsAfterItsRecv) {
  const auto world = MakeWorld(2);
  Data large(kLargeSend, 1), got(kLargeSend), small(1, 2), got_small(1);
  const Pending send = Pending::Of(world->at(0), SendOp(large, 1, 1));
  const Pending other = Pending::Of(world->at(0), SendOp(small, 1, 2));
  EXPECT_TRUE(Pending::Of(world->at(1), RecvOp(got_small, 0, 2)).Wait().ok());
  EXPECT_TRUE(other.Wait().ok());
  EXPECT_FALSE(send.IsDone());
  EXPECT_TRUE(Pending::Of(world->at(1), RecvOp(got, 0, 1)).Wait().ok());
  EXPECT_TRUE(send.Wait().ok());
  EXPECT_TRUE(got == large);
}

TEST_P(AnnouncedSends, RecvsFromAnyRank_TakeWhatWasAnnouncedFirst) {
  const auto world = MakeWorld(3);
  Data first(60'000, 2), second(60'000, 1), got(60'000), mark(1), got_mark(1);
  std::vector<Pending> sends;
  // One after the other, which the mark that follows each shows.
  for (const int from : {2, 1}) {
    sends.push_back(Pending::Of(world->at(from), SendOp(from == 2 ? first : second, 0, 1)));
    sends.push_back(Pending::Of(world->at(from), SendOp(mark, 0, 9)));
    EXPECT_TRUE(Pending::Of(world->at(0), RecvOp(got_mark, from, 9)).Wait().ok());
  }
  for (const int from : {2, 1}) {
    int sender = -1;
    Operation op = RecvOp(got, kAnyPeer, 1);
    op.sender = &sender;
    EXPECT_TRUE(Pending::Of(world->at(0), op).Wait().ok());
    EXPECT_EQ(sender, from);
    EXPECT_EQ(got, from == 2 ? first : second);
  }
  for (const Pending& send : sends) EXPECT_TRUE(send.Wait().ok());
}

TEST_P(AnnouncedSends, AMismatch_IsFoundFromTheAnnouncement) {
  for (const bool recv_first : {false, true}) {
    const auto world = MakeWorld(2);
    Data large(kLargeSend), other(kLargeSend - 1), mark(1), got_mark(1);
    std::optional<Pending> recv;
    if (recv_first) recv = Pending::Of(world->at(1), RecvOp(other, 0, 0));
    const Pending send = Pending::Of(world->at(0), SendOp(large, 1, 0));
    if (!recv_first) {
      const Pending marks = Pending::Of(world->at(0), SendOp(mark, 1, 1));
      EXPECT_TRUE(Pending::Of(world->at(1), RecvOp(got_mark, 0, 1)).Wait().ok());
      EXPECT_TRUE(marks.Wait().ok());
      recv = Pending::Of(world->at(1), RecvOp(other, 0, 0));
    }
    EXPECT_EQ(recv->Wait().code(), StatusCode::kMismatch);
    EXPECT_EQ(send.Wait().code(), StatusCode::kMismatch) << "it was never sent";
  }
}

enum class Stage { kUnlinked, kUnmatched, kCleared };

// A send whose payload waits for a link, waits for its recv, or may go; the recv, if there is one.
struct InFlight {
  InFlight(World& world, Stage stage) {
    if (stage != Stage::kUnlinked) {
      // Over the same link, and after it.
      const Pending marks = Pending::Of(world.at(1), SendOp(mark, 0, 1));
      EXPECT_TRUE(Pending::Of(world.at(0), RecvOp(got_mark, 1, 1)).Wait().ok());
      EXPECT_TRUE(marks.Wait().ok());
    }
    send = Pending::Of(world.at(1), SendOp(*sent, 0, 2));
    if (stage == Stage::kUnmatched) {
      const Pending marks = Pending::Of(world.at(1), SendOp(mark, 0, 1));
      EXPECT_TRUE(Pending::Of(world.at(0), RecvOp(got_mark, 1, 1)).Wait().ok());
      EXPECT_TRUE(marks.Wait().ok());
    }
    if (stage == Stage::kCleared) recv = Pending::Of(world.at(0), RecvOp(*got, 1, 2));
  }
  Data mark = Data(1);
  Data got_mark = Data(1);
  std::unique_ptr<Data> sent = std::make_unique<Data>(kLargeSend, 1.0f);
  std::unique_ptr<Data> got = std::make_unique<Data>(kLargeSend);
  std::optional<Pending> send, recv;
};

constexpr Stage kStages[] = {Stage::kUnlinked, Stage::kUnmatched, Stage::kCleared};

void ExpectOkOr(StatusCode code, const std::optional<Pending>& pending) {
  if (!pending) return;
  const Status status = pending->Wait();
  EXPECT_TRUE(status.ok() || status.code() == code) << status.ToString();
}

TEST_P(AnnouncedSends, Abort_AtEveryStage_EndsThemAndFreesTheirMemory) {
  for (const Stage stage : kStages) {
    for (const int rank : {0, 1}) {
      const auto world = MakeWorld(2);
      InFlight one(*world, stage);
      world->at(rank).Abort(kNinthLost);
      ExpectOkOr(StatusCode::kRankLost, rank == 1 ? one.send : one.recv);
      (rank == 1 ? one.sent : one.got).reset();
      // The other rank waits for the verdict, unless it has all it needs.
      world->at(1 - rank).Abort(kNinthLost);
      ExpectOkOr(StatusCode::kRankLost, rank == 1 ? one.recv : one.send);
    }
  }
}

TEST_P(AnnouncedSends, Leave_OfTheSender_IsToldToTheRecv) {
  for (const Stage stage : kStages) {
    const auto world = MakeWorld(2);
    InFlight one(*world, stage);
    world->at(1).Leave();
    ExpectOkOr(StatusCode::kCancelled, one.send);
    one.sent.reset();
    if (!one.recv) one.recv = Pending::Of(world->at(0), RecvOp(*one.got, 1, 2));
    const Status status = one.recv->Wait();
    if (status.ok()) {
      EXPECT_TRUE(*one.got == Data(kLargeSend, 1.0f));
    } else {
      EXPECT_EQ(status.code(), StatusCode::kLeft) << status.ToString();
      EXPECT_EQ(status.detail().rank, 1);
    }
    if (stage == Stage::kUnmatched) {
      EXPECT_EQ(status.code(), StatusCode::kLeft);
    }
    EXPECT_EQ(world->log(0).LostCount(1), 0);
  }
}

TEST_P(AnnouncedSends, Leave_OfTheReceiver_EndsTheSend) {
  for (const Stage stage : kStages) {
    const auto world = MakeWorld(2);
    InFlight one(*world, stage);
    world->at(0).Leave();
    ExpectOkOr(StatusCode::kCancelled, one.recv);
    one.got.reset();
    const Status sent = one.send->Wait();
    EXPECT_TRUE(sent.code() == StatusCode::kLeft || (sent.ok() && one.recv)) << sent.ToString();
  }
}

// What was announced and never sent is not skipped: the recv that it was for hears of it.
TEST_P(AnnouncedSends, Leave_WhatWasSentAfterAnAnnouncement_GoesToItsOwnRecv) {
  if (GetParam().name.find("NoneEager") != std::string::npos)
    GTEST_SKIP() << "here nothing is sent before its recv";
  for (const bool from_any : {false, true}) {
    const auto world = MakeWorld(2);
    Data large(kLargeSend), small(1, 3), got_large(kLargeSend), got(1), mark(1);
    const Pending first = Pending::Of(world->at(1), SendOp(large, 0, 1));
    EXPECT_TRUE(Pending::Of(world->at(1), SendOp(small, 0, 1)).Wait().ok());
    world->at(1).Leave();
    EXPECT_EQ(first.Wait().code(), StatusCode::kCancelled);
    EXPECT_EQ(Pending::Of(world->at(0), RecvOp(mark, 1, 7)).Wait().code(), StatusCode::kLeft);
    // A recv from any rank takes what there is.
    if (!from_any) {
      EXPECT_EQ(Pending::Of(world->at(0), RecvOp(got_large, 1, 1)).Wait().code(),
                StatusCode::kLeft);
    }
    EXPECT_TRUE(Pending::Of(world->at(0), RecvOp(got, from_any ? kAnyPeer : 1, 1)).Wait().ok());
    EXPECT_EQ(got, small);
    EXPECT_EQ(Pending::Of(world->at(0), RecvOp(got, kAnyPeer, 1)).Wait().code(), StatusCode::kLeft);
  }
}

TEST_P(AnnouncedSends, ASenderThatIsGone_IsReportedAndTheRecvWaitsForTheVerdict) {
  const auto world = MakeWorld(2);
  InFlight one(*world, Stage::kUnmatched);
  world->at(1).Abort(kNinthLost);
  world->fabrics[1].reset();
  EXPECT_TRUE(world->log(0).WaitFor([](EventLog& log) { return log.lost[1] == 1; }));
  one.recv = Pending::Of(world->at(0), RecvOp(*one.got, 1, 2));
  EXPECT_FALSE(one.recv->IsDone());
  world->at(0).Abort(kNinthLost);
  EXPECT_EQ(one.recv->Wait().code(), StatusCode::kRankLost);
}

// The last thing that rank 0 told of group "faked".
std::vector<WaitingOperation> LastTold(World& world, std::size_t missing) {
  std::vector<WaitingOperation> last;
  EXPECT_TRUE(world.log(0).WaitFor([&](EventLog& log) {
    if (log.waiting["faked"].empty()) return false;
    last = log.waiting["faked"].back();
    return last.size() == 1 && last[0].missing.size() == missing;
  }));
  return last;
}

// Rank 0 is a real one, rank 1 the test, over TCP.
class WithFake : public ::testing::Test {
 protected:
  static constexpr std::size_t kLimit = 1000;
  WithFake()
      : world_({.name = "tcp",
                .make =
                    [](const Clock& clock, CommunicatorEvents& events) {
                      CpuFabricOptions options;
                      options.shm_limit = 0;
                      return MakeCpuFabricWithEagerLimit(std::move(options), clock, events, kLimit);
                    }},
               1),
        spec_(SpecWithFake(world_, 0)) {}

  MessageHeader Header(PointToPointPhase phase, std::uint64_t number) {
    MessageHeader header = HeaderOf(SendOp(data_, 0, 1), number);
    header.phase = static_cast<std::uint8_t>(phase);
    const bool has_payload =
        phase == PointToPointPhase::kEager || phase == PointToPointPhase::kPayload;
    if (has_payload) header.payload_bytes = data_.size() * sizeof(float);
    return header;
  }
  // The whole message.
  std::string Message(PointToPointPhase phase, std::uint64_t number) {
    const MessageHeader header = Header(phase, number);
    return EncodeMessage(header) + std::string(header.payload_bytes, 0);
  }
  // What a rank must not say fails the communicator.
  void ExpectRefused(const std::vector<std::string>& messages) {
    const auto group = world_.Create(0, spec_);
    Data got(data_.size());
    const Pending recv = Pending::Of(*group, RecvOp(got, 1, 77));
    FakeRank fake(world_, spec_, 1, Lane::kPointToPoint);
    for (const std::string& message : messages) fake.Say(message);
    const Status status = recv.Wait();
    EXPECT_EQ(status.code(), StatusCode::kCommFailed) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("rank 1 (fake, pid 66)"));
    EXPECT_THAT(status.message(), HasSubstr("carries what no rank sends"));
    ++spec_.attempt;
  }

  // By the clock of the communicator: for a barrier of a group that the other rank never makes.
  void Pass(Duration time) {
    GroupSpec spec = spec_;
    spec.name = "alone";
    const auto alone = world_.Create(0, spec);
    const Status status = Pending::Of(*alone, Bounded(BarrierOp(), time, {})).Wait();
    EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  }

  Data data_ = Data(100);
  World world_;
  GroupSpec spec_;
};

TEST_F(WithFake, WhatNoReceiverMayGet_FailsTheCommunicator) {
  using Phase = PointToPointPhase;
  const std::string eager = Message(Phase::kEager, 1), announced = Message(Phase::kAnnounced, 1);
  // 656 bytes of 1000 each.
  ExpectRefused({eager, Message(Phase::kEager, 2)});
  ExpectRefused({Message(Phase::kPayload, 1)});
  ExpectRefused({announced, Message(Phase::kPayload, 1)});  // Not cleared.
  ExpectRefused({announced, announced});
  ExpectRefused({announced, eager});
  MessageHeader with_payload = Header(Phase::kAnnounced, 1);
  with_payload.payload_bytes = 4;
  ExpectRefused({EncodeMessage(with_payload) + std::string(4, 0)});
  for (const Phase reply : {Phase::kClearToSend, Phase::kUnmatched, Phase::kCredit})
    ExpectRefused({Message(reply, 1)});  // On the sender's own connection.
  MessageHeader unknown = Header(Phase::kCredit, 1);
  unknown.phase = 6;
  ExpectRefused({EncodeMessage(unknown)});
}

TEST_F(WithFake, AClearedPayload_MustBeWhatWasAnnounced) {
  for (const char* what : {"tag", "type", "count"}) {
    const auto group = world_.Create(0, spec_);
    Data got(data_.size());
    const Pending recv = Pending::Of(*group, RecvOp(got, 1, 1));
    FakeRank fake(world_, spec_, 1, Lane::kPointToPoint);
    fake.Say(Message(PointToPointPhase::kAnnounced, 1));
    EXPECT_EQ(fake.HearPhase(0), PointToPointPhase::kClearToSend);
    MessageHeader payload = Header(PointToPointPhase::kPayload, 1);
    if (*what == 't' && what[1] == 'a') payload.tag = 2;
    if (*what == 't' && what[1] == 'y') payload.dtype = DataType::kInt32;
    if (*what == 'c') payload.count -= 1, payload.payload_bytes -= sizeof(float);
    fake.Say(EncodeMessage(payload) + std::string(payload.payload_bytes, 0));
    EXPECT_EQ(recv.Wait().code(), StatusCode::kCommFailed) << what;
    ++spec_.attempt;
  }
}

// A standstill is judged from the moment that both ranks are known to be there.
TEST_F(WithFake, ASenderThatIsClearAndSendsNothing_IsAStandstill) {
  const auto group = world_.Create(0, spec_);
  Data got(data_.size());
  const Pending recv = Pending::Of(*group, Bounded(RecvOp(got, 1, 1), {}, Millis(300)));
  FakeRank fake(world_, spec_, 1, Lane::kPointToPoint);
  fake.Say(Message(PointToPointPhase::kAnnounced, 1));
  const Status status = recv.Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommStalled) << status.ToString();
  EXPECT_THAT(status.message(), HasSubstr("rank 1 (fake, pid 66)"));
}

// Payloads follow each other: while one moves, those after it do not stand still.
TEST_F(WithFake, APayloadThatComesAfterAnother_DoesNotStandStillMeanwhile) {
  const auto group = world_.Create(0, spec_);
  std::vector<Data> got(2, Data(data_.size()));
  constexpr Millis kStall(600);
  std::vector<Pending> recvs;
  for (Data& one : got)
    recvs.push_back(Pending::Of(*group, Bounded(RecvOp(one, 1, 1), {}, kStall)));
  FakeRank fake(world_, spec_, 1, Lane::kPointToPoint);
  for (const std::uint64_t number : {1u, 2u})
    fake.Say(Message(PointToPointPhase::kAnnounced, number));
  const Instant start = world_.clock.Now();
  const std::string payload = Message(PointToPointPhase::kPayload, 1);
  std::size_t said = 0;
  for (; world_.clock.Now() - start < 3 * kStall; ++said) {
    ASSERT_LT(said + 1, payload.size());
    fake.Say(payload.substr(said, 1));
    Pass(kStall / 10);
  }
  fake.Say(payload.substr(said) + Message(PointToPointPhase::kPayload, 2));
  for (const Pending& recv : recvs) EXPECT_TRUE(recv.Wait().ok()) << recv.Wait().ToString();
}

// Accepts the connection of rank 0's sends.
class FakeReceiver {
 public:
  FakeReceiver() {
    auto listener = ListenTcp({.host = "127.0.0.1", .port = 0}, 4);
    EXPECT_TRUE(listener.ok()) << listener.status().ToString();
    listener_ = std::move(*listener);
  }
  std::string address() const { return FormatHostPort(*LocalAddress(listener_)); }
  void Accept() {
    EXPECT_TRUE(Eventually([&] {
      auto link = AcceptTcp(listener_);
      if (link.ok() && link->valid()) link_ = std::move(*link);
      return link_.valid();
    }));
    const std::string fixed = Read(kHelloFixedBytes);
    const std::string rest = Read(*HelloLength(fixed) - kHelloFixedBytes);
    Say(EncodeHelloReply(HelloVerdict::kAccepted, ProofOf(fixed + rest), kSecret));
  }
  void Say(const std::string& bytes) {
    EXPECT_EQ(send(link_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void Reply(PointToPointPhase phase, std::uint64_t number, std::uint64_t credit = 0) {
    MessageHeader header;
    header.type = MessageType::kPointToPoint;
    header.phase = static_cast<std::uint8_t>(phase);
    header.seq = number;
    header.count = credit;
    Say(EncodeMessage(header));
  }
  MessageHeader Hear() {
    Result<MessageHeader> header = DecodeMessage(Read(kMessageHeaderBytes));
    EXPECT_TRUE(header.ok());
    Read(header->call_site_bytes + header->payload_bytes);
    return *header;
  }

 private:
  std::string Read(std::size_t bytes) {
    std::string text;
    EXPECT_TRUE(Eventually([&] {
      std::string part(bytes - text.size(), 0);
      const ssize_t n = recv(link_.get(), part.data(), part.size(), MSG_DONTWAIT);
      if (n > 0) text.append(part, 0, static_cast<std::size_t>(n));
      return text.size() == bytes;
    }));
    return text;
  }
  FileDescriptor listener_, link_;
};

class WithFakeReceiver : public WithFake {
 protected:
  WithFakeReceiver() { spec_.members[1].endpoint = fake_.address(); }
  // Rank 0 sends to the test, more than is eager.
  Pending SendLarge() {
    group_ = world_.Create(0, spec_);
    Pending send = Pending::Of(*group_, SendOp(large_, 1, 1));
    fake_.Accept();
    EXPECT_EQ(fake_.Hear().phase, static_cast<std::uint8_t>(PointToPointPhase::kAnnounced));
    return send;
  }
  FakeReceiver fake_;
  Data large_ = Data(kLimit);
  std::shared_ptr<Communicator> group_;
};

// A sender knows of no recv that is missing before its receiver says so.
TEST_F(WithFakeReceiver, OnlyTheReceiverSaysThatThereIsNoRecv) {
  const Pending send = SendLarge();
  LastTold(world_, 0);
  fake_.Reply(PointToPointPhase::kUnmatched, 1);
  EXPECT_EQ(LastTold(world_, 1)[0].missing, std::vector<int>{1});
  EXPECT_FALSE(send.IsDone());
  fake_.Reply(PointToPointPhase::kClearToSend, 1);
  EXPECT_TRUE(send.Wait().ok());
  const MessageHeader payload = fake_.Hear();
  EXPECT_EQ(payload.phase, static_cast<std::uint8_t>(PointToPointPhase::kPayload));
  EXPECT_EQ(payload.payload_bytes, large_.size() * sizeof(float));
}

TEST_F(WithFakeReceiver, AReplyToNothing_FailsTheCommunicator) {
  using Phase = PointToPointPhase;
  const std::tuple<Phase, std::uint64_t, std::uint64_t> wrong[] = {
      {Phase::kClearToSend, 2, 0},  // There is no such message.
      {Phase::kUnmatched, 2, 0},
      {Phase::kClearToSend, 1, 1},  // No credit was used.
      {Phase::kCredit, 0, 1},
      {Phase::kCredit, 0, ~std::uint64_t{0}}};
  for (const auto& [phase, number, credit] : wrong) {
    const Pending send = SendLarge();
    fake_.Reply(phase, number, credit);
    const Status status = send.Wait();
    EXPECT_EQ(status.code(), StatusCode::kCommFailed) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("carries what no rank sends"));
    ++spec_.attempt;
    fake_ = FakeReceiver();
    spec_.members[1].endpoint = fake_.address();
  }
}

}  // namespace
}  // namespace resilient::testing
