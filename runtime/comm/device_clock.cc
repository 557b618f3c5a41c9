#include "runtime/comm/device_clock.h"

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"

namespace resilient {

void DeviceClock::OnEnded(const Operation& op, std::uint64_t seq, const std::string& group,
                          Instant now) {
  OnMoved(now);
  last_ = OutlineOf(op);
  last_seq_ = seq;
  if (last_group_ != group) last_group_ = group;
  last_at_ = now;
}

void DeviceClock::NoteRuns(const void* group, bool runs) {
  if (runs) {
    running_.insert(group);
  } else if (!running_.empty()) {
    running_.erase(group);
  }
}

DeviceProgress DeviceClock::Tell(std::string name, bool queued, Instant now) const {
  DeviceProgress told;
  told.name = std::move(name);
  told.runs = !running_.empty();
  if (queued && queued_ != Instant::min()) told.still = std::max(StillFor(now), Duration::zero());
  if (last_seq_ == 0) return told;
  told.last = StrCat(Describe(last_), " #", last_seq_, " of group '", last_group_, "'");
  told.last_ago = now - last_at_;
  return told;
}

}  // namespace resilient
