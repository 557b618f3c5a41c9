// Goal: whatever a durable server acknowledged is there after it has died at any point and was
// started again, exactly once; members do not notice; a disk that cannot take more ends it with a
// clear word. Method: the real binary and client, kill -9, and a server that ends itself at the
// n-th step on the way to the disk, for each n.

#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "resilient/store/client.h"
#include "tests/ranks/store_server_support.h"
#include "tests/support/test_directory.h"

namespace resilient::store {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

constexpr int kExitStorage = 4;
constexpr int kCrashed = 137;

// A server with a data directory that can be killed and started again at the same address.
class DurableServer {
 public:
  explicit DurableServer(const std::string& data, std::vector<std::string> arguments = {})
      : arguments_(std::move(arguments)) {
    arguments_.insert(arguments_.end(), {"--data", data});
    server_ = std::make_unique<TestServer>(arguments_);
    arguments_.insert(arguments_.end(), {"--listen", server_->address_text()});
  }

  void Kill() {
    server_->process().Signal(SIGKILL);
    ASSERT_EQ(server_->process().WaitExit(In(kPatience)), -SIGKILL);
  }
  void Start() { server_ = std::make_unique<TestServer>(arguments_); }
  TestServer& operator*() { return *server_; }
  TestServer* operator->() { return server_.get(); }

 private:
  std::vector<std::string> arguments_;
  std::unique_ptr<TestServer> server_;
};

std::shared_ptr<Client> ConnectTo(const std::string& address, std::string session = {}) {
  static const SystemClock clock;
  ConnectOptions options;
  options.addresses = {address};
  options.job = "job";
  options.session = std::move(session);
  auto client = Connect(options, {}, clock, In(kPatience));
  EXPECT_TRUE(client.ok()) << client.status().ToString();
  return client.ok() ? *client : nullptr;
}

Client::Call Within(Duration patience) {
  Client::Call call;
  call.deadline = In(patience);
  return call;
}

std::string GetNow(Client& client, const std::string& key) {
  const auto value = client.Get(key, false, Within(kPatience));
  return value.ok() ? *value : std::string(CodeName(value.status().code()));
}

TEST(StoreDurability, KilledServer_ComesBackWithItsKeysAndItsName) {
  TestDirectory data;
  DurableServer server(data.path());
  const std::string id = server->server_id();
  const auto client = ConnectTo(server->address_text());
  ASSERT_TRUE(client->Set("k", "v", Within(kPatience)).ok());
  ASSERT_EQ(*client->Add("n", 41, Within(kPatience)), 41);
  server.Kill();
  server.Start();
  EXPECT_EQ(server->server_id(), id);
  EXPECT_EQ(GetNow(*client, "k"), "v");
  EXPECT_EQ(*client->Add("n", 1, Within(kPatience)), 42);
  EXPECT_THAT(server->process().ErrorText(), HasSubstr("restored the store: epoch"));
  EXPECT_THAT(server->process().ErrorText(), HasSubstr("1 jobs, 1 sessions, 2 keys"));
}

TEST(StoreDurability, EndedServer_HasFlushedAll) {
  for (const char* durability : {"process", "machine"}) {
    TestDirectory data;
    {
      TestServer server({"--data", data.path(), "--durability", durability});
      const auto client = ConnectTo(server.address_text());
      for (int i = 0; i < 20; ++i) {
        ASSERT_TRUE(client->Set("k" + std::to_string(i), "v", Within(kPatience)).ok());
      }
      server.process().Signal(SIGTERM);
      ASSERT_EQ(server.process().WaitExit(In(kPatience)), 0) << server.process().ErrorText();
    }
    EXPECT_FALSE(std::filesystem::exists(data.path() + "/store.db-wal"));
    TestServer server({"--data", data.path(), "--durability", durability});
    EXPECT_EQ(*ConnectTo(server.address_text())->NumKeys(Within(kPatience)), 20);
  }
}

TEST(StoreDurability, SecondServer_IsToldWhoHoldsTheDirectory) {
  TestDirectory data;
  DurableServer server(data.path());
  const CommandOutcome second = RunCommand({"serve", "--data", data.path()});
  EXPECT_EQ(second.exit_code, kExitStorage);
  EXPECT_THAT(second.errors, HasSubstr("in use by another server: pid " +
                                       std::to_string(server->process().pid())));
  const auto client = ConnectTo(server->address_text());
  EXPECT_TRUE(client->Set("k", "v", Within(kPatience)).ok());
}

TEST(StoreDurability, WrongArguments_OneLineAndTwo) {
  const auto expect = [](const std::vector<std::string>& arguments, const std::string& mention) {
    const CommandOutcome outcome = RunCommand(arguments);
    EXPECT_EQ(outcome.exit_code, 2);
    EXPECT_THAT(outcome.errors, HasSubstr(mention));
  };
  expect({"serve", "--durability", "process"}, "needs --data DIR");
  expect({"serve", "--durability", "mem", "--data", "/tmp"}, "keeps nothing");
  expect({"serve", "--durability", "disk", "--data", "/tmp"}, "--durability");
  EXPECT_THAT(RunCommand({"serve", "--help"}).output, HasSubstr("4  the data directory"));
}

// The log of a session's acknowledged operations, and what must hold after any crash.
struct Ledger {
  std::int64_t acknowledged = 0;
  std::int64_t unknown = 0;
  std::map<std::string, std::string> set;
  std::map<std::string, std::string> maybe_set;
};

// Sets and adds, until the server dies or all are done. False: it died.
bool Work(Client& client, Ledger& ledger, Duration patience) {
  for (int i = 0; i < 4; ++i) {
    const std::string key = "k" + std::to_string(i);
    const Status set = client.Set(key, "v", Within(patience));
    (set.ok() ? ledger.set : ledger.maybe_set)[key] = "v";
    if (!set.ok()) return false;
    const auto added = client.Add("n", 1, Within(patience));
    ++(added.ok() ? ledger.acknowledged : ledger.unknown);
    if (!added.ok()) return false;
    EXPECT_GT(*added, 0);
  }
  return true;
}

void ExpectKept(const HostPort& address, const Ledger& ledger, std::uint64_t crash_at) {
  SCOPED_TRACE("crash at " + std::to_string(crash_at));
  const auto client = ConnectTo(FormatHostPort(address));
  ASSERT_NE(client, nullptr);
  for (const auto& [key, value] : ledger.set) EXPECT_EQ(GetNow(*client, key), value);
  const auto sum = client->Add("n", 0, Within(kPatience));
  ASSERT_TRUE(sum.ok()) << sum.status().ToString();
  EXPECT_GE(*sum, ledger.acknowledged);
  EXPECT_LE(*sum, ledger.acknowledged + ledger.unknown);
}

// The same session goes on after the restart: each operation takes effect exactly once, whether the
// crash came before or after its commit.
TEST(StoreDurability, CrashAtEachPoint_EachOperationTakesEffectOnce) {
  constexpr std::uint64_t kPointsMax = 2000;
  bool crashed = true;
  std::uint64_t point = 0;
  while (crashed && point < kPointsMax) {
    SCOPED_TRACE("crash at " + std::to_string(++point));
    TestDirectory data;
    ChildProcess first({RESILIENT_STORE_BINARY, "serve", "--print-address", "--log-level", "off",
                        "--data", data.path(), "--crash-at", std::to_string(point)});
    const auto line = first.ReadLine(In(kPatience));
    if (!line) {  // Before it listened.
      ASSERT_EQ(first.WaitExit(In(kPatience)), kCrashed) << first.ErrorText();
      TestServer again({"--data", data.path()});
      ExpectKept(again.address(), {}, point);
      continue;
    }
    const auto address = ParseHostPort(line->substr(0, line->find(' ')));
    ASSERT_TRUE(address.ok());
    // The successor, as soon as the first one is gone; the client finds it by itself.
    std::unique_ptr<TestServer> second;
    std::thread nurse([&] {
      const auto outcome = first.WaitExit(In(kPatience));
      crashed = outcome == kCrashed;
      if (!crashed) return;
      second = std::make_unique<TestServer>(
          std::vector<std::string>{"--data", data.path(), "--listen", FormatHostPort(*address)});
    });
    Ledger ledger;
    {
      const auto client = ConnectTo(FormatHostPort(*address));
      EXPECT_TRUE(client != nullptr && Work(*client, ledger, kPatience));
    }
    first.Signal(SIGTERM);  // If it has lived through it all.
    nurse.join();
    EXPECT_EQ(ledger.acknowledged, 4);
    if (crashed) ExpectKept(*address, ledger, point);
  }
  EXPECT_FALSE(crashed);
  EXPECT_GT(point, 40u);
  RecordProperty("points", static_cast<int>(point));
}

// Several threads add 1, each through its own session, while the server is killed again and again.
TEST(StoreDurability, KilledUnderLoad_TheSumIsWhatWasAcknowledged) {
  constexpr int kThreads = 4;
  constexpr int kKills = 6;
  TestDirectory data;
  DurableServer server(data.path(), {"--log-level", "off"});
  std::atomic<bool> stop = false;
  std::atomic<std::int64_t> acknowledged = 0;
  std::atomic<std::int64_t> unknown = 0;
  std::vector<std::thread> threads;
  const std::string address = server->address_text();
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      const auto client = ConnectTo(address);
      while (client != nullptr && !stop) {
        ++(client->Add("sum", 1, Within(kPatience)).ok() ? acknowledged : unknown);
      }
    });
  }
  const auto probe = ConnectTo(address);
  for (int kill = 0; kill < kKills; ++kill) {
    // Some work must have been done since the last one.
    const std::int64_t before = acknowledged;
    const Deadline deadline = In(kPatience);
    while (acknowledged < before + 50 && !deadline.ExpiredAt(Now())) {
      ASSERT_TRUE(probe->Add("pace", 1, Within(kPatience)).ok());
    }
    EXPECT_GE(acknowledged, before + 50) << "no progress after kill " << kill;
    server.Kill();
    server.Start();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  const auto sum = probe->Add("sum", 0, Within(kPatience));
  ASSERT_TRUE(sum.ok()) << sum.status().ToString();
  EXPECT_GE(*sum, acknowledged);
  EXPECT_LE(*sum, acknowledged + unknown);
  EXPECT_EQ(unknown, 0) << "a restart within the deadline hides itself";
}

// A limit of the file's size is a full disk that needs no privileges.
TEST(StoreDurability, FullDisk_EndsTheServerWithOneLineAndNothingIsLost) {
  TestDirectory data;
  DurableServer server(data.path(), {"--log-level", "off"});
  const auto client = ConnectTo(server->address_text());
  ASSERT_TRUE(client->Set("first", "v", Within(kPatience)).ok());
  const rlimit limit{512u << 10, RLIM_INFINITY};
  ASSERT_EQ(prlimit(server->process().pid(), RLIMIT_FSIZE, &limit, nullptr), 0);
  std::vector<std::string> kept;
  for (int i = 0; i < 400; ++i) {
    const std::string key = "k" + std::to_string(i);
    if (!client->Set(key, std::string(4000, 'x'), Within(Millis(500))).ok()) break;
    kept.push_back(key);
  }
  EXPECT_EQ(server->process().WaitExit(In(kPatience)), kExitStorage);
  const std::string errors = server->process().ErrorText();
  EXPECT_THAT(errors, HasSubstr("make room, then start the store again"));
  EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  ASSERT_GT(kept.size(), 10u);
  ASSERT_LT(kept.size(), 400u);
  server.Start();
  const auto again = ConnectTo(server->address_text());
  EXPECT_EQ(GetNow(*again, "first"), "v");
  for (const std::string& key : kept) EXPECT_EQ(GetNow(*again, key).size(), 4000u) << key;
}

// Real mounts in a namespace of its own: a small tmpfs that fills up, and one that is read-only.
TEST(StoreDurability, SmallAndReadOnlyFileSystems_RefusedWithTheFix) {
  const std::string setup = "/usr/bin/unshare";
  if (!std::filesystem::exists(setup)) GTEST_SKIP() << "no unshare on this host";
  {
    ChildProcess probe({setup, "-rm", "/bin/sh", "-c", "mount -t tmpfs -o size=64k none /mnt"});
    if (probe.WaitExit(In(kPatience)) != 0) {
      GTEST_SKIP() << "this host does not let a user mount: " << probe.ErrorText();
    }
  }
  const auto serve = [&](const std::string& options, const std::string& before) {
    ChildProcess shell({setup, "-rm", "/bin/sh", "-c",
                        "mount -t tmpfs -o " + options + " none /mnt && " + before +
                            " exec " RESILIENT_STORE_BINARY
                            " serve --log-level off --data /mnt/d"});
    EXPECT_EQ(shell.WaitExit(In(kPatience)), kExitStorage) << shell.ErrorText();
    return shell.ErrorText();
  };
  EXPECT_THAT(serve("size=64k", "dd if=/dev/zero of=/mnt/fill bs=4k 2>/dev/null;"),
              HasSubstr("make room, then start the store again"));
  EXPECT_THAT(serve("size=64k,ro", ""), HasSubstr("names a directory that the server may write"));
}

// One member of a world on a connection driven by hand, which comes back to its session.
class Member {
 public:
  Member(const HostPort& address, const ProcessIdentity& process)
      : hello_(MakeTestHello(Role::kControl)) {
    hello_.process = process;
    Attach(address);
  }
  // False: the server does not know the session any more.
  bool Attach(const HostPort& address) {
    const std::uint64_t last_seq = line_ == nullptr ? 0 : line_->last_seq();
    line_ = std::make_unique<RawClient>(address);
    line_->GoOnAfter(last_seq);
    const auto welcome = line_->SayHello(hello_);
    EXPECT_TRUE(welcome && welcome->status.ok());
    return welcome && welcome->welcome->session_known;
  }
  bool Run() {
    const auto view = line_->Await<View>(In(kPatience));
    if (!view || !line_->SendOp(ReadyOp{view->generation})) return false;
    generation_ = view->generation;
    return line_->Await<RunningEvent>(In(kPatience)).has_value();
  }
  RawClient& line() { return *line_; }
  std::uint64_t generation() const { return generation_; }

 private:
  Hello hello_;
  std::unique_ptr<RawClient> line_;
  std::uint64_t generation_ = 0;
};

TEST(StoreDurability, WorldOutlivesTheServer_AndIsFencedAfterwards) {
  TestDirectory data;
  DurableServer server(data.path(), {"--lease-ttl", "2s"});
  Sleeper victim;
  Member survivor(server->address(), ThisProcess());
  Member dead(server->address(), victim.identity());
  survivor.line().SendOp(JoinOp{MakeJoin(0, 2)});
  dead.line().SendOp(JoinOp{MakeJoin(1, 2)});
  std::thread other([&] { EXPECT_TRUE(dead.Run()); });
  EXPECT_TRUE(survivor.Run());
  other.join();
  const std::uint64_t generation = survivor.generation();
  server.Kill();
  server.Start();
  EXPECT_TRUE(survivor.Attach(server->address()));
  EXPECT_TRUE(dead.Attach(server->address()));
  // For longer than a lease nothing happens but beats.
  const Instant start = Now();
  for (std::uint64_t beat = 1; Now() - start < seconds(3); ++beat) {
    for (Member* member : {&survivor, &dead}) {
      ASSERT_TRUE(member->line().SendOp(HeartbeatOp{beat}));
      // Behind the state that is pushed again after Hello.
      ASSERT_TRUE(member->line().Await<HeartbeatAckEvent>(In(kPatience)));
    }
    EXPECT_FALSE(survivor.line().Receive(In(Millis(100))));
  }
  victim.Kill();
  const auto fence = survivor.line().Await<Fence>(In(seconds(2)));
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->generation, generation);
  EXPECT_EQ(fence->cause.detail().rank, 1);
  EXPECT_EQ(fence->cause.detail().pid, victim.identity().pid);
}

// Nobody beats while the server is away, and who does not come back is lost with a full lease.
TEST(StoreDurability, MemberThatDiedWithTheServer_IsFenced) {
  TestDirectory data;
  DurableServer server(data.path(), {"--lease-ttl", "2s"});
  auto victim = std::make_unique<Sleeper>();
  Member survivor(server->address(), ThisProcess());
  Member dead(server->address(), victim->identity());
  survivor.line().SendOp(JoinOp{MakeJoin(0, 2)});
  dead.line().SendOp(JoinOp{MakeJoin(1, 2)});
  std::thread other([&] { EXPECT_TRUE(dead.Run()); });
  EXPECT_TRUE(survivor.Run());
  other.join();
  server.Kill();
  victim.reset();
  server.Start();
  EXPECT_TRUE(survivor.Attach(server->address()));
  std::optional<Fence> fence;
  const Instant start = Now();
  for (std::uint64_t beat = 1; !fence && Now() - start < seconds(8); ++beat) {
    survivor.line().SendOp(HeartbeatOp{beat});
    fence = survivor.line().Await<Fence>(In(Millis(200)));
  }
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.detail().rank, 1);
}

}  // namespace
}  // namespace resilient::store
