#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "tests/support/fake_nccl_world.h"

namespace resilient::testing {

// The world of one unique id, as one of its ranks sees it. Its end leaves the world.
// Thread: all under the lock of the fake.
class NcclMeeting {
 public:
  virtual ~NcclMeeting() = default;
  virtual bool IsComplete() const = 0;  // All ranks are there.
  virtual bool IsLost() const = 0;      // The process of another one has gone.
  virtual bool IsFlushed() const = 0;   // Nothing of it would be missed if this process ended.
  virtual PostedCallPtr Post(const NcclCall& call) = 0;
  // Its kernel leaves: its memory is not touched any more.
  virtual void GiveUp(const PostedCallPtr& posted) = 0;
};

// Where the ranks of a unique id find one another. Owner: the fake. Thread: all under its lock,
// the destructor without it. Lifetime: outlives its meetings.
class NcclMeetings {
 public:
  virtual ~NcclMeetings() = default;
  virtual NcclUniqueId NewId() = 0;
  virtual std::unique_ptr<NcclMeeting> Join(const NcclUniqueId& id, int ranks, int rank) = 0;
};

// What they have of their fake. Thread: value type.
struct NcclMeetingHost {
  std::mutex* mutex = nullptr;
  std::condition_variable* changed = nullptr;
  NcclWorld::OnMisuse on_misuse;  // With the lock held.
};

// Of ranks that are threads of this process.
std::unique_ptr<NcclMeetings> MakeLocalMeetings(NcclMeetingHost host);

// Of ranks in any processes of this machine (of one network namespace): the process that made the
// unique id has a hub, and the calls of the others come to it over unix sockets, with what they
// give. When that process or one with a rank goes without having left, the others are lost; one
// that stands still is waited for. Misuse that takes several ranks to see is the hub's.
std::unique_ptr<NcclMeetings> MakeSocketMeetings(NcclMeetingHost host);

}  // namespace resilient::testing
