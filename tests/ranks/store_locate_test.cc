// Goal: a rank that knows only an address finds the store there, or starts it, and what cannot work
// is told apart. Method: the real server program, started by the code under test, and sockets that
// only listen, or have a name as another user.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <future>
#include <string>
#include <vector>

#include <resilient/store/locate.h>

#include "runtime/net/socket.h"
#include "runtime/net/unix_address.h"
#include "store/client/spawn_right.h"
#include "tests/ranks/store_server_support.h"
#include "tests/support/as_user.h"
#include "tests/support/captured_stderr.h"

namespace resilient::store {
namespace {

const InterruptCheck kNoInterrupt = [] { return Status::Ok(); };

LocateOptions OptionsFor(const std::string& address, int rank = 0) {
  LocateOptions options;
  options.connect.addresses = {address};
  options.connect.job = "locate";
  options.rank = rank;
  options.linger = std::chrono::seconds(5);
  return options;
}

Result<Located> Locate(const LocateOptions& options, Duration timeout = kPatience) {
  const SystemClock clock;
  return FindOrStart(options, kNoInterrupt, clock, In(timeout));
}

// An address of loopback where nobody listens at this moment.
std::string FreeAddress() {
  const auto listener = ListenTcp({.host = "127.0.0.1", .port = 0}, 1);
  return FormatHostPort(*LocalAddress(*listener));
}

// Ends what a test has started.
class StoreLocate : public ::testing::Test {
 protected:
  void TearDown() override {
    const SystemClock clock;
    if (!address_.empty()) {
      const Status drained =
          DrainStore(OptionsFor(address_).connect, true, clock, In(std::chrono::seconds(5)));
      EXPECT_TRUE(drained.ok()) << drained.ToString();
    }
    if (!log_path_.empty()) unlink(log_path_.c_str());
  }

  std::string address_;
  std::string log_path_;
};

TEST_F(StoreLocate, NobodyListens_FourAtOnceAgreeOnOneServer) {
  address_ = FreeAddress();
  std::vector<std::future<Result<Located>>> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.push_back(
        std::async(std::launch::async, [&, rank] { return Locate(OptionsFor(address_, rank)); }));
  }
  int spawned = 0;
  std::string server_id;
  for (auto& rank : ranks) {
    const Result<Located> located = rank.get();
    ASSERT_TRUE(located.ok()) << located.status().ToString();
    if (server_id.empty()) server_id = located->server_id;
    EXPECT_EQ(located->server_id, server_id);
    spawned += located->spawned ? 1 : 0;
    if (located->spawned) log_path_ = located->log_path;
  }
  EXPECT_EQ(spawned, 1);
  EXPECT_FALSE(server_id.empty());
}

TEST_F(StoreLocate, ServerListens_IsFound) {
  TestServer server;
  const Result<Located> located = Locate(OptionsFor(server.address_text()));
  ASSERT_TRUE(located.ok()) << located.status().ToString();
  EXPECT_EQ(located->server_id, server.server_id());
  EXPECT_FALSE(located->spawned);
}

TEST_F(StoreLocate, SomethingSilentListens_UnreachableAtTheDeadlineSaysWhy) {
  const auto listener = ListenTcp({.host = "127.0.0.1", .port = 0}, 16);
  const std::string address = FormatHostPort(*LocalAddress(*listener));
  const Result<Located> located = Locate(OptionsFor(address), std::chrono::milliseconds(100));
  ASSERT_FALSE(located.ok());
  EXPECT_EQ(located.status().code(), StatusCode::kUnreachable) << located.status().ToString();
  EXPECT_NE(located.status().message().find(address), std::string::npos);
  EXPECT_NE(located.status().message().find("ended with exit code 3"), std::string::npos)
      << located.status().ToString();
}

// A socket of another user with the name by which processes of this user agree on who starts it.
FileDescriptor TakeRightAsNobody(const std::string& store) {
  const auto name = UnixAddress::Abstract(SpawnRightName(geteuid(), *ParseHostPort(store)));
  const AsUser other(kNobody);
  FileDescriptor taken(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(bind(taken.get(), name->get(), name->size()), 0);
  return taken;
}

TEST_F(StoreLocate, AnotherUserHasTheRightToStartIt_IsStarted) {
  SKIP_UNLESS_ROOT();
  address_ = FreeAddress();
  const FileDescriptor taken = TakeRightAsNobody(address_);
  const Result<Located> located = Locate(OptionsFor(address_));
  ASSERT_TRUE(located.ok()) << located.status().ToString();
  EXPECT_TRUE(located->spawned);
  log_path_ = located->log_path;
}

TEST_F(StoreLocate, AnotherUserHasTheRightToStartIt_IsToldOnceInManyTries) {
  SKIP_UNLESS_ROOT();
  // Does not listen: nobody answers there, and no server can.
  const FileDescriptor port(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(port.get(), reinterpret_cast<sockaddr*>(&loopback), sizeof loopback), 0);
  const std::string address = FormatHostPort(*LocalAddress(port));
  const FileDescriptor taken = TakeRightAsNobody(address);
  int asked = 0;
  const SystemClock clock;
  BeginToCaptureStderr();
  const Result<Located> located = FindOrStart(
      OptionsFor(address),
      [&asked] {  // After each try.
        return ++asked < 4 ? Status::Ok() : Status(StatusCode::kInterrupted, "enough");
      },
      clock, In(kPatience));
  const std::string log = TakeCapturedStderr();
  EXPECT_EQ(located.status().code(), StatusCode::kInterrupted) << located.status().ToString();
  const std::string line = "user 65534 of this host has taken the name";
  const std::size_t first = log.find(line);
  ASSERT_NE(first, std::string::npos) << log;
  EXPECT_EQ(log.find(line, first + 1), std::string::npos) << log;
}

TEST_F(StoreLocate, NameThatDoesNotResolve_IsLookedForUntilTheDeadline) {
  const Result<Located> located =
      Locate(OptionsFor("no-such-host.invalid:29500"), std::chrono::milliseconds(1000));
  ASSERT_FALSE(located.ok());
  EXPECT_EQ(located.status().code(), StatusCode::kResolve) << located.status().ToString();
  EXPECT_NE(located.status().message().find("does not resolve"), std::string::npos);
  const Result<Located> other =
      Locate(OptionsFor("no-such-host.invalid:29500", 1), std::chrono::milliseconds(1000));
  ASSERT_TRUE(other.ok()) << other.status().ToString();
  EXPECT_TRUE(other->server_id.empty());
}

TEST_F(StoreLocate, InterruptedWait_ReturnsItsReason) {
  const auto listener = ListenTcp({.host = "127.0.0.1", .port = 0}, 16);
  const SystemClock clock;
  const Status reason(StatusCode::kInterrupted, "Ctrl-C");
  const Result<Located> located = FindOrStart(
      OptionsFor(FormatHostPort(*LocalAddress(*listener))), [&] { return reason; }, clock,
      In(kPatience));
  ASSERT_FALSE(located.ok());
  EXPECT_EQ(located.status().code(), StatusCode::kInterrupted) << located.status().ToString();
}

TEST_F(StoreLocate, PortZero_SettingAndNothingIsStarted) {
  const Result<Located> located = Locate(OptionsFor("127.0.0.1:0"));
  ASSERT_FALSE(located.ok());
  EXPECT_EQ(located.status().code(), StatusCode::kSetting) << located.status().ToString();
  EXPECT_NE(located.status().message().find("port 0"), std::string::npos);
}

TEST_F(StoreLocate, StartedServer_IsNobodysChildHere) {
  address_ = FreeAddress();
  const Result<Located> located = Locate(OptionsFor(address_));
  ASSERT_TRUE(located.ok()) << located.status().ToString();
  log_path_ = located->log_path;
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST_F(StoreLocate, MalformedAddress_Setting) {
  const Result<Located> located = Locate(OptionsFor("no port"));
  ASSERT_FALSE(located.ok());
  EXPECT_EQ(located.status().code(), StatusCode::kSetting) << located.status().ToString();
}

TEST(StoreAddressTowards, Loopback_IsLoopback) {
  EXPECT_EQ(AddressTowards("127.0.0.1:1"), "127.0.0.1");
  EXPECT_EQ(AddressTowards("[::1]:1"), "127.0.0.1");
  EXPECT_EQ(AddressTowards("malformed"), "127.0.0.1");
}

}  // namespace
}  // namespace resilient::store
