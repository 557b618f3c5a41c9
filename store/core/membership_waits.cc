#include <algorithm>
#include <utility>

#include "runtime/base/texts.h"
#include "store/core/membership.h"

// Who waits for whom, and what follows from it. Texts about ranks that are late, of deadlocks and
// of ranks that stand still.
namespace resilient::store {
namespace {

std::string Behind(std::string_view what, const std::string& text) {
  return text.empty() ? "" : std::string(what) + text;
}

// "; thread 'trainer' in train.py:41 step"; empty where that is not known.
std::string Placed(std::string_view separator, const Whereabouts& where) {
  if (where.at.empty()) return {};
  return std::string(separator) + TextOfThread(where.thread) + " in " + where.at;
}

// Those that exist, each once, ascending.
void KeepRanks(int world_size, std::vector<int>* ranks) {
  std::erase_if(*ranks, [world_size](int rank) { return rank < 0 || rank >= world_size; });
  std::sort(ranks->begin(), ranks->end());
  ranks->erase(std::unique(ranks->begin(), ranks->end()), ranks->end());
}

std::string LastText(const DeviceProgress& device, Duration later) {
  if (device.last.empty()) return ", and has finished no operation before";
  return ", and has finished " + device.last + " last, " + Seconds(device.last_ago + later) +
         " s ago";
}

// Of a device that is waited for: what it does, by its rank's account.
std::string DeviceText(const ProgressBook::Device& told, Moment moment) {
  std::string text = ", has submitted it, and its device has not begun it";
  if (told.progress == nullptr) return text;
  const DeviceProgress& device = *told.progress;
  const Duration later = moment.now - told.given;
  const std::string does = device.runs
                               ? " runs another operation"
                               : " has begun nothing for " + Seconds(device.still + later) + " s";
  return text + ": " + device.name + does + LastText(device, later);
}

// What a member says of itself, within the limits and about ranks that exist.
WaitingReport Checked(const WaitingReport& told, int world_size) {
  WaitingReport report;
  report.generation = told.generation;
  report.blocked = told.blocked;
  report.tell = told.tell;
  report.stall = told.stall;
  report.device_stall = told.device_stall;
  report.threads = told.threads;
  for (const WaitingCall& call : told.calls) {
    if (report.calls.size() >= kWaitingCallsMax) {
      report.blocked = false;  // One that is left out may end.
      break;
    }
    WaitingCall& kept = report.calls.emplace_back(call);
    std::vector<int>& missing = kept.operation.missing;
    std::vector<int>& not_begun = kept.operation.not_begun;
    KeepRanks(world_size, &missing);
    KeepRanks(world_size, &not_begun);
    if (not_begun.size() > kMissingRanksMax) not_begun.resize(kMissingRanksMax);
    if (missing.size() <= kMissingRanksMax) continue;
    missing.resize(kMissingRanksMax);
    kept.more = true;
    if (!kept.operation.any) continue;
    // One of those that are left out may be enough.
    kept.blocked = false;
    report.blocked = false;
  }
  for (const GroupMade& told_made : told.made) {
    if (report.made.size() >= kMadeGroupsMax) break;
    report.made.push_back(told_made);
  }
  for (const GroupProgress& told_progress : told.progress) {
    if (report.progress.size() >= kProgressGroupsMax) break;
    // A list that was cut short would say that nothing was sent.
    if (told_progress.peers.size() >= static_cast<std::size_t>(world_size)) continue;
    report.progress.push_back(told_progress);
  }
  return report;
}

}  // namespace

World* Membership::RunningWorldOf(SessionId session, std::uint64_t generation) {
  Participant* who = Find(session);
  World* world = who && who->state == State::kSeated ? WorldOf(*who) : nullptr;
  const bool present = world && world->generation == generation && world->phase == Phase::kRunning;
  return present ? world : nullptr;
}

void Membership::Waiting(SessionId session, const WaitingReport& report, Moment moment,
                         MembershipEffects& effects) {
  const Participant* who = Find(session);
  if (!who || !who->Active()) return;
  if (report.generation == 0 && who->state == State::kSpare) {
    // A world of no ranks: there is nobody whom it waits for.
    if (report.tell) effects.Tell(session, LateEvent{LateNotice{}});
    return;
  }
  if (report.generation == 0) {
    World* world = who->state == State::kSeated ? WorldOf(*who) : nullptr;
    if (!world || world->phase != Phase::kForming) return;
    NotePresent(*world, *who, report, moment);
    if (report.tell) TellJoin(*world, *who, moment, effects);
    return;
  }
  World* world = RunningWorldOf(session, report.generation);
  if (!world) return;
  world->diagnosis.OnWaiting(who->request.rank, Checked(report, world->size()), moment.now);
}

void Membership::OnWhereabouts(SessionId session, const WhereaboutsOp& op, Moment moment) {
  World* world = RunningWorldOf(session, op.ask);
  if (!world) return;
  world->diagnosis.OnWhereabouts(Find(session)->request.rank, op.whereabouts, moment.now);
}

void Membership::Diagnose(Moment moment, MembershipEffects& effects) {
  for (auto next = worlds_.begin(); next != worlds_.end();) {
    World& world = (next++)->second;  // A verdict may end it.
    if (world.phase == Phase::kRunning) Diagnose(world, moment, effects);
  }
}

void Membership::Diagnose(World& world, Moment moment, MembershipEffects& effects) {
  const auto excused = [this, &world](int rank) {
    const Participant* who = Find(world.seats.At(rank).session);
    return !who || !who->Active() || who->hold || !who->connected;
  };
  world.diagnosis.SetLeft(world.RanksLeft());
  const Diagnosis::Steps steps = world.diagnosis.Advance(moment.now, excused);
  for (const int rank : steps.ask) {
    const Seat& seat = world.seats.At(rank);
    if (seat.Live()) effects.Tell(seat.session, WhereEvent{world.generation});
  }
  for (const auto& [rank, groups] : steps.ask_progress) {
    const Seat& seat = world.seats.At(rank);
    if (seat.Live()) effects.Tell(seat.session, AskProgressEvent{world.generation, groups});
  }
  for (const auto& [rank, calls] : steps.entered) {
    const Seat& seat = world.seats.At(rank);
    if (seat.Live()) effects.Tell(seat.session, AllEnteredEvent{world.generation, calls});
  }
  for (const int rank : steps.tell) TellLate(world, rank, moment, effects);
  if (!steps.verdict) return;
  const Diagnosis::Verdict& verdict = *steps.verdict;
  const Status cause = verdict.other_ranks       ? OtherRanks(world, *verdict.other_ranks, moment)
                       : !verdict.circle.empty() ? Deadlock(world, verdict.circle, moment)
                       : verdict.device          ? DeviceStall(world, verdict, moment)
                                                 : Stall(world, verdict, moment);
  FenceWorld(world, cause, moment, effects);
}

void Membership::TellLate(World& world, int listener, Moment moment, MembershipEffects& effects) {
  const Seat& seat = world.seats.At(listener);
  if (!seat.Live()) return;
  LateNotice notice;
  notice.generation = world.generation;
  notice.world_size = world.size();
  const std::vector<int> late = world.diagnosis.AwaitedBy(listener);
  for (const int rank : late) {
    if (notice.ranks.size() >= kLateRanksMax) break;
    const bool of_network = world.diagnosis.IsBeyondAsking(listener, rank);
    notice.ranks.push_back({rank, LateText(world, listener, rank, moment), of_network});
  }
  notice.more = static_cast<int>(late.size() - notice.ranks.size());
  effects.Tell(seat.session, LateEvent{std::move(notice)});
}

void Membership::TellJoin(const World& world, const Participant& listener, Moment moment,
                          MembershipEffects& effects) const {
  LateNotice notice;
  notice.ready = static_cast<int>(world.joined);
  notice.world_size = world.size();
  for (int rank = 0; rank < world.size(); ++rank) {
    const Seat& seat = world.seats.At(rank);
    if (seat.state == SeatState::kJoined) continue;
    if (notice.ranks.size() >= kLateRanksMax) {
      ++notice.more;
      continue;
    }
    std::string text = "rank " + std::to_string(rank);
    if (seat.Live()) {
      text =
          AliveText(*Find(seat.session), moment) + ", ends the operations of the last generation";
    } else if (world.PresentUntil(seat) > moment.now) {
      text += ": alive on host " + seat.texts->present_on + ", not yet in its init";
    } else {
      text +=
          seat.texts->note.empty() ? ": nothing has been heard from it" : ": " + seat.texts->note;
    }
    notice.ranks.push_back({rank, std::move(text)});
  }
  notice.elsewhere = world.elsewhere;
  effects.Tell(listener.session, LateEvent{std::move(notice)});
}

const World* Membership::AwaitingFirstJoins(Instant since) const {
  for (const auto& [round, world] : worlds_) {
    if (world.AwaitsFirstJoins(since)) return &world;
  }
  return nullptr;
}

void Membership::TellElsewhere(std::uint64_t round, const std::string& text,
                               MembershipEffects& effects) {
  World& world = worlds_.at(round);
  if (text.empty() == world.elsewhere.empty()) return;  // It is known.
  world.elsewhere = text;
  if (text.empty()) return;
  LateNotice notice;
  notice.elsewhere = text;
  for (const Seat& seat : world.seats) {
    if (seat.Live()) effects.Tell(seat.session, LateEvent{notice});
  }
}

std::string Membership::NameOfFirstJoined(const World& world) const {
  const auto seat = std::ranges::find_if(world.seats, &Seat::Live);
  return seat == world.seats.end() ? "" : Name(ClaimantOf(*Find(seat->session)));
}

std::string Membership::AliveText(const Participant& who, Moment moment) const {
  std::string text = Name(ClaimantOf(who));
  if (who.hold)
    return text + ": held" + Behind(" (", who.hold->reason) + (who.hold->reason.empty() ? "" : ")");
  if (!who.connected && who.closed_at) {
    return text + ": without a connection to the store for " +
           Seconds(moment.now - *who.closed_at) + " s";
  }
  return text + ": alive, last beat " + Seconds(moment.now - who.last_seen) + " s ago";
}

std::string Membership::LateText(const World& world, int listener, int rank, Moment moment) const {
  const Seat& seat = world.seats.At(rank);
  const Participant* who = Find(seat.session);
  if (!who) return "rank " + std::to_string(rank);
  if (!seat.Live()) return Name(ClaimantOf(*who)) + ": has left";
  std::string text = AliveText(*who, moment);
  const Diagnosis& diagnosis = world.diagnosis;
  // It keeps nobody waiting.
  if (diagnosis.IsBeyondAsking(listener, rank)) return text + ", has entered it";
  if (diagnosis.AwaitsDevice(listener, rank))
    text += DeviceText(diagnosis.DeviceAwaited(listener, rank), moment);
  if (const WaitingCall* own = diagnosis.OldestBlockedCallOf(rank)) {
    return text + ", waits itself in " + CallText(*own) +
           Behind(" for ", own->operation.missing.empty() ? "" : RanksText(own->operation.missing));
  }
  const Whereabouts* where = diagnosis.Known(rank, moment.now);
  if (!where) return text + ", it did not answer where its program is";
  text += Placed(", ", *where);
  if (where->expected_slow_for > Duration::zero()) {
    text += ", announced to be slow: " + where->expected_slow + " (for " +
            Seconds(where->expected_slow_for) + " s more)";
  }
  return text;
}

std::string Membership::NameOf(const World& world, int rank) const {
  const Participant* who = Find(world.seats.At(rank).session);
  return who ? Name(ClaimantOf(*who)) : "rank " + std::to_string(rank);
}

Status Membership::Deadlock(const World& world, const std::vector<WaitEdge>& circle,
                            Moment moment) const {
  std::string text = circle.size() == 1
                         ? "a rank waits for itself"
                         : std::to_string(circle.size()) + " ranks wait for each other in a circle";
  for (const WaitEdge& edge : circle) {
    text += "; " + NameOf(world, edge.from) + " in " + edge.call.what + " (#" +
            std::to_string(edge.call.seq) + " of group '" + edge.call.group + "') waits for rank " +
            std::to_string(edge.to);
  }
  text += "; in generation " + std::to_string(world.generation) +
          ". Every rank must start its operations in the same order, over all groups, and of two "
          "that receive from each other one must send first";
  FailureDetail detail;
  detail.rank = circle.front().from;
  detail.generation = world.generation;
  detail.group = circle.front().call.group;
  detail.seq = circle.front().call.seq;
  detail.since_unix_s = moment.wall_s;
  return Status(StatusCode::kDeadlock, text, std::move(detail));
}

Status Membership::OtherRanks(const World& world, const GroupBook::Difference& found,
                              Moment moment) const {
  FailureDetail detail;
  detail.rank = found.other;
  if (const Participant* who = Find(world.seats.At(found.other).session)) {
    detail.host = who->hello.process.host;
    detail.pid = who->hello.process.pid;
  }
  detail.generation = world.generation;
  detail.group = found.group;
  detail.since_unix_s = moment.wall_s;
  return Status(StatusCode::kMismatch,
                OtherRanksText(found.group, world.generation, NameOf(world, found.other),
                               found.of_other, NameOf(world, found.one), found.of_one),
                std::move(detail));
}

FailureDetail Membership::DetailOfStalled(const World& world,
                                          const Diagnosis::Verdict& verdict) const {
  const Participant* who = Find(world.seats.At(verdict.stalled).session);
  FailureDetail detail;
  detail.rank = verdict.stalled;
  if (who) {
    detail.host = who->hello.process.host;
    detail.pid = who->hello.process.pid;
  }
  detail.generation = world.generation;
  detail.group = verdict.call.group;
  detail.seq = verdict.call.operation.seq;
  return detail;
}

Status Membership::Stall(const World& world, const Diagnosis::Verdict& verdict,
                         Moment moment) const {
  const Whereabouts& where = verdict.whereabouts;
  FailureDetail detail = DetailOfStalled(world, verdict);
  detail.since_unix_s = moment.wall_s - std::chrono::duration<double>(where.no_progress).count();
  std::string text = NameOf(world, verdict.stalled) + " is alive and has made no progress for " +
                     Seconds(where.no_progress) + " s (RESILIENT_STALL) while " +
                     RanksText(verdict.waiters) + " waited for it in " + CallText(verdict.call) +
                     ", in generation " + std::to_string(world.generation) + Placed("; ", where) +
                     Behind("; its stack: ", where.stack) +
                     ". If it may be that slow, say so with torch_resilient.expect_slow or raise "
                     "RESILIENT_STALL";
  return Status(StatusCode::kStalled, std::move(text), std::move(detail));
}

Status Membership::DeviceStall(const World& world, const Diagnosis::Verdict& verdict,
                               Moment moment) const {
  const DeviceProgress& device = *verdict.device;
  FailureDetail detail = DetailOfStalled(world, verdict);
  detail.since_unix_s = moment.wall_s - std::chrono::duration<double>(device.still).count();
  std::string text =
      device.name + " of " + NameOf(world, verdict.stalled) +
      " hangs: it has begun and finished nothing for " + Seconds(device.still) +
      " s (RESILIENT_DEVICE_STALL) while " + RanksText(verdict.waiters) + " waited for it in " +
      CallText(verdict.call) + ", which that rank has submitted, in generation " +
      std::to_string(world.generation) + LastText(device, Duration::zero()) +
      Placed("; ", verdict.whereabouts) + Behind("; its stack: ", verdict.whereabouts.stack) +
      ". A kernel or a copy ahead of the operation does not end: look at the kernels "
      "of that rank, and at the log of the driver (dmesg, nvidia-smi -q). The "
      "process cannot go on with that device and must end. If work of a device may "
      "take that long, raise RESILIENT_DEVICE_STALL";
  return Status(StatusCode::kDeviceStalled, std::move(text), std::move(detail));
}

}  // namespace resilient::store
