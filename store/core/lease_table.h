#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <resilient/clock.h>

#include "store/core/keyspace.h"

namespace resilient::store {

// Time as the server lived through it: a gap between two ticks that is longer than `most_step`
// counts as `most_step` only, so that a paused server holds its pause against nobody. All timers of
// the core (leases, grace periods, join deadlines) run on this line. Owner: ServerCore. Thread:
// caller-synchronised. Pure.
class AwakeClock {
 public:
  AwakeClock(Instant now, Duration most_step) : most_step_(most_step), tick_(now), awake_(now) {}

  // The awake time of `now`, between ticks and at a tick. Never goes back.
  Instant At(Instant now) const;
  // As At, and starts the next gap.
  Instant Tick(Instant now);

 private:
  const Duration most_step_;
  Instant tick_;
  Instant awake_;
};

// Leases and who is next to lose one. Expiry has two phases: a Tick that finds a lease overdue only
// marks it suspect; a later Tick with `input_drained` expires those still silent, because only then
// everything that the holder had sent before the first one has been read. Owner: ServerCore.
// Thread: caller-synchronised. Pure; time is awake time.
class LeaseTable {
 public:
  explicit LeaseTable(Duration ttl) : ttl_(ttl) {}

  // Grants or renews.
  void Grant(SessionId session, Instant now);
  // No-ops without a lease. While it is held it does not expire; afterwards it has a full TTL.
  void Hold(SessionId session);
  void Resume(SessionId session, Instant now);
  // No-op without a lease.
  void Renew(SessionId session, Instant now);
  void Remove(SessionId session);
  // Removes what has expired and returns it, longest silent first.
  struct Expired {
    SessionId session;
    Duration silent;
  };
  std::vector<Expired> Tick(Instant now, bool input_drained);

  bool Has(SessionId session) const { return leases_.contains(session); }
  // nullopt without a lease.
  std::optional<Instant> LastSeen(SessionId session) const;
  std::size_t size() const { return leases_.size(); }
  Duration ttl() const { return ttl_; }

 private:
  struct Lease {
    Instant renewed;
    bool suspect = false;
    bool held = false;
  };
  const Duration ttl_;
  std::unordered_map<SessionId, Lease> leases_;
  std::set<std::pair<Instant, SessionId>> by_renewal_;  // Without those that are held.
};

}  // namespace resilient::store
