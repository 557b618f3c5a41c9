#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <resilient/clock.h>

#include "runtime/net/unproven.h"
#include "store/core/server_core.h"

namespace resilient::store {

// The connections of peers that have not said Hello yet: which have had the time for it, and which
// goes when another one waits for a place. While there are places none is hurried. When there are
// none, one goes that has sent nothing for kSilentWhenFull, or that has not come to its Hello in
// kHelloWhenFull, of the address that has most of them. Of many ranks that start together each
// speaks at once, so none of theirs goes, and the last of them wait in the kernel's queue.
//
// Pure. Owner: Server. Thread: the loop's.
class Newcomers {
 public:
  static constexpr Duration kSilentWhenFull = std::chrono::milliseconds(100);
  static constexpr Duration kHelloWhenFull = std::chrono::seconds(1);

  Newcomers(std::size_t most, Duration hello_within) : most_(most), hello_within_(hello_within) {}

  // Ids ascend with `now`. `peer`: "host:port" of the other end.
  void Add(ConnectionId id, const std::string& peer, Instant now);
  void Remove(ConnectionId id) { all_.Remove(id); }  // Idempotent.
  void Clear() { all_.Clear(); }
  std::size_t size() const { return all_.size(); }
  bool Full() const { return all_.size() >= most_; }

  // To which it is charged; empty: it is none of them.
  std::string AddressOf(ConnectionId id) const { return all_.AddressOf(id); }

  // Those that should have said Hello by now, the oldest first.
  std::vector<ConnectionId> Overdue(Instant now) const {
    return all_.AcceptedBy(now - hello_within_);
  }
  // Who gives its place to one that waits; empty: nobody yet. `has_spoken`: something has come from
  // it. REQUIRES: what had arrived before `now` has been read.
  std::optional<ConnectionId> WhoGoes(Instant now,
                                      const std::function<bool(ConnectionId)>& has_spoken) const;

 private:
  const std::size_t most_;
  const Duration hello_within_;
  UnprovenConnections all_;
};

}  // namespace resilient::store
