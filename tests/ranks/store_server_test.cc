// Goal: the store server keeps its promises to good peers whatever bad ones do: foreign protocols,
// floods, silence, peers that do not read, many at once. Method: the real binary, bare sockets and
// the codec; every wait is for an event and has a bound.

#include <sys/resource.h>

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "store/core/codec.h"
#include "tests/ranks/store_server_support.h"

namespace resilient::store {
namespace {

using std::chrono::seconds;

// A client that said Hello, to see that others live on.
std::unique_ptr<RawClient> Greeted(const TestServer& server, Role role = Role::kRequest) {
  auto client = std::make_unique<RawClient>(server.address());
  const auto welcome = client->SayHello(MakeTestHello(role));
  EXPECT_TRUE(welcome && welcome->status.ok());
  return client;
}

void ExpectWorks(RawClient& client) {
  const auto set = client.Call(SetOp{"probe", "value"});
  ASSERT_TRUE(set && set->status.ok());
  const auto got = client.Call(GetOp{"probe", false});
  ASSERT_TRUE(got && got->status.ok());
  EXPECT_EQ(got->value, "value");
}

TEST(StoreServer, Hello_IsAnsweredWithWelcome) {
  TestServer server({"--lease-ttl", "3s"});
  RawClient client(server.address());
  const auto reply = client.SayHello(MakeTestHello(Role::kRequest));
  ASSERT_TRUE(reply);
  EXPECT_TRUE(reply->status.ok()) << reply->status.ToString();
  EXPECT_EQ(reply->welcome->server, server.server_id());
  EXPECT_EQ(reply->welcome->lease_ttl_ms, 3000u);
  EXPECT_FALSE(reply->welcome->session_known);
  ExpectWorks(client);
}

TEST(StoreServer, OtherServerExpected_RefusedWithJob) {
  TestServer server;
  RawClient client(server.address());
  Hello hello = MakeTestHello(Role::kRequest);
  hello.expected_server = std::string(32, '0');
  const auto reply = client.SayHello(hello);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status.code(), StatusCode::kJob);
  EXPECT_TRUE(client.ClosedBy(In(kPatience)));
}

TEST(StoreServer, ForeignProtocols_ClosedAndNamedWhileOthersLiveOn) {
  TestServer server;
  const auto witness = Greeted(server);
  const std::string tcp_store("\x00\xce\xf7\x85\x3c\x00\x00\x00\x00\x00", 10);
  const std::string tls("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
  const std::vector<std::pair<std::string, std::string>> foreign = {
      {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"},
      {tls, "speaks TLS"},
      {tcp_store, "TCPStore"},
      {"complete nonsense, at length", "first 8 bytes"},
  };
  for (const auto& [bytes, name] : foreign) {
    for (int again = 0; again < 3; ++again) {
      RawClient client(server.address());
      ASSERT_TRUE(client.SendBytes(bytes));
      EXPECT_TRUE(client.ClosedBy(In(kPatience))) << name;
    }
    const std::string log = server.process().ErrorText();
    const std::size_t first = log.find(name);
    ASSERT_NE(first, std::string::npos) << name << " is not named in:\n" << log;
    EXPECT_EQ(log.find(name, first + name.size()), std::string::npos) << "said again:\n" << log;
  }
  ExpectWorks(*witness);
}

TEST(StoreServer, FrameTooLargeBeforeHello_Closed) {
  TestServer server;
  const auto witness = Greeted(server);
  RawClient client(server.address());
  Frame frame;
  frame.body.assign(kMaxFrameBodyBeforeHello + 1, 'x');
  client.SendBytes(EncodePreamble() + EncodeFrame(frame));
  EXPECT_TRUE(client.ClosedBy(In(kPatience)));
  // The same size is welcome after Hello.
  const auto set = witness->Call(SetOp{"large", std::string(1u << 20, 'x')});
  ASSERT_TRUE(set);
  EXPECT_TRUE(set->status.ok());
}

TEST(StoreServer, RequestBeforeHello_RefusedAndClosed) {
  TestServer server;
  RawClient client(server.address());
  client.SendBytes(EncodePreamble());
  const auto reply = client.Call(SetOp{"k", "v"});
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status.code(), StatusCode::kProtocol);
  EXPECT_TRUE(client.ClosedBy(In(kPatience)));
}

TEST(StoreServer, UnknownOperation_AnsweredAndConnectionLivesOn) {
  TestServer server;
  const auto client = Greeted(server);
  Frame frame;
  frame.seq = 1;
  frame.body = std::string("\x9a\x06\x00", 3);  // Field 99 of a Request, empty.
  ASSERT_TRUE(client->SendBytes(EncodeFrame(frame)));
  const auto reply = client->Await<Reply>(In(kPatience));
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->seq, 1u);
  EXPECT_EQ(reply->status.code(), StatusCode::kUnimplemented);
  ASSERT_TRUE(client->SendOp(NumKeysOp{}));  // Takes number 1, which was not executed.
  EXPECT_TRUE(client->Await<Reply>(In(kPatience)));
}

TEST(StoreServer, BodyThatIsNoMessage_AnsweredAndClosed) {
  TestServer server;
  const auto client = Greeted(server);
  Frame frame;
  frame.seq = 1;
  frame.body = "\xff\xff\xff\xff";
  ASSERT_TRUE(client->SendBytes(EncodeFrame(frame)));
  const auto reply = client->Await<Reply>(In(kPatience));
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status.code(), StatusCode::kProtocol);
  EXPECT_TRUE(client->ClosedBy(In(kPatience)));
}

TEST(StoreServer, SilenceInsteadOfHello_ClosedAfterTheLimit) {
  TestServer server;
  RawClient silent(server.address());
  RawClient half(server.address());
  half.SendBytes(EncodePreamble());
  const Instant start = Now();
  EXPECT_TRUE(silent.ClosedBy(In(kPatience)));
  EXPECT_TRUE(half.ClosedBy(In(kPatience)));
  EXPECT_GE(Now() - start, Millis(4500));
}

TEST(StoreServer, ThousandConnections_AllWelcome) {
  constexpr int kCount = 1000;
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  TestServer server;
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < kCount; ++i) clients.push_back(std::make_unique<RawClient>(server.address()));
  // More than may be open before Hello have connected; the rest waits and comes to its turn.
  for (auto& client : clients) client->SendHello(MakeTestHello(Role::kRequest));
  for (auto& client : clients) {
    const auto welcome = client->Await<Reply>(In(kPatience));
    ASSERT_TRUE(welcome && welcome->status.ok());
  }
  for (auto& client : clients) ASSERT_TRUE(client->SendOp(AddOp{"counter", 1}));
  std::int64_t highest = 0;
  for (auto& client : clients) {
    const auto reply = client->Await<Reply>(In(kPatience));
    ASSERT_TRUE(reply && reply->status.ok());
    highest = std::max(highest, reply->number);
  }
  EXPECT_EQ(highest, kCount);
}

TEST(StoreServer, IdleConnectionsFillThePlacesBeforeHello_OthersComeToTheirTurn) {
  TestServer server;
  std::vector<std::unique_ptr<RawClient>> idle;
  for (int i = 0; i < 300; ++i) idle.push_back(std::make_unique<RawClient>(server.address()));
  const Instant start = Now();
  const auto client = Greeted(server);
  EXPECT_LT(Now() - start, seconds(5));
  ExpectWorks(*client);
}

TEST(StoreServer, Flood_AnsweredInOrderAndStarvesNobody) {
  constexpr std::uint64_t kCount = 20000;
  TestServer server;
  const auto flooder = Greeted(server, Role::kAdmin);
  const auto witness = Greeted(server);
  std::string bytes;
  for (std::uint64_t seq = 1; seq <= kCount; ++seq) {
    Request request;
    request.seq = seq;
    request.op = StatusOp{};
    bytes += EncodeFrame(EncodeRequest(request));
  }
  ASSERT_TRUE(flooder->SendBytes(bytes));
  for (int i = 0; i < 20; ++i) {
    const Instant start = Now();
    ExpectWorks(*witness);
    EXPECT_LT(Now() - start, seconds(1));
  }
  for (std::uint64_t seq = 1; seq <= kCount; ++seq) {
    const auto reply = flooder->Await<Reply>(In(kPatience));
    ASSERT_TRUE(reply) << "after " << seq;
    ASSERT_EQ(reply->seq, seq);
  }
}

// 24 waits for a value of 4 MiB: its arrival puts 96 MiB before a peer that does not read.
TEST(StoreServer, PeerThatDoesNotRead_IsCutAndNamedWhileOthersLiveOn) {
  TestServer server;
  const auto slow = Greeted(server);
  const auto witness = Greeted(server);
  for (int i = 0; i < 24; ++i) ASSERT_TRUE(slow->SendOp(GetOp{"big", true}));
  // On the same connection: answered after all waits were registered.
  ASSERT_TRUE(slow->Call(CheckOp{{"big"}}));
  const auto set = witness->Call(SetOp{"big", std::string(4u << 20, 'x')});
  ASSERT_TRUE(set && set->status.ok());
  ExpectWorks(*witness);
  EXPECT_NE(server.process().ErrorText().find("it does not read"), std::string::npos)
      << server.process().ErrorText();
  EXPECT_TRUE(slow->ClosedBy(In(kPatience)));
}

// Requests whose answers are not read stay unread themselves, and are answered in the end.
TEST(StoreServer, PeerThatReadsLate_GetsEverything) {
  constexpr int kCount = 40;
  TestServer server;
  const auto client = Greeted(server);
  const auto set = client->Call(SetOp{"big", std::string(4u << 20, 'x')});
  ASSERT_TRUE(set && set->status.ok());
  for (int i = 0; i < kCount; ++i) ASSERT_TRUE(client->SendOp(GetOp{"big", false}));
  const auto witness = Greeted(server);
  ExpectWorks(*witness);
  for (int i = 0; i < kCount; ++i) {
    const auto reply = client->Await<Reply>(In(kPatience));
    ASSERT_TRUE(reply) << "after " << i;
    ASSERT_EQ(reply->value.size(), 4u << 20);
  }
}

TEST(StoreServer, ConnectionMadeAnew_ReplacesTheOldOne) {
  TestServer server;
  const Hello hello = MakeTestHello(Role::kRequest);
  RawClient old(server.address());
  ASSERT_TRUE(old.SayHello(hello));
  RawClient fresh(server.address());
  const auto welcome = fresh.SayHello(hello);
  ASSERT_TRUE(welcome && welcome->status.ok());
  EXPECT_TRUE(welcome->welcome->session_known);
  EXPECT_TRUE(old.ClosedBy(In(kPatience)));
  ExpectWorks(fresh);
}

}  // namespace
}  // namespace resilient::store
