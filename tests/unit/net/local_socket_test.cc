// Goal: a peer of this host comes by the unix socket beside a TCP listener where that is of its own
// user or of root, and is left with TCP in all other cases. Method: listeners within this process,
// some of them bound as another user.
#include "runtime/net/local_socket.h"

#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/net/unix_address.h"
#include "tests/support/as_user.h"

namespace resilient {
namespace {

constexpr uid_t kSomebody = 12345;

class LocalSockets : public testing::Test {
 protected:
  // A TCP listener keeps the port from everybody else on this host.
  void SetUp() override { ASSERT_TRUE(Bind("127.0.0.1")); }
  bool Bind(const std::string& host) {
    Result<FileDescriptor> bound = ListenTcp({host, 0}, 1);
    if (!bound.ok()) return false;
    tcp_ = std::move(*bound);
    address_ = *LocalAddress(tcp_);
    return true;
  }
  HostPort At(const std::string& host) const { return {host, address_.port}; }

  FileDescriptor tcp_;
  HostPort address_;
};

TEST_F(LocalSockets, OwnListener_IsFoundByItsAddressAlone) {
  const FileDescriptor listener = ListenLocally(address_, 4);
  ASSERT_TRUE(listener.valid());
  const FileDescriptor connected = ConnectLocally(address_);
  ASSERT_TRUE(connected.valid());
  EXPECT_EQ(UserOfPeer(connected.get()), geteuid());
  const Result<FileDescriptor> accepted = AcceptTcp(listener);
  ASSERT_TRUE(accepted.ok() && accepted->valid());
  EXPECT_EQ(UserOfPeer(accepted->get()), geteuid());
}

TEST_F(LocalSockets, NothingListens_IsLeftWithTcp) {
  EXPECT_FALSE(ConnectLocally(address_).valid());
  FileDescriptor listener = ListenLocally(address_, 4);
  ASSERT_TRUE(listener.valid());
  EXPECT_FALSE(ListenLocally(address_, 4).valid()) << "the name is taken";
  listener.Reset();
  EXPECT_FALSE(ConnectLocally(address_).valid());
}

TEST_F(LocalSockets, AnotherAddressOfThisHost_IsAnotherListener) {
  const FileDescriptor listener = ListenLocally(address_, 4);
  ASSERT_TRUE(listener.valid());
  EXPECT_FALSE(ConnectLocally(At("127.0.0.2")).valid());
}

TEST_F(LocalSockets, AllAddresses_AreThoseOfThisHostOnly) {
  ASSERT_TRUE(Bind("0.0.0.0"));
  const FileDescriptor listener = ListenLocally(address_, 4);
  ASSERT_TRUE(listener.valid());
  EXPECT_TRUE(ConnectLocally(At("127.0.0.1")).valid());
  EXPECT_TRUE(ConnectLocally(At("127.0.0.2")).valid());
  EXPECT_FALSE(ConnectLocally(At("192.0.2.1")).valid()) << "a host elsewhere (RFC 5737)";
  EXPECT_FALSE(ConnectLocally(At("no number")).valid());
}

TEST_F(LocalSockets, OfOneFamily_AreNotTheOthers) {
  ASSERT_TRUE(Bind("0.0.0.0"));
  const FileDescriptor listener = ListenLocally(address_, 4);
  ASSERT_TRUE(listener.valid());
  EXPECT_FALSE(ConnectLocally(At("::1")).valid());
}

TEST_F(LocalSockets, FullQueue_IsLeftWithTcp) {
  const FileDescriptor listener = ListenLocally(address_, 0);
  ASSERT_TRUE(listener.valid());
  std::vector<FileDescriptor> queue;
  do {
    queue.push_back(ConnectLocally(address_));
  } while (queue.back().valid() && queue.size() < 100);
  EXPECT_LT(queue.size(), 100u);
}

TEST_F(LocalSockets, NameThatAnotherUserHasBound_IsNotTaken) {
  SKIP_UNLESS_ROOT();
  const auto name = UnixAddress::Abstract(LocalSocketName(geteuid(), address_));
  FileDescriptor squatter;
  {
    const AsUser other(kSomebody);
    squatter = FileDescriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(bind(squatter.get(), name->get(), name->size()), 0);
    ASSERT_EQ(listen(squatter.get(), 4), 0);
  }
  EXPECT_FALSE(ListenLocally(address_, 4).valid());
  EXPECT_FALSE(ConnectLocally(address_).valid());
}

TEST_F(LocalSockets, ListenerOfRoot_IsTakenByAnybody) {
  SKIP_UNLESS_ROOT();
  const FileDescriptor listener = ListenLocally(address_, 4);
  ASSERT_TRUE(listener.valid());
  const AsUser other(kSomebody);
  EXPECT_TRUE(ConnectLocally(address_).valid());
}

TEST_F(LocalSockets, ListenerOfAnotherUser_IsTakenByNobodyElse) {
  SKIP_UNLESS_ROOT();
  FileDescriptor listener;
  {
    const AsUser other(kSomebody);
    listener = ListenLocally(address_, 4);
    ASSERT_TRUE(listener.valid());
    EXPECT_TRUE(ConnectLocally(address_).valid());
  }
  EXPECT_FALSE(ConnectLocally(address_).valid());
}

// To a container without a number for it every user of the host is the same one.
TEST_F(LocalSockets, UserWithoutANumber_IsNobodysOwn) {
  SKIP_UNLESS_ROOT();
  const AsUser nobody(kNobody);
  const FileDescriptor listener = ListenLocally(address_, 4);
  ASSERT_TRUE(listener.valid());
  EXPECT_FALSE(ConnectLocally(address_).valid());
}

TEST(UserOfPeer, IsKnownOfUnixSocketsOnly) {
  const Result<FileDescriptor> listener = ListenTcp({"127.0.0.1", 0}, 1);
  ASSERT_TRUE(listener.ok());
  const Result<FileDescriptor> tcp = StartConnectTcp(*LocalAddress(*listener));
  ASSERT_TRUE(tcp.ok());
  EXPECT_EQ(UserOfPeer(tcp->get()), std::nullopt);
  const FileDescriptor unconnected(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(UserOfPeer(unconnected.get()), std::nullopt);
}

}  // namespace
}  // namespace resilient
