// What the ranks of a Sim do with RESILIENT_REPLAY=1: their collectives have numbers and kept
// inputs in a real ReplayLog; where a link alone has ended a generation its members meet in the
// next one, tell each other what they know, and go by the real plan: all run again from there, or
// all programs meet the failure. What a program was told of a number is remembered beside it.
#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/log.h"
#include "tests/sim/sim_parts.h"

namespace resilient::store::sim {
namespace {

constexpr char kWorld[] = "world";
constexpr Duration kSlice = Millis(100);
constexpr Duration kAgain = Millis(5);
constexpr char kBeganAnew[] = "began anew";

// Of some ranks so few that not every broken link can be got over.
recovery::ReplayLog LogOf(std::int64_t pid) {
  recovery::ReplayLimits limits;
  if (pid % 4 < 2) limits.operations = static_cast<std::size_t>(pid % 4);
  return recovery::ReplayLog(limits);
}

std::uint64_t Mix(std::uint64_t sum, std::uint64_t more) {
  return (sum ^ more) * 0x9E3779B97F4A7C15u + 1;
}

}  // namespace

// With a half of the seeds.
void Sim::PlanReplays() { replays_ = Random(options_.seed * 7919 + 5).Below(2) == 0; }

// ---- Operations ----

// Whether the operation that the program asks for starts at once.
bool Sim::MayStart(Process& process) {
  if (!replays_) return true;
  Replay& replay = process.replay;
  if (replay.phase == Replay::Phase::kFailed) {
    ++count_.refused;
    MeetFailure(process);
    return false;
  }
  replay.blocked = replay.queued = true;
  return replay.phase == Replay::Phase::kOpen && !replay.in_call && replay.again.empty();
}

void Sim::NoteNotStarted(Process& process, const Status& why) {
  if (recovery::IsLinkFailure(why)) return BeginHealing(process, why);
  process.replay.first_cause = why;
  GiveUpReplay(process);
}

void Sim::Number(Process& process, std::uint64_t generation) {
  Replay& replay = process.replay;
  const bool again = !replay.again.empty();
  replay.running = again ? replay.again.front() : replay.log.next();
  // A broadcast of rank 0 ends there at once. A world that grows does so where all are.
  const bool synchronises = max_world_ > 0 || (replay.epoch + replay.running) % 3 != 0;
  if (again) {
    replay.again.pop_front();
    if (!replay.inputs.contains(replay.running)) {
      Violated(StrCat("rank ", process.rank, " is to run number ", replay.running,
                      " again, and its input is kept no more"));
    }
  } else {
    replay.queued = false;
    replay.log.Add(replay.running, sizeof(std::uint64_t), synchronises);
    replay.inputs[replay.running] = random_.Next();
  }
  Process::Calls& calls = process.calls[generation];
  calls.synchronises = synchronises;
  calls.given.push_back({replay.epoch, replay.running, replay.inputs[replay.running]});
}

// What comes of the parts that met in one place of the communicator.
std::uint64_t Sim::ResultOf(Process& process, std::uint64_t generation) {
  Process::Calls& calls = process.calls[generation];
  const std::size_t place = calls.given.size() - 1;
  std::uint64_t result = 0;
  for (Process* member : views_[generation]) {
    const std::vector<Given>& parts = member->calls[generation].given;
    if (parts.size() <= place) break;  // CheckResult has said so.
    const Given& part = parts[place];
    if (part.epoch != process.replay.epoch || part.number != process.replay.running) {
      Violated(StrCat("number ", process.replay.running, " since generation ", process.replay.epoch,
                      " of rank ", process.rank, " has met number ", part.number,
                      " since generation ", part.epoch, " of rank ", member->rank));
    }
    result = Mix(result, part.input);
    if (!calls.synchronises) break;
  }
  return result;
}

// Who has a result already throws this one away: it must be the same.
void Sim::KeepResult(Process& process, std::uint64_t generation) {
  Replay& replay = process.replay;
  const std::uint64_t number = replay.running;
  const std::uint64_t result = ResultOf(process, generation);
  const auto known = results_.try_emplace({replay.epoch, number}, result).first;
  if (known->second != result) {
    Violated(StrCat("number ", number, " since generation ", replay.epoch,
                    " has two results, the second one on rank ", process.rank, " in generation ",
                    generation));
  }
  if (number <= replay.told) {
    ++count_.replayed_for;
    return;
  }
  if (number != replay.told + 1 && replay.veto.empty()) {
    Violated(StrCat("rank ", process.rank, " is told of number ", number, " behind number ",
                    replay.told));
  }
  replay.told = number;
  for (const std::uint64_t dropped : replay.log.Complete(number)) replay.inputs.erase(dropped);
}

// An operation has left the communicator; the program hears of it, or the link is got over first.
void Sim::EndKept(Process& process, std::uint64_t generation, const Status& outcome, bool ended) {
  Replay& replay = process.replay;
  replay.in_call = false;
  const std::uint64_t number = std::exchange(replay.running, 0);
  // Numbers end in their order, so the last one started is the one that the program waits for.
  const bool asked = number == 0 || (replay.blocked && !replay.queued && replay.again.empty() &&
                                     number + 1 == replay.log.next());
  if (outcome.ok()) {
    if (!asked) {
      OfferRoom(process, generation);
      return StartNext(process);
    }
    replay.blocked = false;
    replay.heal = Heal::kNot;
    return Succeed(process, generation);
  }
  ++count_.aborted;
  if (replay.phase == Replay::Phase::kFailed) {
    replay.queued = false;
    if (std::exchange(replay.blocked, false)) MeetFailure(process);
    return;
  }
  if (ended && recovery::IsLinkFailure(outcome)) {
    if (number == 0) process.will_receive = replay.queued = true;
    return BeginHealing(process, outcome);
  }
  if (ended) {
    replay.first_cause = outcome;
    return GiveUpReplay(process);
  }
  replay.veto = "an operation has failed there: " + outcome.ToString();
  if (!asked) return StartNext(process);
  replay.blocked = replay.queued = false;
  return outcome.code() == StatusCode::kLeft ? MeetLeaver(process) : MeetFailure(process);
}

void Sim::StartNext(Process& process) {
  Replay& replay = process.replay;
  if (replay.phase != Replay::Phase::kOpen || replay.in_call) return;
  if (replay.again.empty()) replay.heal = Heal::kNot;
  if (!replay.again.empty() || replay.queued) StartCall(process);
}

// ---- On the way to the next generation ----

void Sim::FollowFence(Process& process, const Fence& fence) {
  Replay& replay = process.replay;
  if (!replays_ || replay.epoch == 0 || fence.generation < replay.epoch) return;
  if (process.session->ended_generation() == fence.generation) {
    CountHealBlow(Blow::kFence, process);
  }
  if (replay.phase == Replay::Phase::kFailed) return;
  if (recovery::IsLinkFailure(fence.cause)) {
    replay.link_fence = std::max(replay.link_fence, fence.generation);
    return BeginHealing(process, fence.cause);
  }
  replay.first_cause = fence.cause;
  GiveUpReplay(process);
}

void Sim::BeginHealing(Process& process, const Status& cause) {
  Replay& replay = process.replay;
  replay.link_fence = std::max(replay.link_fence, cause.detail().generation);
  if (replay.phase != Replay::Phase::kOpen) return;
  ++count_.heals;
  replay.phase = Replay::Phase::kHealing;
  replay.heal = Heal::kComing;
  replay.first_cause = cause;
  replay.again.clear();
  replay.heal_by = now_ + budget_;
  if (!kind_ && Chance(5)) {
    DoAfter(process, Between(0, 200), [this, &process] { AbortInHealing(process); });
  }
  DoAfter(process, Between(0, 3), [this, &process] { HealStep(process); });
}

// Of another thread of the program.
void Sim::AbortInHealing(Process& process) {
  if (process.doomed || process.replay.phase != Replay::Phase::kHealing) return;
  process.replay.aborts = true;
  process.replay.veto = "its program has aborted";
}

// The program meets the first cause, at the latest when it asks for something.
void Sim::GiveUpReplay(Process& process) {
  Replay& replay = process.replay;
  if (std::exchange(replay.phase, Replay::Phase::kFailed) == Replay::Phase::kFailed) return;
  replay.heal = Heal::kNot;
  replay.aborts = false;
  replay.again.clear();
  if (replay.in_call || !replay.blocked) return;
  replay.blocked = replay.queued = false;
  ++count_.aborted;
  MeetFailure(process);
}

void Sim::HealStep(Process& process) {
  const Replay& replay = process.replay;
  if (process.doomed || replay.phase != Replay::Phase::kHealing) return;
  if (now_ >= replay.heal_by) {
    ++count_.too_late;
    // Its part is with the others, who may go on by it.
    if (replay.meeting) {
      replay.meeting->NoteBroken();
      process.session->AbortGroup();
    }
    return GiveUpReplay(process);
  }
  process.session->Rebuild(kSlice, {0, seat_wait_}, [this, &process](const Status& status) {
    OnHealRebuilt(process, status);
  });
}

void Sim::OnHealRebuilt(Process& process, const Status& status) {
  const Replay& replay = process.replay;
  if (process.doomed || replay.phase != Replay::Phase::kHealing) return;
  const std::uint64_t generation = process.generation();
  const bool early = status.ok() && (generation <= replay.link_fence || replay.in_call ||
                                     replay.meeting || replay.place == generation);
  if (early || status.code() == StatusCode::kTimeout) {
    return DoAfter(process, kAgain, [this, &process] { HealStep(process); });
  }
  if (!status.ok()) return GiveUpReplay(process);
  const bool same = views_[generation] == views_[replay.acknowledged];
  if (same || options_.planted == Planted::kReplacedTakenForSame) return Meet(process);
  ++count_.strangers;
  GiveUpReplay(process);
}

// ---- The meeting ----

void Sim::Meet(Process& process) {
  Replay& replay = process.replay;
  const std::uint64_t generation = process.generation();
  replay.place = generation;
  Result<std::shared_ptr<recovery::Flight>> flight = process.session->Enter();
  if (!flight.ok()) {
    return DoAfter(process, kAgain, [this, &process] { HealStep(process); });
  }
  replay.meeting = *flight;
  replay.heal = Heal::kMeeting;
  replay.heard.erase(replay.heard.begin(), replay.heard.lower_bound(generation));
  recovery::ReplaySummary own{.epoch = replay.epoch, .veto = replay.veto, .groups = {}};
  recovery::GroupSummary& world = own.groups[kWorld];
  world = replay.log.Summary();
  world.ranks.resize(views_[generation].size());
  std::iota(world.ranks.begin(), world.ranks.end(), 0);
  Tell(process, generation, recovery::EncodeSummary(own));
  StrikeSoon(process);
  // Nobody waits longer than that.
  DoAfter(process, std::max(replay.heal_by - now_, Duration::zero()), [this, &process, generation] {
    const Replay& late = process.replay;
    if (late.meeting && late.place == generation) HealStep(process);
  });
  LookAround(process, generation);
}

void Sim::Tell(Process& process, std::uint64_t generation, const std::string& said) {
  process.replay.heard[generation][process.rank] = said;
  for (Process* member : views_[generation]) {
    if (member == &process) continue;
    const int most = kind_ ? 5 : Chance(10) ? 1000 : 50;
    DoAfter(*member, Between(0, most), [this, member, generation, rank = process.rank, said] {
      member->replay.heard[generation][rank] = said;
      LookAround(*member, generation);
    });
  }
}

void Sim::LookAround(Process& process, std::uint64_t generation) {
  Replay& replay = process.replay;
  if (!replay.meeting || replay.place != generation) return;
  if (replay.heard[generation].size() < views_[generation].size()) return;
  const std::shared_ptr<recovery::Flight> flight = std::exchange(replay.meeting, nullptr);
  const Status outcome = process.session->Outcome(*flight, Status::Ok());
  process.session->Leave(*flight);
  if (process.doomed || replay.phase != Replay::Phase::kHealing) return;
  DoAfter(process, Between(0, 3), [this, &process, generation, ok = outcome.ok()] {
    if (process.replay.phase != Replay::Phase::kHealing || process.doomed) return;
    ok ? Decide(process, generation) : HealStep(process);
  });
}

// The fence has ended it.
void Sim::LeaveMeeting(Process& process, std::uint64_t generation) {
  if (!process.replay.meeting || process.replay.place != generation) return;
  DoAfter(process, Between(0, 100), [this, &process, flight = process.replay.meeting] {
    if (process.replay.meeting != flight) return;
    process.replay.meeting.reset();
    process.session->Leave(*flight);
    if (process.replay.phase != Replay::Phase::kHealing) return;
    process.replay.heal = Heal::kComing;
    HealStep(process);
  });
}

void Sim::Decide(Process& process, std::uint64_t generation) {
  std::vector<recovery::ReplaySummary> all;
  const auto own = static_cast<std::size_t>(process.rank);
  for (const auto& [rank, said] : process.replay.heard[generation]) {
    std::optional<recovery::ReplaySummary> summary = recovery::DecodeSummary(said);
    if (!summary) return Violated("a summary cannot be read");
    all.push_back(*std::move(summary));
  }
  for (recovery::ReplaySummary& summary : all) {
    if (options_.planted == Planted::kDroppedIgnored && summary.groups.contains(kWorld)) {
      summary.groups[kWorld].kept_from = 1;
    }
    if (options_.planted == Planted::kPlansAlone) summary = all[own];
    if (options_.planted == Planted::kVetoIgnored && own == 0) summary.veto.clear();
  }
  const recovery::ReplayPlan plan = recovery::PlanReplay(all);
  if (plan.refusal.empty()) return RunAgain(process, generation, plan.from.at(kWorld));
  const bool input = plan.refusal.find("has the inputs") != std::string::npos;
  ++(input ? count_.dropped : count_.vetoed);
  GiveUpReplay(process);
}

void Sim::RunAgain(Process& process, std::uint64_t generation, std::uint64_t from) {
  Replay& replay = process.replay;
  if (views_[generation] != views_[replay.epoch]) {
    Violated(StrCat("rank ", process.rank, " runs again in generation ", generation,
                    " what it began with others in generation ", replay.epoch));
  }
  CheckOneEnd(generation, StrCat("goes on from ", from));
  replay.acknowledged = process.synced = generation;
  if (!process.session->IsPresent(generation) || replay.link_fence >= generation) {
    replay.heal = Heal::kComing;
    return HealStep(process);
  }
  ++count_.replays;
  for (std::uint64_t number = from; number < replay.log.next(); ++number) {
    replay.again.push_back(number);
    ++count_.replayed;
  }
  replay.phase = Replay::Phase::kOpen;
  replay.heal = Heal::kRunning;
  replay.first_cause = {};
  if (std::exchange(replay.aborts, false)) process.session->AbortGroup();
  StrikeSoon(process);
  StartNext(process);
}

// Its program has been told that it may go on from its last commit: nothing of before counts.
void Sim::BeginAnew(Process& process) {
  Replay& replay = process.replay;
  const std::uint64_t generation = process.generation();
  if (!replays_) return;
  if (replay.phase == Replay::Phase::kOpen && replay.acknowledged == generation) return;
  CheckOneEnd(generation, kBeganAnew);
  const bool first = replay.epoch == 0;
  replay.phase = Replay::Phase::kOpen;
  replay.epoch = replay.acknowledged = generation;
  replay.log = LogOf(process.pid);
  replay.inputs.clear();
  replay.told = 0;
  replay.veto.clear();
  replay.first_cause = {};
  // Whoever meets there needs to hear of it; those that came last meet nobody.
  const bool tells = !first || options_.planted == Planted::kReplacedTakenForSame;
  if (!tells || std::exchange(replay.place, generation) == generation) return;
  const bool taken = options_.planted == Planted::kReplacedTakenForSame && first;
  recovery::ReplaySummary said{.epoch = generation, .veto = "it began anew", .groups = {}};
  for (const Process* member : views_[generation]) {
    if (taken && member != &process)
      said = {.epoch = member->replay.epoch, .veto = {}, .groups = {}};
  }
  Tell(process, generation, recovery::EncodeSummary(said));
}

// ---- What must hold, and what was seen ----

// The members of a generation all go on with the same number, or all begin anew.
void Sim::CheckOneEnd(std::uint64_t generation, const std::string& end) {
  const auto known = ends_.try_emplace(generation, end).first;
  if (known->second == end) return;
  Violated(
      StrCat("in generation ", generation, " one rank ", known->second, ", another one ", end));
}

void Sim::CountHealBlow(Blow blow, const Process& process) {
  if (process.replay.heal == Heal::kNot) return;
  ++count_
        .heal_blows[static_cast<std::size_t>(blow)][static_cast<std::size_t>(process.replay.heal)];
}

// Both the meeting and what comes of it are short.
void Sim::StrikeSoon(Process& process) {
  if (kind_ || !Chance(25)) return;
  DoAfter(process, Between(0, 60), [this, &process, kind = random_.Below(5)] {
    if (kind_ || process.doomed) return;
    if (kind == 0) Accuse(process);
    if (kind == 1) Crash(process);
    if (kind == 2) Destroy(process);
    if (kind == 3 && durable_) CrashServer();
    if (kind == 4) StopProcess(process);
  });
}

}  // namespace resilient::store::sim
