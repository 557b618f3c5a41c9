#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/json.h"
#include "store/core/codec.h"
#include "store/core/membership.h"

namespace resilient::store {

void Membership::BuildIfComplete(World& world, MembershipEffects& effects) {
  if (world.phase != Phase::kForming || world.joined < world.seats.size()) return;
  world.phase = Phase::kBuilding;
  world.viewed = true;
  world.grown_from = 0;
  Changed(world);
  ChangedView(world);
  world.ready = 0;
  world.joined = 0;
  View view;
  view.life = life_;
  view.round = world.round;
  view.generation = world.generation;
  view.attempt = 1;
  view.secret = make_secret_();
  if (world.secret.empty()) world.secret = make_secret_();
  view.world_secret = world.secret;
  view.members.reserve(world.seats.size());
  for (Seat& seat : world.seats) {
    seat.state = SeatState::kMember;
    seat.ready = false;
    Changed(world, seat);
    Participant* who = Find(seat.session);
    RESILIENT_CHECK(who != nullptr);
    if (std::exchange(who->fresh, false) || who->since == 0) {
      if (who->since == 0) who->since = world.generation;
      Changed(*who);
    }
    view.members.push_back({who->request.rank, who->hello.incarnation, who->hello.process.host,
                            who->hello.process.pid, who->request.endpoint});
  }
  world.view = Share(std::move(view));
  for (const Seat& seat : world.seats) effects.Tell(seat.session, world.view);
  ForgetAbsent(world);
}

// REQUIRES: BUILDING or RUNNING.
void Membership::FenceWorld(World& world, const Status& cause, Moment moment,
                            MembershipEffects& effects) {
  const std::uint64_t round = world.round;
  const std::uint64_t ended = world.generation;
  world.generation = ++generation_;
  world.phase = Phase::kForming;
  world.diagnosis = {};
  world.room = {};
  world.first_cause = cause;
  world.ready = 0;
  ChangedJob();
  Changed(world);
  effects.ended.push_back({world.round, cause, false});
  effects.fenced.push_back(cause.code());
  effects.log.push_back(LogRecord{"fence",
                                  {{"job", job_},
                                   {"round", std::to_string(world.round)},
                                   {"generation", std::to_string(ended)},
                                   {"code", std::string(CodeName(cause.code()))}},
                                  cause.message()});
  for (Seat& seat : world.seats) {
    seat.room_at = 0;
    if (seat.Live()) {
      effects.Tell(seat.session, Fence{ended, cause});
    } else {
      seat.vacant_since = moment.now;
    }
  }
  RefuseIfDue(world, moment, effects);
  const auto left = worlds_.find(round);
  const bool waits = left != worlds_.end() && left->second.phase == Phase::kForming;
  if (host_left_ && waits) {  // Whoever takes a lost seat comes to this address.
    host_left_ = false;
    ChangedJob();
    effects.listens = true;
  }
}

void Membership::RefuseIfDue(World& world, Moment moment, MembershipEffects& effects) {
  TakeBackGrowth(world, effects);
  SeatSpares(world, effects);
  if (ShrinkIfDue(world, moment, effects)) return;
  const std::optional<Instant> due = world.RefusalDue();
  if (!due || *due == kNever) return;
  if (*due > moment.now) {
    if (world.armed && *world.armed <= *due) return;
    world.armed = *due;
    return Arm(*due, TimerKind::kWorld, world.round);
  }
  RefuseWorld(world, moment, effects);
}

void Membership::RefuseWorld(World& world, Moment moment, MembershipEffects& effects) {
  if (world.viewed) {
    TakeBackSpares(world, moment, effects);
    world.phase = Phase::kRefused;
    Changed(world);
    effects.ended.push_back({world.round, world.first_cause, false});
    effects.log.push_back(LogRecord{"round_refused",
                                    {{"job", job_}, {"round", std::to_string(world.round)}},
                                    "a lost seat was not filled: " + world.first_cause.message()});
    for (const Seat& seat : world.seats) {
      if (seat.state != SeatState::kJoined) continue;
      effects.Tell(seat.session,
                   JoinRefusedEvent{world.first_cause, Find(seat.session)->request.number});
    }
    return;
  }
  FailureDetail detail;
  detail.generation = world.generation;
  detail.since_unix_s =
      moment.wall_s - std::chrono::duration<double>(moment.now - world.first_join).count();
  const Status why(StatusCode::kJoinTimeout,
                   world.WhoIsMissing(moment.now) + "; waited " +
                       Seconds(moment.now - world.first_join) + " s from the first join",
                   std::move(detail));
  RefuseAll(world, why, effects);
}

void Membership::RefuseAll(World& world, const Status& why, MembershipEffects& effects) {
  for (const Seat& seat : world.seats) {
    if (seat.Live()) Refuse(*Find(seat.session), why, effects);
  }
  EndWorld(world.round, why, effects);
}

void Membership::EndIfDeserted(std::uint64_t round, const Status& why, Moment moment,
                               MembershipEffects& effects) {
  const auto world = worlds_.find(round);
  if (world == worlds_.end() || !IsLeftToSpares(world->second)) return;
  TakeBackSpares(world->second, moment, effects);
  EndWorld(round, why, effects);
}

void Membership::EndWorld(std::uint64_t round, const Status& why, MembershipEffects& effects) {
  effects.ended.push_back({round, why, true});
  effects.log.push_back(LogRecord{"round_end",
                                  {{"job", job_},
                                   {"round", std::to_string(round)},
                                   {"code", std::string(CodeName(why.code()))}},
                                  "the world of this round has ended"});
  const World& world = worlds_.at(round);
  last_attempt_ = std::max(last_attempt_, world.launcher_attempt);
  ended_by_leave_ = why.code() == StatusCode::kLeft;
  Gone(world);
  worlds_.erase(round);
  CallClaimants();
}

// The launcher restarted the job: whoever is still there of the old attempt is out.
void Membership::SupersedeWorld(std::uint64_t round, std::uint64_t attempt, Moment moment,
                                MembershipEffects& effects) {
  World& world = worlds_.at(round);
  const Status cause = Superseded(world.generation, world.launcher_attempt, attempt);
  std::vector<SessionId> members;
  for (const Seat& seat : world.seats) {
    if (seat.Live()) members.push_back(seat.session);
  }
  const std::uint64_t ended = world.generation;
  EndWorld(round, cause, effects);
  for (const SessionId session : members) {
    effects.Tell(session, Fence{ended, cause});
    Lose(*Find(session), cause, moment, effects);
  }
}

// What a session must know that it may have missed while it had no connection.
void Membership::PushState(const Participant& who, MembershipEffects& effects) const {
  const auto push = [&effects, &who](Event event) { effects.Tell(who.session, std::move(event)); };
  switch (who.state) {
    case State::kLost:
      return push(SessionLostEvent{who.out});
    case State::kRefused:
      if (!who.out.ok()) push(JoinRefusedEvent{who.out, who.request.number});
      return;
    case State::kWaiting:
    case State::kSpare:
    case State::kLeft:
      return;
    case State::kSeated:
      break;
  }
  const World* world = WorldOf(who);
  RESILIENT_CHECK(world != nullptr);
  const Seat& seat = world->seats.At(who.request.rank);
  switch (world->phase) {
    case Phase::kBuilding:
      return push(world->view);
    case Phase::kRunning:
      push(world->view);
      return push(RunningEvent{world->generation});
    case Phase::kForming:
      if (seat.state == SeatState::kMember) {
        push(Fence{world->view->view.generation, world->first_cause});
        if (seat.refused) push(JoinRefusedEvent{world->first_cause, who.request.number});
      }
      return;
    case Phase::kRefused:
      if (seat.state == SeatState::kMember) {
        return push(Fence{world->view->view.generation, world->first_cause});
      }
      return push(JoinRefusedEvent{world->first_cause, who.request.number});
  }
}

void Membership::AppendJson(std::string& out, Moment moment, StatusPage& page) const {
  out += "\"life\":" + std::to_string(life_) + ",\"generation\":" + std::to_string(generation_) +
         ",\"worlds\":[";
  const char* comma = "";
  for (auto at = worlds_.lower_bound(page.first_round(job_)); at != worlds_.end(); ++at) {
    const auto& [round, world] = *at;
    if (!page.Take(StatusPage::kTold, job_, round, page.first_rank(job_, round))) break;
    out += std::exchange(comma, ",");
    out += "{\"round\":" + std::to_string(round) +
           ",\"world_size\":" + std::to_string(world.size()) +
           ",\"generation\":" + std::to_string(world.generation) +
           ",\"attempt\":" + std::to_string(world.launcher_attempt) + ",\"phase\":\"" +
           std::string(PhaseName(world.phase)) + "\",\"first_cause\":" +
           JsonString(world.first_cause.ok() ? "" : world.first_cause.ToString());
    AppendMembers(world, moment, page, out);
    out += '}';
  }
  out += "],\"spares\":[";
  comma = "";
  std::uint64_t number = 0;
  const std::uint64_t first = page.first_rank(job_, StatusPage::kSparesRound);
  for (const SessionId session : spares_) {
    const Participant* who = Find(session);
    if (!who || who->state != State::kSpare || number++ < first) continue;
    if (!page.Take(StatusPage::kTold, job_, StatusPage::kSparesRound, number - 1)) break;
    out += std::exchange(comma, ",");
    out += "{\"state\":\"spare\"";
    AppendHolder(*who, moment, out);
    out += '}';
  }
  out += ']';
}

// Seats that nobody has had yet are told as ranges: [first, last].
void Membership::AppendMembers(const World& world, Moment moment, StatusPage& page,
                               std::string& out) const {
  out += ",\"members\":[";
  const char* comma = "";
  std::string empty;
  int empty_since = -1;
  const auto end_range = [&](int rank) {
    if (empty_since < 0) return;
    empty += empty.empty() ? "[" : ",[";
    empty += std::to_string(empty_since) + "," + std::to_string(rank - 1) + "]";
    empty_since = -1;
  };
  const auto first = page.first_rank(job_, world.round);
  int rank = static_cast<int>(std::min<std::uint64_t>(first, world.seats.size()));
  for (; rank < world.size(); ++rank) {
    const Seat& seat = world.seats.At(rank);
    const bool is_empty = seat.state == SeatState::kEmpty;
    const std::size_t cost = is_empty && empty_since >= 0 ? 1 : StatusPage::kTold;
    if (!page.Take(cost, job_, world.round, static_cast<std::uint64_t>(rank))) break;
    if (is_empty) {
      if (empty_since < 0) empty_since = rank;
      continue;
    }
    end_range(rank);
    out += std::exchange(comma, ",");
    out += "{\"rank\":" + std::to_string(rank) + ",\"state\":\"" +
           std::string(SeatStateName(seat.state)) + "\"";
    if (const Participant* who = Find(seat.session)) AppendHolder(*who, moment, out);
    out += '}';
  }
  end_range(rank);
  out += "],\"empty_seats\":[" + empty + "]";
}

// Opens no object and closes none.
void Membership::AppendHolder(const Participant& who, Moment moment, std::string& out) {
  out += ",\"host\":" + JsonString(who.hello.process.host) +
         ",\"pid\":" + std::to_string(who.hello.process.pid) +
         ",\"session\":" + JsonString(who.hello.session) +
         ",\"connected\":" + (who.connected ? "true" : "false") +
         ",\"last_seen_s\":" + Seconds(moment.now - who.last_seen) +
         ",\"held\":" + (who.hold ? "true" : "false");
  if (!who.hold) return;
  out += ",\"held_for_s\":" + Seconds(who.held_until - moment.now) +
         ",\"held_because\":" + JsonString(who.hold->reason);
}

}  // namespace resilient::store
