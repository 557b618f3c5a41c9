// Goal: whoever operates a store server learns from it what it does and how it is: metrics that
// Prometheus can read and that count what happened, probes that tell the truth, and an HTTP port
// through which nobody can hurt the store. Method: the real binary, bare sockets.

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "resilient/store/client.h"
#include "tests/ranks/http_support.h"
#include "tests/ranks/store_server_support.h"
#include "tests/support/test_directory.h"

namespace resilient::store {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

const std::vector<std::string> kWithMetrics = {"--metrics", "127.0.0.1:0"};

std::unique_ptr<RawClient> Greeted(const TestServer& server, Role role = Role::kRequest) {
  auto client = std::make_unique<RawClient>(server.address());
  const auto welcome = client->SayHello(MakeTestHello(role));
  EXPECT_TRUE(welcome && welcome->status.ok());
  return client;
}

Samples Scrape(const TestServer& server) {
  const auto reply = HttpGet(MetricsAddress(server), "/metrics");
  if (!reply || reply->status != 200) {
    ADD_FAILURE() << "no metrics: " << (reply ? reply->head : "no answer");
    return {};
  }
  EXPECT_NE(reply->head.find("text/plain; version=0.0.4"), std::string::npos) << reply->head;
  Result<Samples> samples = ParseMetrics(reply->body);
  if (samples.ok()) return *samples;
  ADD_FAILURE() << samples.status().message();
  return {};
}

// Scrapes until the value is there, or patience ends.
double Await(const TestServer& server, const std::string& name, double wanted) {
  const Deadline deadline = In(kPatience);
  while (true) {
    const Samples samples = Scrape(server);
    const auto found = samples.find(name);
    const double value = found == samples.end() ? 0 : found->second;
    if (value == wanted || testing::Test::HasFailure() || deadline.ExpiredAt(Now())) return value;
  }
}

TEST(StoreMetrics, Requests_AreCountedByOperationAndOutcome) {
  TestServer server(kWithMetrics);
  const auto client = Greeted(server);
  const auto other = Greeted(server);
  ASSERT_TRUE(client->Call(SetOp{"k", "value"}));
  ASSERT_TRUE(client->Call(GetOp{"k", false}));
  ASSERT_TRUE(client->Call(GetOp{"missing", false}));
  ASSERT_TRUE(client->SendOp(WaitOp{{"late"}}));
  ASSERT_TRUE(client->Call(CheckOp{{"late"}}));  // Behind the wait.
  Samples now = Scrape(server);
  EXPECT_EQ(now["resilient_store_requests_total{operation=\"hello\",outcome=\"ok\"}"], 2);
  EXPECT_EQ(now["resilient_store_requests_total{operation=\"set\",outcome=\"ok\"}"], 1);
  EXPECT_EQ(now["resilient_store_requests_total{operation=\"get\",outcome=\"ok\"}"], 1);
  EXPECT_EQ(now["resilient_store_requests_total{operation=\"get\",outcome=\"not_found\"}"], 1);
  EXPECT_EQ(now["resilient_store_requests_total{operation=\"wait\",outcome=\"waits\"}"], 1);
  EXPECT_EQ(now["resilient_store_waits"], 1);
  EXPECT_EQ(now["resilient_store_connections"], 2);
  EXPECT_EQ(now["resilient_store_sessions"], 2);
  EXPECT_EQ(now["resilient_store_jobs"], 1);
  EXPECT_EQ(now["resilient_store_keys"], 1);
  EXPECT_GE(now["resilient_store_bytes"], 6);
  EXPECT_EQ(now["resilient_store_request_duration_seconds_count"], 6);  // Not the wait.
  EXPECT_EQ(now["resilient_store_epoch"], 0);
  EXPECT_EQ(now.count("resilient_store_commit_duration_seconds_count"), 0u);
  EXPECT_GT(now["process_resident_memory_bytes"], 1e6);
  EXPECT_GT(now["process_start_time_seconds"], 1.7e9);
  ASSERT_TRUE(other->Call(SetOp{"late", ""}));
  EXPECT_EQ(Await(server, "resilient_store_waits_ended_total{outcome=\"ok\"}", 1), 1);
  EXPECT_EQ(Scrape(server)["resilient_store_waits"], 0);
}

TEST(StoreMetrics, RepeatedRequestAndResumedSession_AreCounted) {
  TestServer server(kWithMetrics);
  const Hello hello = MakeTestHello(Role::kRequest);
  Request request;
  request.seq = 1;
  request.op = AddOp{"n", 1};
  for (int i = 0; i < 2; ++i) {
    RawClient client(server.address());
    ASSERT_TRUE(client.SayHello(hello));
    ASSERT_TRUE(client.Send(request));
    const auto reply = client.Await<Reply>(In(kPatience));
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->number, 1);
  }
  Samples now = Scrape(server);
  EXPECT_EQ(now["resilient_store_sessions_opened_total"], 1);
  EXPECT_EQ(now["resilient_store_sessions_resumed_total"], 1);
  EXPECT_EQ(now["resilient_store_requests_total{operation=\"add\",outcome=\"ok\"}"], 1);
  EXPECT_EQ(now["resilient_store_requests_total{operation=\"add\",outcome=\"repeated\"}"], 1);
}

TEST(StoreMetrics, LostMember_IsAnExpiryAndAFence) {
  std::vector<std::string> arguments = kWithMetrics;
  arguments.insert(arguments.end(), {"--lease-ttl", "1s"});
  TestServer server(arguments);
  const auto silent = Greeted(server, Role::kControl);
  const auto alive = Greeted(server, Role::kControl);
  ASSERT_TRUE(silent->SendOp(JoinOp{MakeJoin(0, 2)}));
  ASSERT_TRUE(alive->SendOp(JoinOp{MakeJoin(1, 2)}));
  ASSERT_TRUE(alive->Await<View>(In(kPatience)));
  Samples now = Scrape(server);
  EXPECT_EQ(now["resilient_store_live_members"], 2);
  EXPECT_EQ(now["resilient_store_worlds"], 1);
  const Deadline deadline = In(kPatience);
  std::optional<Fence> fence;
  while (!fence && !deadline.ExpiredAt(Now())) {
    ASSERT_TRUE(alive->SendOp(HeartbeatOp{1}));
    fence = alive->Await<Fence>(In(Millis(200)));
  }
  ASSERT_TRUE(fence);
  now = Scrape(server);
  EXPECT_EQ(now["resilient_store_leases_expired_total"], 1);
  EXPECT_EQ(now["resilient_store_fences_total{cause=\"rank_lost\"}"], 1);
  EXPECT_EQ(now["resilient_store_live_members"], 1);
}

TEST(StoreMetrics, DurableStore_MeasuresItsCommits) {
  const TestDirectory data;
  std::vector<std::string> arguments = kWithMetrics;
  arguments.insert(arguments.end(), {"--data", data.path()});
  {
    TestServer server(arguments);
    const auto client = Greeted(server);
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(client->Call(AddOp{"n", 1}));
    Samples now = Scrape(server);
    EXPECT_EQ(now["resilient_store_epoch"], 1);
    EXPECT_GE(now["resilient_store_commit_duration_seconds_count"], 10);
    EXPECT_GT(now["resilient_store_commit_duration_seconds_sum"], 0);
    EXPECT_EQ(now["resilient_store_commit_changes_sum"], 11);  // The Hello, too.
    EXPECT_EQ(now["resilient_store_held_bytes"], 0);
    EXPECT_EQ(now["resilient_store_request_duration_seconds_count"], 11);
    server.process().Signal(SIGKILL);
    ASSERT_TRUE(server.process().WaitExit(In(kPatience)));
  }
  TestServer again(arguments);
  Samples now = Scrape(again);
  EXPECT_EQ(now["resilient_store_epoch"], 2);
  EXPECT_EQ(now["resilient_store_keys"], 1);
  EXPECT_EQ(now["resilient_store_sessions"], 1);
}

TEST(StoreMetrics, RefusedConnections_ByReason) {
  TestServer server(kWithMetrics);
  RawClient garbage(server.address());
  garbage.SendBytes("GET / HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(garbage.ClosedBy(In(kPatience)));
  const auto rubbish = Greeted(server);
  Frame frame;
  frame.seq = 1;
  frame.body = "\xff\xff\xff\xff";
  ASSERT_TRUE(rubbish->SendBytes(EncodeFrame(frame)));
  EXPECT_TRUE(rubbish->ClosedBy(In(kPatience)));
  Samples now = Scrape(server);
  EXPECT_EQ(now["resilient_store_connections_refused_total{reason=\"protocol\"}"], 1);
  EXPECT_EQ(now["resilient_store_connections_refused_total{reason=\"request\"}"], 1);
  EXPECT_EQ(now["resilient_store_connections_accepted_total"], 2);
}

TEST(StoreProbes, HealthyAndReady_UntilItEnds) {
  TestServer server(kWithMetrics);
  const HostPort address = MetricsAddress(server);
  EXPECT_EQ(HttpGet(address, "/healthz").value_or(HttpReply()).status, 200);
  EXPECT_EQ(HttpGet(address, "/readyz").value_or(HttpReply()).status, 200);
  EXPECT_EQ(Scrape(server)["resilient_store_ready"], 1);
  EXPECT_EQ(HttpGet(address, "/").value_or(HttpReply()).status, 404);
  EXPECT_EQ(HttpGet(address, "/metrics", "POST").value_or(HttpReply()).status, 405);
  const auto head = HttpGet(address, "/metrics", "HEAD");
  ASSERT_TRUE(head);
  EXPECT_EQ(head->status, 200);
  EXPECT_EQ(head->body, "");
  // A client that does not go keeps the end waiting, for its second.
  const auto stays = Greeted(server);
  server.process().Signal(SIGTERM);
  int ready = 200;
  const Deadline deadline = In(kPatience);
  while (ready == 200 && !deadline.ExpiredAt(Now())) {
    ready = HttpGet(address, "/readyz").value_or(HttpReply()).status;
  }
  EXPECT_EQ(ready, 503);
  EXPECT_EQ(server.process().WaitExit(In(kPatience)), 0);
}

TEST(StoreProbes, RudeHttpClients_HurtNobody) {
  TestServer server(kWithMetrics);
  const HostPort address = MetricsAddress(server);
  const auto client = Greeted(server);
  std::vector<std::unique_ptr<RawClient>> rude;
  for (const std::string& bytes :
       {std::string(100000, 'x'), std::string("\r\n\r\n\r\n\xff\xfe nonsense\r\n\r\n"),
        std::string("GET /metrics HTTP/1.1\r\nHost: half")}) {
    rude.push_back(std::make_unique<RawClient>(address));
    rude.back()->SendBytes(bytes);
  }
  // Headers beyond what is kept of one request.
  const std::string refused =
      HttpRaw(address, "GET /healthz HTTP/1.1\r\nX: " + std::string(64u << 10, 'y') + "\r\n\r\n");
  EXPECT_EQ(refused.find("HTTP/1.1 2"), std::string::npos) << refused;
  // As many as are served, silent: the next one waits for their time to pass.
  for (int i = 0; i < 40; ++i) rude.push_back(std::make_unique<RawClient>(address));
  ASSERT_TRUE(client->Call(SetOp{"k", "v"}));
  const auto health = HttpGet(address, "/healthz");
  ASSERT_TRUE(health);
  EXPECT_EQ(health->status, 200);
  ASSERT_TRUE(client->Call(GetOp{"k", false}));
}

TEST(StoreProbes, PortInUse_ExitsWithThreeAndNamesTheOption) {
  TestServer server(kWithMetrics);
  const std::string address = FormatHostPort(MetricsAddress(server));
  const CommandOutcome outcome = RunCommand({"serve", "--metrics", address});
  EXPECT_EQ(outcome.exit_code, 3) << outcome.errors;
  EXPECT_NE(outcome.errors.find("--metrics"), std::string::npos) << outcome.errors;
  EXPECT_NE(outcome.errors.find(address), std::string::npos) << outcome.errors;
  EXPECT_EQ(RunCommand({"serve", "--metrics", "nonsense"}).exit_code, 2);
}

// Where a service manager would listen.
class Manager {
 public:
  Manager()
      : path_(testing::TempDir() + "notify." + std::to_string(getpid())),
        socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof(address.sun_path), "%s", path_.c_str());
    EXPECT_EQ(bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Manager() { std::filesystem::remove(path_); }

  const std::string& path() const { return path_; }
  // Datagrams up to the one that contains `text`; the last one is that, or patience has ended.
  std::vector<std::string> Until(const std::string& text) {
    const Deadline deadline = In(kPatience);
    std::vector<std::string> heard;
    while (heard.empty() || heard.back().find(text) == std::string::npos) {
      std::vector<PollEntry> entries = {{socket_.get(), POLLIN, 0}};
      if (PollUntil(entries, SystemClock(), deadline) == 0) break;
      char buffer[4096];
      const ssize_t count = recv(socket_.get(), buffer, sizeof(buffer), 0);
      if (count > 0) heard.emplace_back(buffer, static_cast<std::size_t>(count));
    }
    return heard;
  }

 private:
  const std::string path_;
  const FileDescriptor socket_;
};

TEST(StoreNotify, ReadyWatchdogAndStopping_AreTold) {
  Manager manager;
  ChildProcess server({RESILIENT_STORE_BINARY, "serve", "--print-address"},
                      {"NOTIFY_SOCKET=" + manager.path(), "WATCHDOG_USEC=200000"});
  const auto line = server.ReadLine(In(kPatience));
  ASSERT_TRUE(line) << server.ErrorText();
  EXPECT_THAT(manager.Until("READY=1").back(),
              HasSubstr("STATUS=listens on " + line->substr(0, line->find(' '))));
  const Instant start = Now();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(manager.Until("WATCHDOG=1").back(), "WATCHDOG=1");
  EXPECT_LT(Now() - start, seconds(2));
  server.Signal(SIGTERM);
  EXPECT_THAT(manager.Until("STOPPING=1").back(), HasSubstr("STATUS=ends: SIGTERM"));
  EXPECT_EQ(server.WaitExit(In(kPatience)), 0);
}

TEST(StoreNotify, WatchdogOfAnotherProcessAndUnusableSockets_AreLeftAlone) {
  Manager manager;
  ChildProcess server(
      {RESILIENT_STORE_BINARY, "serve", "--print-address"},
      {"NOTIFY_SOCKET=" + manager.path(), "WATCHDOG_USEC=100000", "WATCHDOG_PID=1"});
  ASSERT_TRUE(server.ReadLine(In(kPatience)));
  ASSERT_THAT(manager.Until("READY=1"), Not(IsEmpty()));
  const auto ticks = [&] { return RunCommand({"version"}).exit_code; };  // Time passes.
  EXPECT_EQ(ticks(), 0);
  server.Signal(SIGTERM);
  EXPECT_THAT(manager.Until("STOPPING=1"), SizeIs(1));
  for (const std::string& name : {std::string("relative"), std::string("/nonexistent/socket"),
                                  std::string(4000, '/'), std::string("vsock:2:1234")}) {
    ChildProcess other({RESILIENT_STORE_BINARY, "serve", "--print-address"},
                       {"NOTIFY_SOCKET=" + name});
    EXPECT_TRUE(other.ReadLine(In(kPatience))) << name;
    other.Signal(SIGTERM);
    EXPECT_EQ(other.WaitExit(In(kPatience)), 0) << name;
  }
}

// Clients that add without a pause, each with a wait of its own, over several ends of the server,
// which comes back in turn at two addresses.
TEST(StoreDrain, EndedServer_LosesNoOperationAndAppliesNoneTwice) {
  constexpr int kClients = 4;
  constexpr int kEnds = 4;
  const TestDirectory data;
  const std::vector<std::string> durable = {"--data", data.path()};
  const auto serve = [&](const std::string& listen) {
    std::vector<std::string> arguments = {"--listen", listen};
    arguments.insert(arguments.end(), durable.begin(), durable.end());
    return std::make_unique<TestServer>(arguments);
  };
  auto server = serve("127.0.0.1:0");
  const std::string first = server->address_text();
  const std::string second = "127.0.0.2:" + std::to_string(server->address().port);
  const SystemClock clock;
  std::atomic<bool> stop = false;
  std::atomic<std::int64_t> added = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&, i] {
      ConnectOptions options;
      options.addresses = {first, second};
      options.job = "job";
      auto client = Connect(options, {}, clock, In(kPatience));
      ASSERT_TRUE(client.ok()) << client.status().ToString();
      auto waiting = std::async(std::launch::async, [&] {
        return (*client)->Get("end", true, Client::Call{.deadline = In(6 * kPatience)});
      });
      while (!stop) {
        const auto sum = (*client)->Add("n", 1, Client::Call{.deadline = In(kPatience)});
        ASSERT_TRUE(sum.ok()) << i << ": " << sum.status().ToString();
        ++added;
      }
      ASSERT_TRUE((*client)->Set("end", "now", Client::Call{.deadline = In(kPatience)}).ok());
      const auto end = waiting.get();
      ASSERT_TRUE(end.ok()) << end.status().ToString();
      EXPECT_EQ(*end, "now");
    });
  }
  const auto more = [&](std::int64_t than) {
    const Deadline deadline = In(kPatience);
    while (added < than + 200 && !deadline.ExpiredAt(Now())) std::this_thread::yield();
    EXPECT_GE(added, than + 200);
  };
  more(0);
  for (int i = 0; i < kEnds; ++i) {
    const Instant start = Now();
    server->process().Signal(SIGTERM);
    ASSERT_EQ(server->process().WaitExit(In(kPatience)), 0) << server->process().ErrorText();
    EXPECT_LT(Now() - start, seconds(12));
    server = serve(i % 2 == 0 ? second : first);
    more(added);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  const auto n = RunCommand({"get", "n", "--store", server->address_text(), "--job", "job"});
  EXPECT_EQ(n.output, std::to_string(added.load())) << n.errors;
}

TEST(StoreDrain, PeerThatDoesNotReadOrGo_DoesNotHoldTheEnd) {
  const TestDirectory data;
  TestServer server({"--data", data.path()});
  const auto stays = Greeted(server);
  const auto other = Greeted(server);
  ASSERT_TRUE(other->Call(SetOp{"big", std::string(4u << 20, 'x')}));
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(stays->SendOp(GetOp{"big", false}));
  const Instant start = Now();
  server.process().Signal(SIGTERM);
  EXPECT_EQ(server.process().WaitExit(In(kPatience)), 0) << server.process().ErrorText();
  EXPECT_LT(Now() - start, seconds(5));
}

}  // namespace
}  // namespace resilient::store
