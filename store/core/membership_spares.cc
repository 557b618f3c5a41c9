#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "store/core/membership.h"

namespace resilient::store {

void Membership::BecomeSpare(Participant& who, Moment moment, MembershipEffects& effects) {
  who.claim = who.request.rank;
  Await(who, effects);
  // Its launcher may begin anew.
  who.outlived = life_ > 0 && ended_by_leave_ && who.hello.launcher_attempt <= last_attempt_;
  who.bereft_until = kNever;
  if (worlds_.empty()) LetWait(who, moment);
  FillLostSeats(moment, effects);
}

void Membership::LetWait(Participant& who, Moment moment) {
  const Duration left = who.outlived ? limits_.spare_grace : who.request.join_timeout;
  who.bereft_until = Deadline::After(moment.now, left).when();
  Arm(who.bereft_until, TimerKind::kSpare, who.session);
}

void Membership::Await(Participant& who, MembershipEffects& effects) {
  who.state = State::kSpare;
  who.holder = 0;
  who.round = 0;
  who.request.rank = kSpareRank;
  who.fresh = false;
  who.out = Status();
  Changed(who);
  spares_.insert(who.session);
  effects.log.push_back(Record("spare", who, "waits for a seat to become free"));
}

void Membership::FillLostSeats(Moment moment, MembershipEffects& effects) {
  // Worlds that had a view do not end by being filled.
  for (auto& [round, world] : worlds_) {
    if (world.viewed) RefuseIfDue(world, moment, effects);
  }
}

void Membership::SeatSpares(World& world, MembershipEffects& effects) {
  if (spares_.empty() || world.phase != Phase::kForming || !world.viewed) return;
  if (IsLeftToSpares(world)) return;
  bool any = false;
  for (const Seat& seat : world.seats) {
    if (seat.state != SeatState::kLost) continue;
    if (!SeatSpare(world, seat, effects)) break;
    any = true;
  }
  if (any) BuildIfComplete(world, effects);
}

bool Membership::SeatSpare(World& world, const Seat& seat, MembershipEffects& effects) {
  while (Participant* who = SpareFor(world, seat)) {
    spares_.erase(who->session);
    who->request.rank = world.seats.RankOf(seat);
    std::optional<Status> why = SharedDeviceIn(world, who);
    if (Status room = CheckRoomInView(who->hello, who->request, world.size()); !why && !room.ok())
      why = room;
    if (why) {
      Refuse(*who, *std::move(why), effects);
      continue;
    }
    who->fresh = true;
    Occupy(world, *who, effects);
    return true;
  }
  return false;
}

std::vector<Participant*> Membership::WaitingSpares() {
  std::vector<Participant*> waiting;
  for (auto next = spares_.begin(); next != spares_.end();) {
    Participant* who = Find(*next);
    if (who && who->state == State::kSpare) {
      waiting.push_back(who);
      ++next;
    } else {
      next = spares_.erase(next);
    }
  }
  return waiting;
}

bool Membership::Fits(const World& world, const Participant& who) {
  // One without a connection may be dead; it is looked at again when it is back.
  return who.connected && who.hello.launcher_attempt == world.launcher_attempt &&
         (who.request.world_size == world.size() || world.resized_at > 0);
}

Participant* Membership::SpareFor(const World& world, const Seat& seat) {
  const Participant* last = Find(seat.session);
  Participant* best = nullptr;
  bool best_is_near = false;
  for (Participant* who : WaitingSpares()) {
    if (!Fits(world, *who)) continue;
    const bool near = last && last->hello.process.host == who->hello.process.host;
    if (best && (best_is_near || !near)) continue;  // They come in the order of their sessions.
    best = who;
    best_is_near = near;
  }
  return best;
}

bool Membership::IsLeftToSpares(const World& world) const {
  return std::none_of(world.seats.begin(), world.seats.end(), [this](const Seat& seat) {
    return seat.Live() && !Find(seat.session)->fresh;
  });
}

void Membership::TakeBackSpares(World& world, Moment moment, MembershipEffects& effects) {
  for (Seat& seat : world.seats) {
    Participant* who = seat.Live() ? Find(seat.session) : nullptr;
    if (!who || !who->fresh) continue;  // Without a view it has joined, and is no member yet.
    seat.state = SeatState::kLost;
    seat.session = 0;
    seat.vacant_since = moment.now;
    --world.live;
    --world.joined;
    Changed(world, seat);
    Await(*who, effects);
  }
}

void Membership::TakeClaim(Participant& who, Moment moment, MembershipEffects& effects) {
  for (auto& [round, world] : worlds_) {
    const bool fits = world.phase == Phase::kForming && !world.viewed &&
                      world.size() == who.request.world_size &&
                      world.launcher_attempt == who.hello.launcher_attempt;
    const Seat* seat = fits ? world.seats.Find(who.claim) : nullptr;
    if (seat == nullptr || !seat->Open()) continue;
    who.request.rank = who.claim;
    return TakeSeat(world, who, moment, effects);
  }
  // Where the last world was lost nobody else may be left who would begin the next one.
  if (!worlds_.empty() || ended_by_leave_) return;
  who.request.rank = who.claim;
  Place(who, moment, effects);
}

void Membership::CallClaimants() {
  for (const Participant* who : WaitingSpares()) {
    if (who->claim >= 0) to_replace_.push_back(who->session);
  }
}

void Membership::LoseSparesBefore(std::uint64_t attempt, Moment moment,
                                  MembershipEffects& effects) {
  for (Participant* who : WaitingSpares()) {
    if (who->hello.launcher_attempt >= attempt) continue;
    Lose(*who, Superseded(generation_, who->hello.launcher_attempt, attempt), moment, effects);
  }
}

void Membership::MindSpares(Moment moment) {
  if (std::exchange(bereft_, worlds_.empty()) == worlds_.empty()) return;
  for (Participant* who : WaitingSpares()) {
    who->outlived = ended_by_leave_;
    who->bereft_until = kNever;
    if (bereft_) LetWait(*who, moment);
  }
}

void Membership::SendAwayIfDue(Participant& who, Moment moment, MembershipEffects& effects) {
  if (who.state != State::kSpare || who.bereft_until > moment.now) return;
  const int size = who.request.world_size;
  const bool on_its_way = std::any_of(present_.begin(), present_.end(), [size](const auto& entry) {
    return entry.first.first == size && !entry.second.holders.empty();
  });
  if (on_its_way) return LetWait(who, moment);  // Some rank lives, and has not come to its init.
  if (who.outlived) {
    return Refuse(who,
                  Status(StatusCode::kLeft,
                         "the world of this job has ended, no other one has begun for " +
                             Seconds(limits_.spare_grace) +
                             " s, and this process, which waited as a spare, is not needed; let it "
                             "end, or start it anew with the next world"),
                  effects);
  }
  Refuse(who,
         Status(StatusCode::kJoinTimeout,
                "no rank of the job has joined for " + Seconds(who.request.join_timeout) +
                    " s while this process waited as a spare; start the ranks with this store "
                    "and job name (RESILIENT_STORE, RESILIENT_JOB)"),
         effects);
}

void Membership::DropBadSpares(MembershipEffects& effects) {
  std::vector<SessionId> bad;
  for (const auto& [session, who] : participants_) {
    const int size = who.request.world_size;
    const bool fits = size >= 1 && size <= kWorldSizeMax && who.claim < size;
    if (who.state == State::kSpare && !(fits && who.request.rank == kSpareRank)) {
      bad.push_back(session);
    }
  }
  std::sort(bad.begin(), bad.end());
  for (const SessionId session : bad) {
    Participant& who = *Find(session);
    effects.log.push_back(Record("dropped", who,
                                 "waited as a spare for rank " + std::to_string(who.claim) +
                                     " of " + std::to_string(who.request.world_size) +
                                     ", which no world has; it may join again"));
    who.state = State::kLeft;
    who.round = 0;
    Forget(session);
  }
}

// How long it has waited is not known any more.
void Membership::RestoreSpare(Participant& who, Moment moment) {
  spares_.insert(who.session);
  bereft_ = worlds_.empty();
  who.outlived = life_ > 0 && ended_by_leave_;
  if (bereft_) LetWait(who, moment);
}

}  // namespace resilient::store
