#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>

#include "store/core/server_core.h"

namespace resilient::store {

// What clients have sent of requests that are not whole yet: how much of each, and who has begun
// longest ago. An honest client's request is whole soon after; one that sends a part and stops is
// found by its age. Owner: Server. Thread: the loop's.
class InputLedger {
 public:
  // So much of it is there; 0: it is whole, or its connection has ended.
  void Note(ConnectionId connection, std::size_t bytes);

  // Of all.
  std::size_t total() const { return total_; }
  std::size_t Of(ConnectionId connection) const;
  // nullopt: all requests are whole.
  std::optional<ConnectionId> Oldest() const;

 private:
  struct Entry {
    std::size_t bytes = 0;
    std::uint64_t order = 0;
  };
  std::unordered_map<ConnectionId, Entry> entries_;
  std::map<std::uint64_t, ConnectionId> by_order_;
  std::uint64_t last_order_ = 0;
  std::size_t total_ = 0;
};

}  // namespace resilient::store
