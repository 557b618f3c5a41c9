#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>

#include <resilient/clock.h>
#include <resilient/operation.h>
#include <resilient/waiting.h>

#include "runtime/comm/op_timeouts.h"

namespace resilient {

// What one device does for the operations of this process: since when it has begun and finished
// nothing though something is in its queue, and what it finished last. All of a process that waits
// for a kernel which never ends stands still together, so it is counted for the device, and not for
// a group.
//
// Owner: NcclContext, for the groups of one loop. Thread: loop-confined. Pure: time is an argument.
class DeviceClock {
 public:
  // Something of this process is in the queue, and is not begun. To be called in each turn in which
  // that is so: where no call came for kUnwatched nothing was in the queue, or the process was
  // itself stopped, and it counts from now.
  void OnQueued(Instant now) {
    if (queued_ == Instant::min() || now - queued_ > kUnwatched) since_ = now;
    queued_ = now;
  }
  // It has begun or finished something.
  void OnMoved(Instant now) { moved_ = now; }
  // It has finished operation `seq` of `group`.
  void OnEnded(const Operation& op, std::uint64_t seq, const std::string& group, Instant now);
  // Whether an operation of `group` has been begun and is not over.
  void NoteRuns(const void* group, bool runs);

  // REQUIRES: something is in the queue, and OnQueued has said so.
  Duration StillFor(Instant now) const { return now - std::max(since_, moved_); }
  // All but `begun`, which is a group's. `queued`: whether that group has something in the queue.
  DeviceProgress Tell(std::string name, bool queued, Instant now) const;

 private:
  Instant queued_ = Instant::min();
  Instant since_ = Instant::min();
  Instant moved_ = Instant::min();
  Operation last_;  // In outline. `last_seq_` = 0: none.
  std::uint64_t last_seq_ = 0;
  std::string last_group_;
  Instant last_at_{};
  std::set<const void*> running_;
};

}  // namespace resilient
