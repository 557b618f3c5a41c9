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
// Compute, enter, tell twice, and the way.
constexpr Duration kDeadlockFound = std::chrono::seconds(8);

}  // namespace

void Sim::StartCalls(Process& process) {
  const std::uint64_t generation = process.generation;
  if (std::exchange(process.calls[generation].started, true)) return;
  Compute(process, generation);
}

void Sim::Compute(Process& process, std::uint64_t generation) {
  Duration length = Between(5, Chance(20) ? 3000 : 800);
  Process::Calls& calls = process.calls[generation];
  if (std::exchange(process.will_stand_still, false)) {
    length = kStandsStill;
    calls.stands_since = now_;
  }
  DoAfter(process, length, [this, &process, generation] { Enter(process, generation); });
}

void Sim::Enter(Process& process, std::uint64_t generation) {
  if (!InGeneration(process, generation)) return;
  Process::Calls& calls = process.calls[generation];
  if (calls.stands_since) {
    calls.stood_still = std::max(calls.stood_still, now_ - *calls.stands_since);
    calls.stands_since.reset();
  }
  calls.waiting = true;
  calls.since = now_;
  if (std::exchange(process.will_receive, false)) {
    calls.receives_from = (process.rank + 1) % ranks_;
  } else {
    ++calls.entered;
    Announce(process, generation);
  }
  ++calls.number;
  DoAfter(process, kWaitTellAfter, [this, &process, generation, number = calls.number] {
    TellWaiting(process, generation, number);
  });
  Finish(process, generation);
}

// The others hear of it from this rank itself, each in its own time.
void Sim::Announce(Process& process, std::uint64_t generation) {
  const int entered = process.calls[generation].entered;
  for (Process* member : views_[generation]) {
    if (member == &process) continue;
    DoAfter(*member, Between(0, kind_ ? 5 : 50),
            [this, member, generation, rank = process.rank, entered] {
              int& known = member->calls[generation].known[rank];
              known = std::max(known, entered);
              if (InGeneration(*member, generation)) Finish(*member, generation);
            });
  }
}

void Sim::Finish(Process& process, std::uint64_t generation) {
  Process::Calls& calls = process.calls[generation];
  if (!calls.waiting || !Missing(process, generation).empty()) return;
  calls.waiting = false;
  if (now_ - calls.since >= kWaitTellAfter && Chance(50)) {
    SendWaiting(process, WaitingReport{.generation = generation});
  }
  Compute(process, generation);
}

std::vector<int> Sim::Missing(Process& process, std::uint64_t generation) const {
  Process::Calls& calls = process.calls[generation];
  if (calls.receives_from >= 0) return {calls.receives_from};
  std::vector<int> missing;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != process.rank && calls.known[rank] < calls.entered) missing.push_back(rank);
  }
  return missing;
}

// Each second, as long as that call waits.
void Sim::TellWaiting(Process& process, std::uint64_t generation, int number) {
  if (!InGeneration(process, generation)) return;
  Process::Calls& calls = process.calls[generation];
  const bool over = !calls.waiting || calls.number != number;
  if (over && options_.planted != Planted::kWaitsOutliveTheirCalls) return;
  WaitingReport report;
  report.generation = generation;
  report.blocked = true;
  report.tell = Chance(30);
  report.stall = kStall;
  WaitingCall call;
  call.group = "world";
  call.operation.seq = static_cast<std::uint64_t>(number);
  call.operation.what = calls.receives_from >= 0 ? "recv()" : "barrier()";
  call.operation.point_to_point = calls.receives_from >= 0;
  call.operation.age = now_ - calls.since;
  call.operation.missing =
      over ? std::vector<int>{(process.rank + 1) % ranks_} : Missing(process, generation);
  call.blocked = true;
  calls.told.insert(call.operation.missing.begin(), call.operation.missing.end());
  report.calls.push_back(std::move(call));
  SendWaiting(process, std::move(report));
  DoAfter(process, kWaitTellAfter,
          [this, &process, generation, number] { TellWaiting(process, generation, number); });
}

// As a client does: what cannot be sent at once is told anew later.
void Sim::SendWaiting(Process& process, WaitingReport report) {
  if (options_.planted == Planted::kWaitsNotTold && process.rank == 0) return;
  if (!process.control->welcomed) return;
  ++count_.waits_told;
  SendUp(*process.control, Request{.op = WaitingOp{std::move(report)}});
}

void Sim::OnWhere(Process& process, std::uint64_t generation) {
  const Process::Calls& calls = process.calls[generation];
  Whereabouts where;
  where.main_thread = "in the simulator";
  if (calls.stands_since) where.no_progress = now_ - *calls.stands_since;
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
  return process.generation == generation && !process.fenced && !process.doomed;
}

// Whether a fault in what this rank does will end its generation, or may.
bool Sim::StandsInTheWay(const Process& process) {
  const auto calls = process.calls.find(process.generation);
  return calls != process.calls.end() &&
         (calls->second.receives_from >= 0 || calls->second.stands_since);
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
        for (std::size_t other = 0; other < members.size(); ++other)
          can &= comes(calls, other) || other == rank;
      }
      goes_on[rank] = can;
      changed = changed || can;
    }
  }
  return std::find(goes_on.begin(), goes_on.end(), false) != goes_on.end();
}

void Sim::CheckVerdict(std::uint64_t generation, const Status& cause) {
  if (cause.code() == StatusCode::kDeadlock) {
    ++count_.deadlocks;
    if (!IsDeadlocked(generation)) Violated("no circle is there: " + cause.message());
  }
  if (cause.code() == StatusCode::kStalled) {
    ++count_.stalls;
    Process::Calls& calls =
        views_[generation].at(static_cast<std::size_t>(cause.detail().rank))->calls[generation];
    const Duration stands = calls.stands_since ? now_ - *calls.stands_since : Duration::zero();
    if (std::max(calls.stood_still, stands) < kStall) {
      Violated("it did not stand still: " + cause.message());
    }
  }
}

// With nothing else going wrong a circle ends the generation, in time, and the next one runs.
void Sim::CheckDeadlockIsFound() {
  const int found = count_.deadlocks;
  at_[random_.Below(at_.size())]->will_receive = true;
  RunUntil(now_ + kDeadlockFound, [&] { return count_.deadlocks > found; });
  if (count_.deadlocks == found) Violated("a circle was not found");
  RunUntil(now_ + options_.settle, [this] { return AllRun(); });
  if (!AllRun()) Violated("not all ranks run after a circle");
}

}  // namespace resilient::store::sim
