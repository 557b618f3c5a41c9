#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "store/core/membership.h"

// The end of a member in its own words: that it leaves, and what of it others need; that it comes
// to its end, and by what.
namespace resilient::store {
void Membership::LeaveSeat(World& world, Participant& who, Moment moment,
                           MembershipEffects& effects) {
  Seat& seat = SeatOf(world, who);
  const bool joined = seat.state == SeatState::kJoined;
  const Status cause = Left(ClaimantOf(who), world.generation, moment.wall_s);
  world.joined -= joined ? 1 : 0;
  --world.live;
  seat.state = world.viewed ? SeatState::kLeft : SeatState::kEmpty;
  seat.texts.Make().note = world.viewed ? "" : Name(ClaimantOf(who)) + " joined and left again";
  seat.vacant_since = moment.now;
  seat.gone_for_good = !who.hello.supervised;
  Changed(world, seat);
  NoteFailure(world, cause);
  const std::uint64_t round = world.round;
  effects.left.push_back(round);
  // Before all are ready nobody has got beyond building links to the leaver: that cannot end well.
  const bool building = world.phase == Phase::kBuilding;
  // That links to it broke is not enough: its goodbye may have been lost on its way.
  const bool needed = world.phase == Phase::kRunning && who.needed_in == world.generation;
  who.accusation.reset();
  world.diagnosis.OnWaiting(who.request.rank, {}, moment.now);  // It waits no more.
  if (world.live > 0 && (building || needed)) {
    (void)FenceForLeaver(world, needed ? who.needed_by : "", moment, effects);
  }
  EndIfDeserted(round, cause, moment, effects);
  if (const auto found = worlds_.find(round); found != worlds_.end()) {
    RefuseIfDue(found->second, moment, effects);
  }
}

// An operation, a rebuild or an exchange needs who has left. All seats whose holders have left
// count as lost from here on: each view is one of all seats. False: nobody has left.
bool Membership::FenceForLeaver(World& world, const std::string& met, Moment moment,
                                MembershipEffects& effects) {
  const Participant* first = nullptr;
  for (Seat& seat : world.seats) {
    if (seat.state != SeatState::kLeft) continue;
    const Participant* leaver = Find(seat.session);
    RESILIENT_CHECK(leaver != nullptr);  // A seat that was left keeps its session known.
    if (first == nullptr) first = leaver;
    seat.state = SeatState::kLost;
    // Nobody supervises it, so nobody has said either that it ended well.
    if (!leaver->hello.supervised) seat.gone_for_good = false;
    Changed(world, seat);
  }
  if (first == nullptr) return false;
  Status cause = Left(ClaimantOf(*first), world.generation, moment.wall_s);
  if (!met.empty()) cause = Status(cause.code(), Cut(cause.message() + "; " + met), cause.detail());
  FenceWorld(world, cause, moment, effects);
  return true;
}

// A rank has said goodbye to a peer, which needs it. It may have left one group alone, and then
// that is between these two; what it says to the store may be on its way, too.
void Membership::NeedLeaver(World& world, const Participant& reporter,
                            const resilient::Report& report, Moment moment,
                            MembershipEffects& effects) {
  if (world.phase != Phase::kRunning) return;
  const std::string& text = report.status.message();
  const std::string met = text.empty() ? "" : Name(ClaimantOf(reporter)) + " needs it for " + text;
  if (FenceForLeaver(world, met, moment, effects)) return;
  for (const Seat& seat : world.seats) {
    const int rank = report.accused_rank;
    if (rank >= 0 && rank != world.seats.RankOf(seat)) continue;
    Participant* who = Find(seat.session);
    if (who == nullptr) continue;
    who->needed_in = world.generation;
    who->needed_by = met;
  }
}

void Membership::NeedAll(std::uint64_t round, Moment moment, MembershipEffects& effects) {
  const auto found = worlds_.find(round);
  if (found == worlds_.end()) return;
  World& world = found->second;
  if (world.phase != Phase::kRunning || world.live == world.seats.size()) return;
  (void)FenceForLeaver(world, "", moment, effects);
  Settle(moment, effects);
}

// A process that said goodbye and then ended badly: its launcher will replace it.
void Membership::LoseLeaver(Participant& who, const ExitReportOp& report, Moment moment,
                            MembershipEffects& effects) {
  World* world = WorldOf(who);
  if (!world || !HasLeft(who, world->round)) return;
  Seat& seat = SeatOf(*world, who);
  if (IsCleanEnd(report)) {
    seat.gone_for_good = true;
    Changed(*world, seat);
    return RefuseIfDue(*world, moment, effects);
  }
  if (seat.state == SeatState::kLost) return;  // It was needed: that is known.
  seat.state = SeatState::kLost;
  seat.gone_for_good = false;
  seat.vacant_since = moment.now;
  Changed(*world, seat);
  const Status cause = LossOf(who, HowItEnded(report), moment);
  effects.log.push_back(Record("lost", who, cause.message()));
  if (world->phase == Phase::kBuilding || world->phase == Phase::kRunning) {
    FenceWorld(*world, cause, moment, effects);
  } else {
    RefuseIfDue(*world, moment, effects);
  }
}

// By its own word, which comes before its end is seen: only the process knows by what it ends.
void Membership::EndBy(Participant& who, const resilient::Report& report, Moment moment,
                       MembershipEffects& effects) {
  if (!who.Active()) return;
  const std::string& what = report.status.message();
  Lose(who, LossOf(who, what.empty() ? "has said that it ends" : "ended by " + what, moment),
       moment, effects, "ending");
}

}  // namespace resilient::store
