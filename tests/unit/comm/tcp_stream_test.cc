// Goal: the kernel ends no link between two processes that live, and its probes of idle links come
// one at a time.
// Method: the options of sockets over loopback. tests/torch/test_hosts.py has links that are
// silent.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <resilient/clock.h>

#include "runtime/comm/byte_stream.h"
#include "runtime/net/socket.h"

namespace resilient {
namespace {

constexpr int kHourMs = 3600 * 1000;
constexpr Duration kPatience = std::chrono::seconds(30);

std::unique_ptr<ByteStream> MakeLink() {
  Result<FileDescriptor> listener = ListenTcp({"127.0.0.1", 0}, 1);
  EXPECT_TRUE(listener.ok());
  const SystemClock clock;
  Result<FileDescriptor> socket =
      ConnectTcp(*LocalAddress(*listener), clock, Deadline::After(clock.Now(), kPatience), -1);
  EXPECT_TRUE(socket.ok());
  return MakeTcpStream(std::move(*socket));
}

int OptionOf(const ByteStream& link, int level, int option) {
  int value = -1;
  socklen_t size = sizeof value;
  EXPECT_EQ(getsockopt(link.fd(), level, option, &value, &size), 0);
  return value;
}

TEST(TcpStream, SilentLink_IsNotEndedByTheKernel) {
  const auto link = MakeLink();
  // With it set the kernel counts no probes.
  EXPECT_GT(OptionOf(*link, IPPROTO_TCP, TCP_USER_TIMEOUT), kHourMs);
}

TEST(TcpStream, IdleLinks_AreProbedEachAtItsOwnTime) {
  std::vector<std::unique_ptr<ByteStream>> links;
  std::set<int> times;
  for (int i = 0; i < 8; ++i) {
    links.push_back(MakeLink());
    EXPECT_NE(OptionOf(*links.back(), SOL_SOCKET, SO_KEEPALIVE), 0);
    times.insert(OptionOf(*links.back(), IPPROTO_TCP, TCP_KEEPIDLE));
  }
  EXPECT_EQ(times.size(), links.size());
  EXPECT_GE(*times.begin(), 60);
  EXPECT_LT(*times.rbegin(), 120);
}

}  // namespace
}  // namespace resilient
