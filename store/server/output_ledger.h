#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <resilient/clock.h>

#include "store/core/server_core.h"

namespace resilient::store {

// What clients leave unread: how much, and since when they read nothing at all. Only those are kept
// for whom something waits. Owner: Server. Thread: the loop's.
class OutputLedger {
 public:
  // `queued` bytes wait for the connection, after `written` have gone to it since it was made.
  void Note(ConnectionId connection, std::size_t queued, std::uint64_t written, Instant now);
  void Forget(ConnectionId connection) { Note(connection, 0, 0, {}); }

  std::size_t total() const { return total_; }
  // The one with most; nullopt: nothing waits for anybody.
  std::optional<ConnectionId> Largest() const;
  std::vector<ConnectionId> All() const;
  // Those with more than `queued` bytes that have read nothing since `before`.
  std::vector<ConnectionId> Stuck(std::size_t queued, Instant before) const;

 private:
  struct Entry {
    std::size_t queued = 0;
    std::uint64_t written = 0;
    Instant since{};  // Of the last progress.
  };
  std::map<ConnectionId, Entry> entries_;
  std::size_t total_ = 0;
};

}  // namespace resilient::store
