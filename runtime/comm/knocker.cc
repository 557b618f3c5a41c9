#include "runtime/comm/knocker.h"

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/endpoint.h"
#include "runtime/comm/op_timeouts.h"

namespace resilient {

void Knocker::Begin(KnockRound round, Instant now) {
  knocks_.clear();
  left_.assign(round.ranks.begin(), round.ranks.end());
  round_ = std::move(round);
  last_turn_ = now;
  Fill(now);
}

void Knocker::Fill(Instant now) {
  while (!left_.empty() && knocks_.size() < kAtATime) {
    const int rank = left_.front();
    left_.pop_front();
    const GroupMember& member = round_.world.members[static_cast<std::size_t>(rank)];
    seed_ += 0x9e3779b97f4a7c15u;
    knocks_.push_back(
        {.connector = std::make_unique<Connector>(static_cast<ConnectorListener&>(*this),
                                                  DecodeEndpoint(member.endpoint).address,
                                                  Hello{.generation = round_.world.generation,
                                                        .attempt = round_.world.attempt,
                                                        .from = round_.world.rank,
                                                        .to = rank,
                                                        .lane = Lane::kKnock,
                                                        .stream = 0,
                                                        .group = round_.world.name,
                                                        .shm_offer = {}},
                                                  round_.world.secret, nullptr, seed_),
         .until = now + round_.patience,
         .trouble = {},
         .answered = false});
  }
}

void Knocker::AddInterest(std::vector<PollEntry>& entries, std::vector<Watch>& watches) {
  for (const Knock& knock : knocks_) {
    if (knock.connector->fd() < 0) continue;
    entries.push_back({.fd = knock.connector->fd(), .events = knock.connector->Interest()});
    watches.push_back({.connector = knock.connector.get()});
  }
}

Instant Knocker::NextTime() const {
  if (knocks_.empty()) return kNever;
  Instant next = last_turn_ + kUnwatched / 2;  // A longer gap says that this thread was not run.
  for (const Knock& knock : knocks_)
    next = std::min({next, knock.until, knock.connector->NextTime()});
  return next;
}

void Knocker::OnTime(Instant now) {
  const Duration gap = now - std::exchange(last_turn_, now);
  for (Knock& knock : knocks_) {
    if (gap >= kUnwatched && knock.until != kNever) knock.until += gap;
    if (!knock.answered) knock.connector->OnTime(now);
  }
  const auto over = std::stable_partition(
      knocks_.begin(), knocks_.end(),
      [now](const Knock& knock) { return !knock.answered && now < knock.until; });
  for (auto knock = over; knock != knocks_.end(); ++knock) Tell(*knock);
  knocks_.erase(over, knocks_.end());
  Fill(now);
}

void Knocker::Tell(const Knock& knock) const {
  const auto& member = round_.world.members[static_cast<std::size_t>(knock.connector->peer())];
  Status found;
  if (!knock.answered) {
    found = knock.trouble.ok()
                ? Status(StatusCode::kUnreachable,
                         StrCat(DecodeEndpoint(member.endpoint).address, " gives no answer"))
                : knock.trouble;
  }
  events_.OnKnocked(round_.world.generation, member.global_rank, found);
}

Knocker::Knock& Knocker::Of(const Connector& connector) {
  return *std::ranges::find_if(
      knocks_, [&](const Knock& knock) { return knock.connector.get() == &connector; });
}

void Knocker::OnConnected(Connector& connector, std::unique_ptr<ByteStream>) {
  Of(connector).answered = true;
}

void Knocker::OnPeerLeft(Connector& connector) { Of(connector).answered = true; }

void Knocker::OnOtherRanks(Connector& connector, const Status& /*mismatch*/) {
  Of(connector).answered = true;
}

void Knocker::OnAttemptFailed(Connector& connector, const Status& why) {
  Of(connector).trouble = why;
}

}  // namespace resilient
