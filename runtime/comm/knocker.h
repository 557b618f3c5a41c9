#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include <resilient/communicator.h>

#include "runtime/comm/connector.h"
#include "runtime/comm/fabric.h"
#include "runtime/comm/group.h"

namespace resilient {

// Asks other processes for a word, each over a connection of its own. The links do not do for that:
// one may be full, or wait behind a message that its reader does not take yet, while the peer
// lives. Whoever lives answers from its comm thread (Lane::kKnock); a process that was stopped, a
// host that is gone and a network that is down do not. Time in which this thread was not run counts
// for nobody. Owner: the loop. Thread: loop-confined.
class Knocker final : private ConnectorListener {
 public:
  // Connections at a time; a round may ask more ranks, one after the other.
  static constexpr std::size_t kAtATime = 16;

  Knocker(CommunicatorEvents& events, std::uint64_t seed) : events_(events), seed_(seed) {}

  // Replaces the round before, of which nothing more is told.
  void Begin(KnockRound round, Instant now);
  // What to wait for; the watches match the entries one to one.
  void AddInterest(std::vector<PollEntry>& entries, std::vector<Watch>& watches);
  Instant NextTime() const;
  // Once a turn of the loop.
  void OnTime(Instant now);

 private:
  struct Knock {
    std::unique_ptr<Connector> connector;
    Instant until{};
    Status trouble;  // Of the latest attempt.
    bool answered = false;
  };

  void OnConnected(Connector& connector, std::unique_ptr<ByteStream> stream) override;
  void OnPeerLeft(Connector& connector) override;
  void OnOtherRanks(Connector& connector, const Status& mismatch) override;
  void OnAttemptFailed(Connector& connector, const Status& why) override;
  Knock& Of(const Connector& connector);
  void Fill(Instant now);
  void Tell(const Knock& knock) const;

  CommunicatorEvents& events_;
  std::uint64_t seed_;
  KnockRound round_;
  std::deque<int> left_;  // Of the round: not asked yet.
  std::vector<Knock> knocks_;
  Instant last_turn_{};
};

}  // namespace resilient
