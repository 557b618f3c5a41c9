// The operations of a Sim, and what its ranks tell the server of those that take long. In each
// generation every rank enters the collectives of the world one after the other and waits in each
// for the others; a fault makes a rank receive from one that never sends, or stand still. So who
// waits for whom is known from outside, and every verdict can be judged.
#include <algorithm>
#include <string>
#include <vector>

#include "runtime/base/log.h"
#include "tests/sim/sim_parts.h"

namespace resilient::store::sim {
namespace {

constexpr Duration kStall = std::chrono::seconds(4);
constexpr Duration kStandsStill = std::chrono::seconds(9);
constexpr Duration kSaidCounts = std::chrono::seconds(4);
// Compute, enter, tell twice, and the way.
constexpr Duration kDeadlockFound = std::chrono::seconds(8);
// Where rank 0 may be ahead of the others by a broadcast: as long as it computes.
constexpr Duration kAhead = std::chrono::seconds(3);

}  // namespace

// A rank that stands still does so whatever becomes of its generation meanwhile.
void Sim::Compute(Process& process) {
  Duration length = Between(5, Chance(20) ? 3000 : 800);
  if (std::exchange(process.will_stand_still, false)) {
    length = kStandsStill;
    process.stands_since = now_;
  }
  DoAfter(process, length, [this, &process] { Enter(process); });
}

void Sim::Enter(Process& process) {
  if (process.doomed) return;
  if (process.stands_since) {
    Duration& stood_still = process.calls[process.generation()].stood_still;
    stood_still = std::max(stood_still, now_ - *process.stands_since);
    process.stands_since.reset();
    process.stood_until = now_;
  }
  if (MayStart(process)) StartCall(process);
}

void Sim::StartCall(Process& process) {
  Result<std::shared_ptr<recovery::Flight>> flight = process.session->Enter();
  if (!flight.ok()) {
    ++count_.refused;
    return replays_ ? NoteNotStarted(process, flight.status()) : MeetFailure(process);
  }
  const std::uint64_t generation = (*flight)->generation();
  Process::Calls& calls = process.calls[generation];
  calls.flight = std::move(*flight);
  calls.waiting = process.replay.in_call = true;
  calls.since = now_;
  const bool again = !process.replay.again.empty();
  if (process.size > 1 && !again && std::exchange(process.will_receive, false)) {
    calls.receives_from = (process.rank + 1) % process.size;
  } else {
    ++calls.entered;
    if (replays_) Number(process, generation);
    Announce(process, generation);
  }
  ++calls.number;
  DoAfter(process, kWaitTellAfter, [this, &process, generation, number = calls.number] {
    TellWaiting(process, generation, number);
  });
  ReportGone(process, generation);
  Finish(process, generation);
  MissLeavers(process, generation);
}

// The others hear of it from this rank itself, each in its own time.
void Sim::Announce(Process& process, std::uint64_t generation) {
  const Contribution put_in{generation, process.calls[generation].entered};
  for (Process* member : views_[generation]) {
    if (member == &process) continue;
    const Duration silent = std::max(silent_[{process.pid, member->pid}] - now_, Duration::zero());
    DoAfter(*member, silent + Between(0, kind_ ? 5 : 50),
            [this, member, generation, rank = process.rank, put_in] {
              Hear(*member, generation, rank, put_in);
            });
  }
}

void Sim::Hear(Process& process, std::uint64_t generation, int rank, Contribution heard) {
  Contribution& known = process.calls[generation].known[rank];
  if (heard.number > known.number) known = heard;
  Finish(process, generation);
  if (options_.planted != Planted::kOldOperationCompletes) return;
  for (auto& [older, calls] : process.calls) {
    if (older >= generation || !calls.waiting) continue;
    calls.known[rank] = {generation, calls.entered};
    return Finish(process, older);
  }
}

void Sim::Finish(Process& process, std::uint64_t generation) {
  const Process::Calls& calls = process.calls[generation];
  if (calls.waiting && Missing(process, generation).empty()) {
    EndCall(process, generation, Status::Ok());
  }
}

// The communicator is done with it, and says `status`.
void Sim::EndCall(Process& process, std::uint64_t generation, const Status& status) {
  Process::Calls& calls = process.calls[generation];
  calls.waiting = false;
  const std::shared_ptr<recovery::Flight> flight = std::move(calls.flight);
  const Status outcome = process.session->Outcome(*flight, status);
  if (outcome.ok()) CheckResult(process, generation);
  const bool left = options_.planted == Planted::kOldOperationCompletes && flight->Ended();
  if (!left) process.session->Leave(*flight);
  if (process.doomed) return;
  if (outcome.ok()) calls.finished = calls.entered;
  if (replays_ && outcome.ok()) KeepResult(process, generation);
  if (replays_) return EndKept(process, generation, outcome, flight->Ended());
  if (!outcome.ok()) {
    ++count_.aborted;
    return outcome.code() == StatusCode::kLeft && !flight->Ended() ? MeetLeaver(process)
                                                                   : MeetFailure(process);
  }
  Succeed(process, generation);
}

void Sim::Succeed(Process& process, std::uint64_t generation) {
  const Process::Calls& calls = process.calls[generation];
  ++count_.operations;
  OfferRoom(process, generation);
  if (now_ - calls.since >= kWaitTellAfter && Chance(50)) {
    SendWaiting(process, WaitingReport{.generation = generation});
  }
  if (Chance(30)) Commit(process);
  Compute(process);
}

// A collective that was right has something of every member, all of one generation, which still is
// the present one.
void Sim::CheckResult(Process& process, std::uint64_t generation) {
  Process::Calls& calls = process.calls[generation];
  if (process.generation() != generation) {
    Violated(StrCat("an operation of generation ", generation, " completed on rank ", process.rank,
                    " in generation ", process.generation()));
  }
  for (const auto& [rank, heard] : calls.known) {
    if (heard.generation == generation) continue;
    Violated(StrCat("an operation of generation ", generation, " has a part of generation ",
                    heard.generation));
  }
  for (Process* member : views_[generation]) {
    if (member->calls[generation].entered >= calls.entered) continue;
    if (!calls.synchronises && member != views_[generation].front()) continue;
    Violated(StrCat("an operation completed on rank ", process.rank, " before rank ", member->rank,
                    " entered it"));
  }
}

void Sim::AbortCalls(Process& process, std::uint64_t generation) {
  LeaveMeeting(process, generation);
  Process::Calls& calls = process.calls[generation];
  if (!calls.waiting) return;
  if (options_.planted == Planted::kOldOperationCompletes) {
    return process.session->Leave(*calls.flight);
  }
  DoAfter(process, Between(0, Chance(20) ? 400 : 100),
          [this, &process, generation, number = calls.number] {
            const Process::Calls& open = process.calls[generation];
            if (!open.waiting || open.number != number) return;
            EndCall(process, generation, open.flight->cause());
          });
}

// The session is told of each link once, as soon as there is one of that generation.
void Sim::ReportGone(Process& process, std::uint64_t generation) {
  if (!process.session->IsPresent(generation)) return;
  for (const int rank : std::exchange(process.calls[generation].gone, {})) {
    const Status why(StatusCode::kCommFailed, StrCat("the link to rank ", rank, " broke"));
    process.session->OnLinkLost(generation, rank, why);
    process.calls[generation].links.Note("world", rank);
    if (options_.planted == Planted::kNeedsUnasked)
      process.session->ReportNeed(generation, rank, "nothing");
  }
}

// An operation that needs somebody who has left fails, and no other.
void Sim::MissLeavers(Process& process, std::uint64_t generation) {
  const Process::Calls& calls = process.calls[generation];
  if (!calls.waiting || calls.left.empty()) return;
  const std::vector<int> missing = Missing(process, generation);
  const bool misses = std::any_of(missing.begin(), missing.end(),
                                  [&calls](int rank) { return calls.left.contains(rank); });
  if (misses) EndCall(process, generation, Status(StatusCode::kLeft, "it needs one that has left"));
}

std::vector<int> Sim::Missing(Process& process, std::uint64_t generation) const {
  Process::Calls& calls = process.calls[generation];
  if (calls.receives_from >= 0) return {calls.receives_from};
  std::vector<int> missing;
  const std::vector<Process*>& members = views_.at(generation);
  for (int rank = 0; rank < static_cast<int>(members.size()); ++rank) {
    const bool other = members[static_cast<std::size_t>(rank)] != &process;
    if (!calls.synchronises && rank > 0) break;
    if (other && calls.known[rank].number < calls.entered) missing.push_back(rank);
  }
  return missing;
}

// Each second, as long as that call waits.
void Sim::TellWaiting(Process& process, std::uint64_t generation, int number) {
  if (!InGeneration(process, generation)) return;
  Process::Calls& calls = process.calls[generation];
  const bool over = !calls.waiting || calls.number != number;
  if (over && options_.planted != Planted::kWaitsOutliveTheirCalls) return;
  WaitingReport report = WaitsOf(process, generation, over);
  report.tell = Chance(30);
  if (options_.planted != Planted::kNeedsNotTold) {
    for (const recovery::Need& need : calls.links.NeededBy(report.calls))
      process.session->ReportNeed(generation, need.rank, need.what);
  }
  SendWaiting(process, std::move(report));
  DoAfter(process, kWaitTellAfter,
          [this, &process, generation, number] { TellWaiting(process, generation, number); });
}

// What the only thread of this rank is blocked in.
WaitingReport Sim::WaitsOf(Process& process, std::uint64_t generation, bool over) {
  Process::Calls& calls = process.calls[generation];
  WaitingReport report;
  report.generation = generation;
  report.blocked = true;
  report.stall = kStall;
  // Of a collective that is over its awaited rank says that it has entered it.
  const bool receives = over || calls.receives_from >= 0;
  WaitingCall call;
  call.group = "world";
  call.operation.seq = static_cast<std::uint64_t>(receives ? calls.number : calls.entered);
  call.operation.what = receives ? "recv()" : "barrier()";
  call.operation.point_to_point = receives;
  call.operation.needs_all = !receives && calls.synchronises;
  call.operation.age = now_ - calls.since;
  call.operation.missing =
      over ? std::vector<int>{(process.rank + 1) % process.size} : Missing(process, generation);
  call.blocked = true;
  calls.told.insert(call.operation.missing.begin(), call.operation.missing.end());
  report.calls.push_back(std::move(call));
  return report;
}

// No rank ever sends a message.
void Sim::OnAskProgress(Process& process, const AskProgressEvent& ask) {
  if (!InGeneration(process, ask.generation) || !process.control->welcomed) return;
  ++count_.progress_asked;
  Process::Calls& calls = process.calls[ask.generation];
  const bool told = calls.waiting && now_ - calls.since >= kWaitTellAfter;
  const bool over = options_.planted == Planted::kWaitsOutliveTheirCalls && !calls.waiting;
  WaitingReport report{.generation = ask.generation};
  if (told || over) report = WaitsOf(process, ask.generation, over);
  for (const std::string& group : ask.groups) {
    GroupProgress progress;
    progress.group = group;
    progress.entered = static_cast<std::uint64_t>(calls.entered);
    if (over) progress.entered = 0;
    report.progress.push_back(std::move(progress));
  }
  SendWaiting(process, std::move(report));
}

// What one rank sends another one is on its way for so long; often in both directions. The lines to
// the store are as they were.
void Sim::SilenceLink() {
  const std::size_t from = random_.Below(at_.size());
  const std::size_t to = random_.Below(at_.size());
  if (from == to || !at_[from] || !at_[to]) return;
  ++count_.silences;
  const Instant until = now_ + Between(500, 9000);
  silent_[{at_[from]->pid, at_[to]->pid}] = until;
  if (Chance(70)) silent_[{at_[to]->pid, at_[from]->pid}] = until;
}

// As a client does: what cannot be sent at once is told anew later.
void Sim::SendWaiting(Process& process, WaitingReport report) {
  if (options_.planted == Planted::kWaitsNotTold && process.rank == 0) return;
  if (!process.control->welcomed) return;
  ++count_.waits_told;
  SendUp(*process.control, Request{.op = WaitingOp{std::move(report)}});
}

void Sim::OnWhere(Process& process, std::uint64_t generation) {
  Whereabouts where;
  where.at = "in the simulator";
  if (process.stands_since) where.no_progress = now_ - *process.stands_since;
  if (options_.planted == Planted::kProgressNotSeen) where.no_progress = kStandsStill;
  if (process.control->welcomed) {
    SendUp(*process.control, Request{.op = WhereaboutsOp{generation, std::move(where)}});
  }
}

void Sim::OnLate(Process& process, const LateNotice& notice) {
  ++count_.late_told;
  const std::set<int>& told = process.calls[notice.generation].told;
  for (const LateRank& late : notice.ranks) {
    if (told.contains(late.rank)) continue;
    Violated(StrCat("rank ", process.rank, " is told that rank ", late.rank,
                    " is late, for which it did not wait"));
  }
}

bool Sim::InGeneration(const Process& process, std::uint64_t generation) {
  return process.session->IsPresent(generation) && !process.doomed;
}

// Whether a fault in what this rank does will end its generation, or may.
bool Sim::StandsInTheWay(const Process& process) const {
  const auto calls = process.calls.find(process.generation());
  const bool receives = calls != process.calls.end() && calls->second.receives_from >= 0;
  // What it said of itself counts on for a while.
  const bool stood = process.stood_until && now_ - *process.stood_until < kSaidCounts;
  return receives || process.stands_since || stood;
}

// Those of a past generation have ended.
void Sim::CheckWaits() {
  for (const Process* process : at_) {
    for (const auto& [seq, generation] : process->waits) {
      if (generation == process->generation()) continue;
      Violated(StrCat("a wait of generation ", generation, " goes on in ", process->generation()));
    }
  }
}

// Whether some rank of the generation can never go on, whatever the others do: what is left over
// when all that can go on has done so.
bool Sim::IsDeadlocked(std::uint64_t generation) {
  const std::vector<Process*>& members = views_[generation];
  std::vector<bool> goes_on(members.size(), false);
  const auto comes = [&](const Process::Calls& waiter, std::size_t rank) {
    return goes_on[rank] || members[rank]->calls[generation].entered >= waiter.entered;
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t rank = 0; rank < members.size(); ++rank) {
      if (goes_on[rank]) continue;
      const Process::Calls& calls = members[rank]->calls[generation];
      bool can = !calls.waiting;
      if (calls.waiting && calls.receives_from >= 0) {
        can = goes_on[static_cast<std::size_t>(calls.receives_from)];
      } else if (calls.waiting) {
        can = true;
        const std::size_t needed = calls.synchronises ? members.size() : 1;
        for (std::size_t other = 0; other < needed; ++other)
          can &= comes(calls, other) || other == rank;
      }
      goes_on[rank] = can;
      changed = changed || can;
    }
  }
  return std::find(goes_on.begin(), goes_on.end(), false) != goes_on.end();
}

// Whether a rank waits for one that has left; or has died, and nobody knows in what.
bool Sim::NeedsALeaver(std::uint64_t generation) {
  const std::vector<Process*>& members = views_[generation];
  return std::ranges::any_of(members, [&](Process* member) {
    if (member->has_left) return false;
    if (!member->alive) return true;
    if (!member->calls[generation].waiting) return false;
    return std::ranges::any_of(Missing(*member, generation), [&](int rank) {
      return members[static_cast<std::size_t>(rank)]->has_left;
    });
  });
}

void Sim::CheckVerdict(std::uint64_t generation, const Status& cause) {
  if (cause.code() == StatusCode::kLeft && running_ == generation && !NeedsALeaver(generation)) {
    Violated("no operation needs the rank that left: " + cause.message());
  }
  if (cause.code() == StatusCode::kDeadlock) {
    ++count_.deadlocks;
    if (!IsDeadlocked(generation)) Violated("no circle is there: " + cause.message());
  }
  if (cause.code() == StatusCode::kStalled) {
    ++count_.stalls;
    Process& process = *views_[generation].at(static_cast<std::size_t>(cause.detail().rank));
    const Duration stands = process.stands_since ? now_ - *process.stands_since : Duration::zero();
    if (std::max(process.calls[generation].stood_still, stands) < kStall) {
      Violated("it did not stand still: " + cause.message());
    }
  }
}

// With nothing else going wrong a circle ends the generation, in time, and the next one runs.
void Sim::CheckDeadlockIsFound() {
  if (at_.size() < 2) return;
  const int found = count_.deadlocks;
  at_[random_.Below(at_.size())]->will_receive = true;
  const Duration most = kDeadlockFound + (replays_ ? kAhead : Duration::zero());
  RunUntil(now_ + most, [&] { return count_.deadlocks > found; });
  if (count_.deadlocks == found) Violated("a circle was not found");
  RunUntil(now_ + options_.settle, [this] { return AllRun(); });
  if (!AllRun()) Violated("not all ranks run after a circle");
}

}  // namespace resilient::store::sim
