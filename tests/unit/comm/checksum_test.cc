// Goal: with checksums no damaged byte becomes a result; without them the same damage does, so that
// these tests can fail. Method: one byte is flipped in each place of a message, on the way between
// two ranks, and in the slots of shared memory before they are read.

#include "runtime/comm/checksum.h"

#include <poll.h>
#include <sys/socket.h>

#include <condition_variable>
#include <cstring>
#include <mutex>

#include <gmock/gmock.h>

#include "runtime/base/random.h"
#include "runtime/comm/endpoint.h"
#include "runtime/comm/message_link.h"
#include "runtime/comm/step_observer.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/damage.h"
#include "tests/unit/comm/fault_points.h"
#include "tests/unit/comm/trial.h"

namespace resilient::testing {
namespace {

using ::testing::HasSubstr;

Bytes RandomBytes(std::size_t count) {
  Random random(count);
  return RandomElements(DataType::kUInt8, ReduceOp::kNone, count, random);
}

TEST(Checksum, InPieces_IsThatOfTheWhole) {
  EXPECT_EQ(ChecksumOf({}), 0x2d06800538d394c2u);  // Of XXH3, wherever it runs.
  const Bytes bytes = RandomBytes(5000);
  Random random(1);
  RunningChecksum sum;
  for (int round = 0; round < 50; ++round) {
    sum.Begin();
    std::span<const std::byte> rest = bytes;
    while (!rest.empty()) {
      const std::size_t part = std::min<std::size_t>(rest.size(), random.Below(700));
      sum.Update(rest.first(part));
      rest = rest.subspan(part);
    }
    EXPECT_EQ(sum.Value(), ChecksumOf(bytes));
  }
}

constexpr std::size_t kNowhere = ~std::size_t{0};

// Flips byte `at` of what is read.
class DamagedStream final : public ByteStream {
 public:
  DamagedStream(FileDescriptor socket, std::size_t at)
      : inner_(MakeTcpStream(std::move(socket))), at_(at) {}
  int fd() const override { return inner_->fd(); }
  short PollFor(const StreamEvents& wanted) const override { return inner_->PollFor(wanted); }
  StreamEvents OnReady(short revents) override { return inner_->OnReady(revents); }
  IoResult Read(std::span<const iovec> into) override {
    const IoResult result = inner_->Read(into);
    std::size_t left = result.bytes;
    for (const iovec& piece : into) {
      const std::size_t here = std::min(left, piece.iov_len);
      if (at_ >= passed_ && at_ - passed_ < here)
        static_cast<std::byte*>(piece.iov_base)[at_ - passed_] ^= kFlip;
      passed_ += here;
      left -= here;
    }
    return result;
  }
  IoResult Write(std::span<const iovec> from) override { return inner_->Write(from); }
  void ShutdownWrite() override { inner_->ShutdownWrite(); }

 private:
  const std::unique_ptr<ByteStream> inner_;
  const std::size_t at_;
  std::size_t passed_ = 0;
};

// Keeps what comes.
class Receiver final : public LinkListener {
 public:
  static constexpr std::size_t kMost = 8u << 20;

  HeaderVerdict OnHeader(MessageLink&, const MessageHeader& header) override {
    if (drop || header.payload_bytes > kMost) return {};
    got.assign(header.payload_bytes, std::byte{0});
    sink_ = FlatSink(got);
    return {.action = HeaderVerdict::Action::kTake, .sink = &sink_};
  }
  void OnMessage(MessageLink&, const MessageHeader&) override { ++messages; }
  void OnDamaged(MessageLink&, const MessageHeader&) override { ++damaged; }
  void OnSent(MessageLink&, std::uint64_t) override { ++sent; }
  void OnEnd(MessageLink&, const Status&) override { ended = true; }
  void OnEndAhead(MessageLink&, const std::optional<MessageHeader>&) override {}

  bool drop = false;
  Bytes got;
  int messages = 0;
  int damaged = 0;
  int sent = 0;
  bool ended = false;

 private:
  FlatSink sink_;
};

// Two ends of one link; what the second reads is damaged at byte `at`.
struct Pair {
  Pair(bool checksums, std::size_t at) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    from.emplace(MakeTcpStream(FileDescriptor(ends[0])), sender, 1, Lane::kCollective, checksums);
    to.emplace(std::make_unique<DamagedStream>(FileDescriptor(ends[1]), at), receiver, 0,
               Lane::kCollective, false);
  }
  void Send(const Bytes& payload, bool owned = false) {
    MessageHeader header;
    header.seq = 1;
    header.call_site = "train.py:7";
    header.payload_bytes = payload.size();
    if (owned) {
      from->SendOwned(header,
                      std::string(reinterpret_cast<const char*>(payload.data()), payload.size()));
    } else {
      from->Send(header, payload, 1);
    }
  }
  // Until nothing moves any more.
  void Pump() {
    do {
      from->OnReady(POLLOUT);
      if (from->wants_flush()) from->Flush();
      to->OnReady(POLLIN);
    } while (from->TakeMoved() | to->TakeMoved());
  }

  Receiver sender, receiver;
  std::optional<MessageLink> from, to;
};

TEST(LinkChecksum, WhatIsWhole_Passes_AlsoWhereOnlyTheSenderHasThem) {
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{1000}, (std::size_t{128} << 10) - 1,
        std::size_t{128} << 10, std::size_t{5} << 20}) {
    const Bytes payload = RandomBytes(size);
    Pair pair(true, kNowhere);
    for (const bool owned : {false, true, false}) {
      pair.Send(payload, owned);
      pair.Send({});  // A note between.
    }
    pair.Pump();
    EXPECT_EQ(pair.receiver.messages, 6) << size;
    EXPECT_EQ(pair.receiver.damaged, 0) << size;
    EXPECT_EQ(pair.sender.sent, 5) << size;
  }
}

TEST(LinkChecksum, AByteFlippedAnywhere_IsNeverTakenForTheMessage) {
  const Bytes payload = RandomBytes(100);
  const std::size_t head = kMessageHeaderBytes + std::strlen("train.py:7");
  const std::size_t all = head + payload.size() + kChecksumBytes;
  for (std::size_t at = 0; at < all; ++at) {
    Pair pair(true, at);
    pair.Send(payload);
    pair.Pump();
    EXPECT_EQ(pair.receiver.messages, 0) << at;
    if (at >= head) {
      EXPECT_EQ(pair.receiver.damaged, 1) << at;
    }
  }
  for (std::size_t at = head; at < head + payload.size(); ++at) {
    Pair pair(false, at);
    pair.Send(payload);
    pair.Pump();
    EXPECT_EQ(pair.receiver.messages, 1) << at;
    EXPECT_FALSE(pair.receiver.got == payload) << at;
  }
}

// Perhaps it is dropped because what its header says is damaged.
TEST(LinkChecksum, WhatIsDropped_IsComparedAsWell) {
  const Bytes payload = RandomBytes(100'000);
  for (const std::size_t at : {kNowhere, kMessageHeaderBytes, std::size_t{50'000}}) {
    Pair pair(true, at);
    pair.receiver.drop = true;
    pair.Send(payload);
    pair.Pump();
    EXPECT_EQ(pair.receiver.messages, at == kNowhere ? 1 : 0) << at;
    EXPECT_EQ(pair.receiver.damaged, at == kNowhere ? 0 : 1) << at;
  }
}

TEST(LinkChecksum, AByteOfALargeMessage_AndTheMessageAfterIt) {
  const Bytes payload = RandomBytes(3u << 20);
  for (const std::size_t at : {std::size_t{1000}, std::size_t{1} << 20, std::size_t{3} << 20}) {
    Pair pair(true, at);
    pair.Send(payload);
    pair.Send(payload);
    pair.Pump();
    EXPECT_EQ(pair.receiver.damaged, 1) << at;
    EXPECT_EQ(pair.receiver.messages, 1) << at;
    EXPECT_TRUE(pair.receiver.got == payload) << at;
  }
}

TEST(LinkChecksum, WhatLosesItsSenderHalfWay_ArrivesWhole) {
  Bytes payload = RandomBytes(6u << 20);
  Pair pair(true, kNowhere);
  pair.Send(payload);
  pair.Send(payload);
  pair.from->Flush();  // As much as the kernel takes.
  EXPECT_EQ(pair.from->DetachSends(), 1u);
  std::fill(payload.begin(), payload.end(), std::byte{0});
  pair.Send(RandomBytes(10), true);
  pair.Pump();
  EXPECT_EQ(pair.receiver.messages, 2);
  EXPECT_EQ(pair.receiver.damaged, 0);
}

// One operation of three ranks, of which rank 1 sends to rank 0 what comes damaged.
struct Case {
  std::string name;
  OpKind kind = OpKind::kAllReduce;
  std::size_t count = 0;
  std::size_t at = 0;       // Over links: which byte from rank 1 to rank 0.
  std::uint64_t round = 0;  // In shared memory: when it has published that.
  std::uint64_t back = 0;   // And how many rounds before the slot is of.
  std::size_t eager_limit = kEagerLimitBytes;
  friend void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }
};

constexpr int kRanks = 3;

// How an operation has ended on each rank, and how the next one.
struct Outcome {
  std::vector<Status> first, next;
  bool wrong = false;  // A rank was told OK and has a wrong result.
};

class Damage : public ::testing::TestWithParam<Case> {
 protected:
  // What reduces counts bits, so that no flip is rounded away.
  Call MakeCall() const {
    Call call{.kind = GetParam().kind, .dtype = DataType::kInt32};
    if (Reduces(call.kind)) call.reduce = ReduceOp::kSum;
    if (HasRoot(call.kind)) {
      const bool from_root = call.kind == OpKind::kBroadcast || call.kind == OpKind::kScatter;
      call.root = from_root ? 1 : 0;
    }
    SetCounts(call, kRanks, GetParam().count);
    return call;
  }
  Outcome RunOn(const std::vector<std::shared_ptr<Communicator>>& group) {
    Trial trial(MakeCall(), random_);
    std::vector<Pending> pending;
    for (int rank = 0; rank < kRanks; ++rank) {
      Operation op = trial.At(rank);
      op.call_site = "train.py:7";
      // The damage may be known before the last rank comes.
      pending.push_back(Pending::Try(*group[static_cast<std::size_t>(rank)], std::move(op)));
    }
    return Collect(group, pending, [&](int rank) { return !trial.WhatIsWrong(rank).empty(); });
  }
  Outcome SendOn(const std::vector<std::shared_ptr<Communicator>>& group) {
    std::vector<float> sent(GetParam().count, 1.5f), got(GetParam().count);
    Operation op = RecvOp(got, 1, 0);
    op.call_site = "train.py:8";
    const Pending recv = Pending::Of(*group[0], op);
    Operation send = SendOp(sent, 0, 0);
    send.call_site = "train.py:7";
    const Pending sending = Pending::Of(*group[1], send);
    return Collect(group, {recv, sending}, [&](int rank) { return rank == 0 && got != sent; });
  }
  static Outcome Collect(const std::vector<std::shared_ptr<Communicator>>& group,
                         const std::vector<Pending>& pending,
                         const std::function<bool(int)>& is_wrong) {
    Outcome outcome;
    for (const Pending& one : pending) outcome.first.push_back(one.Wait());
    for (std::size_t rank = 0; rank < pending.size(); ++rank) {
      if (outcome.first[rank].ok() && is_wrong(static_cast<int>(rank))) outcome.wrong = true;
    }
    std::vector<Pending> next;
    for (const auto& one : group) next.push_back(Pending::Try(*one, BarrierOp()));
    for (const Pending& one : next) outcome.next.push_back(one.Wait());
    return outcome;
  }

  static void ExpectAllHeard(const Outcome& outcome) {
    EXPECT_FALSE(outcome.wrong);
    EXPECT_EQ(outcome.first[0].code(), StatusCode::kCommFailed);
    for (const Status& status : outcome.next) {
      EXPECT_EQ(status.code(), StatusCode::kCommFailed) << status.ToString();
      EXPECT_THAT(status.message(), HasSubstr("from rank 1 (node1, pid 1001) have come damaged"));
      EXPECT_THAT(status.message(), HasSubstr("at train.py:7"));
      EXPECT_THAT(status.message(), HasSubstr("group damaged, "));
      EXPECT_THAT(status.message(), HasSubstr("EDAC"));
      EXPECT_EQ(status.detail().rank, 1);
    }
  }
  static void ExpectNobodyNoticed(const Outcome& outcome) {
    ExpectAllOk(outcome.first);
    ExpectAllOk(outcome.next);
    EXPECT_TRUE(outcome.wrong);
  }

  Random random_{5};
};

class LinkDamage : public Damage {
 protected:
  Outcome Run(bool checksums) {
    World world({.name = "tcp",
                 .make =
                     [&](const Clock& clock, CommunicatorEvents& events) {
                       CpuFabricOptions options;
                       options.shm_limit = 0;
                       options.checksums = checksums;
                       return MakeCpuFabricWithEagerLimit(std::move(options), clock, events,
                                                          GetParam().eager_limit);
                     }},
                kRanks);
    DamagingProxy proxy(DecodeEndpoint(world.endpoint(0)).address, GetParam().at);
    std::vector<std::shared_ptr<Communicator>> group;
    for (int rank = 0; rank < kRanks; ++rank) {
      GroupSpec spec = world.Spec("damaged", rank);
      if (rank == 1) spec.members[0].endpoint = proxy.address();
      group.push_back(world.Create(rank, spec));
    }
    const bool send = GetParam().kind == OpKind::kSend;
    const Outcome outcome = send ? SendOn(group) : RunOn(group);
    EXPECT_EQ(proxy.flips(), 1);
    if (checksums) {
      for (int rank = 0; rank < kRanks; ++rank)
        EXPECT_TRUE(world.log(rank).WaitFor([](EventLog& log) { return log.stalls.size() == 1; }));
    }
    for (auto& one : group) one->Leave();
    return outcome;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Checksum, LinkDamage,
    ::testing::Values(
        Case{.name = "AllReduceSmall", .kind = OpKind::kAllReduce, .count = 1'000, .at = 2'000},
        Case{.name = "AllReduceInput", .kind = OpKind::kAllReduce, .count = 99'999, .at = 60'000},
        Case{.name = "AllReduceResult", .kind = OpKind::kAllReduce, .count = 99'999, .at = 200'000},
        Case{.name = "Broadcast", .kind = OpKind::kBroadcast, .count = 10'000, .at = 20'000},
        Case{.name = "AllGather", .kind = OpKind::kAllGather, .count = 10'000, .at = 20'000},
        Case{.name = "Reduce", .kind = OpKind::kReduce, .count = 10'000, .at = 20'000},
        Case{.name = "Gather", .kind = OpKind::kGather, .count = 10'000, .at = 20'000},
        Case{.name = "Scatter", .kind = OpKind::kScatter, .count = 10'000, .at = 20'000},
        Case{
            .name = "ReduceScatter", .kind = OpKind::kReduceScatter, .count = 10'000, .at = 20'000},
        Case{.name = "AllToAll", .kind = OpKind::kAllToAll, .count = 10'000, .at = 20'000},
        Case{.name = "Send", .kind = OpKind::kSend, .count = 10'000, .at = 20'000},
        Case{.name = "SendAnnounced",
             .kind = OpKind::kSend,
             .count = 10'000,
             .at = 20'000,
             .eager_limit = 0}),
    [](const auto& info) { return info.param.name; });

TEST_P(LinkDamage, WithChecksums_FailsAllRanks_WithoutThem_PassesForData) {
  ExpectAllHeard(Run(true));
  ExpectNobodyNoticed(Run(false));
}

class SlotDamage : public Damage {
 protected:
  // Rank 1 has published round `round`, the others wait before they do, and its slot is damaged in
  // the middle of each region: whoever reads any of it reads damage.
  void Observe(const GroupSpec& group, std::uint64_t step) {
    if (group.name != "damaged") return;
    std::unique_lock lock(mutex_);
    if (group.rank != 1) {
      const bool about_to_publish = step == 2 * GetParam().round + 1;
      if (about_to_publish) {
        EXPECT_TRUE(changed_.wait_for(lock, kBound, [&] { return damaged_; }));
      }
    } else if (step == 2 * GetParam().round + 2) {
      std::set<std::size_t> offsets;
      const std::uint64_t board_step = GetParam().round + 1 - GetParam().back;
      const std::size_t slot =
          geometry_.ControlEnd() +
          (ShmGeometry::kSlots + board_step % ShmGeometry::kSlots) * geometry_.slot_bytes;
      for (std::size_t region = 0; region < kRanks; ++region)
        offsets.insert(slot + geometry_.slot_bytes * (2 * region + 1) / (2 * kRanks));
      EXPECT_GT(DamageSegments(offsets), 0);
      damaged_ = true;
      changed_.notify_all();
    }
  }
  Outcome Run(bool checksums) {
    damaged_ = false;
    World world(
        {.name = "shm",
         .make =
             [&](const Clock& clock, CommunicatorEvents& events) {
               CpuFabricOptions options;
               options.shm_limit = LeastShmLimit(kRanks);
               options.checksums = checksums;
               return MakeObservedCpuFabric(
                   options, clock, events,
                   [this](const GroupSpec& group, std::uint64_t step) { Observe(group, step); });
             }},
        kRanks);
    const Outcome outcome = RunOn(world.CreateAll("damaged"));
    EXPECT_TRUE(damaged_);
    return outcome;
  }

  const ShmGeometry geometry_ = *ShmGeometry::Within(LeastShmLimit(kRanks), kRanks);
  std::mutex mutex_;
  std::condition_variable changed_;
  bool damaged_ = false;
};

INSTANTIATE_TEST_SUITE_P(
    Checksum, SlotDamage,
    ::testing::Values(
        Case{.name = "AllReduceSmall", .kind = OpKind::kAllReduce, .count = 2'000},
        Case{.name = "AllReduceInput", .kind = OpKind::kAllReduce, .count = 20'000, .round = 1},
        Case{.name = "AllReduceResult",
             .kind = OpKind::kAllReduce,
             .count = 20'000,
             .round = 2,
             .back = 1},
        Case{.name = "Broadcast", .kind = OpKind::kBroadcast, .count = 10'000},
        Case{.name = "BroadcastLater", .kind = OpKind::kBroadcast, .count = 10'000, .round = 1},
        Case{.name = "AllGather", .kind = OpKind::kAllGather, .count = 10'000, .round = 1},
        Case{.name = "Reduce", .kind = OpKind::kReduce, .count = 10'000, .round = 1},
        Case{.name = "Gather", .kind = OpKind::kGather, .count = 10'000},
        Case{.name = "Scatter", .kind = OpKind::kScatter, .count = 3'000, .round = 1},
        Case{.name = "ReduceScatter", .kind = OpKind::kReduceScatter, .count = 3'000},
        Case{.name = "AllToAll", .kind = OpKind::kAllToAll, .count = 3'000}),
    [](const auto& info) { return info.param.name; });

TEST_P(SlotDamage, WithChecksums_FailsAllRanks_WithoutThem_PassesForData) {
  ExpectAllHeard(Run(true));
  ExpectNobodyNoticed(Run(false));
}

// The sender decides: no rank refuses another, and what one sends with checksums is compared.
TEST(ChecksumSettings, RanksThatDiffer_WorkTogether) {
  for (const std::size_t shm_limit : {std::size_t{0}, LeastShmLimit(kRanks)}) {
    int made = 0;
    World world({.name = "mixed",
                 .make =
                     [&](const Clock& clock, CommunicatorEvents& events) {
                       CpuFabricOptions options;
                       options.shm_limit = shm_limit;
                       options.checksums = made++ % 2 == 0;
                       return MakeCpuFabric(std::move(options), clock, events);
                     }},
                kRanks);
    Random random(3);
    for (const OpKind kind : kCollectives) {
      Call call = RandomCall(kRanks, 0, random);
      while (call.kind != kind) call = RandomCall(kRanks, 0, random);
      SetCounts(call, kRanks, 5'000);
      Trial trial(call, random);
      ExpectAllOk(world.RunAll([&](int rank) { return trial.At(rank); }));
      for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(trial.WhatIsWrong(rank), "");
    }
  }
}

}  // namespace
}  // namespace resilient::testing
