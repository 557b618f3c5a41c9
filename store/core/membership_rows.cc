#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "store/core/codec.h"
#include "store/core/membership.h"
#include "store/core/participant_row.h"
#include "store/core/row_codec.h"

namespace resilient::store {

template <typename Archive>
void Fields(Archive& archive, Seat& seat) {
  archive.Enum(seat.state, SeatState::kLeft);
  SeatTexts& texts = seat.texts.Make();
  archive(seat.session, seat.ready, seat.refused, seat.gone_for_good, texts.note,
          texts.incarnations);
}

namespace {

// The value of a job's row. Thread: value type.
struct JobState {
  std::uint64_t life = 0;
  std::uint64_t rounds = 0;
  std::uint64_t generation = 0;
  bool ended_well = true;
  bool host_left = false;
};

// The value of a world's row; seats and view have rows of their own. Thread: value type.
struct WorldState {
  World& world;
  std::uint64_t size = 0;
};

template <typename Archive>
void Fields(Archive& archive, JobState& job) {
  archive(job.life, job.rounds, job.generation, job.ended_well, job.host_left);
}

template <typename Archive>
void Fields(Archive& archive, WorldState& state) {
  World& world = state.world;
  archive(state.size, world.generation, world.launcher_attempt);
  archive.Enum(world.phase, Phase::kRefused);
  archive(world.viewed, world.join_timeout, world.seat_wait, world.first_cause, world.shrinking,
          world.resized_at, world.grown_from, world.former, world.secret);
}

std::string WorldRowValue(const World& world) {
  // Only read: RowWriter and RowReader share one description of the fields.
  return EncodeRow(WorldState{const_cast<World&>(world), world.seats.size()});
}

template <typename What>
std::vector<What> TakeOnce(std::vector<What>& list) {
  std::vector<What> taken = std::exchange(list, {});
  std::sort(taken.begin(), taken.end());
  taken.erase(std::unique(taken.begin(), taken.end()), taken.end());
  return taken;
}

Status Damaged(std::string what) { return Status(StatusCode::kInternal, std::move(what)); }

}  // namespace

std::string Membership::JobRowValue() const {
  return EncodeRow(JobState{life_, rounds_, generation_, ended_well_, host_left_});
}

std::string Membership::RowOf(const World& world, const Seat& seat) const {
  return SeatRow(job_, world.round, static_cast<std::uint64_t>(world.seats.RankOf(seat)));
}

void Membership::Keep() {
  if (!Keeps()) return;
  if (std::exchange(changed_.job, false)) journal_->Put(JobRow(job_), JobRowValue());
  for (const std::uint64_t round : TakeOnce(changed_.worlds)) {
    const auto world = worlds_.find(round);
    if (world == worlds_.end()) continue;  // Gone, and so are its rows.
    journal_->Put(WorldRow(job_, round), WorldRowValue(world->second));
  }
  for (const auto& [round, rank] : TakeOnce(changed_.seats)) {
    const auto world = worlds_.find(round);
    const Seat* seat = world == worlds_.end() ? nullptr : world->second.seats.Find(rank);
    if (seat && seat->Used()) journal_->Put(RowOf(world->second, *seat), EncodeRow(*seat));
  }
  for (const std::uint64_t round : TakeOnce(changed_.views)) {
    const auto world = worlds_.find(round);
    if (world == worlds_.end() || !world->second.viewed) continue;
    journal_->Put(ViewRow(job_, round), EncodeRow(world->second.view->view));
  }
  for (const SessionId session : TakeOnce(changed_.participants)) {
    if (const Participant* who = Find(session)) {
      journal_->Put(ParticipantRow(session), EncodeRow(*who));
    } else {
      journal_->Remove(ParticipantRow(session));
    }
  }
}

// At once and not in Keep: a world of the same round may follow in the same step.
void Membership::Gone(const World& world) {
  if (!Keeps()) return;
  journal_->Remove(WorldRow(job_, world.round));
  for (const Seat& seat : world.seats) {
    if (seat.Used()) journal_->Remove(RowOf(world, seat));
  }
  if (world.viewed) journal_->Remove(ViewRow(job_, world.round));
}

void Membership::RemoveRows() {
  if (!Keeps()) return;
  changed_ = Changes();
  changed_.job = false;
  for (const auto& [round, world] : worlds_) Gone(world);
  for (const auto& [session, who] : participants_) journal_->Remove(ParticipantRow(session));
  journal_->Remove(JobRow(job_));
}

void Membership::AppendRows(Rows& rows) const {
  rows.emplace(JobRow(job_), JobRowValue());
  for (const auto& [round, world] : worlds_) {
    rows.emplace(WorldRow(job_, round), WorldRowValue(world));
    for (const Seat& seat : world.seats) {
      if (seat.Used()) rows.emplace(RowOf(world, seat), EncodeRow(seat));
    }
    if (world.viewed) rows.emplace(ViewRow(job_, round), EncodeRow(world.view->view));
  }
  for (const auto& [session, who] : participants_) {
    rows.emplace(ParticipantRow(session), EncodeRow(who));
  }
}

// ---- Back again ----

Status Membership::Restore(const RowName& name, std::string_view value, const Hello* hello) {
  if (name.kind == RowKind::kParticipant) return RestoreParticipant(name.session, value, hello);
  if (name.kind == RowKind::kJob) {
    JobState job;
    if (!DecodeRow(value, job)) return Damaged("this is no job");
    life_ = job.life;
    rounds_ = job.rounds;
    generation_ = job.generation;
    ended_well_ = job.ended_well;
    host_left_ = job.host_left;
    ended_by_leave_ = job.ended_well;
    changed_.job = false;
    return {};
  }
  if (name.kind == RowKind::kWorld) {
    World& world = worlds_.try_emplace(name.scope, &seats_).first->second;
    world.round = name.scope;
    WorldState state{world};
    if (!DecodeRow(value, state) || state.size < 1 || state.size > kWorldSizeMax ||
        world.generation > generation_ || world.round > rounds_) {
      return Damaged("this is no world of the job");
    }
    world.seats.Resize(state.size);
    return {};
  }
  const auto world = worlds_.find(name.scope);
  if (world == worlds_.end()) return Damaged("its world is missing");
  if (name.kind == RowKind::kSeat) return RestoreSeat(name, value);
  RESILIENT_CHECK(name.kind == RowKind::kView);
  View view;
  if (!DecodeRow(value, view)) return Damaged("this is no view");
  world->second.view = Share(std::move(view));
  return {};
}

Status Membership::RestoreSeat(const RowName& name, std::string_view value) {
  Seats& seats = worlds_.at(name.scope).seats;
  const bool is_rank = name.index < seats.size();
  if (!is_rank || !DecodeRow(value, seats.At(static_cast<int>(name.index)))) {
    return Damaged("this is no seat of its world");
  }
  return {};
}

Status Membership::RestoreParticipant(SessionId session, std::string_view value,
                                      const Hello* hello) {
  Participant& who = participants_[session];
  who.session = session;
  who.connected = false;
  if (!hello || !DecodeRow(value, who)) return Damaged("this is nobody who joined");
  who.hello = *hello;
  by_process_[{hello->process.boot_id, hello->process.pid}].insert(session);
  return {};
}

Status Membership::CheckRestored(const Participant& who) const {
  const auto damaged = [this, &who](const char* what) {
    return Damaged("job " + job_ + ": " + Name(ClaimantOf(who)) + " " + what);
  };
  const World* world = WorldOf(who);
  if (who.state == State::kSeated) {
    if (who.request.rank < 0 || !world || who.request.rank >= world->size() ||
        !SeatOf(*const_cast<World*>(world), who).Live()) {
      return damaged("is to hold a seat and holds none");
    }
  } else if (who.request.rank < 0) {
    // Refused for it; the row tells a repeat of the join so.
    if (who.state == State::kWaiting) return damaged("waits for a seat and has no rank");
  } else if (world && who.Active() && SeatOf(*const_cast<World*>(world), who).Live()) {
    return damaged("holds a seat and is to hold none");
  }
  if (who.state == State::kWaiting && !participants_.contains(who.holder)) {
    return damaged("waits for nobody");
  }
  return {};
}

Status Membership::FinishRestore(Moment moment, MembershipEffects& effects) {
  DropBadSpares(effects);
  std::size_t live = 0;
  for (auto& [round, world] : worlds_) {
    RESILIENT_RETURN_IF_ERROR(world.FinishRestore(moment.now));
    live += world.live;
  }
  std::size_t seated = 0;
  for (auto& [session, who] : participants_) {
    RESILIENT_RETURN_IF_ERROR(CheckRestored(who));
    who.last_seen = moment.now;
    if (!who.Active()) continue;
    ++active_;
    seated += who.state == State::kSeated ? 1 : 0;
    effects.granted.push_back(session);
    if (who.hold) BeginHold(who, moment, effects);
    if (who.accusation) who.answers_due = kAnswersWanted;
    if (who.state == State::kSpare) RestoreSpare(who, moment);
    if (who.state != State::kWaiting) continue;
    Participant& holder = participants_.at(who.holder);
    holder.claimants.push_back(session);
    holder.answers_due = kAnswersWanted;
    if (!holder.Active()) ReplaceClaimants(holder);
  }
  if (live != seated) return Damaged("job " + job_ + " has seats that nobody holds");
  std::sort(effects.granted.begin(), effects.granted.end());
  std::sort(effects.held.begin(), effects.held.end());
  Settle(moment, effects);
  std::vector<std::uint64_t> rounds;
  rounds.reserve(worlds_.size());
  for (const auto& [round, world] : worlds_) rounds.push_back(round);
  for (const std::uint64_t round : rounds) {
    if (const auto found = worlds_.find(round); found != worlds_.end()) {
      RefuseIfDue(found->second, moment, effects);
    }
  }
  return {};
}

}  // namespace resilient::store
