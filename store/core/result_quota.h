#pragma once

#include <compare>
#include <cstddef>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include <resilient/clock.h>

#include "store/core/gathering.h"
#include "store/core/messages.h"
#include "store/core/quota.h"

namespace resilient::store {

// A line of requests: one connection of a session, and those after it.
struct LineId {
  SessionId session = 0;
  Role role = Role::kRequest;
  friend auto operator<=>(const LineId&, const LineId&) = default;
};

// What the results of one job's lines take, and which line gives its results up when that is too
// much: of those whose session has no connection the one that lost it first, and where there is
// none the one that takes most. Lines are in order of size by powers of two, and small ones in
// none, so that an honest client's request costs a comparison. Owner: SessionTable. Thread:
// caller-synchronised. Pure.
class ResultQuota {
 public:
  // As Quota.
  ResultQuota(std::size_t most, Pool* all) : quota_(most, all) {}

  // Of a line, all that is kept for the reply.
  static std::size_t BytesOf(const Reply& reply) { return OwnBytes(reply) + SharedBytes(reply); }

  // A reply is kept, or no longer. Values that many have in common count once.
  void Take(const Reply& reply);
  void GiveBack(const Reply& reply);

  // Where a line stands: since when its session has no connection, and what it takes.
  struct Standing {
    std::optional<Instant> idle_since;
    std::size_t bytes = 0;
  };
  void Move(LineId line, Standing from, Standing to);

  bool Over() const { return !quota_.Fits(0); }
  // Who is to give up what it has; nullopt: no line takes as much as kSmallLineBytes.
  std::optional<LineId> First() const;

  static constexpr std::size_t kSmallLineBytes = 1u << 10;
  // Of a reply: itself, and the trees that it is in.
  static constexpr std::size_t kOverhead = sizeof(Reply) + 160;

 private:
  static std::size_t OwnBytes(const Reply& reply);
  static std::size_t SharedBytes(const Reply& reply) {
    return reply.shared_values ? reply.shared_values->encoded.size() : 0;
  }
  static int SizeClass(std::size_t bytes);  // 0: small.
  void Insert(LineId line, const Standing& at);
  void Erase(LineId line, const Standing& at);

  Quota quota_;
  std::set<std::pair<Instant, LineId>> idle_;
  std::set<std::pair<int, LineId>> connected_;  // By class of size.
  std::unordered_map<const SharedValues*, std::size_t> holders_;
};

}  // namespace resilient::store
