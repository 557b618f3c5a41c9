// Times of the CPU communicator's collectives, without PyTorch: `collective_bench RANKS DIRECTORY`.
// Forks one process per rank; collective_bench.py tells them what to do and describes how.

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <semaphore>
#include <sstream>
#include <string>
#include <vector>

#include <resilient/settings.h>
#include <resilient/transports.h>

namespace resilient {
namespace {

// A broken link or a mismatch ends the measurement: the rank reports it and exits.
class Events final : public CommunicatorEvents {
 public:
  void OnConnected(const std::string&, std::uint64_t) override {}
  void OnLinkLost(const std::string&, std::uint64_t, int, const Status& why) override { End(why); }
  void OnMismatch(const std::string&, std::uint64_t, const Status& mismatch) override {
    End(mismatch);
  }
  void OnStalled(const std::string&, std::uint64_t, const Status& why) override { End(why); }
  void OnUnreached(const std::string&, std::uint64_t, int, const Status&) override {}
  void OnWaiting(const std::string&, std::uint64_t, std::vector<WaitingOperation>) override {}
  void OnProgress(std::uint64_t, GroupProgress) override {}

 private:
  static void End(const Status& why) {
    std::fprintf(stderr, "collective_bench: %s\n", why.ToString().c_str());
    std::_Exit(1);
  }
};

// The collective of one command, on buffers of its own. A tensor has `bytes` on each rank; where it
// consists of parts, there is one for each rank. Thread: the rank's only one.
class Measurement {
 public:
  Measurement(Communicator& communicator, std::string name, std::size_t bytes)
      : communicator_(communicator), name_(std::move(name)) {
    const auto ranks = static_cast<std::size_t>(communicator.size());
    const std::size_t part = std::max<std::size_t>(bytes / sizeof(float) / ranks, 1);
    const bool in_parts = name_ == "reduce_scatter" || name_ == "all_to_all";
    const bool out_parts = name_ == "all_gather" || name_ == "all_to_all";
    const std::size_t whole = std::max<std::size_t>(bytes / sizeof(float), 1);
    input_.resize(in_parts ? part * ranks : name_ == "all_gather" ? part : whole);
    output_.resize(out_parts ? part * ranks : name_ == "reduce_scatter" ? part : whole);
    const bool moves = in_parts || out_parts;
    op_.dtype = DataType::kFloat32;
    op_.data = name_ == "reduce_scatter" ? output_.data() : input_.data();
    op_.count = moves ? part : whole;
    for (std::size_t i = 0; i < ranks && moves; ++i) {
      if (in_parts) op_.inputs.push_back({.data = input_.data() + i * part, .count = part});
      if (out_parts) op_.outputs.push_back({.data = output_.data() + i * part, .count = part});
    }
    SetKind();
  }

  // False when a result is wrong.
  bool Check() {
    std::fill(input_.begin(), input_.end(), 1.0f);
    Once(0);
    const bool sums = op_.reduce == ReduceOp::kSum;
    const float expected = sums ? static_cast<float>(communicator_.size()) : 1.0f;
    const bool in_place = name_ == "all_reduce" || name_ == "broadcast" || name_ == "barrier";
    const std::vector<float>& result = in_place ? input_ : output_;
    const bool right = std::all_of(result.begin(), result.end(),
                                   [&](float element) { return element == expected; });
    std::fill(input_.begin(), input_.end(), 0.0f);  // Its sum with itself stays what it is.
    return right;
  }

  // Seconds of `calls` calls.
  double Time(int calls) {
    Barrier();
    const auto began = std::chrono::steady_clock::now();
    for (int call = 0; call < calls; ++call) Once(call);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }

 private:
  void SetKind() {
    if (name_ == "all_reduce") op_.kind = OpKind::kAllReduce;
    if (name_ == "broadcast") op_.kind = OpKind::kBroadcast;
    if (name_ == "all_gather") op_.kind = OpKind::kAllGather;
    if (name_ == "reduce_scatter") op_.kind = OpKind::kReduceScatter;
    if (name_ == "all_to_all") op_.kind = OpKind::kAllToAll;
    if (name_ == "all_reduce" || name_ == "reduce_scatter") op_.reduce = ReduceOp::kSum;
    if (name_ == "all_to_all") op_.data = nullptr, op_.count = 0;
    if (name_ == "barrier") op_ = Operation();
  }

  void Once(int call) {
    if (name_ == "copy") {
      std::memcpy(output_.data(), input_.data(), input_.size() * sizeof(float));
      return;
    }
    // The root goes round: a fixed one would be ahead of its receivers.
    if (name_ == "broadcast") op_.root = call % communicator_.size();
    Run(op_);
  }

  void Barrier() { Run({}); }

  void Run(const Operation& op) {
    Status outcome;
    const auto done = [&](const Status& status) {
      outcome = status;
      ended_.release();
    };
    Result<Communicator::Ran> ran = communicator_.Run(op, done, [] { return true; });
    if (!ran.ok()) {
      outcome = ran.status();
    } else if (ran->outcome) {
      outcome = *ran->outcome;
    } else {
      ended_.acquire();
    }
    if (!outcome.ok()) {
      std::fprintf(stderr, "collective_bench: %s\n", outcome.ToString().c_str());
      std::_Exit(1);
    }
  }

  Communicator& communicator_;
  const std::string name_;
  std::vector<float> input_;
  std::vector<float> output_;
  Operation op_;
  std::binary_semaphore ended_{0};  // Not of one call: its end may still be at it when we return.
};

// One line to the parent; the lines of all ranks come back, in their order.
std::vector<std::string> ExchangeEndpoints(int channel, const std::string& endpoint, int ranks) {
  const std::string line = endpoint + "\n";
  if (write(channel, line.data(), line.size()) < 0) return {};
  std::vector<std::string> endpoints(1);
  char byte = 0;
  while (static_cast<int>(endpoints.size()) <= ranks && read(channel, &byte, 1) == 1) {
    if (byte == '\n') {
      endpoints.emplace_back();
    } else {
      endpoints.back() += byte;
    }
  }
  endpoints.pop_back();
  return endpoints;
}

// The commands of one rank, until "end" or the end of the driver. Returns the exit code.
int Serve(Communicator& communicator, const std::string& directory) {
  const std::string rank = std::to_string(communicator.rank());
  std::ifstream commands(directory + "/rank-" + rank);
  std::FILE* answers = std::fopen((directory + "/answers").c_str(), "w");
  if (!commands || answers == nullptr) return 2;
  std::setvbuf(answers, nullptr, _IOLBF, BUFSIZ);
  std::fprintf(answers, "%s ready\n", rank.c_str());
  for (std::string line; std::getline(commands, line) && line != "end";) {
    std::istringstream words(line);
    std::string name;
    std::size_t bytes = 0;
    int calls = 0;
    words >> name >> bytes >> calls;
    Measurement measurement(communicator, name, bytes);
    if (measurement.Check()) {
      std::fprintf(answers, "%s %.9f\n", rank.c_str(), measurement.Time(calls));
    } else {
      std::fprintf(answers, "%s error: the result of %s is wrong\n", rank.c_str(), name.c_str());
    }
  }
  std::fclose(answers);
  return 0;
}

int RankMain(int rank, int ranks, int channel, const std::string& directory) {
  SystemClock clock;
  Events events;
  const Result<Settings> settings = ParseSettings(ProcessEnvironment());
  if (!settings.ok()) {
    std::fprintf(stderr, "collective_bench: %s\n", settings.status().ToString().c_str());
    return 1;
  }
  CpuFabricOptions options;
  options.shm_limit = settings->shm_limit;
  options.checksums = settings->checksums;
  Result<std::unique_ptr<CommunicatorFactory>> fabric = MakeCpuFabric(options, clock, events);
  if (!fabric.ok()) {
    std::fprintf(stderr, "collective_bench: %s\n", fabric.status().ToString().c_str());
    return 1;
  }
  const std::vector<std::string> endpoints =
      ExchangeEndpoints(channel, (*fabric)->endpoint(), ranks);
  if (static_cast<int>(endpoints.size()) != ranks) return 1;
  GroupSpec spec;
  spec.name = "bench";
  spec.generation = 1;
  spec.secret = "bench";
  spec.rank = rank;
  for (int member = 0; member < ranks; ++member) {
    spec.members.push_back({.global_rank = member,
                            .endpoint = endpoints[static_cast<std::size_t>(member)],
                            .host = "localhost",
                            .pid = member + 1});
  }
  std::shared_ptr<Communicator> communicator =
      (*fabric)->Create(std::move(spec), std::make_shared<AbortCell>());
  const int exit_code = Serve(*communicator, directory);
  communicator->Leave();
  (*fabric)->Close(Deadline::After(clock.Now(), std::chrono::seconds(2)));
  return exit_code;
}

// Reads a line from each rank and gives all of them to all.
bool RelayEndpoints(const std::vector<int>& channels) {
  std::string all;
  for (const int channel : channels) {
    char byte = 0;
    do {
      if (read(channel, &byte, 1) != 1) return false;
      all += byte;
    } while (byte != '\n');
  }
  return std::all_of(channels.begin(), channels.end(), [&](int channel) {
    return write(channel, all.data(), all.size()) == static_cast<ssize_t>(all.size());
  });
}

// Waits for all ranks; the first that fails takes the others with it. Returns the exit code.
int WaitForRanks(const std::vector<pid_t>& ranks) {
  int exit_code = 0;
  int status = 0;
  for (std::size_t left = ranks.size(); left > 0 && wait(&status) > 0; --left) {
    if (status == 0 || exit_code != 0) continue;
    exit_code = 1;
    for (const pid_t rank : ranks) kill(rank, SIGKILL);
  }
  return exit_code;
}

int Main(int ranks, const std::string& directory) {
  std::vector<int> channels;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return 1;
    const pid_t pid = fork();
    if (pid < 0) return 1;
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends[0]);
      for (const int channel : channels) close(channel);
      std::exit(RankMain(rank, ranks, ends[1], directory));
    }
    close(ends[1]);
    channels.push_back(ends[0]);
    pids.push_back(pid);
  }
  if (!RelayEndpoints(channels)) std::fprintf(stderr, "collective_bench: a rank did not start\n");
  for (const int channel : channels) close(channel);
  return WaitForRanks(pids);
}

}  // namespace
}  // namespace resilient

int main(int argc, char** argv) {
  const int ranks = argc == 3 ? std::atoi(argv[1]) : 0;
  if (ranks < 1) {
    std::fprintf(stderr, "usage: collective_bench RANKS DIRECTORY\n");
    return 2;
  }
  return resilient::Main(ranks, argv[2]);
}
