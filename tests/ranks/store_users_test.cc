// Goal: a store that is there for one user takes nothing from another user of its host, whichever
// protocol that one speaks, and everything from its own. Method: a real server, and connections
// that this process makes as another user, for which it has to be root.

#include <unistd.h>

#include <memory>
#include <optional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/server/peer_user.h"
#include "tests/ranks/store_server_support.h"
#include "tests/support/as_user.h"

namespace resilient::store {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class StoreUsers : public ::testing::Test {
 protected:
  void SetUp() override {
    SKIP_UNLESS_ROOT();
    if (!KernelTellsPeerUsers()) GTEST_SKIP() << "the kernel does not tell users";
  }
  static std::unique_ptr<RawClient> ConnectAs(uid_t user, const HostPort& address) {
    const AsUser other(user);
    return std::make_unique<RawClient>(address);
  }
};

TEST_F(StoreUsers, ConnectionOfAnotherUser_IsRefusedWithTheReason) {
  TestServer server({"--users=own"});
  const auto stranger = ConnectAs(kNobody, server.address());
  const auto refused = stranger->SayHello(MakeTestHello(Role::kAdmin));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status.code(), StatusCode::kAuth);
  EXPECT_THAT(refused->status.message(),
              AllOf(HasSubstr("user 65534"), HasSubstr("RESILIENT_TOKEN_FILE")));
  RawClient own(server.address());
  const auto welcome = own.SayHello(MakeTestHello(Role::kRequest));
  ASSERT_TRUE(welcome);
  EXPECT_TRUE(welcome->status.ok()) << welcome->status.ToString();
}

TEST_F(StoreUsers, ConnectionThatWasClosedAtOnce_IsNobodys) {
  TestServer server({"--users=own"});
  {
    const auto stranger = ConnectAs(kNobody, server.address());
    stranger->SendHello(MakeTestHello(Role::kRequest));
    stranger->SendOp(SetOp{.key = "key", .value = "theirs"});
  }
  RawClient own(server.address());
  ASSERT_TRUE(own.SayHello(MakeTestHello(Role::kRequest)));
  const auto found = own.Call(CheckOp{.keys = {"key"}});
  ASSERT_TRUE(found);
  EXPECT_FALSE(found->flag);
}

TEST_F(StoreUsers, TcpStoreClientOfAnotherUser_IsRefused) {
  TestServer server({"--users=own", "--tcpstore=loopback"});
  const auto stranger = ConnectAs(kNobody, server.address());
  ASSERT_TRUE(stranger->SendBytes(std::string("\x00\xce\xf7\x85\x3c", 5)));  // VALIDATE.
  EXPECT_TRUE(stranger->ClosedBy(In(kPatience)));
}

TEST_F(StoreUsers, WithoutTheOption_EveryUserIsAdmitted) {
  TestServer server;
  const auto other = ConnectAs(kNobody, server.address());
  const auto welcome = other->SayHello(MakeTestHello(Role::kRequest));
  ASSERT_TRUE(welcome);
  EXPECT_TRUE(welcome->status.ok());
}

TEST(PeerUser, OwnConnection_IsOfThisUser) {
  if (!KernelTellsPeerUsers()) GTEST_SKIP() << "the kernel does not tell users";
  for (const char* host : {"127.0.0.1", "::1"}) {
    const auto listener = ListenTcp({.host = host, .port = 0}, 1);
    if (!listener.ok()) continue;  // No IPv6 here.
    const SystemClock clock;
    auto client =
        ConnectTcp(*LocalAddress(*listener), clock, Deadline::After(clock.Now(), kPatience), -1);
    ASSERT_TRUE(client.ok());
    const auto accepted = AcceptTcp(*listener);
    ASSERT_TRUE(accepted.ok() && accepted->valid());
    const PeerUser peer = FindPeerUser(accepted->get());
    EXPECT_TRUE(peer.is_here);
    EXPECT_EQ(peer.user, geteuid());
    client->Reset();
    EXPECT_EQ(FindPeerUser(accepted->get()).user, std::nullopt) << "it has been closed";
  }
}

}  // namespace
}  // namespace resilient::store
