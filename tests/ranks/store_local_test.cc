// Goal: clients of the store's host come by the unix socket beside its address, find it by
// themselves, lose nothing where it is missing, and are let in or refused as over TCP. Method: the
// real server, whose counters say by which way a connection came.
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <resilient/rendezvous.h>
#include <resilient/store/client.h>

#include "runtime/net/local_socket.h"
#include "runtime/net/unix_address.h"
#include "tests/ranks/http_support.h"
#include "tests/ranks/store_server_support.h"
#include "tests/support/as_user.h"
#include "tests/support/test_directory.h"

namespace resilient::store {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr uid_t kSomebody = 12345;
constexpr int kRequestsPerTurn = 64;        // That the server takes of one connection.
constexpr std::size_t kLargest = 8u << 20;  // Of a value.

// The beats of a membership line, as its thread tells them. Thread: thread-safe.
class Beats final : public RendezvousEvents {
 public:
  void OnBeat(Instant now, Instant contact, Duration /*lease*/) override {
    std::lock_guard lock(mutex_);
    now_ = now;
    contact_ = contact;
    changed_.notify_all();
  }
  void OnView(const View& /*view*/) override {}
  void OnRunning(std::uint64_t /*generation*/) override {}
  void OnFence(const Fence& /*fence*/) override {}
  void OnJoinRefused(std::uint64_t /*join*/, const Status& /*why*/) override {}
  void OnSessionLost(const Status& /*why*/) override {}
  void OnHeld(Instant /*until*/) override {}

  // False: `patience` was over before.
  bool AwaitBeat(Instant at_least, Duration patience) {
    return Await(patience, [&] { return now_ >= at_least; });
  }
  // Until the store was heard after `since`.
  bool AwaitContact(Instant since, Duration patience) {
    return Await(patience, [&] { return contact_ > since; });
  }
  Instant contact() {
    std::lock_guard lock(mutex_);
    return contact_;
  }

 private:
  template <typename Condition>
  bool Await(Duration patience, Condition condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, condition);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Instant now_{};
  Instant contact_{};
};

class StoreLocal : public ::testing::Test {
 protected:
  static std::vector<std::string> Watched(std::vector<std::string> arguments = {}) {
    arguments.insert(arguments.end(), {"--metrics", "127.0.0.1:0"});
    return arguments;
  }
  Result<std::shared_ptr<Client>> Open(const std::string& address, const std::string& token = {}) {
    ConnectOptions options;
    options.addresses = {address};
    options.job = "train";
    options.token_file = token;
    return Connect(options, {}, clock_, In(kPatience));
  }
  Client::Call Patient() {
    Client::Call call;
    call.deadline = In(kPatience);
    return call;
  }
  static double Arrived(const TestServer& server, const std::string& counter) {
    const auto reply = HttpGet(MetricsAddress(server), "/metrics");
    if (!reply) return -1;
    Result<Samples> samples = ParseMetrics(reply->body);
    return samples.ok() ? (*samples)["resilient_store_" + counter] : -1;
  }
  static double ByUnixSocket(const TestServer& server) {
    return Arrived(server, "local_connections_accepted_total");
  }

  SystemClock clock_;
  TestDirectory folder_;
};

TEST_F(StoreLocal, ClientOfThisHost_ComesByTheUnixSocket) {
  TestServer server(Watched());
  const auto client = Open(server.address_text());
  ASSERT_TRUE(client.ok()) << client.status().ToString();
  EXPECT_EQ(*(*client)->Add("n", 1, Patient()), 1);
  EXPECT_EQ(ByUnixSocket(server), 1);
  EXPECT_EQ(Arrived(server, "connections_accepted_total"), 1);
}

TEST_F(StoreLocal, LargestValues_GoBothWays) {
  TestServer server;
  const auto client = Open(server.address_text());
  ASSERT_TRUE(client.ok());
  const std::string value(kLargest, 'v');
  EXPECT_TRUE((*client)->Set("large", value, Patient()).ok());
  EXPECT_EQ(*(*client)->Get("large", false, Patient()), value);
}

TEST_F(StoreLocal, TcpOnly_HasNone) {
  TestServer server(Watched({"--tcp-only"}));
  const auto client = Open(server.address_text());
  ASSERT_TRUE(client.ok());
  EXPECT_EQ(*(*client)->Add("n", 1, Patient()), 1);
  EXPECT_EQ(ByUnixSocket(server), 0);
}

TEST_F(StoreLocal, NameThatIsTaken_LeavesBothSidesWithTcp) {
  // Whose port is free again when the server starts.
  auto found = ListenTcp({"127.0.0.1", 0}, 1);
  ASSERT_TRUE(found.ok());
  const HostPort address = *LocalAddress(*found);
  const FileDescriptor squatter(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto name = UnixAddress::Abstract(LocalSocketName(geteuid(), address));
  ASSERT_EQ(bind(squatter.get(), name->get(), name->size()), 0);
  found->Reset();
  TestServer server(Watched({"--listen", FormatHostPort(address)}));
  EXPECT_THAT(server.process().ErrorText(), HasSubstr("event=tcp_only"));
  const auto client = Open(server.address_text());
  ASSERT_TRUE(client.ok()) << client.status().ToString();
  EXPECT_EQ(*(*client)->Add("n", 1, Patient()), 1);
  EXPECT_EQ(ByUnixSocket(server), 0);
}

TEST_F(StoreLocal, Token_IsAskedForHereToo) {
  const std::string token = folder_.Write("token", "0123456789abcdef0123456789abcdef");
  TestServer server(Watched({"--token-file", token}));
  EXPECT_EQ(Open(server.address_text()).status().code(), StatusCode::kAuth);
  const std::string wrong = folder_.Write("wrong", "fedcba9876543210fedcba9876543210");
  EXPECT_EQ(Open(server.address_text(), wrong).status().code(), StatusCode::kAuth);
  EXPECT_TRUE(Open(server.address_text(), token).ok());
  EXPECT_EQ(ByUnixSocket(server), 3);
  EXPECT_THAT(server.process().ErrorText(),
              HasSubstr("peer=\"user " + std::to_string(geteuid()) + " of this host\""));
}

TEST_F(StoreLocal, OtherUsers_AreRefusedHereToo) {
  SKIP_UNLESS_ROOT();
  TestServer server(Watched({"--users=own"}));
  const auto root = Open(server.address_text());
  EXPECT_TRUE(root.ok());
  const AsUser other(kSomebody);
  const auto refused = Open(server.address_text());
  EXPECT_EQ(refused.status().code(), StatusCode::kAuth);
  EXPECT_THAT(refused.status().message(), HasSubstr("user 12345"));
  EXPECT_EQ(ByUnixSocket(server), 2);
}

// The server cannot answer it any more, and learns that when it tries to. What the peer has said
// before counts, or a leave would be a lost rank.
TEST_F(StoreLocal, LastWordsOfAPeerThatHasClosed_AreHeard) {
  constexpr int kWords = 3 * kRequestsPerTurn + 1;
  TestServer server;
  for (const bool by_unix_socket : {true, false}) {
    auto leaves = by_unix_socket ? std::make_unique<RawClient>(ConnectLocally(server.address()))
                                 : std::make_unique<RawClient>(server.address());
    Hello hello = MakeTestHello(Role::kRequest);
    hello.job = by_unix_socket ? "unix" : "tcp";
    ASSERT_TRUE(leaves->SayHello(hello));
    server.process().Signal(SIGSTOP);
    for (int i = 0; i < kWords; ++i) ASSERT_TRUE(leaves->SendOp(AddOp{.key = "n", .amount = 1}));
    ASSERT_TRUE(leaves->SendOp(SetOp{.key = "last", .value = "word"}));
    leaves->Close();
    server.process().Signal(SIGCONT);
    ConnectOptions options;
    options.addresses = {server.address_text()};
    options.job = hello.job;
    const auto client = Connect(options, {}, clock_, In(kPatience));
    ASSERT_TRUE(client.ok());
    EXPECT_EQ(*(*client)->Get("last", true, Patient()), "word") << hello.job;
    EXPECT_EQ(*(*client)->Add("n", 0, Patient()), kWords) << hello.job;
  }
}

// Nothing can lose what was sent on it, so its beats and its goodbye are heard, however late, and
// the store, which is late enough, has no new connections to greet.
TEST_F(StoreLocal, ConnectionToAStoppedServer_IsKept) {
  TestServer server(Watched({"--lease-ttl", "1s"}));
  ConnectOptions options;
  options.addresses = {server.address_text()};
  options.job = "train";
  Beats beats;
  const auto line = MakeRendezvous(options, {}, clock_, {});
  ASSERT_TRUE(line->Start(beats, In(kPatience)).ok());
  const auto client = Connect(options, {}, clock_, In(kPatience));
  ASSERT_TRUE(client.ok());
  ASSERT_TRUE(beats.AwaitContact(clock_.Now(), kPatience));
  const double before = Arrived(server, "connections_accepted_total");

  server.process().Signal(SIGSTOP);
  Client::Call brief;
  brief.deadline = In(Millis(10));
  // Its cancellation has no answer either: one that comes by TCP would be replaced.
  EXPECT_EQ((*client)->Add("n", 1, brief).status().code(), StatusCode::kOutcomeUnknown);
  const Instant stopped = clock_.Now();
  ASSERT_TRUE(beats.AwaitBeat(stopped + seconds(4), kPatience));
  EXPECT_LT(beats.contact(), stopped);
  server.process().Signal(SIGCONT);

  EXPECT_TRUE(beats.AwaitContact(clock_.Now(), kPatience));
  EXPECT_EQ(*(*client)->Add("n", 1, Patient()), 2);
  EXPECT_EQ(Arrived(server, "connections_accepted_total"), before);
  line->Close(In(kPatience));
}

TEST_F(StoreLocal, RestartedServer_IsFoundAgain) {
  std::optional<TestServer> server(std::in_place, Watched({"--data", folder_.path()}));
  const std::string address = server->address_text();
  const auto client = Open(address);
  ASSERT_TRUE(client.ok());
  EXPECT_EQ(*(*client)->Add("n", 1, Patient()), 1);
  server->process().Signal(SIGKILL);
  ASSERT_TRUE(server->process().WaitExit(In(kPatience)));
  server.emplace(Watched({"--data", folder_.path(), "--listen", address}));
  EXPECT_EQ(*(*client)->Add("n", 1, Patient()), 2);
  EXPECT_EQ(ByUnixSocket(*server), 1);
}

}  // namespace
}  // namespace resilient::store
