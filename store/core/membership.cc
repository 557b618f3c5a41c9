#include "store/core/membership.h"

#include <algorithm>

#include "runtime/base/check.h"

namespace resilient::store {
namespace {

constexpr Duration kMassCloseWindow = std::chrono::seconds(1);
constexpr std::size_t kMassCloseFloor = 8;

}  // namespace

bool SameProcess(const ProcessIdentity& known, const ProcessIdentity& told) {
  if (known.boot_id != told.boot_id || known.pid != told.pid) return false;
  if (!told.pid_namespace.empty() && known.pid_namespace != told.pid_namespace) return false;
  return told.start_time == 0 || known.start_time == told.start_time;
}

void MembershipEffects::Tell(SessionId session, Event event) {
  push.push_back({session, std::move(event)});
}

Membership::Membership(std::string job, MembershipLimits limits, std::uint64_t first_generation,
                       const SecretMaker& make_secret, Journal* journal, Pool* all_seats)
    : job_(std::move(job)),
      limits_(limits),
      journal_(journal),
      make_secret_(make_secret),
      generation_(first_generation),
      seats_(limits.seats, all_seats) {}

Status Membership::Ready(SessionId session, std::uint64_t generation, Moment moment,
                         MembershipEffects& effects) {
  RESILIENT_RETURN_IF_ERROR(Standing(session));
  Participant* who = Find(session);
  World* world = who && who->state == State::kSeated ? WorldOf(*who) : nullptr;
  // Of a generation that was fenced meanwhile: the fence is on its way.
  if (!world || world->generation != generation || world->phase != Phase::kBuilding) return {};
  Seat& seat = SeatOf(*world, *who);
  if (seat.ready) return {};
  seat.ready = true;
  Changed(*world, seat);
  if (++world->ready < world->seats.size()) return {};
  world->phase = Phase::kRunning;
  Changed(*world);
  effects.log.push_back(LogRecord{"running",
                                  {{"job", job_},
                                   {"generation", std::to_string(generation)},
                                   {"ranks", std::to_string(world->size())}},
                                  "every member is ready"});
  for (const Seat& member : world->seats) {
    effects.Tell(member.session, RunningEvent{generation});
  }
  Settle(moment, effects);
  return {};
}

Status Membership::Leave(SessionId session, Moment moment, MembershipEffects& effects) {
  Participant* who = Find(session);
  if (!who || !who->Active()) return {};  // Nothing to give up, or a repeat.
  if (who->hold) EndHolds({who}, "it has left", moment, effects);
  const State before = who->state;
  who->state = State::kLeft;
  who->out = Status(StatusCode::kStaleGeneration,
                    "this session has left the job; open a new one to join again");
  --active_;
  ended_well_ = true;
  Changed(*who);
  ChangedJob();
  effects.released.push_back(session);
  effects.lost.push_back({session, who->out});
  effects.log.push_back(Record("leave", *who, "has left"));
  World* world = WorldOf(*who);
  if (before == State::kSeated && world) LeaveSeat(*world, *who, moment, effects);
  ReplaceClaimants(*who);
  Settle(moment, effects);
  if (who->hello.hosts_store) {
    const bool another =
        std::any_of(participants_.begin(), participants_.end(), [who](const auto& entry) {
          return entry.second.Active() && entry.second.hello.incarnation == who->hello.incarnation;
        });
    // Whoever has joined the next round already counts on meeting the host here, and members whose
    // generation this leave has ended on meeting a replacement.
    const bool awaited = std::any_of(worlds_.begin(), worlds_.end(), [](const auto& entry) {
      return entry.second.phase == Phase::kForming && entry.second.live > 0;
    });
    host_left_ = host_left_ || (!another && !awaited);
    ChangedJob();
    if (host_left_) effects.listens = false;
  }
  return {};
}

Status Membership::Report(SessionId session, const resilient::Report& report, Moment moment,
                          MembershipEffects& effects) {
  RESILIENT_RETURN_IF_ERROR(Standing(session));
  Participant* who = Find(session);
  World* world = who ? WorldOf(*who) : nullptr;
  if (world && report.kind == ReportKind::kProcessDied) {
    Status taken = ReportDeath(*world, *who, report, moment, effects);
    Settle(moment, effects);
    return taken;
  }
  if (report.kind == ReportKind::kEnding) {
    if (who) EndBy(*who, report, moment, effects);
    Settle(moment, effects);
    return {};
  }
  const bool current = world && who->state == State::kSeated &&
                       world->generation == report.generation &&
                       (world->phase == Phase::kBuilding || world->phase == Phase::kRunning);
  if (!current) return {};  // Of the past: whatever it was, it is over.
  const std::string& text = report.status.message();
  FailureDetail detail = report.status.detail();
  detail.generation = world->generation;
  switch (report.kind) {
    case ReportKind::kLinkLost:
    case ReportKind::kUnreached:
      if (report.accused_rank < 0 || report.accused_rank >= world->size() ||
          report.accused_rank == who->request.rank) {
        return Status(StatusCode::kInvalidArgument,
                      "a report of a lost link to rank " + std::to_string(report.accused_rank) +
                          " by rank " + std::to_string(who->request.rank) + " of " +
                          std::to_string(world->size()));
      }
      Accuse(*world, *who, report, moment, effects);
      break;
    case ReportKind::kMismatch:
      // Where a member has left, the others may be anywhere: that comes first.
      if (FenceForLeaver(*world, MetBy(who->request.rank, text), moment, effects)) break;
      FenceWorld(*world, Status(StatusCode::kMismatch, text, detail), moment, effects);
      break;
    case ReportKind::kNeedsLeaver:
      NeedLeaver(*world, *who, report, moment, effects);
      break;
    case ReportKind::kCommFailed: {
      const StatusCode code = report.status.code();
      const bool kept = code == StatusCode::kCommStalled || code == StatusCode::kDeviceLost;
      FenceWorld(*world, Status(kept ? code : StatusCode::kCommFailed, text, detail), moment,
                 effects);
      break;
    }
    case ReportKind::kRebuild:
      if (world->phase == Phase::kRunning && FenceForLeaver(*world, "", moment, effects)) {
        Settle(moment, effects);
        return Status(StatusCode::kLeft, "a member has left: the generation ends");
      }
      break;
    case ReportKind::kRoom:
      OfferRoom(*world, *who, report, moment, effects);
      break;
    case ReportKind::kProcessDied:
    case ReportKind::kEnding:
      break;  // Above.
  }
  Settle(moment, effects);
  return {};
}

// A fact about a process, not about a generation: it counts for whatever that process still holds.
Status Membership::ReportDeath(World& world, const Participant& reporter,
                               const resilient::Report& report, Moment moment,
                               MembershipEffects& effects) {
  const bool numbered = world.resized_at == 0;
  if (numbered && (report.accused_rank < 0 || report.accused_rank >= world.size())) {
    return Status(StatusCode::kInvalidArgument,
                  "a report of the death of rank " + std::to_string(report.accused_rank) +
                      " in a world of " + std::to_string(world.size()));
  }
  // By its process: the reporter's number of it may be one of before the world was resized.
  Participant* accused = nullptr;
  for (const Seat& seat : world.seats) {
    Participant* holder = Find(seat.session);
    if (holder && holder->hello.incarnation == report.accused_incarnation) accused = holder;
  }
  if (!accused) return {};  // It has no seat any more: what is told of is over.
  if (accused->hello.incarnation == reporter.hello.incarnation) {
    return Status(StatusCode::kInvalidArgument, "a process reported its own death");
  }
  if (!accused->Active()) return {};
  accused->ended.clear();
  if (report.wait_status >= 0) {
    const ExitReportOp exit = FromWaitStatus(report.wait_status);
    accused->ended = HowItEnded(exit);
    if (IsCleanEnd(exit)) return Leave(accused->session, moment, effects);
    if (exit.signal != 0) {  // A launcher could not say more.
      Lose(*accused, LossAfterExit(*accused, moment), moment, effects);
      return {};
    }
  }
  ProcessEnded(*accused, moment, effects);
  return {};
}

void Membership::Accuse(World& world, const Participant& reporter, const resilient::Report& report,
                        Moment moment, MembershipEffects& effects) {
  const Seat& seat = world.seats.At(report.accused_rank);
  Participant* accused = Find(seat.session);
  RESILIENT_CHECK(accused != nullptr);  // In BUILDING and RUNNING every seat had a holder.
  if (seat.state == SeatState::kLeft) {
    // Where an operation waits over that link, the member reports a need as well.
    if (report.kind == ReportKind::kLinkLost) return;
    const std::string& text = report.status.message();
    (void)FenceForLeaver(world, MetBy(reporter.request.rank, text), moment, effects);
    return;
  }
  if (accused->accusation && accused->accusation->generation == world.generation) return;
  // A link that was never up is silent, and silence is no witness.
  if (report.kind == ReportKind::kUnreached) return;
  accused->accusation =
      Accusation{world.generation, reporter.request.rank, report.status.message()};
  Changed(*accused);
  Ping(*accused, moment, effects);
  ArmLoneClose(*accused, moment.now);
}

void Membership::Ping(Participant& who, Moment moment, MembershipEffects& effects) {
  who.answers_due = kAnswersWanted;
  effects.Tell(who.session, PingEvent{++pings_});
  Arm(moment.now + limits_.ping_grace, TimerKind::kPing, who.session);
}

void Membership::OnControlOpen(SessionId session, Moment moment, MembershipEffects& effects) {
  Participant* who = Find(session);
  if (!who) return;
  who->connected = true;
  who->closed_at.reset();
  PushState(*who, effects);
  PushHolds(session, moment, effects);
  if (who->answers_due > 0) effects.Tell(session, PingEvent{++pings_});
  if (who->Active()) who->last_seen = moment.now;
  if (who->state == State::kSpare) FillLostSeats(moment, effects);
}

void Membership::OnControlFrame(SessionId session, Moment moment, MembershipEffects& effects) {
  Participant* who = Find(session);
  if (!who || !who->Active()) return;
  who->last_seen = moment.now;
  if (who->answers_due == 0) return;
  if (--who->answers_due > 0) {
    effects.Tell(session, PingEvent{++pings_});
    return;
  }
  OnAnswers(*who, moment, effects);
  Settle(moment, effects);
}

void Membership::OnAnswers(Participant& who, Moment moment, MembershipEffects& effects) {
  RefuseClaimants(who, moment, effects);
  if (!who.accusation) return;
  const Accusation accusation = *who.accusation;
  who.accusation.reset();
  Changed(who);
  World* world = WorldOf(who);
  if (!world || world->generation != accusation.generation) return;
  FailureDetail detail;
  detail.rank = who.request.rank;
  detail.host = who.hello.process.host;
  detail.pid = who.hello.process.pid;
  detail.generation = world->generation;
  detail.since_unix_s = moment.wall_s;
  const std::string why = accusation.text.empty() ? "" : ": " + accusation.text;
  FenceWorld(*world,
             Status(StatusCode::kCommFailed,
                    "the link between rank " + std::to_string(accusation.reporter) + " and " +
                        Name(ClaimantOf(who)) + " broke in generation " +
                        std::to_string(world->generation) + " while both are alive" + why,
                    detail),
             moment, effects);
}

void Membership::OnControlClosed(SessionId session, Moment moment) {
  Participant* who = Find(session);
  if (!who) return;
  who->connected = false;
  if (!who->Active()) return;
  who->closed_at = moment.now;
  closes_.push_back(moment.now);
  // The newest ones decide; older ones only take room.
  while (closes_.size() > std::max(kMassCloseFloor, active_ / 10) + 1) closes_.pop_front();
  ArmLoneClose(*who, moment.now);
}

void Membership::ArmLoneClose(const Participant& who, Instant now) {
  if (!who.closed_at) return;
  Arm(std::max(now, *who.closed_at + limits_.lone_close_grace), TimerKind::kLoneClose, who.session);
}

// A network that ends one connection is no death. With a process the links to its peers end too,
// and each of these says so; or another process has come for its seat. Where neither can be, before
// the links are up or without a seat, the lease decides.
bool Membership::HasSecondWitness(const Participant& who) const {
  if (!who.claimants.empty()) return true;
  const World* world = who.state == State::kSeated ? WorldOf(who) : nullptr;
  return world && who.accusation && who.accusation->generation == world->generation;
}

bool Membership::MassClose(Instant now) const {
  const auto recent = std::count_if(closes_.begin(), closes_.end(),
                                    [now](Instant when) { return now - when < kMassCloseWindow; });
  return static_cast<std::size_t>(recent) > std::max(kMassCloseFloor, active_ / 10);
}

void Membership::OnLeaseExpired(SessionId session, Duration silent, Duration ttl, Moment moment,
                                MembershipEffects& effects) {
  Participant* who = Find(session);
  if (!who || !who->Active()) return;
  const std::string how =
      "sent no heartbeat for " + Seconds(silent) + " s (lease " + Seconds(ttl) + " s)";
  Lose(*who, LossOf(*who, how, moment), moment, effects, "expiry");
  Settle(moment, effects);
}

void Membership::OnProcessExit(SessionId session, Moment moment, MembershipEffects& effects) {
  if (Participant* who = Find(session); who && who->Active()) ProcessEnded(*who, moment, effects);
  Settle(moment, effects);
}

void Membership::ProcessEnded(Participant& who, Moment moment, MembershipEffects& effects) {
  if (std::exchange(who.exited, true)) return;
  if (who.hello.supervised) {
    return Arm(moment.now + limits_.exit_report_grace, TimerKind::kExitReport, who.session);
  }
  Lose(who, LossAfterExit(who, moment), moment, effects);
}

Status Membership::LossAfterExit(const Participant& who, Moment moment) const {
  return LossOf(who,
                who.ended.empty() ? "is gone: its process ended (how was not reported)" : who.ended,
                moment);
}

void Membership::OnExitReport(const ExitReportOp& report, Moment moment,
                              MembershipEffects& effects) {
  const auto found = by_process_.find({report.process.boot_id, report.process.pid});
  if (found == by_process_.end()) return;
  const std::set<SessionId> sessions = found->second;
  for (const SessionId session : sessions) {
    Participant* who = Find(session);
    if (!who || !SameProcess(who->hello.process, report.process)) continue;
    if (who->Active() && !IsCleanEnd(report)) {
      Lose(*who, LossOf(*who, HowItEnded(report), moment), moment, effects);
    } else {
      (void)Leave(session, moment, effects);  // Of one that has not said so itself.
      if (who->state == State::kLeft) LoseLeaver(*who, report, moment, effects);
    }
  }
  Settle(moment, effects);
}

void Membership::Lose(Participant& who, const Status& cause, Moment moment,
                      MembershipEffects& effects, std::string_view event) {
  if (who.hold) EndHolds({&who}, "it is lost", moment, effects);
  const State before = who.state;
  who.state = State::kLost;
  who.out = OutOfJob(cause);
  who.accusation.reset();
  who.answers_due = 0;
  --active_;
  ended_well_ = false;
  Changed(who);
  ChangedJob();
  effects.released.push_back(who.session);
  effects.lost.push_back({who.session, who.out});
  effects.Tell(who.session, SessionLostEvent{who.out});
  effects.log.push_back(Record(event, who, cause.message()));
  ReplaceClaimants(who);
  World* world = WorldOf(who);
  if (before != State::kSeated || !world) return;
  Seat& seat = SeatOf(*world, who);
  world->joined -= seat.state == SeatState::kJoined ? 1 : 0;
  --world->live;
  seat.state = world->viewed ? SeatState::kLost : SeatState::kEmpty;
  seat.texts.Make().note = world->viewed ? "" : cause.message();
  seat.vacant_since = moment.now;
  seat.gone_for_good = false;
  Changed(*world, seat);
  NoteFailure(*world, cause);
  const std::uint64_t round = world->round;
  if (world->phase == Phase::kBuilding || world->phase == Phase::kRunning) {
    FenceWorld(*world, cause, moment, effects);
  }
  EndIfDeserted(round, cause, moment, effects);
  if (const auto found = worlds_.find(round); found != worlds_.end()) {
    RefuseIfDue(found->second, moment, effects);
  }
}

Status Membership::LossOf(const Participant& who, const std::string& how, Moment moment) const {
  const World* world = WorldOf(who);
  return RankLost(ClaimantOf(who), how, {moment.now - who.last_seen, moment.wall_s},
                  world ? world->generation : generation_);
}

void Membership::OnTick(Moment moment, bool input_drained, MembershipEffects& effects) {
  // Whoever has called back by now may be among the input that is not read yet.
  while (input_drained && !timers_.empty() && timers_.begin()->first <= moment.now) {
    const Timer timer = timers_.begin()->second;
    timers_.erase(timers_.begin());
    OnTimer(timer, moment, effects);
  }
  EndDueHolds(moment, effects);
  if (input_drained) Diagnose(moment, effects);
  Settle(moment, effects);
}

void Membership::OnTimer(Timer timer, Moment moment, MembershipEffects& effects) {
  if (timer.first == TimerKind::kWorld) {
    const auto world = worlds_.find(timer.second);
    if (world == worlds_.end()) return;
    world->second.armed.reset();
    return RefuseIfDue(world->second, moment, effects);
  }
  Participant* who = Find(timer.second);
  if (!who || !who->Active()) return;
  switch (timer.first) {
    case TimerKind::kLoneClose:
      if (who->closed_at && !who->hold &&
          moment.now - *who->closed_at >= limits_.lone_close_grace && !MassClose(moment.now) &&
          HasSecondWitness(*who)) {
        const std::string links = who->accusation
                                      ? " and its links (reported by rank " +
                                            std::to_string(who->accusation->reporter) + "),"
                                      : "";
        Lose(*who,
             LossOf(*who,
                    "lost its connection" + links + " and did not come back within " +
                        Seconds(limits_.lone_close_grace) + " s",
                    moment),
             moment, effects);
      }
      break;
    case TimerKind::kExitReport:
      Lose(*who, LossAfterExit(*who, moment), moment, effects);
      break;
    case TimerKind::kPing:
      // With a connection that is still open the lease decides, and so it does for one that has not
      // called yet since this server started.
      if (who->accusation && who->answers_due > 0 && who->closed_at && !who->hold) {
        Lose(
            *who,
            LossOf(*who,
                   "lost its links (reported by rank " + std::to_string(who->accusation->reporter) +
                       ") and its connection to the store, and did not answer within " +
                       Seconds(limits_.ping_grace) + " s",
                   moment),
            moment, effects);
      }
      break;
    case TimerKind::kSpare:
      SendAwayIfDue(*who, moment, effects);
      break;
    case TimerKind::kHold:
      if (who->hold && who->held_until <= moment.now) due_holds_.push_back(who->session);
      break;
    case TimerKind::kWorld:
      break;
  }
}

bool Membership::Needs(SessionId session) const {
  const Participant* who = Find(session);
  return who && (who->Active() || WorldOf(*who));
}

void Membership::Forget(SessionId session) {
  const Participant* who = Find(session);
  if (!who || Needs(session)) return;
  Changed(*who);
  const auto process = by_process_.find({who->hello.process.boot_id, who->hello.process.pid});
  if (process != by_process_.end()) {
    process->second.erase(session);
    if (process->second.empty()) by_process_.erase(process);
  }
  participants_.erase(session);
}

Status Membership::Standing(SessionId session) const {
  const Participant* who = Find(session);
  return who && who->state == State::kLost ? who->out : Status();
}

Status Membership::CheckAccess(SessionId session, std::uint64_t scope,
                               std::uint64_t generation) const {
  if (scope == 0 && generation == 0) return {};
  const Participant* who = Find(session);
  if (who && generation == 0 && HasLeft(*who, scope)) return {};
  if (who && !who->out.ok() && !(who->state == State::kSeated)) {
    return Status(StatusCode::kStaleGeneration, who->out.message(), who->out.detail());
  }
  const World* world = who && who->state == State::kSeated ? WorldOf(*who) : nullptr;
  if (!world || (scope != 0 && scope != world->round)) {
    return Status(StatusCode::kStaleGeneration,
                  "this session is not in round " + std::to_string(scope) +
                      " of the job; its keys are for the members of that round");
  }
  if (generation != 0 && generation != world->generation) {
    const std::string why = world->first_cause.ok() ? "" : ": " + world->first_cause.message();
    return Status(StatusCode::kStaleGeneration,
                  "generation " + std::to_string(generation) + " is over (the present one is " +
                      std::to_string(world->generation) + ")" + why,
                  world->first_cause.detail());
  }
  return {};
}

// What a library keeps of a world that its program has left, while others are in it.
bool Membership::HasLeft(const Participant& who, std::uint64_t round) const {
  const World* world = who.state == State::kLeft ? WorldOf(who) : nullptr;
  if (!world || world->round != round) return false;
  const Seat* seat = world->seats.Find(who.request.rank);
  return seat != nullptr && seat->session == who.session;
}

Participant* Membership::Find(SessionId session) {
  const auto found = participants_.find(session);
  return found == participants_.end() ? nullptr : &found->second;
}

const Participant* Membership::Find(SessionId session) const {
  const auto found = participants_.find(session);
  return found == participants_.end() ? nullptr : &found->second;
}

World* Membership::WorldOf(const Participant& who) {
  const auto world = worlds_.find(who.round);
  if (world == worlds_.end()) return nullptr;
  // Rounds start anew in each life: the seat must still be its own.
  const Seat* seat = world->second.seats.Find(who.request.rank);
  return seat != nullptr && seat->session == who.session ? &world->second : nullptr;
}

const World* Membership::WorldOf(const Participant& who) const {
  return const_cast<Membership*>(this)->WorldOf(who);
}

Seat& Membership::SeatOf(World& world, const Participant& who) {
  return world.seats.At(who.request.rank);
}

Claimant Membership::ClaimantOf(const Participant& who) {
  return {who.request.rank, who.hello.process};
}

LogRecord Membership::Record(std::string_view event, const Participant& who,
                             std::string text) const {
  const ProcessIdentity& process = who.hello.process;
  return {event,
          {{"job", job_},
           {"rank", who.request.rank == kSpareRank ? "spare" : std::to_string(who.request.rank)},
           {"host", process.host},
           {"pid", std::to_string(process.pid)},
           {"incarnation", who.hello.incarnation},
           {"generation", std::to_string(generation_)}},
          std::move(text)};
}

bool Membership::AnyoneSeated() const {
  return std::any_of(worlds_.begin(), worlds_.end(),
                     [](const auto& entry) { return entry.second.live > 0; });
}

void Membership::Arm(Instant when, TimerKind kind, std::uint64_t id) {
  timers_.emplace(when, Timer{kind, id});
}

}  // namespace resilient::store
