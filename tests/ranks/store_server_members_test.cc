// Goal: the server tells life from death by evidence (process exit, lease), ends when it should,
// and never because it was itself asleep. Method: the real binary; members are bare sockets that
// claim to be this process, or another one that is killed.

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/ranks/store_server_support.h"
#include "tests/support/test_directory.h"

namespace resilient::store {
namespace {

using std::chrono::seconds;

// A member on its control connection.
class TestMember {
 public:
  TestMember(const TestServer& server, Hello hello) : line_(server.address()) {
    const auto welcome = line_.SayHello(hello);
    EXPECT_TRUE(welcome && welcome->status.ok());
  }

  void Join(int rank, int world_size) {
    EXPECT_TRUE(line_.SendOp(JoinOp{MakeJoin(rank, world_size)}));
  }
  // Waits for the view and for all to be ready.
  bool Run() {
    const auto view = line_.Await<View>(In(kPatience));
    if (!view || !line_.SendOp(ReadyOp{view->generation})) return false;
    generation_ = view->generation;
    return true;
  }
  bool AwaitRunning() { return line_.Await<RunningEvent>(In(kPatience)).has_value(); }
  RawClient& line() { return line_; }
  std::uint64_t generation() const { return generation_; }

 private:
  RawClient line_;
  std::uint64_t generation_ = 0;
};

Hello ControlHello() { return MakeTestHello(Role::kControl); }

Hello HelloOf(const ProcessIdentity& process) {
  Hello hello = ControlHello();
  hello.process = process;
  return hello;
}

void RunBoth(TestMember& first, TestMember& second) {
  first.Join(0, 2);
  second.Join(1, 2);
  ASSERT_TRUE(first.Run());
  ASSERT_TRUE(second.Run());
  ASSERT_TRUE(first.AwaitRunning());
  ASSERT_TRUE(second.AwaitRunning());
}

TEST(StoreServerMembers, LargeView_IsTheSameForAllMembers) {
  constexpr int kMembers = 8;
  constexpr std::size_t kEndpointBytes = 3000;
  TestServer server;
  std::vector<std::unique_ptr<TestMember>> members;
  for (int rank = 0; rank < kMembers; ++rank) {
    members.push_back(std::make_unique<TestMember>(server, ControlHello()));
    JoinRequest join = MakeJoin(rank, kMembers);
    join.endpoint = std::string(kEndpointBytes, static_cast<char>('a' + rank));
    ASSERT_TRUE(members.back()->line().SendOp(JoinOp{join}));
  }
  std::set<std::string> secrets;
  for (const auto& member : members) {
    const auto view = member->line().Await<View>(In(kPatience));
    ASSERT_TRUE(view);
    secrets.insert(view->secret);
    ASSERT_EQ(view->members.size(), static_cast<std::size_t>(kMembers));
    for (int rank = 0; rank < kMembers; ++rank) {
      EXPECT_EQ(view->members[static_cast<std::size_t>(rank)].endpoint,
                std::string(kEndpointBytes, static_cast<char>('a' + rank)));
    }
    ASSERT_TRUE(member->line().SendOp(ReadyOp{view->generation}));
  }
  EXPECT_EQ(secrets.size(), 1u);
  for (const auto& member : members) EXPECT_TRUE(member->AwaitRunning());
}

// The victim's connection stays open (it is held here), so nothing but its pidfd can tell.
TEST(StoreServerMembers, KilledProcess_FencedAtOnceByItsPidfd) {
  TestServer server;
  Sleeper victim;
  TestMember survivor(server, ControlHello());
  TestMember dead(server, HelloOf(victim.identity()));
  RunBoth(survivor, dead);
  const Instant killed = Now();
  victim.Kill();
  const auto fence = survivor.line().Await<Fence>(In(kPatience));
  ASSERT_TRUE(fence);
  EXPECT_LT(Now() - killed, Millis(500));
  EXPECT_EQ(fence->cause.code(), StatusCode::kRankLost);
  EXPECT_EQ(fence->cause.detail().rank, 1);
  EXPECT_EQ(fence->cause.detail().pid, victim.identity().pid);
}

// A supervisor's pipe that is full before the server has said anything.
class UnreadPipe {
 public:
  UnreadPipe() : path_(directory_ / "pipe") {
    EXPECT_EQ(mkfifo(path_.c_str(), 0600), 0);
    pipe_ = FileDescriptor(open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
    const std::string page(4096, '#');
    while (write(pipe_.get(), page.data(), page.size()) > 0) {
    }
    EXPECT_EQ(errno, EAGAIN);
  }
  const std::string& path() const { return path_; }
  // Reads until this comes, or patience ends.
  bool Says(const std::string& wanted) {
    std::string all;
    while (all.find(wanted) == std::string::npos) {
      std::vector<PollEntry> entries = {{pipe_.get(), POLLIN, 0}};
      if (PollUntil(entries, SystemClock(), In(kPatience)) == 0) return false;
      char buffer[65536];
      const ssize_t count = read(pipe_.get(), buffer, sizeof buffer);
      if (count > 0) all.append(buffer, static_cast<std::size_t>(count));
    }
    return true;
  }

 private:
  const TestDirectory directory_;
  const std::string path_;
  FileDescriptor pipe_;
};

// The log of a server that nobody reads holds up nothing: members join, are answered, and their end
// is known as quickly as ever. So it is where the disk of the log is full.
TEST(StoreServerMembers, LogThatNobodyReads_IsWaitedForByNobody) {
  UnreadPipe unread;
  for (const std::string& errors : {unread.path(), std::string("/dev/full")}) {
    SCOPED_TRACE(errors);
    TestServer server({"--log-level", "debug"}, errors);
    Sleeper victim;
    TestMember survivor(server, ControlHello());
    TestMember dead(server, HelloOf(victim.identity()));
    RunBoth(survivor, dead);
    RawClient client(server.address());
    ASSERT_TRUE(client.SayHello(MakeTestHello(Role::kRequest)));
    for (int i = 0; i < 300; ++i) {
      const auto reply = client.Call(SetOp{"key", "value"});
      ASSERT_TRUE(reply && reply->status.ok());
    }
    const Instant killed = Now();
    victim.Kill();
    const auto fence = survivor.line().Await<Fence>(In(kPatience));
    ASSERT_TRUE(fence);
    EXPECT_LT(Now() - killed, Millis(500));
    EXPECT_EQ(fence->cause.detail().pid, victim.identity().pid);
    if (errors == unread.path()) {
      EXPECT_TRUE(unread.Says("listens on " + server.address_text()));
    }
    server.process().Signal(SIGTERM);
    EXPECT_EQ(server.process().WaitExit(In(kPatience)), 0);
  }
}

// It has much to say, and ends all the same.
TEST(StoreServerMembers, LogThatNobodyReads_DoesNotHoldTheEnd) {
  const UnreadPipe unread;
  TestServer server({"--log-level", "debug"}, unread.path());
  TestMember member(server, ControlHello());
  member.Join(0, 1);
  ASSERT_TRUE(member.Run());
  const Instant start = Now();
  server.process().Signal(SIGTERM);
  EXPECT_EQ(server.process().WaitExit(In(kPatience)), 0);
  EXPECT_LT(Now() - start, seconds(5));
}

TEST(StoreServerMembers, ProcessGoneBeforeItIsWatched_FencedAtOnce) {
  TestServer server;
  ProcessIdentity gone = ThisProcess();
  gone.start_time += 1;  // Another process had this pid.
  TestMember survivor(server, ControlHello());
  TestMember dead(server, HelloOf(gone));
  survivor.Join(0, 2);
  dead.Join(1, 2);
  const auto lost = dead.line().Await<SessionLostEvent>(In(seconds(3)));
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->why.code(), StatusCode::kStaleGeneration);
}

TEST(StoreServerMembers, ProcessOfAnotherHost_IsNotWatchedHere) {
  TestServer server({"--lease-ttl", "1s"});
  Sleeper look_alike;
  ProcessIdentity elsewhere = look_alike.identity();
  elsewhere.boot_id = "00000000-0000-0000-0000-000000000000";
  TestMember survivor(server, ControlHello());
  TestMember remote(server, HelloOf(elsewhere));
  RunBoth(survivor, remote);
  look_alike.Kill();
  const Instant killed = Now();
  std::optional<Fence> fence;
  // Both must beat, or their leases end.
  for (std::uint64_t beat = 1; Now() - killed < Millis(1500) && !fence; ++beat) {
    survivor.line().SendOp(HeartbeatOp{beat});
    remote.line().SendOp(HeartbeatOp{beat});
    fence = survivor.line().Await<Fence>(In(Millis(100)));
  }
  EXPECT_FALSE(fence) << fence->cause.ToString();
}

TEST(StoreServerMembers, SilentMember_LostWithItsLease) {
  TestServer server({"--lease-ttl", "1s"});
  Sleeper elsewhere;
  TestMember survivor(server, ControlHello());
  TestMember silent(server, HelloOf(elsewhere.identity()));
  const Instant start = Now();
  RunBoth(survivor, silent);
  std::optional<Fence> fence;
  for (std::uint64_t beat = 1; Now() - start < seconds(10) && !fence; ++beat) {
    survivor.line().SendOp(HeartbeatOp{beat});
    fence = survivor.line().Await<Fence>(In(Millis(100)));
  }
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.detail().rank, 1);
  EXPECT_GE(Now() - start, Millis(900));
  EXPECT_LT(Now() - start, Millis(2000));
}

TEST(StoreServerMembers, PausedServer_KillsNobody) {
  TestServer server({"--lease-ttl", "1s"});
  TestMember first(server, ControlHello());
  TestMember second(server, ControlHello());
  RunBoth(first, second);
  server.process().Signal(SIGSTOP);
  // Nothing can come meanwhile: this waits for longer than two leases.
  EXPECT_FALSE(first.line().Receive(In(Millis(2500))));
  server.process().Signal(SIGCONT);
  const Instant resumed = Now();
  std::optional<Fence> fence;
  std::uint64_t beat = 0;
  while (Now() - resumed < Millis(1500) && !fence) {
    // Not before a good part of the lease has passed anew, as a member that was just about to beat.
    fence = first.line().Await<Fence>(In(Millis(300)));
    ++beat;
    first.line().SendOp(HeartbeatOp{beat});
    second.line().SendOp(HeartbeatOp{beat});
  }
  EXPECT_FALSE(fence) << fence->cause.ToString();
  ASSERT_TRUE(first.line().SendOp(HeartbeatOp{++beat}));
  EXPECT_TRUE(first.line().Await<HeartbeatAckEvent>(In(kPatience)));
}

// A leave whose bytes arrive together with the end of the process is a leave, whatever came before
// it.
TEST(StoreServerMembers, LeaveAndExitAtOnce_CountsAsLeave) {
  TestServer server;
  for (int again = 0; again < 5; ++again) {
    Sleeper process;
    TestMember member(server, HelloOf(process.identity()));
    member.Join(0, 1);
    ASSERT_TRUE(member.Run());
    ASSERT_TRUE(member.AwaitRunning());
    server.process().Signal(SIGSTOP);
    // More than a turn of the loop takes of one connection.
    for (int beat = 0; beat < 1000 * again; ++beat) {
      ASSERT_TRUE(member.line().Send({.op = HeartbeatOp{}}));
    }
    ASSERT_TRUE(member.line().SendOp(LeaveOp{}));
    process.Kill();
    server.process().Signal(SIGCONT);
    const auto left = member.line().Await<Reply>(In(kPatience));
    ASSERT_TRUE(left);
    EXPECT_TRUE(left->status.ok()) << left->status.ToString();
  }
  EXPECT_EQ(server.process().ErrorText().find("RANK_LOST"), std::string::npos);
}

TEST(StoreServerMembers, LastLeave_EndsAnAutoSpawnedServer) {
  TestServer server({"--linger", "60"});
  TestMember member(server, ControlHello());
  member.Join(0, 1);
  ASSERT_TRUE(member.Run());
  ASSERT_TRUE(member.AwaitRunning());
  EXPECT_TRUE(member.line().SendOp(LeaveOp{}));
  const auto left = member.line().Await<Reply>(In(kPatience));
  ASSERT_TRUE(left);
  EXPECT_TRUE(left->status.ok());
  EXPECT_TRUE(member.line().ClosedBy(In(kPatience)));
  member.line().Close();
  EXPECT_EQ(server.process().WaitExit(In(seconds(5))), 0) << server.process().ErrorText();
}

TEST(StoreServerMembers, LastLeave_LeavesASidecarAlone) {
  TestServer server;
  TestMember member(server, ControlHello());
  member.Join(0, 1);
  ASSERT_TRUE(member.Run());
  EXPECT_TRUE(member.line().SendOp(LeaveOp{}));
  ASSERT_TRUE(member.line().Await<Reply>(In(kPatience)));
  TestMember next(server, ControlHello());
  next.Join(0, 1);
  EXPECT_TRUE(next.Run());
}

TEST(StoreServerMembers, HostingMemberLeaves_PortIsFreeBeforeItsAnswer) {
  TestServer server({"--linger", "60"});
  Hello host = ControlHello();
  host.hosts_store = true;
  TestMember hosting(server, host);
  TestMember other(server, ControlHello());
  RunBoth(hosting, other);
  EXPECT_TRUE(hosting.line().SendOp(LeaveOp{}));
  ASSERT_TRUE(hosting.line().Await<Reply>(In(kPatience)));
  EXPECT_EQ(ListenTcp(server.address(), 1).status().code(), StatusCode::kOk);
  // The other one still has its line.
  ASSERT_TRUE(other.line().SendOp(HeartbeatOp{1}));
  EXPECT_TRUE(other.line().Await<HeartbeatAckEvent>(In(kPatience)));
}

TEST(StoreServerMembers, HostingMemberIsNeededAfterItsLeave_PortIsTheServersAgain) {
  TestServer server({"--linger", "60"});
  Hello host = ControlHello();
  host.hosts_store = true;
  TestMember hosting(server, host);
  TestMember other(server, ControlHello());
  JoinRequest patient = MakeJoin(1, 2);
  patient.seat_wait = seconds(60);
  EXPECT_TRUE(other.line().SendOp(JoinOp{patient}));
  hosting.Join(0, 2);
  ASSERT_TRUE(hosting.Run());
  ASSERT_TRUE(other.Run());
  ASSERT_TRUE(other.AwaitRunning());
  EXPECT_TRUE(hosting.line().SendOp(LeaveOp{}));
  ASSERT_TRUE(hosting.line().Await<Reply>(In(kPatience)));
  Report needs;
  needs.kind = ReportKind::kNeedsLeaver;
  needs.generation = 1;
  needs.accused_rank = 0;
  ASSERT_TRUE(other.line().SendOp(ReportOp{needs}));
  ASSERT_TRUE(other.line().Await<Fence>(In(kPatience)));
  TestMember next(server, ControlHello());
  next.Join(0, 2);
  EXPECT_TRUE(next.line().SendOp(HeartbeatOp{1}));
  EXPECT_TRUE(next.line().Await<HeartbeatAckEvent>(In(kPatience)));
}

TEST(StoreServerMembers, Linger_EndsAServerThatNobodyUses) {
  TestServer server({"--linger", "300ms"});
  EXPECT_EQ(server.process().WaitExit(In(seconds(5))), 0) << server.process().ErrorText();
}

TEST(StoreServerMembers, Linger_BeginsWhenTheLastClientHasGone) {
  TestServer server({"--linger", "1s"});
  TestMember member(server, ControlHello());
  EXPECT_FALSE(server.process().WaitExit(In(Millis(2000)))) << server.process().ErrorText();
  member.line().Close();
  EXPECT_EQ(server.process().WaitExit(In(seconds(5))), 0) << server.process().ErrorText();
}

TEST(StoreServerMembers, Linger_EndsAfterMembersVanished) {
  TestServer server({"--linger", "1s", "--lease-ttl", "1s"});
  {
    TestMember member(server, ControlHello());
    member.Join(0, 1);
    ASSERT_TRUE(member.Run());
  }
  EXPECT_EQ(server.process().WaitExit(In(seconds(8))), 0) << server.process().ErrorText();
}

TEST(StoreServerMembers, Signal_FlushesClosesAndEndsWithZero) {
  for (const int signal : {SIGTERM, SIGINT}) {
    TestServer server;
    TestMember member(server, ControlHello());
    server.process().Signal(signal);
    EXPECT_TRUE(member.line().ClosedBy(In(kPatience)));
    // Not even a client that keeps its side open holds it for long.
    EXPECT_EQ(server.process().WaitExit(In(seconds(5))), 0) << server.process().ErrorText();
  }
}

}  // namespace
}  // namespace resilient::store
