#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/communicator.h>

#include "runtime/comm/group_port.h"

namespace resilient {

// What a rank can say at a meeting.
inline constexpr std::size_t kMeetingBytes = 1024;

// What all ranks of a group tell each other at once: one all_gather over its group of the CPU
// transport. A rank that does not come is waited for as long as it lives.
//
// Owner: shared by NcclGroup and the operation. Thread: caller-synchronised, the group's.
class NcclMeeting : public std::enable_shared_from_this<NcclMeeting> {
 public:
  // REQUIRES: `said` has at most kMeetingBytes. Rings when it is over.
  static std::shared_ptr<NcclMeeting> Begin(Communicator& control, std::string_view said,
                                            std::shared_ptr<const Doorbell> doorbell);

  bool IsOver() const { return over_.load(std::memory_order_acquire); }
  // REQUIRES: IsOver.
  const Status& status() const { return status_; }
  // By group rank. REQUIRES: IsOver, and status() is OK.
  std::string HeardFrom(int rank) const;

 private:
  NcclMeeting(std::string_view said, int ranks);
  void End(const Status& status);

  std::string said_;   // The length, what is said, nothing.
  std::string heard_;  // As much from each rank.
  Status status_;
  std::atomic<bool> over_{false};  // The others are not written any more.
};

}  // namespace resilient
