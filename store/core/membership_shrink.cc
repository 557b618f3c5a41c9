#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "store/core/membership.h"

namespace resilient::store {

Membership::Wishes Membership::WishesOf(const World& world) const {
  Wishes wishes;
  for (const Seat& seat : world.seats) {
    if (!seat.Live()) continue;
    const Participant* who = Find(seat.session);
    RESILIENT_CHECK(who != nullptr);
    const bool joined = seat.state == SeatState::kJoined;
    const bool wants = joined && who->request.min_world > 0;
    // One that has lost nothing has nothing that it could give up.
    if (who->fresh || (!world.viewed && !wants)) continue;
    wishes.all = wishes.all && wants;
    if (!wants) continue;
    wishes.any = true;
    wishes.least = std::max(wishes.least, who->request.min_world);
    const JoinRequest& request = who->request;
    wishes.wait = std::max(wishes.wait, world.viewed ? request.seat_wait : request.join_timeout);
  }
  return wishes;
}

void Membership::ReopenFor(World& world, const Participant& who) {
  if (world.phase != Phase::kRefused || who.request.min_world == 0 ||
      world.live < static_cast<std::size_t>(who.request.min_world)) {
    return;
  }
  world.phase = Phase::kForming;
  world.joined = 0;
  for (Seat& seat : world.seats) {
    // Refused as it was, it waits for no view.
    if (seat.state != SeatState::kJoined) continue;
    seat.state = SeatState::kMember;
    seat.refused = true;
    Changed(world, seat);
  }
  Changed(world);
}

bool Membership::ShrinkIfDue(World& world, Moment moment, MembershipEffects& effects) {
  if (world.phase != Phase::kForming || world.live == world.seats.size()) return false;
  const Wishes wishes = WishesOf(world);
  if (!wishes.any || world.live < static_cast<std::size_t>(wishes.least)) {
    // Nobody is left who would be content with so few.
    if (std::exchange(world.shrinking, false)) Changed(world);
    return false;
  }
  Instant due = Instant::min();
  for (const Seat& seat : world.seats) {
    if (!seat.Live()) due = std::max(due, seat.WaitedForUntil(wishes.wait));
  }
  if (wishes.all && due > moment.now) {
    Arm(due, TimerKind::kWorld, world.round);
    return true;
  }
  if (wishes.all) {
    Shrink(world, effects);
    return true;
  }
  // Some have not said whether they want it. Whoever has joined for the whole world is refused, and
  // may ask for less.
  const std::optional<Instant> whole = world.RefusalDue();
  if (!world.shrinking && (!whole || *whole > moment.now)) return false;
  if (!std::exchange(world.shrinking, true)) Changed(world);
  for (Seat& seat : world.seats) {
    if (seat.state != SeatState::kJoined) continue;
    const Participant& who = *Find(seat.session);
    if (who.request.min_world > 0 || who.fresh) continue;
    seat.state = SeatState::kMember;
    seat.refused = true;
    --world.joined;
    Changed(world, seat);
    effects.Tell(seat.session, JoinRefusedEvent{world.first_cause, who.request.number});
  }
  return true;
}

// The seats that are left keep their order.
void Membership::Shrink(World& world, MembershipEffects& effects) {
  const std::size_t before = world.seats.size();
  Seats left(&seats_);
  for (Seat& seat : world.seats) {
    if (!seat.Live()) {
      world.RememberHoldersOf(seat);
      continue;
    }
    Participant* who = Find(seat.session);
    who->request.rank = static_cast<int>(left.size());
    Changed(*who);
    left.Add(std::move(seat));
  }
  if (Keeps()) {
    for (std::size_t rank = left.size(); rank < before; ++rank) {
      journal_->Remove(SeatRow(job_, world.round, rank));
    }
  }
  world.seats = std::move(left);
  for (const Seat& seat : world.seats) Changed(world, seat);
  world.shrinking = false;
  world.resized_at = world.generation;
  Changed(world);
  if (!world.viewed) {
    if (const std::optional<Status> why = SharedDeviceIn(world)) {
      return RefuseAll(world, *why, effects);
    }
  }
  effects.log.push_back(LogRecord{
      "shrink",
      {{"job", job_},
       {"round", std::to_string(world.round)},
       {"generation", std::to_string(world.generation)},
       {"ranks", std::to_string(world.size())}},
      "goes on with " + std::to_string(world.size()) + " of " + std::to_string(before) + " ranks"});
  BuildIfComplete(world, effects);
}

}  // namespace resilient::store
