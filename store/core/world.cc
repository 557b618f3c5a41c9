#include "store/core/world.h"

#include <algorithm>

#include <resilient/ladder.h>

#include "runtime/base/check.h"
#include "runtime/base/texts.h"

namespace resilient::store {

namespace {

// Of the rank of `seat`, which is missing; empty: nothing is known of it.
std::string NoteOfMissing(int rank, const Seat& seat, Instant now) {
  if (!seat.texts->note.empty() || seat.unverified_until <= now) return seat.texts->note;
  return "a process on host " + seat.texts->present_on + " has the name of rank " +
         std::to_string(rank) +
         " and was waited for no longer than twice the timeout, as the kernel there does not tell "
         "whose it is";
}

}  // namespace

std::string_view PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kForming:
      return "FORMING";
    case Phase::kBuilding:
      return "BUILDING";
    case Phase::kRunning:
      return "RUNNING";
    case Phase::kRefused:
      return "REFUSED";
  }
  return "?";
}

std::string_view SeatStateName(SeatState state) {
  switch (state) {
    case SeatState::kEmpty:
      return "empty";
    case SeatState::kJoined:
      return "joined";
    case SeatState::kMember:
      return "member";
    case SeatState::kLost:
      return "lost";
    case SeatState::kLeft:
      return "left";
  }
  return "?";
}

Seat& Seats::At(int rank) {
  Seat* seat = Find(rank);
  RESILIENT_CHECK(seat != nullptr);
  return *seat;
}

Instant Seat::WaitedForUntil(Duration wait) const {
  if (gone_for_good) return vacant_since;
  const Instant end = Deadline::After(vacant_since, wait).when();
  const Instant last_call = Deadline::After(end, LastCallOf(wait)).when();
  return std::max(end, std::min(PresentUntil(last_call), last_call));
}

Instant World::PresentUntil(const Seat& seat) const {
  if (viewed) return seat.PresentUntil(kNever);  // WaitedForUntil has a bound for all.
  const Instant due = Deadline::After(first_join, join_timeout).when();
  return seat.PresentUntil(Deadline::After(due, join_timeout).when());
}

std::optional<Instant> World::RefusalDue() const {
  if (phase != Phase::kForming || live == seats.size() || shrinking) return std::nullopt;
  if (!viewed) {
    // Nobody is missing while every process that has not joined is known to live.
    Instant known = kNever;
    for (const Seat& seat : seats) {
      if (!seat.Live()) known = std::min(known, PresentUntil(seat));
    }
    return std::max(Deadline::After(first_join, join_timeout).when(), known);
  }
  std::optional<Instant> due;
  for (const Seat& seat : seats) {
    if (seat.Live()) continue;
    const Instant end = seat.WaitedForUntil(seat_wait);
    due = std::min(due.value_or(end), end);
  }
  return due;
}

void World::RememberHoldersOf(const Seat& seat) {
  const std::vector<std::string>& held = seat.texts->incarnations;
  former.insert(former.end(), held.begin(), held.end());
}

std::vector<int> World::RanksLeft() const {
  std::vector<int> left;
  if (live == seats.size()) return left;
  for (const Seat& seat : seats) {
    if (seat.state == SeatState::kLeft) left.push_back(seats.RankOf(seat));
  }
  return left;
}

bool World::AwaitsFirstJoins(Instant since) const {
  return phase == Phase::kForming && !viewed && live > 0 && live < seats.size() &&
         first_join <= since;
}

bool World::IsCrossedWith(const World& other) const {
  if (seats.size() != other.seats.size()) return false;
  for (const Seat& seat : seats) {
    if (seat.Live() && other.seats.At(seats.RankOf(seat)).Live()) return false;
  }
  return true;
}

std::string World::WhoIsMissing(Instant now) const {
  constexpr int kNamedAtMost = 64;
  std::string ranks;
  std::string notes;
  int missing = 0;
  int unheard = 0;
  int present = 0;
  for (int rank = 0; rank < size(); ++rank) {
    const Seat& seat = seats.At(rank);
    if (seat.Live()) continue;
    if (PresentUntil(seat) > now) {
      if (++present > kNamedAtMost) continue;
      notes += "; rank " + std::to_string(rank) + " lives on host " + seat.texts->present_on +
               " and has not come to its init";
      continue;
    }
    if (++missing <= kNamedAtMost) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    const std::string note = NoteOfMissing(rank, seat, now);
    if (note.empty()) {
      ++unheard;
    } else if (missing <= kNamedAtMost) {
      notes += "; " + note;
    }
  }
  ranks += AndMore(static_cast<std::size_t>(std::max(missing - kNamedAtMost, 0)));
  std::string text =
      std::to_string(joined) + " of " + std::to_string(size()) + " joined; missing ranks " + ranks;
  if (unheard == missing) {
    text += "; nothing was ever heard from them";
  } else if (unheard > 0) {
    text += "; nothing was ever heard from " + std::to_string(unheard) + " of them";
  }
  if (present > kNamedAtMost) {
    notes += "; so do " + std::to_string(present - kNamedAtMost) + " more";
  }
  return text + notes + (elsewhere.empty() ? "" : "; " + elsewhere);
}

Status World::FinishRestore(Instant now) {
  std::size_t open = 0;
  bool members = false;
  for (Seat& seat : seats) {
    live += seat.Live() ? 1 : 0;
    joined += seat.state == SeatState::kJoined ? 1 : 0;
    open += seat.Open() ? 1 : 0;
    members = members || seat.state == SeatState::kMember;
    ready += seat.ready && phase == Phase::kBuilding ? 1 : 0;
    incarnations.insert(seat.texts->incarnations.begin(), seat.texts->incarnations.end());
    seat.vacant_since = now;
  }
  incarnations.insert(former.begin(), former.end());
  first_join = now;
  const std::size_t settled = grown_from > 0 ? grown_from : seats.size();
  const bool whole = phase == Phase::kBuilding || phase == Phase::kRunning;
  if (live == 0 || (whole && (open > 0 || joined > 0)) || ((whole || members) && !viewed) ||
      (viewed && (view == nullptr || view->view.members.size() != settled)) ||
      grown_from >= seats.size() || (grown_from > 0 && phase != Phase::kForming) ||
      (whole && view->view.generation != generation)) {
    return Status(StatusCode::kInternal, "round " + std::to_string(round) + " in phase " +
                                             std::string(PhaseName(phase)) +
                                             " lacks seats or its view");
  }
  return {};
}

}  // namespace resilient::store
