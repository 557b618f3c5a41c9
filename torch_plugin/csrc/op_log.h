#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/clock.h>
#include <resilient/operation.h>
#include <resilient/status.h>

namespace resilient::plugin {

inline constexpr std::size_t kLoggedOperations = 2'000;  // A group.

enum class LoggedState : std::uint8_t { kRunning, kCompleted, kFailed };
std::string_view LoggedStateName(LoggedState state);  // "running"

// One operation of a group as its log keeps it. Thread: value type.
struct LoggedOperation {
  std::uint64_t id = 0;   // Counts the operations of the group from 1.
  std::uint64_t seq = 0;  // 0: it was refused.
  const char* name = "";  // As the caller called it.
  DataType dtype = DataType::kUInt8;
  std::size_t count = 0;
  LoggedState state = LoggedState::kRunning;
  std::string call_site;
  double started_unix_s = 0;
  double ended_unix_s = 0;  // 0 while it runs.
  std::string failure;      // "[resilient:CODE] ..."; empty without.
};

// The latest operations of one group: what a rank was doing when it failed or stood still.
//
// Owner: the backend, and the completions of its operations. Thread: thread-safe; End runs on the
// communicator's thread.
class OpLog {
 public:
  // The id for the other calls. `name` is a literal.
  std::uint64_t Start(const char* name, const Operation& operation);
  void SetSequence(std::uint64_t id, std::uint64_t seq);
  void End(std::uint64_t id, const Status& status);

  std::vector<LoggedOperation> Snapshot() const;  // Oldest first.

 private:
  LoggedOperation* Find(std::uint64_t id);  // Null: overwritten. REQUIRES: mutex_ is held.

  const SystemClock clock_;
  mutable std::mutex mutex_;
  std::uint64_t last_id_ = 0;          // Guarded by mutex_.
  std::vector<LoggedOperation> ring_;  // Guarded by mutex_. Entry of id i: (i - 1) % limit.
};

}  // namespace resilient::plugin
