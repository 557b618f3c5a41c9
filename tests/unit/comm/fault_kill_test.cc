// Goal: a rank that is killed at whatever step of a collective is told to the others; aborted, they
// end at once and go on as a smaller group in the same processes. Method: each rank is a process;
// one of them counts its steps and kills itself at one of them, each in turn.

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <future>
#include <utility>

#include "runtime/base/random.h"
#include "runtime/comm/step_observer.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/fault_points.h"

namespace resilient::testing {
namespace {

constexpr double kAbortBoundMs = kSanitized ? 1000 : 100;

const Status kKilled(StatusCode::kRankLost, "a rank was killed");

// What the processes of one trial are to do.
struct Plan {
  const FaultCase* fault = nullptr;
  int victim = 1;
  std::uint64_t step = 0;  // 0: nobody is killed.
  bool inline_run = false;
};

// One rank in a process of its own. Says one line: what went wrong, or "ok" and a number. Never
// returns.
class RankProcess {
 public:
  RankProcess(const Plan& plan, Trial& trial, int rank, int in, int out)
      : plan_(plan), trial_(trial), rank_(rank), in_(in), out_(out) {}

  [[noreturn]] void Main() {
    alarm(static_cast<unsigned>(kBound.count()));  // A hang ends here, and the parent hears of it.
    CpuFabricOptions options;
    options.shm_limit = plan_.fault->shm_limit;
    options.hierarchical = plan_.fault->hierarchical;
    auto fabric = MakeObservedCpuFabric(options, clock_, log_,
                                        [this](const GroupSpec&, std::uint64_t) { OnStep(); });
    if (!fabric.ok()) Say(fabric.status().message());
    fabric_ = std::move(*fabric);
    endpoints_ = Exchange(fabric_->endpoint());
    const auto group = fabric_->Create(Spec(1, {0, 1, 2}), nullptr);
    if (!Submit(*group, BarrierOp()).Wait().ok()) Say("the first barrier failed");
    armed_.store(true);
    const Status outcome = RunTrial(group);
    if (outcome.ok()) {
      if (const std::string wrong = trial_.WhatIsWrong(rank_); !wrong.empty()) Say(wrong);
    } else if (plan_.step == 0 || outcome.code() != StatusCode::kRankLost) {
      Say(outcome.ToString());
    }
    if (plan_.step == 0) {
      Exchange(group->size() == 3 ? "done" : "");  // Nobody leaves before all are through.
      Say("ok " + std::to_string(steps_.load()));
    }
    Rebuild();
    Say("ok " + std::to_string(waited_ms_));
  }

 private:
  void OnStep() {
    if (rank_ != plan_.victim || !armed_.load()) return;
    if (++steps_ == plan_.step) kill(getpid(), SIGKILL);
  }

  Pending Submit(Communicator& communicator, Operation op) {
    return Pending::Try(communicator, std::move(op));
  }

  // Aborts when the victim is told to be lost, as the membership service would have it.
  Status RunTrial(const std::shared_ptr<Communicator>& group) {
    std::atomic<Instant> aborted = Instant::max();
    std::thread membership;
    if (plan_.step > 0 && rank_ != plan_.victim) {
      membership = std::thread([&] {
        if (!log_.WaitFor([this](EventLog& log) { return log.lost[plan_.victim] > 0; }))
          Say("nobody told that the link was lost");
        aborted.store(clock_.Now());
        group->Abort(kKilled);
      });
    }
    Status outcome;
    if (plan_.inline_run) {
      std::promise<Status> completed;
      const auto ran = group->Run(
          trial_.At(rank_), [&](const Status& status) { completed.set_value(status); },
          [] { return true; });
      if (!ran.ok()) {
        outcome = ran.status();  // The verdict was there first.
      } else {
        outcome = ran->outcome ? *ran->outcome : completed.get_future().get();
      }
    } else {
      outcome = Submit(*group, trial_.At(rank_)).Wait();
    }
    const Instant ended = clock_.Now();
    if (membership.joinable()) membership.join();
    const Duration waited = ended > aborted.load() ? ended - aborted.load() : Duration(0);
    waited_ms_ = std::chrono::duration<double, std::milli>(waited).count();
    return outcome;
  }

  void Rebuild() {
    std::vector<int> survivors;
    for (int r = 0; r < kFaultRanks; ++r)
      if (r != plan_.victim) survivors.push_back(r);
    const auto group = fabric_->Create(Spec(2, survivors), nullptr);
    std::vector<float> data(5'000, 1.0f);
    const Status sum = Submit(*group, AllReduceOp(data)).Wait();
    if (!sum.ok()) Say("after the rebuild: " + sum.ToString());
    if (data != std::vector<float>(5'000, 2.0f)) Say("a wrong sum after the rebuild");
    group->Leave();
    fabric_->Close(Deadline::After(clock_.Now(), Millis(1000)));
  }

  GroupSpec Spec(std::uint64_t generation, const std::vector<int>& ranks) const {
    GroupSpec spec{.name = "world", .generation = generation, .secret = "sesame", .members = {}};
    for (const int rank : ranks) {
      if (rank == rank_) spec.rank = static_cast<int>(spec.members.size());
      spec.members.push_back({.global_rank = rank,
                              .endpoint = OnHost(endpoints_[static_cast<std::size_t>(rank)],
                                                 plan_.fault->HostOf(rank)),
                              .host = "here"});
    }
    return spec;
  }

  // Gives the parent a line and gets those of all.
  std::vector<std::string> Exchange(std::string line) {
    line += '\n';
    std::vector<std::string> all;
    std::string got;
    if (write(out_, line.data(), line.size()) < 0) _exit(1);
    while (all.size() < kFaultRanks) {
      char byte = 0;
      if (read(in_, &byte, 1) != 1) _exit(1);
      if (byte != '\n') {
        got += byte;
      } else {
        all.push_back(std::exchange(got, {}));
      }
    }
    return all;
  }
  [[noreturn]] void Say(std::string line) {
    line += '\n';
    _exit(write(out_, line.data(), line.size()) < 0 ? 1 : 0);
  }

  const Plan& plan_;
  Trial& trial_;
  const int rank_;
  const int in_;
  const int out_;
  SystemClock clock_;
  EventLog log_;
  std::unique_ptr<CommunicatorFactory> fabric_;
  std::vector<std::string> endpoints_;
  std::atomic<bool> armed_ = false;
  std::atomic<std::uint64_t> steps_ = 0;
  double waited_ms_ = 0;
};

// The parent's end of a rank.
struct Child {
  pid_t pid = -1;
  FileDescriptor to;
  FileDescriptor from;

  // A line, without its end; "" when the child has ended.
  std::string ReadLine() const {
    std::string line;
    for (char byte = 0; read(from.get(), &byte, 1) == 1 && byte != '\n';) line += byte;
    return line;
  }
};

class KillPoints : public ::testing::TestWithParam<FaultCase> {
 protected:
  // Runs a trial in three processes. Returns what each rank said last.
  std::vector<std::string> Run(const Plan& plan) {
    Trial trial(GetParam().call, random_);
    std::vector<Child> children;
    for (int rank = 0; rank < kFaultRanks; ++rank) children.push_back(Start(plan, trial, rank));
    Relay(children);
    if (plan.step == 0) Relay(children);
    std::vector<std::string> said;
    for (int rank = 0; rank < kFaultRanks; ++rank) {
      const Child& child = children[static_cast<std::size_t>(rank)];
      said.push_back(child.ReadLine());
      int status = 0;
      EXPECT_EQ(waitpid(child.pid, &status, 0), child.pid);
      const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
      EXPECT_EQ(killed, plan.step > 0 && rank == plan.victim) << "rank " << rank;
    }
    return said;
  }

 private:
  // Gives everyone the lines of all.
  static void Relay(const std::vector<Child>& children) {
    std::string all;
    for (const Child& child : children) all += child.ReadLine() + '\n';
    for (const Child& child : children)
      EXPECT_EQ(write(child.to.get(), all.data(), all.size()), static_cast<ssize_t>(all.size()));
  }

  static Child Start(const Plan& plan, Trial& trial, int rank) {
    int to[2], from[2];
    EXPECT_EQ(pipe2(to, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(from, O_CLOEXEC), 0);
    Child child;
    child.pid = fork();
    EXPECT_GE(child.pid, 0);
    // The ends of the other ranks' pipes are closed in a child: FileDescriptor sees to it.
    if (child.pid == 0) {
      close(to[1]);
      close(from[0]);
      RankProcess(plan, trial, rank, to[0], from[1]).Main();
    }
    close(to[0]);
    close(from[1]);
    child.to = FileDescriptor(to[1]);
    child.from = FileDescriptor(from[0]);
    return child;
  }

  Random random_{13};
};

INSTANTIATE_TEST_SUITE_P(Collectives, KillPoints, ::testing::ValuesIn(AllFaultCases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(KillPoints, ARankKilledAtEachStep_IsToldAndTheOthersRebuild) {
  double longest = 0;
  std::uint64_t killed = 0;
  // Rank 0 is the one whose shared memory the others use.
  for (const int victim : {1, 0}) {
    Plan plan{.fault = &GetParam(), .victim = victim};
    const std::vector<std::string> alive = Run(plan);
    for (const std::string& said : alive) ASSERT_EQ(said.rfind("ok ", 0), 0u) << said;
    const std::uint64_t steps = std::stoull(alive[static_cast<std::size_t>(victim)].substr(3));
    EXPECT_GE(steps, victim == 1 ? 2u : 1u);
    for (plan.step = 1; plan.step <= steps && !HasFailure(); ++plan.step) {
      plan.inline_run = !plan.inline_run;
      const std::vector<std::string> said = Run(plan);
      for (int rank = 0; rank < kFaultRanks; ++rank) {
        if (rank == victim) continue;
        const std::string& line = said[static_cast<std::size_t>(rank)];
        ASSERT_EQ(line.rfind("ok ", 0), 0u)
            << "rank " << rank << ", rank " << victim << " was killed at step " << plan.step << ": "
            << (line.empty() ? "it hung" : line);
        longest = std::max(longest, std::stod(line.substr(3)));
      }
      ++killed;
    }
  }
  EXPECT_LT(longest, kAbortBoundMs);
  std::printf("%s: killed at %llu steps; the longest wait after an abort took %.2f ms\n",
              GetParam().name.c_str(), static_cast<unsigned long long>(killed), longest);
}

}  // namespace
}  // namespace resilient::testing
