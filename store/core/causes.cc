#include "store/core/causes.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

namespace resilient::store {
namespace {

// Names of the signals that end processes on Linux; the same numbers on all machines served.
std::string SignalName(int signal) {
  constexpr std::array<std::pair<int, const char*>, 13> kNames = {{{1, "SIGHUP"},
                                                                   {2, "SIGINT"},
                                                                   {3, "SIGQUIT"},
                                                                   {4, "SIGILL"},
                                                                   {6, "SIGABRT"},
                                                                   {7, "SIGBUS"},
                                                                   {8, "SIGFPE"},
                                                                   {9, "SIGKILL"},
                                                                   {11, "SIGSEGV"},
                                                                   {13, "SIGPIPE"},
                                                                   {15, "SIGTERM"},
                                                                   {24, "SIGXCPU"},
                                                                   {31, "SIGSYS"}}};
  for (const auto& [number, name] : kNames) {
    if (number == signal) return " (" + std::string(name) + ")";
  }
  return {};
}

}  // namespace

std::string Name(const Claimant& who, bool started) {
  std::string name = who.rank == kSpareRank ? "a spare" : "rank " + std::to_string(who.rank);
  name += " (host " + who.process.host + ", pid " + std::to_string(who.process.pid);
  if (started) name += ", started at tick " + std::to_string(who.process.start_time);
  return name + ")";
}

std::string Seconds(Duration duration) {
  const double seconds = std::max(0.0, std::chrono::duration<double>(duration).count());
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f", seconds);
  return text.data();
}

std::string HowItEnded(const ExitReportOp& report) {
  std::string how = report.signal != 0 ? "was killed by signal " + std::to_string(report.signal) +
                                             SignalName(report.signal)
                                       : "exited with code " + std::to_string(report.exit_code);
  if (!report.text.empty()) how += " (" + report.text + ")";
  return how;
}

bool IsCleanEnd(const ExitReportOp& report) { return report.signal == 0 && report.exit_code == 0; }

ExitReportOp FromWaitStatus(int wait_status) {
  ExitReportOp report;
  report.signal = wait_status & 0x7f;
  report.exit_code = report.signal != 0 ? 0 : (wait_status >> 8) & 0xff;
  return report;
}

Status RankLost(const Claimant& who, const std::string& how, LastSeen seen,
                std::uint64_t generation) {
  FailureDetail detail;
  detail.rank = who.rank;
  detail.host = who.process.host;
  detail.pid = who.process.pid;
  detail.generation = generation;
  detail.since_unix_s = seen.wall_s - std::chrono::duration<double>(seen.silent).count();
  return Status(StatusCode::kRankLost,
                Name(who) + " " + how + ", last seen " + Seconds(seen.silent) +
                    " s ago, in generation " + std::to_string(generation),
                std::move(detail));
}

std::string MetBy(int rank, const std::string& text) {
  return "rank " + std::to_string(rank) + " met it as: " + text;
}

Status Left(const Claimant& who, std::uint64_t generation, double wall_s) {
  FailureDetail detail;
  detail.rank = who.rank;
  detail.host = who.process.host;
  detail.pid = who.process.pid;
  detail.generation = generation;
  detail.since_unix_s = wall_s;
  return Status(StatusCode::kLeft,
                Name(who) +
                    " has left (it destroyed its process group or ended normally) in "
                    "generation " +
                    std::to_string(generation) +
                    "; every rank must take part in every operation before it leaves: if the ranks "
                    "have different numbers of batches, give all the same or train inside "
                    "torch_resilient.join(model)",
                std::move(detail));
}

Status OutOfJob(const Status& cause) {
  return Status(StatusCode::kStaleGeneration,
                "the job goes on without this process: " + cause.message() +
                    "; it can change nothing any more: start it anew",
                cause.detail());
}

Status Superseded(std::uint64_t generation, std::uint64_t old_attempt, std::uint64_t new_attempt) {
  FailureDetail detail;
  detail.generation = generation;
  return Status(StatusCode::kStaleGeneration,
                "the launcher has started the job anew: attempt " + std::to_string(new_attempt) +
                    " has taken the place of attempt " + std::to_string(old_attempt) +
                    "; this process belongs to the old one and must end",
                std::move(detail));
}

std::string Cut(const std::string& text) {
  if (text.size() <= kTextBytesMax) return text;
  std::string cut(text.data(), kTextBytesMax);
  return cut.append("...");
}

}  // namespace resilient::store
