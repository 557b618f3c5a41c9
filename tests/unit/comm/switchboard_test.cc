// Goal: what strangers open at a rank's port costs them their own connections, and the rank neither
// its descriptors nor its log nor the connections of its peers. Method: a switchboard on a real
// port, real connections from two addresses of loopback, and a clock moved by hand.

#include "runtime/comm/switchboard.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/captured_stderr.h"
#include "tests/support/descriptors.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr Duration kTick = std::chrono::milliseconds(1);

// The limit of open files of this process, for the life of the object.
class FileLimit {
 public:
  explicit FileLimit(rlim_t files) {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = files;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  ~FileLimit() { setrlimit(RLIMIT_NOFILE, &before_); }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  rlimit before_{};
};

FileDescriptor NewSocket() {
  return FileDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

void Dial(const FileDescriptor& client, std::uint16_t port, const std::string& said,
          const char* source) {
  sockaddr_in own{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {}, .sin_zero = {}};
  inet_pton(AF_INET, source, &own.sin_addr);
  ASSERT_EQ(bind(client.get(), reinterpret_cast<sockaddr*>(&own), sizeof own), 0);
  sockaddr_in to{.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {}, .sin_zero = {}};
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  ASSERT_EQ(connect(client.get(), reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
  ASSERT_EQ(send(client.get(), said.data(), said.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(said.size()));
}
// A connection from `source`; its first bytes are `said`.
FileDescriptor Dial(std::uint16_t port, const std::string& said, const char* source) {
  FileDescriptor client = NewSocket();
  Dial(client, port, said, source);
  return client;
}

// The hello of a rank that is ahead: of a generation that nobody knows yet where it comes.
std::string Early(int from, std::uint64_t generation = 2, std::uint64_t connector = 1) {
  return EncodeHello({.generation = generation,
                      .attempt = 1,
                      .from = from,
                      .to = 0,
                      .connector = connector,
                      .group = "world",
                      .from_world = from},
                     "secret");
}

class SwitchboardTest : public ::testing::Test, public HelloRouter {
 protected:
  void SetUp() override { Begin(); }
  void Begin() {
    Result<FileDescriptor> listener = ListenTcp({.host = "127.0.0.1", .port = 0}, 4096);
    ASSERT_TRUE(listener.ok());
    address_ = *LocalAddress(*listener);
    board_ = std::make_unique<Switchboard>(std::move(*listener), *this);
  }

  // With room for so many of either kind.
  void BeginWithRoomFor(rlim_t connections) {
    const FileLimit files(4 * connections);
    Begin();
  }

  FileDescriptor Connect(const std::string& said, const char* source = "127.0.0.1") const {
    return Dial(address_.port, said, source);
  }
  // One turn of the loop, without waiting. Returns what it was ready for.
  int Turn() {
    std::vector<PollEntry> entries;
    board_->OnTime(now_);
    board_->AddInterest(now_, entries);
    const int ready = poll(entries.data(), entries.size(), 0);
    board_->OnReady(now_, entries.data());
    return ready;
  }
  // Until there is nothing left to do at this instant. What is sent over loopback has arrived.
  void Settle() {
    for (int turn = 0; turn < 1000 && Turn() > 0; ++turn) {
    }
  }
  // Whether the other side has closed it.
  static bool Closed(const FileDescriptor& client) {
    char byte = 0;
    const ssize_t n = recv(client.get(), &byte, 1, MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno == ECONNRESET);
  }

  Instant now_ = Instant(std::chrono::hours(1));
  Routing routing_ = Routing::kPark;
  std::vector<Hello> routed_;
  HostPort address_;
  std::unique_ptr<Switchboard> board_;
  std::vector<FileDescriptor> taken_;

 private:
  Routing Route(const Hello& hello, FileDescriptor& socket) override {
    routed_.push_back(hello);
    if (routing_ == Routing::kTaken) taken_.push_back(std::move(socket));
    return routing_;
  }
};

TEST_F(SwitchboardTest, PeerThatIsAhead_IsParkedAndHandedOverLater) {
  const FileDescriptor peer = Connect(Early(1) + "and the first message");
  Settle();
  EXPECT_EQ(board_->parked(), 1u);
  routing_ = Routing::kTaken;
  board_->Reroute();
  EXPECT_EQ(board_->parked(), 0u);
  ASSERT_EQ(routed_.size(), 2u);
  EXPECT_EQ(routed_.back().from, 1);
  EXPECT_FALSE(Closed(peer));
}

TEST_F(SwitchboardTest, NewTryOfAParkedPeer_TakesThePlaceOfTheOldOne) {
  const FileDescriptor first = Connect(Early(1));
  Settle();
  const FileDescriptor second = Connect(Early(1));
  Settle();
  EXPECT_EQ(board_->parked(), 1u);
  EXPECT_TRUE(Closed(first));
  EXPECT_FALSE(Closed(second));
}

TEST_F(SwitchboardTest, HelloOfAnotherConnector_TakesNobodysPlace) {
  const FileDescriptor first = Connect(Early(1));
  Settle();
  const FileDescriptor stranger = Connect(Early(1, 2, 99));
  Settle();
  EXPECT_EQ(board_->parked(), 2u);
  EXPECT_FALSE(Closed(first));
}

TEST_F(SwitchboardTest, ParkedPeersThatGoAway_FreeAllButAFewDescriptors) {
  BeginWithRoomFor(64);
  const std::size_t before = OpenDescriptors();
  {
    std::vector<FileDescriptor> peers;
    for (int from = 1; from <= 50; ++from) peers.push_back(Connect(Early(from)));
    Settle();
    EXPECT_EQ(board_->parked(), 50u);
  }
  Settle();
  EXPECT_EQ(board_->parked(), 16u);
  EXPECT_EQ(OpenDescriptors(), before + 16);
  // Their groups hear of those.
  routed_.clear();
  routing_ = Routing::kTaken;
  board_->Reroute();
  EXPECT_EQ(routed_.size(), 16u);
  EXPECT_EQ(board_->parked(), 0u);
}

TEST_F(SwitchboardTest, GoodbyeOfAParkedPeer_IsThereForItsGroup) {
  const std::string goodbye(kMessageHeaderBytes, 'g');
  Connect(Early(1) + goodbye).Reset();
  Settle();
  EXPECT_EQ(board_->parked(), 1u);
  EXPECT_EQ(Turn(), 0) << "an end that is known woke the loop";
  routing_ = Routing::kTaken;
  board_->Reroute();
  ASSERT_EQ(taken_.size(), 1u);
  std::string read(100, '\0');
  read.resize(static_cast<std::size_t>(recv(taken_[0].get(), read.data(), read.size(), 0)));
  EXPECT_EQ(read, goodbye);
}

TEST_F(SwitchboardTest, PeersThatLeaveLessThanAMessage_CountAsEnded) {
  BeginWithRoomFor(64);
  for (int from = 1; from <= 50; ++from) Connect(Early(from) + "no message").Reset();
  Settle();
  EXPECT_EQ(board_->parked(), 16u);
}

TEST_F(SwitchboardTest, ParkedPeerThatSends_CostsNoTurn) {
  const FileDescriptor peer = Connect(Early(1) + std::string(1000, 'x'));
  Settle();
  EXPECT_EQ(Turn(), 0) << "the bytes of its group woke the loop";
}

TEST_F(SwitchboardTest, SilentConnection_IsClosedWhenAHelloIsOverdue) {
  const FileDescriptor silent = Connect("");
  const FileDescriptor slow = Connect(Early(1).substr(0, 10));
  Settle();
  EXPECT_EQ(board_->greeting(), 2u);
  EXPECT_EQ(board_->NextTime(), now_ + Switchboard::kHelloWithin);
  now_ += Switchboard::kHelloWithin - kTick;
  Settle();
  EXPECT_EQ(board_->greeting(), 2u);
  now_ += kTick;
  Settle();
  EXPECT_EQ(board_->greeting(), 0u);
  EXPECT_TRUE(Closed(silent));
  EXPECT_TRUE(Closed(slow));
  EXPECT_EQ(board_->NextTime(), kNever);
}

TEST_F(SwitchboardTest, FloodOfOneAddress_ClosesNoneOfAnother) {
  BeginWithRoomFor(16);
  const FileDescriptor rank = Connect(Early(1), "127.0.0.2");
  const FileDescriptor slow_rank = Connect(Early(2).substr(0, 10), "127.0.0.2");
  Settle();
  std::vector<FileDescriptor> strangers;
  for (std::uint64_t i = 0; i < 100; ++i) {
    strangers.push_back(Connect(i % 2 == 0 ? Early(7, 1000 + i) : ""));
    Settle();
  }
  EXPECT_EQ(board_->parked(), 16u);
  EXPECT_EQ(board_->greeting(), 16u);
  EXPECT_EQ(std::ranges::count_if(strangers, Closed), 100 - 2 * 15);
  EXPECT_FALSE(Closed(rank));
  const std::string rest = Early(2).substr(10);
  ASSERT_EQ(send(slow_rank.get(), rest.data(), rest.size(), 0), static_cast<ssize_t>(rest.size()));
  Settle();
  EXPECT_EQ(routed_.back().from, 2);
  EXPECT_FALSE(Closed(slow_rank));
}

TEST_F(SwitchboardTest, OutOfDescriptors_NothingIsAcceptedForAWhile) {
  if (kAddressSanitized) GTEST_SKIP() << "UBSan makes a pipe for each type that it meets";
  const FileDescriptor stranger = Connect("");
  const FileDescriptor rank = NewSocket();
  Settle();
  EXPECT_EQ(board_->greeting(), 1u);
  BeginToCaptureStderr();
  {
    std::vector<FileDescriptor> used;
    const FileLimit files(64);
    do {
      used.emplace_back(dup(0));
    } while (used.back().valid());
    Dial(rank, address_.port, Early(1), "127.0.0.1");
    Turn();
    EXPECT_EQ(Turn(), 0) << "the connection that waits woke the loop";
    EXPECT_EQ(board_->parked(), 0u);
    EXPECT_EQ(board_->NextTime(), now_ + Switchboard::kAcceptPause);
    EXPECT_TRUE(Closed(stranger)) << "whose place is worth less than what waits";
  }
  EXPECT_THAT(TakeCapturedStderr(), HasSubstr("cannot accept a connection"));
  now_ += Switchboard::kAcceptPause;
  Settle();
  EXPECT_EQ(board_->parked(), 1u);
  EXPECT_EQ(board_->NextTime(), kNever);
}

TEST_F(SwitchboardTest, Rubbish_IsOneLineASecondWithACount) {
  BeginToCaptureStderr();
  for (int i = 0; i < 50; ++i) {
    const FileDescriptor stranger = Connect("GET / HTTP/1.1\r\n\r\n");
    Settle();
    EXPECT_TRUE(Closed(stranger));
  }
  now_ += LogLimit::kInterval;
  const FileDescriptor stranger = Connect("GET / HTTP/1.1\r\n\r\n");
  Settle();
  const std::string lines = TakeCapturedStderr();
  EXPECT_EQ(std::ranges::count(lines, '\n'), 2) << lines;
  EXPECT_THAT(lines, AllOf(HasSubstr("closed a connection from 127.0.0.1"),
                           HasSubstr("and 49 more like it")));
}

// 800 connections of a stranger, half of them silent, while a group is made.
TEST(FloodedPort, RanksMeetAllTheSame_AndGetTheirDescriptorsBack) {
  auto files = std::make_unique<FileLimit>(256);  // 64 of either kind for each rank.
  World world(AllTransports().front(), 2);
  files.reset();
  ExpectAllOk(world.RunAll([](int) { return BarrierOp(); }));
  const std::size_t before = OpenDescriptors();
  std::vector<FileDescriptor> strangers;
  const auto flood = [&] {
    for (int rank = 0; rank < world.size(); ++rank) {
      const auto address = ParseHostPort(DecodeEndpoint(world.endpoint(rank)).address);
      ASSERT_TRUE(address.ok());
      for (std::uint64_t i = 0; i < 200; ++i) {
        const std::string said = i % 2 == 0 ? Early(7, (1u << 20) + i) : "";
        strangers.push_back(Dial(address->port, said, "127.0.0.1"));
      }
    }
  };
  flood();
  world.group = world.CreateAll("late", 2);
  flood();
  ExpectAllOk(world.RunAll([](int) { return BarrierOp(); }));
  const std::size_t theirs = strangers.size();
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() <= before + theirs + 2 * 2 * 64 + 8; }));
  strangers.clear();
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() <= before + 2 * 16 + 8; }));
}

}  // namespace
}  // namespace resilient::testing
