#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>
#include <resilient/status.h>

#include "store/core/diagnosis.h"
#include "store/core/keyspace.h"
#include "store/core/quota.h"
#include "store/core/seldom.h"

namespace resilient::store {

enum class Phase : std::uint8_t { kForming, kBuilding, kRunning, kRefused };
enum class SeatState : std::uint8_t { kEmpty, kJoined, kMember, kLost, kLeft };

std::string_view PhaseName(Phase phase);
std::string_view SeatStateName(SeatState state);

// The texts of a seat, once a process has come to it. Thread: value type.
struct SeatTexts {
  std::string note;                       // It lost its holder before the first view: how.
  std::vector<std::string> incarnations;  // Of all its holders.
  std::string present_on;                 // Not kept: where the process is that will take it.
};

// One place of a world: who holds it, or how it became vacant. It is small, as the first join of a
// world makes all of its seats at once. Thread: value type that can only be moved.
struct Seat {
  // Kept in a row of its own, from its first holder on.
  SeatState state = SeatState::kEmpty;
  bool ready = false;    // In BUILDING: its communicators are built.
  bool refused = false;  // A member, and its last join was refused: it may have missed that.
  // Left and not to be replaced: it ended well, or nobody supervises it.
  bool gone_for_good = false;
  SessionId session = 0;  // The holder; for lost and left the last one.
  Seldom<SeatTexts> texts;

  // Not kept.
  Instant vacant_since{};
  std::uint64_t room_at = 0;  // The latest commit at which its holder had room for more.
  // Its process counts as alive though it has not come to its init: as long as that process holds
  // its presence key, and until then, as a member on its host has seen.
  bool announced = false;
  Instant seen_until = Instant::min();
  Instant unverified_until = Instant::min();  // As seen_until; it may be another user's process.

  bool Live() const { return state == SeatState::kJoined || state == SeatState::kMember; }
  // Whether there is anything to keep.
  bool Used() const {
    return state != SeatState::kEmpty || !texts->note.empty() || !texts->incarnations.empty();
  }
  bool Open() const { return state == SeatState::kEmpty || state == SeatState::kLost; }
  // `unverified_max`: what is not verified counts until then at the latest.
  Instant PresentUntil(Instant unverified_max) const {
    return announced ? kNever : std::max(seen_until, std::min(unverified_until, unverified_max));
  }
  // Of a vacant seat of a world that had a view: until when it may stay so, when it may for `wait`.
  // A process that lives and is on its way to it by then has a last call.
  Instant WaitedForUntil(Duration wait) const;
};
static_assert(sizeof(Seat) <= 64);

// The places of a world. A rank comes from a peer, or from a row: it is looked up here, and is an
// index nowhere else. Thread: value type that can only be moved.
class Seats {
 public:
  // Counted as taken of `quota`, which outlives this or is null.
  explicit Seats(Quota* quota = nullptr) : taken_(quota) {}

  // Null: the world has no such rank.
  Seat* Find(int rank) { return Has(rank) ? &seats_[static_cast<std::size_t>(rank)] : nullptr; }
  const Seat* Find(int rank) const { return const_cast<Seats*>(this)->Find(rank); }
  // REQUIRES: the rank was compared with this world.
  Seat& At(int rank);
  const Seat& At(int rank) const { return const_cast<Seats*>(this)->At(rank); }
  // REQUIRES: `seat` is one of these.
  int RankOf(const Seat& seat) const { return static_cast<int>(&seat - seats_.data()); }

  std::size_t size() const { return seats_.size(); }
  auto begin() { return seats_.begin(); }
  auto begin() const { return seats_.begin(); }
  auto end() { return seats_.end(); }
  auto end() const { return seats_.end(); }
  void Resize(std::size_t size) {
    seats_.resize(size);
    taken_.Set(size);
  }
  void Add(Seat seat) {
    seats_.push_back(std::move(seat));
    taken_.Set(size());
  }

 private:
  bool Has(int rank) const { return rank >= 0 && static_cast<std::size_t>(rank) < size(); }

  std::vector<Seat> seats_;
  Charge taken_;
};

// What the members have said of room for more ranks: they say so at each commit, and when all have
// said it at the same one nobody loses anything by being interrupted there. Thread: value type.
struct Room {
  std::uint64_t commit = 0;  // The latest that anybody has told of,
  std::size_t members = 0;   // so many of them,
  int max_world = 0;         // and the least that any of these would have.
};

// One init round of one life. Owner: Membership, which moves it; thread: caller-synchronised.
struct World {
  // Its seats count as taken of `quota`; null: they are not counted.
  explicit World(Quota* quota = nullptr) : seats(quota) {}

  // Kept.
  std::uint64_t round = 0;
  std::uint64_t generation = 0;
  std::uint64_t launcher_attempt = 0;
  Phase phase = Phase::kForming;
  bool viewed = false;      // A view was built once; from then on losses fence.
  Duration join_timeout{};  // The longest that a member asked for.
  Duration seat_wait{};     // Likewise.
  Status first_cause;       // Of the last fence or the refusal.
  // Some of its ranks want to go on without the empty seats, and wait for the others to say so.
  bool shrinking = false;
  std::uint64_t resized_at = 0;  // The generation from which on it has had its present seats.
  // So many seats it had before those behind them were added, which have had no view; 0: none was.
  std::uint64_t grown_from = 0;
  std::vector<std::string> former;  // Incarnations of holders of seats that are no more.
  std::string secret;               // View::world_secret; made for the first view.
  Seats seats;                      // Each in a row of its own.
  // Likewise; of the present generation from BUILDING on. Null: there was none.
  SharedViewEvent view;

  // Follows from what is kept.
  std::size_t live = 0;                // Seats joined or member.
  std::size_t joined = 0;              // Seats joined.
  std::size_t ready = 0;               // In BUILDING.
  std::set<std::string> incarnations;  // Of every process that ever held a seat.

  // Not kept.
  Room room;  // Of the present generation.
  Instant first_join{};
  std::optional<Instant> armed;  // The timer that is set for RefusalDue.
  std::string elsewhere;         // Where the missing ranks may be: LateNotice::elsewhere.
  Diagnosis diagnosis;           // Of the present generation.

  int size() const { return static_cast<int>(seats.size()); }
  // Until when the process of `seat` counts as alive though it has not come to its init. In the
  // first forming of a round one that is not verified does so for twice the timeout at most, or
  // another user who takes its name could keep the others waiting for ever.
  Instant PresentUntil(const Seat& seat) const;
  // When a FORMING world is to be refused; nullopt: not while things stay as they are.
  std::optional<Instant> RefusalDue() const;
  // `seat` is about to go: what is known of its holders is kept in `former`.
  void RememberHoldersOf(const Seat& seat);
  std::vector<int> RanksLeft() const;  // Whose seats are kLeft, ascending.
  // Whether some of its ranks have joined for the first time, and wait for the others since then.
  bool AwaitsFirstJoins(Instant since) const;
  // Whether each of two such worlds lacks the ranks that the other has.
  bool IsCrossedWith(const World& other) const;
  // "3 of 4 joined; missing ranks 2; nothing was ever heard from them".
  // A rank whose process lives is waited for, and named apart.
  std::string WhoIsMissing(Instant now) const;
  // Fills in what follows from what is kept; `now` stands for instants that are not kept.
  // kInternal: what is kept does not belong together.
  Status FinishRestore(Instant now);
};

}  // namespace resilient::store
