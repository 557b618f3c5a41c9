#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <resilient/session.h>
#include <resilient/status.h>

namespace resilient::recovery {

// The time line of the latest fence on this rank. Owner: SessionImpl. Thread: caller-synchronised.
// Pure: wall times arrive as arguments.
class IncidentLog {
 public:
  // The generation is over; a new incident begins and replaces the one before.
  void Begin(std::uint64_t generation, const Status& cause, double wall_s);

  // The session went from one state to another; fills the phase that this ends. Returns a line for
  // the log: the whole incident when `to` is RUNNING, else one phase; empty when no incident is
  // open.
  std::string Mark(SessionState from, SessionState to, std::uint64_t generation, double wall_s);

  const std::optional<Incident>& latest() const { return latest_; }

 private:
  std::optional<Incident> latest_;
  bool open_ = false;
};

}  // namespace resilient::recovery
