#pragma once

#include <cstdint>
#include <string>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "store/core/messages.h"

// The texts of first causes and refusals, in one place. Pure.
namespace resilient::store {

// A seat and the process in it, as messages name it.
struct Claimant {
  int rank = -1;
  ProcessIdentity process;
};

// "rank 2 (host a, pid 7)"; with `started` also ", started at tick 1234".
std::string Name(const Claimant& who, bool started = false);

// "0.2"; never negative.
std::string Seconds(Duration duration);

// "was killed by signal 9 (SIGKILL)" or "exited with code 1"; the launcher's text follows.
std::string HowItEnded(const ExitReportOp& report);
// With code 0: a leave, whether the process has said goodbye or not.
bool IsCleanEnd(const ExitReportOp& report);
// The part of a report that waitpid's status tells.
ExitReportOp FromWaitStatus(int wait_status);

// When something happened: `silent` before `wall_s`.
struct LastSeen {
  Duration silent{};
  double wall_s = 0;
};

// kRankLost: "<who> <how>, last seen 0.2 s ago, in generation 3".
Status RankLost(const Claimant& who, const std::string& how, LastSeen seen,
                std::uint64_t generation);
// What `rank` has met of a member that has left, for the text of the cause.
std::string MetBy(int rank, const std::string& text);
// kLeft.
Status Left(const Claimant& who, std::uint64_t generation, double wall_s);
// kStaleGeneration, as told to the session itself.
Status OutOfJob(const Status& cause);
Status Superseded(std::uint64_t generation, std::uint64_t old_attempt, std::uint64_t new_attempt);

// `text` cut to kTextBytesMax.
std::string Cut(const std::string& text);

}  // namespace resilient::store
