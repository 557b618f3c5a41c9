#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <resilient/clock.h>

#include "store/core/messages.h"

namespace resilient::store {

// The memory of one client connection that survives the connection: numbers requests, keeps what
// was not answered, and says what to send again after a reconnect. Used by the request connection
// and the control connection alike, by the simulator too. Owner: the connection's shell. Thread:
// caller-synchronised. Pure.
class ClientCore {
 public:
  explicit ClientCore(Hello hello);

  // What to send first on a new connection (after the preamble).
  Request MakeHello() const;

  // Numbers `op` and remembers it; the request is there until it is answered, renumbered or given
  // up. kResourceExhausted above kInFlightPerSessionMax.
  Result<const Request*> Submit(Op op, std::uint64_t scope = 0, std::uint64_t generation = 0);

  // Everything unanswered, in order, to send after Hello was answered on a new connection.
  std::vector<Request> Unanswered() const;

  // True when `reply` answers a request that was open; it is closed then. False: a repeat, to be
  // dropped.
  bool OnReply(const Reply& reply);

  // Gives an open request without effects (a wait, a read) the next number, so that it is a new one
  // to the server; returns that number.
  std::uint64_t Renumber(std::uint64_t seq);

  // Gives the request up without an answer: its outcome is unknown.
  void Forget(std::uint64_t seq);

  std::uint64_t first_unacked() const;
  std::size_t InFlight() const { return open_.size(); }
  const Hello& hello() const { return hello_; }

 private:
  Hello hello_;
  std::uint64_t next_seq_ = 1;
  std::map<std::uint64_t, Request> open_;
};

// Reconnect delays: full jitter, base 20 ms, cap 1 s. Pure given its seed.
class Backoff {
 public:
  explicit Backoff(std::uint64_t seed) : seed_(seed) {}
  Duration Next();
  void Reset() { tries_ = 0; }

 private:
  std::uint64_t seed_;
  int tries_ = 0;
};

}  // namespace resilient::store
