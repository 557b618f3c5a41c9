// Goal: a stream through shared memory carries every byte once and in order, sleeps and wakes
// without a loss, ends where its peer ended, and believes nothing that it reads. Method: both ends
// in one process, on one mapping where ThreadSanitizer is to see every access, on two as in real
// life elsewhere; the connection is a socket pair.

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <thread>

#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "runtime/comm/endpoint.h"
#include "runtime/comm/mismatch.h"
#include "runtime/comm/shm_allowance.h"
#include "runtime/comm/shm_stream.h"
#include "runtime/comm/wire.h"
#include "runtime/net/socket.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {
namespace {

using State = IoResult::State;
using Bytes = std::vector<std::byte>;

constexpr std::size_t kLeast = ShmStreamGeometry::kLeastRingBytes;
// One lost wake-up would take longer than all of a test may.
constexpr int kLostMs = 60'000;

std::pair<FileDescriptor, FileDescriptor> Connection() {
  int fds[2] = {-1, -1};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
  return {FileDescriptor(fds[0]), FileDescriptor(fds[1])};
}

// The two ends of a stream on one mapping, and what is in it.
struct Ends {
  explicit Ends(ShmStreamGeometry shape = {kLeast, kLeast}) : geometry(shape) {
    auto made = ShmSegment::Create(geometry.TotalBytes());
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    segment = std::move(*made);
    ShmStream::FormatMemory(segment->memory());
    auto [left, right] = Connection();
    a = std::make_unique<ShmStream>(std::move(left), segment->memory(), geometry,
                                    ShmStream::Side::kOffers, nullptr);
    b = std::make_unique<ShmStream>(std::move(right), segment->memory(), geometry,
                                    ShmStream::Side::kAttaches, nullptr);
  }
  // Of the ring from `a` to `b`.
  ShmRingControl& forward() const {
    return *reinterpret_cast<ShmRingControl*>(segment->memory().data() + 256);
  }

  const ShmStreamGeometry geometry;
  std::unique_ptr<ShmSegment> segment;
  std::unique_ptr<ShmStream> a;
  std::unique_ptr<ShmStream> b;
};

IoResult Write(ByteStream& to, const Bytes& bytes) {
  const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  return to.Write({&piece, 1});
}

IoResult Read(ByteStream& from, std::size_t most, Bytes* into = nullptr) {
  Bytes bytes(most);
  const iovec piece{bytes.data(), bytes.size()};
  const IoResult result = from.Read({&piece, 1});
  if (into != nullptr) into->insert(into->end(), bytes.begin(), bytes.begin() + result.bytes);
  return result;
}

// How often the bell of a stream was rung and nobody has answered.
int Rung(const ByteStream& stream) {
  int waiting = -1;
  EXPECT_EQ(ioctl(stream.fd(), FIONREAD, &waiting), 0);
  return waiting;
}

Bytes Numbers(std::size_t count, std::uint64_t from = 0) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<std::byte>((from + i) * 31 + (from + i) / 251);
  return bytes;
}

TEST(ShmStream, BytesOfRandomSizes_ArriveOnceAndInOrder) {
  for (const ShmStreamGeometry shape :
       {ShmStreamGeometry{kLeast, 2 * kLeast}, ShmStreamGeometry{256u << 10, kLeast}}) {
    Ends ends(shape);
    Random random(5);
    for (const bool forward : {true, false}) {
      ByteStream& from = forward ? *ends.a : *ends.b;
      ByteStream& to = forward ? *ends.b : *ends.a;
      const Bytes sent = Numbers(2'000'000);
      Bytes got;
      std::size_t at = 0;
      while (got.size() < sent.size()) {
        // Several pieces at once, some of them empty.
        std::vector<iovec> pieces;
        std::size_t end = at;
        for (std::uint64_t i = random.Below(4) + 1; i > 0; --i) {
          const std::size_t part =
              std::min<std::size_t>(random.Below(3 * kLeast), sent.size() - end);
          pieces.push_back({const_cast<std::byte*>(sent.data()) + end, part});
          end += part;
        }
        if (end > at) {
          const IoResult wrote = from.Write(pieces);
          ASSERT_TRUE(wrote.state == State::kMoved || wrote.state == State::kBlocked);
          ASSERT_EQ(wrote.state == State::kMoved, wrote.bytes > 0);
          at += wrote.bytes;
        }
        const IoResult read = Read(to, random.Below(5 * kLeast) + 1, &got);
        ASSERT_TRUE(read.state == State::kMoved || read.state == State::kBlocked);
      }
      EXPECT_TRUE(got == sent);
      EXPECT_EQ(Read(to, 1).state, State::kBlocked);
    }
  }
}

TEST(ShmStream, TheBellIsRungForWhoSleepsAndForNobodyElse) {
  Ends ends;
  EXPECT_EQ(Write(*ends.a, Numbers(10)).bytes, 10u);
  EXPECT_EQ(Rung(*ends.b), 1) << "it has not looked yet";
  EXPECT_EQ(Write(*ends.a, Numbers(10)).bytes, 10u);
  EXPECT_EQ(Rung(*ends.b), 1) << "it knows";
  const StreamEvents ready = ends.b->OnReady(POLLIN);
  EXPECT_TRUE(ready.bytes && !ready.end);
  EXPECT_EQ(Rung(*ends.b), 0) << "drained";
  EXPECT_EQ(Read(*ends.b, 100).bytes, 20u);
  EXPECT_EQ(Write(*ends.a, Numbers(10)).bytes, 10u);
  EXPECT_EQ(Rung(*ends.b), 0) << "it has not said that it sleeps";
  EXPECT_EQ(Read(*ends.b, 100).bytes, 10u);
  EXPECT_EQ(Read(*ends.b, 100).state, State::kBlocked);
  EXPECT_EQ(Write(*ends.a, Numbers(10)).bytes, 10u);
  EXPECT_EQ(Rung(*ends.b), 1);
  EXPECT_EQ(Rung(*ends.a), 0);
}

TEST(ShmStream, AFullRing_IsToldToBeFreeOnceHalfOfItIs) {
  Ends ends;
  EXPECT_EQ(Write(*ends.a, Numbers(kLeast + 1)).bytes, kLeast);
  EXPECT_EQ(Write(*ends.a, Numbers(1)).state, State::kBlocked);
  EXPECT_EQ(ends.a->PollFor({.room = true}), POLLIN);
  EXPECT_EQ(ends.a->PollFor({}), 0);
  EXPECT_EQ(Read(*ends.b, kLeast / 2 - 1).bytes, kLeast / 2 - 1);
  EXPECT_EQ(Rung(*ends.a), 0);
  EXPECT_EQ(Read(*ends.b, 1).bytes, 1u);
  EXPECT_EQ(Rung(*ends.a), 1);
  EXPECT_TRUE(ends.a->OnReady(POLLIN).room);
  EXPECT_EQ(Write(*ends.a, Numbers(kLeast)).bytes, kLeast / 2);
  EXPECT_EQ(Read(*ends.b, kLeast).bytes, kLeast);
  EXPECT_EQ(Rung(*ends.a), 0) << "it does not sleep";
}

TEST(ShmStream, OneCallMovesABoundedPartOfWhatThereIs) {
  Ends ends({4 * kMoveBytes, kLeast});
  const Bytes sent = Numbers(3 * kMoveBytes);
  EXPECT_EQ(Write(*ends.a, sent).bytes, kMoveBytes);
  EXPECT_EQ(Write(*ends.a, sent).bytes, kMoveBytes) << "there was room";
  EXPECT_EQ(Read(*ends.b, 2 * kMoveBytes).bytes, kMoveBytes);
  EXPECT_EQ(Read(*ends.b, 2 * kMoveBytes).bytes, kMoveBytes) << "they were there";
}

// Both directions at once; each end sleeps in poll() whenever a direction blocks.
void Exchange(ByteStream& stream, std::size_t bytes, std::uint64_t seed) {
  Random random(seed);
  const Bytes sent = Numbers(bytes, seed % 2);
  Bytes got;
  std::size_t at = 0;
  while (at < sent.size() || got.size() < bytes) {
    bool moved = false;
    if (at < sent.size()) {
      const std::size_t part = std::min<std::size_t>(random.Below(3000) + 1, sent.size() - at);
      const iovec piece{const_cast<std::byte*>(sent.data()) + at, part};
      const IoResult result = stream.Write({&piece, 1});
      ASSERT_NE(result.state, State::kBroken);
      at += result.bytes;
      moved = result.bytes > 0;
    }
    if (random.Below(8) == 0) std::this_thread::yield();
    const IoResult result = Read(stream, random.Below(3000) + 1, &got);
    ASSERT_TRUE(result.state == State::kMoved || result.state == State::kBlocked);
    if (moved || result.bytes > 0) continue;
    pollfd entry{
        .fd = stream.fd(), .events = stream.PollFor({.bytes = true, .room = true}), .revents = 0};
    ASSERT_EQ(poll(&entry, 1, kLostMs), 1) << "a wake-up was lost";
    stream.OnReady(entry.revents);
  }
  EXPECT_TRUE(got == Numbers(bytes, (seed + 1) % 2));
}

TEST(ShmStream, TwoThreadsBothWays_LoseNoWakeUpAndNoByte) {
  const std::size_t bytes = kSanitized ? 2'000'000 : 20'000'000;
  Ends ends;
  std::thread other([&] { Exchange(*ends.b, bytes, 3); });
  Exchange(*ends.a, bytes, 2);
  other.join();
}

TEST(ShmStream, OneWordToAndFro_LosesNoWakeUp) {
  const int rounds = kSanitized ? 3'000 : 30'000;
  Ends ends;
  const auto play = [&](ByteStream& stream, bool first) {
    for (int i = 0; i < rounds; ++i) {
      if (first) {
        ASSERT_EQ(Write(stream, Numbers(8)).bytes, 8u);
      }
      for (Bytes got; got.size() < 8;) {
        const IoResult result = Read(stream, 8 - got.size(), &got);
        if (result.state == State::kMoved) continue;
        ASSERT_EQ(result.state, State::kBlocked);
        pollfd entry{.fd = stream.fd(), .events = stream.PollFor({.bytes = true}), .revents = 0};
        ASSERT_EQ(poll(&entry, 1, kLostMs), 1) << "a wake-up was lost";
        stream.OnReady(entry.revents);
      }
      if (!first) {
        ASSERT_EQ(Write(stream, Numbers(8)).bytes, 8u);
      }
    }
  };
  std::thread other([&] { play(*ends.b, false); });
  play(*ends.a, true);
  other.join();
}

TEST(ShmStream, Shutdown_IsSeenBehindTheBytes_AndTheOtherWayGoesOn) {
  Ends ends;
  EXPECT_EQ(Write(*ends.a, Numbers(100)).bytes, 100u);
  ends.a->ShutdownWrite();
  EXPECT_EQ(Read(*ends.b, 60).bytes, 60u);
  EXPECT_EQ(Read(*ends.b, 60).bytes, 40u);
  EXPECT_EQ(Read(*ends.b, 60).state, State::kEnd);
  // It still tells of room: many times what the ring takes goes the other way.
  std::size_t got = 0;
  for (int i = 0; i < 10; ++i) {
    while (Write(*ends.b, Numbers(kLeast)).state == State::kMoved) {
    }
    while (got < static_cast<std::size_t>(i + 1) * kLeast) got += Read(*ends.a, kLeast).bytes;
    pollfd entry{.fd = ends.b->fd(), .events = ends.b->PollFor({.room = true}), .revents = 0};
    ASSERT_EQ(poll(&entry, 1, kLostMs), 1);
    EXPECT_TRUE(ends.b->OnReady(entry.revents).room);
  }
}

TEST(ShmStream, WhoWaitsForTheEndAlone_IsNotWokenForBytes) {
  Ends ends;
  EXPECT_EQ(Write(*ends.a, Numbers(10)).bytes, 10u);
  EXPECT_FALSE(ends.b->OnReady(POLLIN).end);
  EXPECT_EQ(Read(*ends.b, 5).bytes, 5u);  // And stops reading: it holds a message.
  EXPECT_EQ(Write(*ends.a, Numbers(10)).bytes, 10u);
  EXPECT_EQ(Rung(*ends.b), 0);
  EXPECT_EQ(ends.b->PollFor({.end = true}), POLLIN);
  ends.a->ShutdownWrite();
  EXPECT_EQ(Rung(*ends.b), 1);
  EXPECT_TRUE(ends.b->OnReady(POLLIN).end);
  EXPECT_EQ(Read(*ends.b, 100).bytes, 15u);
  EXPECT_EQ(Read(*ends.b, 100).state, State::kEnd);
}

TEST(ShmStream, PeerGone_IsToldBehindTheBytes_AndNothingIsPolledAnyMore) {
  // With an unanswered bell the connection is reset instead of ended.
  for (const bool reset : {false, true}) {
    Ends ends;
    EXPECT_EQ(Read(*ends.a, 1).state, State::kBlocked);
    if (reset) {
      EXPECT_EQ(Write(*ends.b, Numbers(5)).bytes, 5u);
    }
    EXPECT_EQ(Write(*ends.a, Numbers(100)).bytes, 100u);
    if (!reset) ends.a->OnReady(POLLIN);
    ends.a.reset();
    StreamEvents ready = ends.b->OnReady(POLLIN);
    if (!ready.end) ready = ends.b->OnReady(POLLIN);  // Behind what it had rung.
    EXPECT_TRUE(ready.bytes && ready.room && ready.end);
    EXPECT_EQ(Write(*ends.b, Numbers(1)).state, State::kBroken);
    EXPECT_EQ(Read(*ends.b, 60).bytes, 60u);
    EXPECT_EQ(Read(*ends.b, 60).bytes, 40u);
    const IoResult end = Read(*ends.b, 60);
    EXPECT_EQ(end.state, reset ? State::kBroken : State::kEnd);
    EXPECT_EQ(end.error, reset ? ECONNRESET : 0);
    EXPECT_EQ(ends.b->PollFor({.bytes = true, .room = true, .end = true}), 0);
  }
}

TEST(ShmStream, WriterThatWaitsForRoom_HearsThatItsPeerIsGone) {
  Ends ends;
  while (Write(*ends.a, Numbers(kLeast)).state == State::kMoved) {
  }
  ends.b->OnReady(POLLIN);
  ends.b.reset();
  pollfd entry{.fd = ends.a->fd(), .events = ends.a->PollFor({.room = true}), .revents = 0};
  ASSERT_EQ(poll(&entry, 1, kLostMs), 1);
  EXPECT_TRUE(ends.a->OnReady(entry.revents).room);
  EXPECT_EQ(Write(*ends.a, Numbers(1)).state, State::kBroken);
}

TEST(ShmStream, AnIndexThatMakesNoSense_BreaksTheStream) {
  for (const std::uint64_t written :
       {std::uint64_t{kLeast} + 11, std::uint64_t{9}, ~std::uint64_t{0}}) {
    Ends ends;
    ASSERT_EQ(Write(*ends.a, Numbers(10)).bytes, 10u);
    ASSERT_EQ(Read(*ends.b, 10).bytes, 10u);
    ends.forward().written.store(written);
    Bytes got(2 * kLeast, std::byte{7});
    const iovec piece{got.data(), got.size()};
    const IoResult result = ends.b->Read({&piece, 1});
    EXPECT_EQ(result.state, State::kBroken);
    EXPECT_EQ(result.error, EBADMSG);
    EXPECT_TRUE(got == Bytes(2 * kLeast, std::byte{7}));
  }
  for (const std::uint64_t read : {std::uint64_t{11}, ~std::uint64_t{0}, std::uint64_t{1} << 63}) {
    Ends ends;
    ASSERT_EQ(Write(*ends.a, Numbers(10)).bytes, 10u);
    ends.forward().read.store(read);
    EXPECT_EQ(Write(*ends.a, Numbers(10)).state, State::kBroken);
  }
}

TEST(ShmStreamOffer, Attached_CarriesBytesAndLeavesNothing) {
  ASSERT_EQ(MappedSegments(), 0u);
  {
    auto offer = ShmStreamOffer::Make({.forward_bytes = 2 * kLeast, .backward_bytes = kLeast});
    ASSERT_TRUE(offer.ok()) << offer.status().ToString();
    const std::string text = (*offer)->text();
    EXPECT_LE(text.size(), kMaxShmText);
    auto [left, right] = Connection();
    auto attached = AttachShmStream(text, right);
    ASSERT_TRUE(attached.ok()) << attached.status().ToString();
    EXPECT_FALSE(right.valid());
    EXPECT_TRUE((*offer)->taken());
    EXPECT_FALSE((*offer)->Withdraw()) << "too late";
    auto [third, fourth] = Connection();
    EXPECT_EQ(AttachShmStream(text, fourth).status().code(), StatusCode::kCancelled) << "twice";
    EXPECT_TRUE(fourth.valid());
    const auto stream = (*offer)->MakeStream(std::move(left));
    EXPECT_EQ(MappedSegments(), 2u);
    for (const auto& [from, to] :
         {std::pair(stream.get(), attached->get()), std::pair(attached->get(), stream.get())}) {
      Bytes got;
      EXPECT_EQ(Write(*from, Numbers(kLeast)).bytes, kLeast);
      EXPECT_EQ(Read(*to, kLeast, &got).bytes, kLeast);
      EXPECT_TRUE(got == Numbers(kLeast));
    }
    EXPECT_EQ(AttachShmStream(text, fourth).status().code(), StatusCode::kUnreachable) << "closed";
  }
  EXPECT_EQ(MappedSegments(), 0u);
}

TEST(ShmStreamOffer, Withdrawn_CannotBeTaken) {
  auto offer = ShmStreamOffer::Make({.forward_bytes = kLeast, .backward_bytes = kLeast});
  ASSERT_TRUE(offer.ok());
  EXPECT_TRUE((*offer)->Withdraw());
  EXPECT_FALSE((*offer)->taken());
  auto [left, right] = Connection();
  EXPECT_EQ(AttachShmStream((*offer)->text(), right).status().code(), StatusCode::kCancelled);
  EXPECT_TRUE(right.valid());
}

TEST(ShmStreamOffer, Nonsense_IsRefused) {
  const auto offer = ShmStreamOffer::Make({.forward_bytes = kLeast, .backward_bytes = 2 * kLeast});
  ASSERT_TRUE(offer.ok());
  const std::string good = (*offer)->text();
  const std::string where = good.substr(0, good.rfind(' ', good.rfind(' ') - 1));
  auto [left, right] = Connection();
  for (const char* sizes :
       {"", " 4096", " 4096 0", " 0 4096", " 4096 4097", " -1 4096", " 4096 x", " 4096 8192 4096",
        " 99999999999999999999 4096", " 4096 2048", " 134217728 4096"}) {
    EXPECT_EQ(AttachShmStream(where + sizes, right).status().code(), StatusCode::kProtocol)
        << sizes;
  }
  EXPECT_EQ(AttachShmStream(where + " 8192 8192", right).status().code(), StatusCode::kUnreachable)
      << "not of that size";
  EXPECT_EQ(AttachShmStream("", right).status().code(), StatusCode::kProtocol);
  EXPECT_TRUE(AttachShmStream(good, right).ok());
}

TEST(ShmAllowance, StaysWithinTheLimitOfTheGroupOnEachHost) {
  for (const int ranks : {1, 2, 3, 8, 64, 200}) {
    for (const bool spans : {false, true}) {
      for (std::size_t limit = 0; limit < std::size_t{4} << 30; limit = limit * 2 + 4096) {
        std::vector<std::string> hosts(static_cast<std::size_t>(ranks), "a");
        if (spans) hosts.push_back("b");
        std::size_t taken = 0;
        if (const auto board = ShmGeometry::Within(limit, ranks); board && !spans)
          taken = board->TotalBytes();
        const HostLayout layout = LayoutOf(hosts);
        for (int rank = 0; rank < ranks; ++rank) {
          ShmAllowance allowance(layout, rank, limit);
          for (int peer = 0; peer < ranks; ++peer) {
            for (const Lane lane : {Lane::kCollective, Lane::kPointToPoint}) {
              if (peer == rank) continue;
              const auto geometry = allowance.Take(peer, lane);
              if (!geometry) continue;
              EXPECT_TRUE(geometry->Valid());
              EXPECT_TRUE(spans || lane == Lane::kPointToPoint);
              EXPECT_GE(geometry->forward_bytes, ShmAllowance::kLeastRingBytes);
              EXPECT_LE(geometry->forward_bytes, ShmAllowance::kBestRingBytes);
              taken += geometry->TotalBytes();
            }
          }
        }
        ASSERT_LE(taken, std::max(limit, std::size_t{1})) << ranks << " ranks";
      }
    }
  }
}

TEST(ShmAllowance, ByDefault_PairsOfAHostHaveTheBestAndOthersNone) {
  const std::size_t limit = CpuFabricOptions().shm_limit;
  const HostLayout hosts = LayoutOf({"a", "b", "a", "", "a"});
  ShmAllowance spanning(hosts, 0, limit);
  for (const auto& [lane, best] :
       {std::pair(Lane::kCollective, ShmAllowance::kBestCollectiveRingBytes),
        std::pair(Lane::kPointToPoint, ShmAllowance::kBestRingBytes)}) {
    EXPECT_FALSE(spanning.Take(1, lane));
    EXPECT_FALSE(spanning.Take(3, lane));
    EXPECT_EQ(spanning.Take(2, lane)->forward_bytes, best);
    EXPECT_EQ(spanning.Take(4, lane)->forward_bytes, best);
  }
  const HostLayout unknown_hosts = LayoutOf({"", ""});
  ShmAllowance unknown(unknown_hosts, 0, limit);
  EXPECT_FALSE(unknown.Take(1, Lane::kPointToPoint));
  const HostLayout same_host = LayoutOf({"a", "a"});
  ShmAllowance one_host(same_host, 1, limit);
  EXPECT_FALSE(one_host.Take(0, Lane::kCollective)) << "collectives have a segment of their own";
  EXPECT_EQ(one_host.Take(0, Lane::kPointToPoint)->forward_bytes, ShmAllowance::kBestRingBytes);
}

TEST(ShmAllowance, ManyRanks_TheFirstLinksHaveMoreThanTheirPart) {
  const HostLayout hosts = LayoutOf(std::vector<std::string>(64, "a"));
  ShmAllowance allowance(hosts, 0, 256u << 20);
  const auto first = allowance.Take(1, Lane::kPointToPoint);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->forward_bytes, 512u << 10);
  int links = 1;
  while (allowance.Take(2, Lane::kPointToPoint)) ++links;
  EXPECT_GE(links, 9);
}

// Links of groups as they are in use.
std::size_t LinksInUse(const Transport& transport, int size) {
  World world(transport, size);
  ExpectAllOk(world.RunAll([](int) { return BarrierOp(); }));
  std::vector<std::vector<float>> data(static_cast<std::size_t>(size), std::vector<float>(3));
  std::vector<Pending> pending;
  for (int rank = 0; rank + 2 < size; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    pending.push_back(Pending::Of(world.at(rank), SendOp(data[r], rank + 2, 0)));
    pending.push_back(Pending::Of(world.at(rank + 2), RecvOp(data[r + 2], rank, 0)));
    EXPECT_TRUE(pending[pending.size() - 2].Wait().ok() && pending.back().Wait().ok());
  }
  return MappedSegments();
}

TEST(ShmLinks, AreWhereAPairIsOnOneHostAndNothingElseServesIt) {
  const std::vector<Transport> all = AllTransports();
  ASSERT_EQ(all[0].name + all[1].name + all[2].name, "tcpshmmixed");
  EXPECT_EQ(LinksInUse(all[0], 4), 0u);
  // The segment of the collectives in all ranks; two links of sends, on both ends.
  EXPECT_EQ(LinksInUse(all[1], 4), 4u + 2 * 2);
  // Two pairs with links for both.
  EXPECT_EQ(LinksInUse(all[2], 4), 2 * 2u + 2 * 2);
  EXPECT_EQ(MappedSegments(), 0u);
}

Duration ProcessorTime() {
  timespec used{};
  EXPECT_EQ(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used), 0);
  return std::chrono::seconds(used.tv_sec) + Duration(used.tv_nsec);
}

TEST(ShmLinks, ThatWaitForALatePeer_TakeNoProcessorTime) {
  World world(AllTransports()[2], 3);
  ExpectAllOk(world.RunAll([](int) { return BarrierOp(); }));
  // From rank 0 to rank 2 a ring is full and its reader holds a message that is too large to keep;
  // the other way a reader sleeps. The collective misses rank 1.
  std::vector<float> large(17u << 20, 1.0f), got(17u << 20), small(4), sum(2, 1.0f);
  std::vector<Pending> waiting = {
      Pending::Of(world.at(0), SendOp(large, 2, 0)), Pending::Of(world.at(0), RecvOp(small, 2, 0)),
      Pending::Of(world.at(0), BarrierOp()), Pending::Of(world.at(2), BarrierOp())};
  std::vector<float> word(4, 2.0f), answer(4);
  const auto talk = [&] {
    const Pending send = Pending::Of(world.at(2), SendOp(word, 0, 1));
    EXPECT_TRUE(Pending::Of(world.at(0), RecvOp(answer, 2, 1)).Wait().ok() && send.Wait().ok());
  };
  talk();
  const auto alone = world.Create(0, world.Spec("alone", 0));
  const Duration before = ProcessorTime();
  Operation op = BarrierOp();
  op.timeout = Millis(400);
  EXPECT_EQ(Pending::Of(*alone, op).Wait().code(), StatusCode::kCommFailed);
  EXPECT_LT(ProcessorTime() - before, Millis(kSanitized ? 200 : 100));
  talk();
  for (const Pending& one : waiting) EXPECT_FALSE(one.IsDone());
  waiting.push_back(Pending::Of(world.at(1), BarrierOp()));
  waiting.push_back(Pending::Of(world.at(2), RecvOp(got, 0, 0)));
  waiting.push_back(Pending::Of(world.at(2), SendOp(word, 0, 0)));
  for (const Pending& one : waiting) EXPECT_TRUE(one.Wait().ok()) << one.Wait().ToString();
  EXPECT_TRUE(got == large && small == word);
}

// What a rank answers to a hello for a group that spans hosts; nothing when it proves no secret.
std::optional<HelloVerdict> AnswerTo(World& world, const std::string& group,
                                     const std::string& shm_offer) {
  const Deadline deadline = Deadline::After(world.clock.Now(), kBound);
  const Hello hello{.generation = 1,
                    .from = 2,
                    .to = 0,
                    .group = group,
                    .shm_offer = shm_offer,
                    .made = RanksOf(world.Spec(group, 2))};
  auto socket = ConnectTcp(*ParseHostPort(DecodeEndpoint(world.endpoint(0)).address), world.clock,
                           deadline, -1);
  if (!socket.ok()) return std::nullopt;
  const std::string bytes = SayHello(hello, kSecret);
  EXPECT_EQ(send(socket->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  std::vector<PollEntry> entries{{.fd = socket->get(), .events = POLLIN}};
  EXPECT_EQ(PollUntil(entries, world.clock, deadline), 1);
  std::string reply(kHelloReplyBytes, 0);
  EXPECT_EQ(recv(socket->get(), reply.data(), reply.size(), 0), static_cast<ssize_t>(reply.size()));
  if (!ReplyProvesSecret(reply, ProofOf(bytes), kSecret)) return std::nullopt;
  return DecodeHelloReply(reply)->verdict;
}

TEST(ShmLinks, AnOfferThatCannotBeTaken_IsAcceptedAsTcp) {
  World world(AllTransports()[2], 3);
  auto offer = ShmStreamOffer::Make({.forward_bytes = kLeast, .backward_bytes = kLeast});
  ASSERT_TRUE(offer.ok());
  const std::string good = (*offer)->text();
  const std::vector<std::pair<std::string, HelloVerdict>> answers = {
      {"", HelloVerdict::kAccepted},
      {"what is this", HelloVerdict::kAccepted},
      {"2147483647" + good.substr(good.find(' ')), HelloVerdict::kAccepted},
      {good, HelloVerdict::kAcceptedShared},
      {good, HelloVerdict::kAccepted}};
  std::vector<std::shared_ptr<Communicator>> groups;
  for (const auto& [text, verdict] : answers) {
    const std::string name = "group" + std::to_string(groups.size());
    groups.push_back(world.Create(0, world.Spec(name, 0)));
    EXPECT_EQ(AnswerTo(world, name, text), verdict) << text;
  }
}

}  // namespace
}  // namespace resilient::testing
