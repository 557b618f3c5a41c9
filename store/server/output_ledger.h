#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <resilient/clock.h>

#include "store/core/server_core.h"

namespace resilient::store {

// What waits for one connection.
struct Unread {
  std::size_t queued = 0;     // Bytes in all.
  std::size_t memory = 0;     // That they take; of what is shared its part.
  std::uint64_t written = 0;  // That have gone to it since it was made.
};

// What clients leave unread: how much, and since when they read nothing at all. Only those are kept
// for whom something waits. Owner: Server. Thread: the loop's.
class OutputLedger {
 public:
  void Note(ConnectionId connection, Unread unread, Instant now);
  void Forget(ConnectionId connection) { Note(connection, {}, {}); }

  bool empty() const { return entries_.empty(); }
  // The memory of all.
  std::size_t total() const { return total_; }
  // The one with most memory; nullopt: nothing waits for anybody.
  std::optional<ConnectionId> Largest() const;
  std::vector<ConnectionId> All() const;
  // Those with more than `queued` bytes that have read nothing since `before`.
  std::vector<ConnectionId> Stuck(std::size_t queued, Instant before) const;

 private:
  struct Entry {
    Unread unread;
    Instant since{};  // Of the last progress.
  };
  std::map<ConnectionId, Entry> entries_;
  std::size_t total_ = 0;
};

}  // namespace resilient::store
