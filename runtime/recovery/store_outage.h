#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>
#include <resilient/status.h>

#include "runtime/recovery/lost_links.h"

namespace resilient::recovery {

// What ends a wait while the store is out of reach. As long as the store answers it alone judges
// who lives. Once it has been silent for as long as a whole recovery may take, nobody is left to
// say that a rank is lost, and the links decide: an operation that needs a rank whose link has
// ended, or whose process gives no answer over the network, ends with kStoreLost, and so does a
// rebuild. A rank that answers is waited for, however late it is.
//
// Ranks are asked from half of that time on, in rounds (CommunicatorFactory::Knock), so that a
// healthy job never asks. Time in which this process was not run, or was run late, counts for
// nobody.
//
// Owner: SessionImpl. Thread: confined to the control thread. Pure: time is an argument.
class StoreOutage {
 public:
  // `patience`: how long a store that was killed may take to come back.
  explicit StoreOutage(Duration patience) : patience_(patience) {}

  // About once a heartbeat, also while the store is out of reach; it was last heard at `contact`.
  // `lease`: of it follows how often that is.
  void OnBeat(Instant now, Instant contact, Duration lease);

  // For so long this process has looked for the store and not heard it.
  Duration lasts() const { return lasts_; }
  bool IsOver() const { return lasts_ >= patience_; }

  // The global ranks to knock at now, of those that `calls` wait for; empty: nobody, or a round is
  // under way. What it returns is a new round.
  std::vector<int> Round(std::uint64_t generation, const std::vector<WaitingCall>& calls);
  // What CommunicatorEvents::OnKnocked has said.
  void OnKnocked(std::uint64_t generation, int rank, const Status& found);

  // Why the wait of this rank is over; nullopt: it is not. `store`: its address. `links`: those
  // that have ended. `members`: of the present generation.
  std::optional<Status> Verdict(const std::string& store, const std::vector<WaitingCall>& calls,
                                const LostLinks& links, const std::vector<Member>& members) const;
  // The same of a rebuild, which needs the store. `first_cause`: what it followed.
  std::optional<Status> RebuildVerdict(const std::string& store, const Status& first_cause) const;

 private:
  std::string Silence(const std::string& store) const;

  const Duration patience_;
  Instant contact_ = Instant::min();
  Instant last_beat_{};
  Duration lasts_{};
  std::uint64_t generation_ = 0;       // Of the round.
  std::vector<int> asked_;             // Of the round: no word on them yet.
  std::map<int, std::string> silent_;  // By rank: what came in place of an answer, when last asked.
};

}  // namespace resilient::recovery
