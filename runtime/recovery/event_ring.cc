#include "runtime/recovery/event_ring.h"

#include <algorithm>
#include <utility>

namespace resilient::recovery {

void EventRing::Add(SessionEvent event) {
  event.number = ++last_;
  events_.push_back(std::move(event));
  if (events_.size() > kSessionEventsKept) events_.pop_front();
}

std::optional<SessionEvent> EventRing::Next(std::uint64_t after) const {
  if (after >= last_) return std::nullopt;
  const std::uint64_t oldest = events_.front().number;
  const std::uint64_t wanted = std::max(after + 1, oldest);
  SessionEvent event = events_[static_cast<std::size_t>(wanted - oldest)];
  event.missed = wanted - (after + 1);
  return event;
}

}  // namespace resilient::recovery
