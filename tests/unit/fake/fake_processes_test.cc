// Goal: the fake NCCL of libresilient_fake_nccl.so joins ranks that are processes: their calls
// meet, a process that dies is told to the others and one that stands still is not. Method: each
// rank is a process of rank_main.cc, which is told line by line what to do.

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/comm/nccl_library.h"

namespace resilient::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Results of NCCL, as the ranks say them.
constexpr char kSuccess[] = "0";
constexpr char kRemoteError[] = "6";
constexpr char kInProgress[] = "7";

// Owner: the test; what still runs is killed. Thread: caller-synchronised.
class RankProcess {
 public:
  explicit RankProcess(const std::string& script = "") {
    int in[2];
    int out[2];
    RESILIENT_CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    std::string environment = "RESILIENT_FAKE_NCCL_SCRIPT=" + script;
    std::string program = RESILIENT_FAKE_RANK;
    std::string library = RESILIENT_FAKE_LIBRARY;
    char* const arguments[] = {program.data(), library.data(), nullptr};
    char* const variables[] = {environment.data(), nullptr};
    RESILIENT_CHECK(posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments, variables) ==
                    0);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    in_ = in[1];
    out_ = fdopen(out[0], "r");
  }
  ~RankProcess() {
    Signal(SIGKILL);
    Wait();
    close(in_);
    fclose(out_);
  }
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  void Tell(const std::string& command) {
    const std::string line = command + "\n";
    RESILIENT_CHECK(write(in_, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
  }
  std::string Answer() {
    std::string line;
    for (int byte = 0; (byte = fgetc(out_)) != EOF && byte != '\n';)
      line += static_cast<char>(byte);
    return line;
  }
  std::string Ask(const std::string& command) {
    Tell(command);
    return Answer();
  }
  void Signal(int number) {
    if (pid_ > 0) kill(pid_, number);
  }
  // Once the input has ended, or after a signal.
  int Wait() {
    int status = 0;
    if (pid_ > 0) waitpid(pid_, &status, 0);
    pid_ = 0;
    return status;
  }
  int Exit() {
    close(in_);
    in_ = -1;
    return Wait();
  }

 private:
  pid_t pid_ = 0;
  int in_ = -1;
  FILE* out_ = nullptr;
};

using Ranks = std::vector<std::unique_ptr<RankProcess>>;

class FakeProcessesTest : public ::testing::Test {
 protected:
  void Start(int count) {
    for (int rank = 0; rank < count; ++rank) ranks_.push_back(std::make_unique<RankProcess>());
    Join({0, 1, 2}, count);
  }
  // One world of the first `count` of these; the first has the hub.
  void Join(const std::vector<std::size_t>& which, int count) {
    const std::string id = ranks_[which[0]]->Ask("id");
    for (int rank = 0; rank < count; ++rank) {
      EXPECT_EQ(ranks_[which[static_cast<std::size_t>(rank)]]->Ask(
                    StrCat("join ", count, " ", rank, " ", id)),
                kInProgress);
    }
    for (int rank = 0; rank < count; ++rank)
      EXPECT_EQ(ranks_[which[static_cast<std::size_t>(rank)]]->Ask("settle"), kSuccess);
  }
  RankProcess& rank(std::size_t number) { return *ranks_[number]; }
  // What all of these say, each having been told before the first one answers.
  std::vector<std::string> Ask(const std::vector<std::size_t>& which, const std::string& command) {
    std::vector<std::string> answers;
    for (const std::size_t one : which) rank(one).Tell(command);
    for (const std::size_t one : which) answers.push_back(rank(one).Answer());
    return answers;
  }

  const std::vector<std::size_t> all_ = {0, 1, 2};
  Ranks ranks_;
};

TEST_F(FakeProcessesTest, Library_FillsBothTables) {
  const auto library =
      LoadNcclLibrary({.nccl = RESILIENT_FAKE_LIBRARY, .cuda_runtime = RESILIENT_FAKE_LIBRARY});
  ASSERT_TRUE(library.ok()) << library.status().message();
  EXPECT_EQ(library->nccl_version, 23007);
  EXPECT_NE(library->nccl.RedOpCreatePreMulSum, nullptr);
}

TEST_F(FakeProcessesTest, Collectives_OfThreeProcesses_MeetAndAreDestroyed) {
  Start(3);
  for (const int count : {1, 1000000}) {
    for (const std::size_t one : all_)
      EXPECT_EQ(rank(one).Ask(StrCat("sum ", count, " ", one + 1)), kSuccess);
    EXPECT_THAT(Ask(all_, "result"), Each("6")) << count;
  }
  EXPECT_THAT(Ask(all_, "destroy"), Each(kSuccess));
  for (const std::size_t one : all_) {
    EXPECT_THAT(rank(one).Ask("counts"),
                AllOf(HasSubstr("\"communicators\": 0"), HasSubstr("\"misuse\": []")));
    EXPECT_EQ(rank(one).Exit(), 0);
  }
}

TEST_F(FakeProcessesTest, Messages_BetweenProcesses_ArriveInTheirOrder) {
  Start(3);
  for (const int value : {7, 8}) {
    rank(1).Ask(StrCat("send 2 500000 ", value));
    EXPECT_EQ(rank(2).Ask("recv 1 500000 0"), kSuccess);
    EXPECT_EQ(rank(2).Ask("result"), StrCat(value));
    EXPECT_EQ(rank(1).Ask("result"), StrCat(value));
  }
}

TEST_F(FakeProcessesTest, KilledRank_IsToldToTheOthers_WhichGoOnWithoutIt) {
  Start(3);
  for (const std::size_t one : {0u, 1u}) rank(one).Ask("sum 10 1");
  rank(2).Signal(SIGKILL);
  EXPECT_THAT(Ask({0, 1}, "await_error"), Each(kRemoteError));
  EXPECT_THAT(Ask({0, 1}, "abort"), Each(kSuccess));
  Join({1, 0}, 2);
  for (const std::size_t one : {0u, 1u}) rank(one).Ask("sum 10 2");
  EXPECT_THAT(Ask({0, 1}, "result"), Each("4"));
}

TEST_F(FakeProcessesTest, KilledHub_IsToldToTheOthers) {
  Start(3);
  rank(0).Signal(SIGKILL);
  EXPECT_THAT(Ask({1, 2}, "await_error"), Each(kRemoteError));
  EXPECT_THAT(Ask({1, 2}, "abort"), Each(kSuccess));
}

TEST_F(FakeProcessesTest, RankKilledDuringTheInit_IsToldToTheOthers) {
  for (int one = 0; one < 3; ++one) ranks_.push_back(std::make_unique<RankProcess>());
  const std::string id = rank(0).Ask("id");
  rank(1).Ask("join 3 1 " + id);
  rank(1).Signal(SIGKILL);
  rank(1).Wait();
  rank(0).Ask("join 3 0 " + id);
  EXPECT_EQ(rank(0).Ask("await_error"), kRemoteError);
}

TEST_F(FakeProcessesTest, HubThatIsGone_IsToldToWhoJoins) {
  for (int one = 0; one < 2; ++one) ranks_.push_back(std::make_unique<RankProcess>());
  const std::string id = rank(0).Ask("id");
  rank(0).Exit();
  rank(1).Ask("join 2 1 " + id);
  EXPECT_EQ(rank(1).Ask("await_error"), kRemoteError);
}

TEST_F(FakeProcessesTest, RanksThatStandStill_DoNotShow_AndDoNotHinderAnAbort) {
  Start(3);
  for (const std::size_t one : {0u, 1u}) rank(one).Signal(SIGSTOP);
  rank(2).Ask("sum 1000000 1");  // More than a socket takes.
  EXPECT_EQ(rank(2).Ask("ask"), kSuccess);
  EXPECT_EQ(rank(2).Ask("abort"), kSuccess);
  EXPECT_THAT(rank(2).Ask("counts"), HasSubstr("\"communicators\": 0"));
}

TEST_F(FakeProcessesTest, RankThatStoodStill_IsWaitedFor) {
  Start(3);
  rank(1).Signal(SIGSTOP);
  for (const std::size_t one : {0u, 2u}) rank(one).Ask("sum 300000 1");
  rank(1).Tell("sum 300000 1");
  EXPECT_THAT(Ask({0, 2}, "ask"), Each(kSuccess));
  rank(1).Signal(SIGCONT);
  EXPECT_EQ(rank(1).Answer(), kSuccess);
  EXPECT_THAT(Ask(all_, "result"), Each("3"));
}

TEST_F(FakeProcessesTest, HubThatLeavesAndEnds_DoesNotShow_UntilItIsMissed) {
  Start(3);
  EXPECT_EQ(rank(0).Ask("destroy"), kSuccess);
  EXPECT_EQ(rank(0).Exit(), 0);
  EXPECT_THAT(Ask({1, 2}, "ask"), Each(kSuccess));
  EXPECT_EQ(rank(1).Ask("destroy"), kSuccess);
  rank(2).Tell("sum 1 1");
  rank(2).Answer();
  EXPECT_EQ(rank(2).Ask("await_error"), kRemoteError);
}

TEST_F(FakeProcessesTest, CallsThatDoNotFit_AreNoticedByTheHub) {
  Start(2);
  rank(1).Ask("sum 3 1");
  rank(0).Ask("sum 2 1");
  EXPECT_EQ(rank(0).Ask("wait misuse 1"), "0");
  EXPECT_THAT(Ask({0, 1}, "abort"), Each(kSuccess));
  EXPECT_THAT(rank(0).Ask("counts"), HasSubstr("rank 1 is in another collective than rank 0"));
}

TEST_F(FakeProcessesTest, Script_IsThatOfTheEnvironment_AndChanges) {
  ranks_.push_back(std::make_unique<RankProcess>("async_error=1 hang_init=1"));
  rank(0).Ask("join 1 0 " + rank(0).Ask("id"));
  EXPECT_EQ(rank(0).Ask("await_error"), "1");
  EXPECT_EQ(rank(0).Ask("change async_error=0"), "0");
  EXPECT_EQ(rank(0).Ask("ask"), kInProgress);
  EXPECT_EQ(rank(0).Ask("change hang_init=0 no_such_name=1"), "1");
  EXPECT_EQ(rank(0).Ask("change hang_init=x"), "1");
  EXPECT_EQ(rank(0).Ask("ask"), kInProgress);
  EXPECT_EQ(rank(0).Ask("change hang_init=0"), "0");
  EXPECT_EQ(rank(0).Ask("settle"), kSuccess);
  EXPECT_EQ(rank(0).Ask("wait no_such_name 1"), "2");
}

TEST_F(FakeProcessesTest, ProcessWithAHangingAbort_Ends) {
  Start(2);
  rank(1).Ask("sum 1 1");
  rank(1).Ask("change hang_abort=1");
  rank(1).Tell("abort");
  // It hangs there; the other hears of nothing but its end.
  EXPECT_EQ(rank(0).Ask("ask"), kSuccess);
  rank(1).Signal(SIGTERM);
  EXPECT_EQ(rank(0).Ask("await_error"), kRemoteError);
}

}  // namespace
}  // namespace resilient::testing
