// In which order Server handles what clients send, and what waits for a later turn of the loop.

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "store/server/server.h"

namespace resilient::store {

void Server::OnFrames(Connection& connection) {
  const Instant begun = clock_.Now();
  TakeFrames(connection, begun);
  Settle();
  const Duration took = Charge(connection, begun) - begun;
  metrics_.step_seconds.Observe(std::chrono::duration<double>(took).count());
}

// What a job asks does not keep its own leases waiting, and neither those of others.
FairTurns* Server::TurnsOf(const Connection& connection) {
  if (!connection.greeted()) return nullptr;
  return connection.role() == Role::kControl ? &control_turns_ : &turns_;
}

void Server::Defer(Connection& connection) {
  ++metrics_.deferred;
  if (FairTurns* turns = TurnsOf(connection)) {
    turns->Wait(connection.job(), connection.id());
  } else {
    deferred_.insert(connection.id());
  }
  UpdateIdle();
}

// What is left is for a later turn, or for when the disk has more room.
void Server::TakeFrames(Connection& connection, Instant begun) {
  const FairTurns* turns = TurnsOf(connection);
  Instant until = Instant::max();
  if (turns != nullptr) {
    until = begun + std::min(kTimePerConnection, turns->Left(connection.job()));
  }
  int taken_at_once = 0;
  int& taken = turns != nullptr ? taken_at_once : connection.TakenInTurn(turn_);
  bool in_time = until > begun;
  Instant now = begun;
  while (in_time && taken < kRequestsPerTurn && connection.HasToDo() && !MustWait(connection)) {
    ++taken;
    if (connection.tcpstore() != nullptr) {
      HandleQuery(connection, now);
    } else {
      Handle(connection, connection.TakeFrame(), now);
    }
    if (!connection.HasToDo()) break;
    now = clock_.Now();
    in_time = now < until;
  }
  if (connection.HasToDo()) {
    if (MustWait(connection)) {
      stalled_.insert(connection.id());
    } else {
      Defer(connection);
    }
  }
  connection.UpdateReading();
  FlushTouched(connection);  // Ahead of connections that were touched before.
}

// Time since `begun` was for its job. Returns the time.
Instant Server::Charge(const Connection& connection, Instant begun) {
  const Instant now = clock_.Now();
  if (FairTurns* turns = TurnsOf(connection)) turns->Charge(connection.job(), now - begun);
  return now;
}

void Server::OnHandshake(Connection& connection) {
  handshakes_.Wait(newcomers_.AddressOf(connection.id()), connection.id());
  TakeHandshakes();
  UpdateIdle();
}

void Server::TakeHandshakes() {
  while (handshakes_took_ < kHandshakesPerTurn) {
    const std::optional<ConnectionId> next = handshakes_.Next();
    if (!next) return;
    const std::string address = newcomers_.AddressOf(*next);  // It may be none any more after this.
    const Instant begun = clock_.Now();
    Find(*next)->GoOn();
    const Duration took = clock_.Now() - begun;
    handshakes_.Charge(address, took);
    handshakes_took_ += took;
    metrics_.step_seconds.Observe(std::chrono::duration<double>(took).count());
  }
}

void Server::TakeDeferred() {
  handshakes_.NextTurn();
  handshakes_took_ = {};
  TakeHandshakes();
  for (const ConnectionId id : std::exchange(deferred_, {})) {
    if (Connection* connection = Find(id)) TakeFrames(*connection, clock_.Now());
  }
  TakeTurns(control_turns_);
  TakeTurns(turns_);
}

void Server::TakeTurns(FairTurns& turns) {
  turns.NextTurn();
  if (!turns.any_waiting()) return;
  Instant now = clock_.Now();
  const Instant until = now + kDeferredPerTurn;
  while (now < until) {
    const std::optional<ConnectionId> next = turns.Next();
    if (!next) return;
    Connection& connection = *Find(*next);
    TakeFrames(connection, now);
    now = Charge(connection, now);
  }
}

bool Server::HasUnread(std::uint64_t watch) {
  const std::optional<ConnectionId> control = core_->ControlConnection(watch);
  const Connection* connection = control ? Find(*control) : nullptr;
  return connection != nullptr && connection->HasInput();
}

bool Server::MustWait(const Connection& connection) const {
  if (shutting_down_) return true;
  // Whoever is silent loses his lease, so control connections are read for longer.
  const bool request = connection.greeted() && connection.role() == Role::kRequest;
  return held_.bytes() >= options_.limits.held_bytes * (request ? 1 : 2);
}

void Server::WakeStalled() {
  if (stalled_.empty() || shutting_down_) return;
  for (const ConnectionId id : std::exchange(stalled_, {})) Defer(*Find(id));
}

void Server::UpdateIdle() {
  const bool waits =
      turns_.any_waiting() || control_turns_.any_waiting() || handshakes_.any_waiting();
  const bool wanted = waits || !deferred_.empty() || !touched_.empty() || !exits_.empty() ||
                      tick_due_in_turn_.has_value();
  if (wanted == idle_started_ || idle_.closed()) return;
  idle_started_ = wanted;
  if (wanted) {
    idle_.Start();
  } else {
    idle_.Stop();
  }
}

}  // namespace resilient::store
