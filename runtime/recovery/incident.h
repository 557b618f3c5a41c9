#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <resilient/session.h>
#include <resilient/status.h>

#include "runtime/base/log_record.h"

namespace resilient::recovery {

// The rank in whose log the lines stand. Thread: value type.
struct IncidentReporter {
  int rank = -1;
  std::string host;
  std::int64_t pid = 0;
};

// How this rank heard that a generation was over.
enum class IncidentSource : std::uint8_t {
  kFence,    // The membership service said so.
  kView,     // The membership service said what came after it.
  kSession,  // The membership service gave this very process up.
};

// The time line of the latest fence on this rank, and the line that it leaves in the log: one for
// each fence, when the session runs again, gave up, was closed, or met the next fence.
// docs/operations.md says what is in it. Owner: SessionImpl. Thread: caller-synchronised.
// Pure: wall times arrive as arguments.
class IncidentLog {
 public:
  explicit IncidentLog(IncidentReporter reporter) : reporter_(std::move(reporter)) {}

  // The generation of `view` is over; a new incident begins, and one that is open ends with it.
  void Begin(const View& view, std::uint64_t generation, IncidentSource source, const Status& cause,
             double wall_s);

  // The session went from one state to another; fills the phase that this ends, and ends the
  // incident in RUNNING, FAILED and CLOSED. Returns a line for the log, empty when no incident is
  // open or has ended.
  std::string Mark(SessionState from, SessionState to, std::uint64_t generation, double wall_s);

  // The lines of the incidents that have ended since the last call.
  std::vector<LogRecord> TakeEnded();

  // For the lines from now on: the world was numbered anew.
  void set_reporter_rank(int rank) { reporter_.rank = rank; }

  const std::optional<Incident>& latest() const { return latest_; }
  bool open() const { return open_; }

 private:
  void End(const char* outcome, std::uint64_t next_generation, double wall_s);

  IncidentReporter reporter_;
  std::optional<Incident> latest_;
  std::uint64_t life_ = 0;
  std::uint64_t round_ = 0;
  IncidentSource source_ = IncidentSource::kFence;
  bool open_ = false;
  std::vector<LogRecord> ended_;  // At most a few: taken after each step of the session.
};

}  // namespace resilient::recovery
