#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <resilient/clock.h>
#include <resilient/per_process.h>

namespace resilient {

// Which call into a driver keeps the process from ending, and from when on that is too long. Pure.
// Owner: the process (exit.cc), or a test. Thread: caller-synchronised.
class ExitWatch {
 public:
  using CallId = std::uint64_t;

  void SetBudget(Duration budget) { budget_ = budget; }
  // A call is under way, until End.
  CallId Begin(std::string what, Instant now);
  void End(CallId call) { calls_.erase(call); }
  // The first one counts.
  void OnExit(Instant now) {
    if (!exit_) exit_ = now;
  }

  // When there is a Blocked() next; kNever while the process is not ending, or nothing keeps it.
  Instant Due() const;
  // "ncclCommAbort of ... has not returned for 21 s": of the call that is under way for longest,
  // where that and the exit are older than the budget.
  std::optional<std::string> Blocked(Instant now) const;

 private:
  struct Call {
    std::string what;
    Instant since;
  };
  Duration budget_ = std::chrono::seconds(20);
  std::optional<Instant> exit_;
  CallId last_ = 0;
  std::map<CallId, Call> calls_;  // The oldest first.
};

// On the stack around a call into a driver that may never return. `what`: "ncclCommAbort of group
// 'world/cuda' on device 0". Allocates. Thread: thread-safe; begins and ends on one thread. In a
// forked child no call of the parent's is under way.
class DriverCall {
 public:
  explicit DriverCall(std::string what);
  ~DriverCall();
  DriverCall(const DriverCall&) = delete;
  DriverCall& operator=(const DriverCall&) = delete;

 private:
  const ProcessMark mark_;
  const ExitWatch::CallId id_;
};

}  // namespace resilient
