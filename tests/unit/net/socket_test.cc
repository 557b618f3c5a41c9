// Goal: addresses parse both ways; connect outcomes are told apart; nothing waits past its
// deadline. Method: loopback sockets on ports that the kernel chooses.
#include "runtime/net/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/thread.h"
#include "tests/support/child_process.h"

namespace resilient {
namespace {

using std::chrono::seconds;

const SystemClock kClock;

Deadline In(Duration timeout) { return Deadline::After(kClock.Now(), timeout); }

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) != -1; }

struct Listener {
  FileDescriptor socket;
  HostPort address;
};

Listener Listen(const std::string& host = "127.0.0.1", int backlog = 16) {
  Result<FileDescriptor> socket = ListenTcp({.host = host, .port = 0}, backlog);
  EXPECT_TRUE(socket.ok()) << socket.status().message();
  Result<HostPort> address = LocalAddress(*socket);
  EXPECT_TRUE(address.ok());
  return {std::move(socket).value(), *address};
}

// A port that nobody listens on: bound, so that nobody else gets it, but not listening.
std::pair<FileDescriptor, HostPort> DeafPort() {
  FileDescriptor bound(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(bind(bound.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  HostPort where = *LocalAddress(bound);
  return {std::move(bound), where};
}

TEST(HostPort, Accepted_Table) {
  const std::pair<const char*, HostPort> kTable[] = {
      {"localhost:29500", {"localhost", 29500}},
      {"10.0.0.1:0", {"10.0.0.1", 0}},
      {"[::1]:65535", {"::1", 65535}},
      {"[fe80::1%eth0]:1", {"fe80::1%eth0", 1}},
      {"a.b-c:80", {"a.b-c", 80}},
  };
  for (const auto& [text, expected] : kTable) {
    const Result<HostPort> parsed = ParseHostPort(text);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_EQ(*parsed, expected) << text;
    EXPECT_EQ(FormatHostPort(*parsed), text);
  }
}

TEST(HostPort, Refused_Table) {
  for (const char* text :
       {"", ":", "host", "host:", ":80", "host:x", "host:80x", "host:-1", "host:65536", "::1:80",
        "[]:80", "[host]:80", "[::1]", "[::1:80", "a b:1", "host:+1", "host: 1"}) {
    const Result<HostPort> parsed = ParseHostPort(text);
    EXPECT_EQ(parsed.status().code(), StatusCode::kSetting) << text;
    EXPECT_NE(parsed.status().message().find("'" + std::string(text) + "'"), std::string::npos);
  }
}

TEST(FileDescriptor, Moves_AndClosesOnce) {
  const int number = dup(STDERR_FILENO);
  FileDescriptor first(number);
  FileDescriptor second(std::move(first));
  EXPECT_FALSE(first.valid());  // NOLINT(bugprone-use-after-move): the moved-from state is defined.
  EXPECT_EQ(second.get(), number);
  FileDescriptor third;
  third = std::move(second);
  EXPECT_TRUE(IsOpen(number));
  third.Reset();
  EXPECT_FALSE(IsOpen(number));
  third.Reset();
}

TEST(FileDescriptor, ForkedChild_HasNone) {
  const WakeFd wake;
  const int number = wake.fd();
  const ChildProcess child([&](int pipe) {
    // A file of the program's own has the number by now.
    const int file = memfd_create("checkpoint", MFD_CLOEXEC);
    RESILIENT_CHECK(dup2(file, number) == number);
    wake.Wake();
    struct stat found {};
    RESILIENT_CHECK(fstat(number, &found) == 0);
    WriteLine(pipe, StrCat(wake.fd(), " ", found.st_size));
  });
  EXPECT_EQ(child.ReadLine(), "-1 0");
  EXPECT_EQ(wake.fd(), number);
}

TEST(FileDescriptor, ForkedChild_ClosesNothingOfItsOwn) {
  FileDescriptor socket(dup(STDERR_FILENO));
  const int number = socket.get();
  const pid_t pid = fork();
  if (pid == 0) {
    if (IsOpen(number)) _exit(1);
    // The number belongs to somebody else now; the stale object must not close it.
    if (dup2(STDERR_FILENO, number) != number) _exit(2);
    socket.Reset();
    _exit(IsOpen(number) ? 0 : 3);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(IsOpen(number));
}

constexpr int kDayMs = 24 * 3600 * 1000;

int OptionOf(const FileDescriptor& socket, int level, int option) {
  int value = -1;
  socklen_t size = sizeof value;
  EXPECT_EQ(getsockopt(socket.get(), level, option, &value, &size), 0);
  return value;
}

TEST(ConnectTcp, IdleConnections_AreProbedEachAtItsOwnTime) {
  const Listener listener = Listen();
  std::vector<FileDescriptor> sockets;
  std::set<int> times;
  for (int i = 0; i < 8; ++i) {
    Result<FileDescriptor> client = ConnectTcp(listener.address, kClock, In(seconds(5)), -1);
    ASSERT_TRUE(client.ok()) << client.status().message();
    EXPECT_NE(OptionOf(*client, SOL_SOCKET, SO_KEEPALIVE), 0);
    times.insert(OptionOf(*client, IPPROTO_TCP, TCP_KEEPIDLE));
    sockets.push_back(std::move(*client));
  }
  EXPECT_EQ(times.size(), sockets.size());
  EXPECT_GE(*times.begin(), 60);
  EXPECT_LT(*times.rbegin(), 120);
}

TEST(ConnectTcp, Loopback_CarriesBytesAndIsTuned) {
  const Listener listener = Listen();
  Result<FileDescriptor> client = ConnectTcp(listener.address, kClock, In(seconds(5)), -1);
  ASSERT_TRUE(client.ok()) << client.status().message();
  std::vector<PollEntry> entries{{.fd = listener.socket.get(), .events = POLLIN}};
  ASSERT_EQ(PollUntil(entries, kClock, In(seconds(5))), 1);
  Result<FileDescriptor> server = AcceptTcp(listener.socket);
  ASSERT_TRUE(server.ok());
  ASSERT_TRUE(server->valid());
  for (const FileDescriptor* end : {&*client, &*server}) {
    int on = 0;
    socklen_t size = sizeof on;
    ASSERT_EQ(getsockopt(end->get(), IPPROTO_TCP, TCP_NODELAY, &on, &size), 0);
    EXPECT_NE(on, 0);
    EXPECT_GT(OptionOf(*end, IPPROTO_TCP, TCP_USER_TIMEOUT), kDayMs)
        << "the kernel ends a connection whose processes live";
    EXPECT_NE(fcntl(end->get(), F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(fcntl(end->get(), F_GETFD) & FD_CLOEXEC, 0);
  }
  ASSERT_EQ(write(client->get(), "hello", 5), 5);
  entries = {{.fd = server->get(), .events = POLLIN}};
  ASSERT_EQ(PollUntil(entries, kClock, In(seconds(5))), 1);
  char bytes[8] = {};
  EXPECT_EQ(read(server->get(), bytes, sizeof bytes), 5);
  EXPECT_STREQ(bytes, "hello");
}

TEST(ConnectTcp, Name_TriesEachFamily) {
  // Only one of the families of "localhost" has this listener.
  const Listener listener = Listen();
  EXPECT_TRUE(ConnectTcp({"localhost", listener.address.port}, kClock, In(seconds(5)), -1).ok());
}

TEST(ConnectTcp, NobodyListens_IsRefused) {
  const auto [held, address] = DeafPort();
  const Status status = ConnectTcp(address, kClock, In(seconds(5)), -1).status();
  EXPECT_EQ(status.code(), StatusCode::kRefused) << status.message();
  EXPECT_NE(status.message().find(FormatHostPort(address)), std::string::npos);
}

TEST(ConnectTcp, UnknownName_IsResolve) {
  const Status status =
      ConnectTcp({"no-such-host.invalid", 1}, kClock, In(seconds(5)), -1).status();
  EXPECT_EQ(status.code(), StatusCode::kResolve) << status.message();
  EXPECT_NE(status.message().find("no-such-host.invalid"), std::string::npos);
}

TEST(ConnectTcp, NoRoute_IsUnreachable) {
  // TCP has no broadcast: the kernel refuses it on every host, whatever its routes are.
  const Status status = ConnectTcp({"255.255.255.255", 1}, kClock, In(seconds(5)), -1).status();
  EXPECT_EQ(status.code(), StatusCode::kUnreachable) << status.message();
}

// A full backlog makes the kernel drop further connection requests, as a firewall would.
struct FullListener {
  Listener listener = Listen("127.0.0.1", 0);
  std::vector<FileDescriptor> queued;
  FullListener() {
    for (int i = 0; i < 3; ++i) {
      Result<FileDescriptor> started = StartConnectTcp(listener.address);
      EXPECT_TRUE(started.ok());
      std::vector<PollEntry> entries{{.fd = started->get(), .events = POLLOUT}};
      PollUntil(entries, kClock, In(Millis(100)));
      queued.push_back(std::move(started).value());
    }
  }
};

TEST(ConnectTcp, NoAnswer_IsUnreachableAtTheDeadline) {
  const FullListener full;
  const Instant start = kClock.Now();
  const Status status = ConnectTcp(full.listener.address, kClock, In(Millis(300)), -1).status();
  EXPECT_EQ(status.code(), StatusCode::kUnreachable) << status.message();
  EXPECT_NE(status.message().find("firewall"), std::string::npos) << status.message();
  EXPECT_GE(kClock.Now() - start, Millis(300));
  EXPECT_LT(kClock.Now() - start, seconds(5));
}

TEST(ConnectTcp, Interrupt_GivesUp) {
  const FullListener full;
  WakeFd wake;
  wake.Wake();
  const Status status =
      ConnectTcp(full.listener.address, kClock, In(seconds(30)), wake.fd()).status();
  EXPECT_EQ(status.code(), StatusCode::kCancelled) << status.message();
}

TEST(ListenTcp, TakenPort_IsRefused) {
  const Listener listener = Listen();
  const Status status = ListenTcp(listener.address, 1).status();
  EXPECT_EQ(status.code(), StatusCode::kRefused) << status.message();
  EXPECT_NE(status.message().find("taken"), std::string::npos);
}

TEST(ListenTcp, ForeignAddress_IsUnreachable) {
  const Status status = ListenTcp({"192.0.2.1", 0}, 1).status();
  EXPECT_EQ(status.code(), StatusCode::kUnreachable) << status.message();
}

TEST(ListenTcp, UnknownName_IsResolve) {
  EXPECT_EQ(ListenTcp({"no-such-host.invalid", 0}, 1).status().code(), StatusCode::kResolve);
}

TEST(AcceptTcp, NobodyWaits_IsInvalidAndOk) {
  const Listener listener = Listen();
  Result<FileDescriptor> accepted = AcceptTcp(listener.socket);
  ASSERT_TRUE(accepted.ok());
  EXPECT_FALSE(accepted->valid());
}

TEST(AcceptTcp, NotAListener_IsAnError) { EXPECT_FALSE(AcceptTcp(FileDescriptor()).ok()); }

TEST(StartConnectTcp, NameInsteadOfNumber_IsResolve) {
  EXPECT_EQ(StartConnectTcp({"localhost", 1}).status().code(), StatusCode::kResolve);
}

TEST(StartConnectTcp, Outcome_IsReadWhenWritable) {
  const auto [held, deaf] = DeafPort();
  Result<FileDescriptor> started = StartConnectTcp(deaf);
  if (started.ok()) {  // Loopback may refuse within connect itself.
    std::vector<PollEntry> entries{{.fd = started->get(), .events = POLLOUT}};
    ASSERT_EQ(PollUntil(entries, kClock, In(seconds(5))), 1);
    EXPECT_EQ(ConnectOutcome(*started, deaf).code(), StatusCode::kRefused);
  } else {
    EXPECT_EQ(started.status().code(), StatusCode::kRefused);
  }
}

TEST(PollUntil, Expired_LooksOnce) {
  WakeFd wake;
  std::vector<PollEntry> entries{{.fd = wake.fd(), .events = POLLIN}};
  EXPECT_EQ(PollUntil(entries, kClock, In(seconds(-1))), 0);
  EXPECT_EQ(entries[0].revents, 0);
  wake.Wake();
  EXPECT_EQ(PollUntil(entries, kClock, In(seconds(-1))), 1);
  EXPECT_NE(entries[0].revents & POLLIN, 0);
}

TEST(WakeFd, WakesAPollOfAnotherThread_AndDrains) {
  WakeFd wake;
  const Thread waker("waker", [&wake] { wake.Wake(); });
  std::vector<PollEntry> entries{{.fd = wake.fd(), .events = POLLIN}};
  EXPECT_EQ(PollUntil(entries, kClock, In(seconds(10))), 1);
  wake.Wake();
  wake.Drain();
  EXPECT_EQ(PollUntil(entries, kClock, In(Millis(0))), 0);
  wake.Drain();  // Empty: does not block.
}

TEST(Sockets, IPv6Loopback_WorksWhereTheHostHasIt) {
  Result<FileDescriptor> listener = ListenTcp({"::1", 0}, 4);
  if (!listener.ok()) GTEST_SKIP() << "no IPv6 here: " << listener.status().message();
  const Result<HostPort> address = LocalAddress(*listener);
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(address->host, "::1");
  EXPECT_TRUE(ConnectTcp(*address, kClock, In(seconds(5)), -1).ok());
}

}  // namespace
}  // namespace resilient
