#include "runtime/recovery/incident.h"

#include <cmath>

#include "runtime/base/log.h"

namespace resilient::recovery {
namespace {

// " aborted +3 ms"; nothing for a phase that has not happened.
std::string Phase(const char* name, double at_s, double begin_s) {
  if (at_s == 0) return {};
  return StrCat(" ", name, " +", std::llround((at_s - begin_s) * 1e3), " ms");
}

}  // namespace

void IncidentLog::Begin(std::uint64_t generation, const Status& cause, double wall_s) {
  latest_.emplace();
  latest_->generation = generation;
  latest_->cause = cause;
  latest_->known_unix_s = wall_s;
  open_ = true;
}

std::string IncidentLog::Mark(SessionState from, SessionState to, std::uint64_t generation,
                              double wall_s) {
  if (!open_ || from == to) return {};
  if (from == SessionState::kAborting &&
      (to == SessionState::kJoining || to == SessionState::kBuilding)) {
    latest_->aborted_unix_s = wall_s;
  }
  if (to == SessionState::kBuilding) latest_->joined_unix_s = wall_s;
  if (to == SessionState::kReady) latest_->rebuilt_unix_s = wall_s;
  if (to == SessionState::kRunning) latest_->running_unix_s = wall_s;

  const Incident& incident = *latest_;
  if (to != SessionState::kRunning) {
    return StrCat("recovery from the end of generation ", incident.generation, ": ",
                  SessionStateName(to), " (generation ", generation, ")",
                  Phase("after", wall_s, incident.known_unix_s));
  }
  open_ = false;
  const double begin_s = incident.known_unix_s;
  return StrCat("generation ", incident.generation, " ended and generation ", generation,
                " runs: ", incident.cause.ToString(),
                "; since it was known here:", Phase("aborted", incident.aborted_unix_s, begin_s),
                Phase("joined", incident.joined_unix_s, begin_s),
                Phase("rebuilt", incident.rebuilt_unix_s, begin_s),
                Phase("running", incident.running_unix_s, begin_s));
}

}  // namespace resilient::recovery
