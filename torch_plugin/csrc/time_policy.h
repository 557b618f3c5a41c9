#pragma once

#include <chrono>

#include <resilient/clock.h>
#include <resilient/operation.h>

namespace resilient::plugin {

// What torch gives a group whose creator said nothing.
inline constexpr std::chrono::milliseconds kTorchDefaultTimeout = std::chrono::minutes(30);

// What bounds the operations of a world's groups. A group that was handed torch's default has the
// timeout of the world. By default a timeout says how long an operation may stand still once all
// have entered it, and a rank that lives is waited for; torch's default leaves that to op_deadline.
// Thread: value type.
struct TimePolicy {
  bool strict = false;  // As c10d: a timeout bounds each operation, whoever is on the way.
  Duration op_deadline = std::chrono::seconds(120);
  std::chrono::milliseconds world_timeout = kTorchDefaultTimeout;

  void Bound(Operation& operation, std::chrono::milliseconds group_timeout) const;
};

}  // namespace resilient::plugin
