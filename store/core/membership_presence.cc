#include <utility>

#include "store/core/membership.h"

// Ranks whose processes live and have not come to their init: by the presence key that such a
// process holds, or seen by a member on the same host.
namespace resilient::store {

void Membership::NotePresent(World& world, const Participant& teller, const WaitingReport& report,
                             Moment moment) const {
  const auto note = [&](const std::vector<int>& ranks, Instant Seat::*until) {
    for (const int rank : ranks) {
      Seat* seat = world.seats.Find(rank);
      if (seat == nullptr) continue;
      seat->*until = moment.now + limits_.presence_life;
      if (!seat->announced) seat->texts.Make().present_on = teller.hello.process.host;
    }
  };
  note(report.present, &Seat::seen_until);
  note(report.unverified, &Seat::unverified_until);
}

void Membership::Announce(Seat& seat, const Presence& presence) {
  seat.announced = !presence.holders.empty();
  if (!seat.announced) return;
  const ProcessIdentity& latest = presence.holders.rbegin()->second;
  seat.texts.Make().present_on = latest.host + " (pid " + std::to_string(latest.pid) + ")";
}

void Membership::OnPresent(SessionId session, const ProcessIdentity& process,
                           const PresenceName& name) {
  Presence& presence = present_[{name.world_size, name.rank}];
  presence.note.clear();
  presence.holders.insert_or_assign(session, process);
  for (auto& [round, world] : worlds_) {
    if (world.size() != name.world_size) continue;
    Announce(world.seats.At(name.rank), presence);
  }
}

void Membership::OnAbsent(SessionId session, const PresenceName& name, const std::string& how,
                          Moment moment, MembershipEffects& effects) {
  const auto found = present_.find({name.world_size, name.rank});
  if (found == present_.end()) return;
  Presence& presence = found->second;
  const auto holder = presence.holders.find(session);
  if (holder == presence.holders.end()) return;
  const ProcessIdentity process = std::move(holder->second);
  presence.holders.erase(holder);
  if (presence.holders.empty()) {
    presence.note = Name({name.rank, process}) + " " + how + " before its init";
  }
  bool joined = false;
  for (auto next = worlds_.begin(); next != worlds_.end();) {
    World& world = (next++)->second;  // It may end.
    if (world.size() != name.world_size) continue;
    Seat& seat = world.seats.At(name.rank);
    Announce(seat, presence);
    joined = joined || seat.Live();
    if (seat.announced || seat.Live()) continue;
    // Of one that had joined and was lost its seat says so.
    const Participant* last = Find(seat.session);
    if (!world.viewed && (!last || !SameProcess(last->hello.process, process))) {
      seat.texts.Make().note = presence.note;
      Changed(world, seat);
    }
    RefuseIfDue(world, moment, effects);
  }
  // What became of it is known better; and there may be more of the dead than of ranks.
  const bool forget = joined || present_.size() > kWorldSizeMax;
  if (presence.holders.empty() && forget) present_.erase(found);
  Settle(moment, effects);
}

// A new world knows who is on the way to it, and who has ended there.
void Membership::SeatThePresent(World& world) {
  for (auto one = present_.lower_bound({world.size(), 0});
       one != present_.end() && one->first.first == world.size(); ++one) {
    Seat& seat = world.seats.At(one->first.second);
    Announce(seat, one->second);
    if (one->second.note.empty()) continue;
    seat.texts.Make().note = one->second.note;
    Changed(world, seat);
  }
}

// All are there: how others ended before them is past.
void Membership::ForgetAbsent(const World& world) {
  std::erase_if(present_, [&world](const auto& one) {
    return one.first.first == world.size() && one.second.holders.empty();
  });
}

}  // namespace resilient::store
