#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include <resilient/session.h>

namespace resilient::recovery {

inline constexpr std::size_t kSessionEventsKept = 256;

// The latest events of a session, for readers who each know how far they are: one that is slow
// misses the oldest and holds up nobody. Owner: SessionImpl. Thread: caller-synchronised. Pure.
class EventRing {
 public:
  // Gives it the next number.
  void Add(SessionEvent event);
  // The oldest one behind number `after` that is still there; nullopt: there is none.
  std::optional<SessionEvent> Next(std::uint64_t after) const;
  std::uint64_t last() const { return last_; }

 private:
  std::deque<SessionEvent> events_;  // The number of the newest is last_.
  std::uint64_t last_ = 0;
};

}  // namespace resilient::recovery
