// The sessions of a Sim, and the program above each of them: it runs operations while the gate is
// open, meets a failure, and asks for a rebuild when it likes, on one thread or two; it gives up
// waiting and asks again; it commits; and now and then it closes, in whatever state it is.
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <utility>

#include "runtime/base/log.h"
#include "tests/sim/sim_parts.h"

namespace resilient::store::sim {
namespace {

constexpr Duration kLong = std::chrono::minutes(10);
constexpr Duration kRebuildTimeout = std::chrono::seconds(15);
constexpr Duration kGoodbye = Millis(500);
constexpr Duration kFenceGrace = std::chrono::seconds(1);
constexpr int kRefusalsMost = 2;  // Then the program ends.

}  // namespace

// ---- The session and the membership line ----

void Sim::StartSession(Process& process) {
  SessionHost host;
  host.now = [this] { return now_; };
  host.between = [this](int low_ms, int high_ms) { return Between(low_ms, high_ms); };
  host.chance = [this](int percent) { return Chance(percent); };
  host.after = [this, &process](Duration delay, std::function<void()> what) {
    DoAfter(process, delay, std::move(what));
  };
  host.join = [this, &process](std::uint64_t generation, std::uint64_t number,
                               const SimWish& wish) {
    JoinWorld(process, generation, number, wish);
  };
  host.take_place = [this, &process](const View& view) { TakePlace(process, view); };
  host.ready = [this, &process](std::uint64_t generation) {
    Submit(process, *process.control, ReadyOp{generation});
  };
  host.report = [this, &process](const Report& report) {
    Submit(process, *process.control, ReportOp{report});
  };
  host.abort = [this, &process](const recovery::Flight& flight) {
    AbortCalls(process, flight.generation());
  };
  host.entered = [this, &process](SessionState state) { OnState(process, state); };
  host.is_peace = [this] { return kind_; };
  host.violated = [this, &process](const std::string& what) {
    Violated(StrCat("rank ", process.rank, ": ", what));
  };
  const SimWish first = process.ran_before ? SomeWish(process.size) : SimWish{0, seat_wait_};
  process.session =
      std::make_unique<SimSession>(budget_, seat_wait_, first, options_.planted, std::move(host));
  // Behind the layer's back nobody rebuilds.
  const bool second_thread = Chance(50) && !replays_;
  process.session->Init([this, &process, second_thread](const Status& status) {
    if (!status.ok()) return Destroy(process);
    if (second_thread) Poke(process);
    OnRebuilt(process, status);
  });
}

void Sim::JoinWorld(Process& process, std::uint64_t generation, std::uint64_t number,
                    const SimWish& wish) {
  JoinOp join;
  join.request.rank = process.rank;
  join.request.world_size = process.size;
  join.request.endpoint = StrCat("endpoint", process.pid);
  join.request.join_timeout = kLong;
  join.request.seat_wait = wish.seat_wait;
  join.request.min_world = wish.min_world;
  if (process.ran_before && process.round() == 0) {
    join.request.join_timeout = wish.seat_wait;
    join.request.seat_wait = seat_wait_;
  }
  process.wishes[number] = wish;
  if (options_.planted == Planted::kWishInvented && wish.min_world == 0 && process.round() != 0) {
    join.request.min_world = 1;
  }
  if (options_.planted == Planted::kSeatWaitNotTold && wish.min_world > 0)
    join.request.seat_wait = Duration::zero();
  join.request.generation = generation;
  join.request.number = number;
  join.request.spare_if_taken = spare_count_ > 0;
  Submit(process, *process.control, join);
  if (options_.planted == Planted::kReadyForAll) {
    for (std::uint64_t ahead = 1; ahead <= 3; ++ahead) {
      Submit(process, *process.control, ReadyOp{process.generation() + ahead});
    }
  }
}

void Sim::OnEvent(Process& process, const Event& event) {
  if (std::holds_alternative<PingEvent>(event)) {
    return SendUp(*process.control, Request{.op = HeartbeatOp{++process.beat}});
  }
  if (process.doomed) return;
  if (const View* view = ViewOf(event)) {
    OnView(process, *view);
  } else if (const auto* running = std::get_if<RunningEvent>(&event)) {
    if (running->generation != process.generation()) Violated("running without a view");
    process.session->OnRunning(running->generation);
  } else if (const auto* fence = std::get_if<Fence>(&event)) {
    if (fence->generation > process.session->ended_generation()) {
      ++count_.Of(Blow::kFence, process.session->state());
    }
    process.session->OnFence(*fence);
    FollowFence(process, *fence);
  } else if (const auto* lost = std::get_if<SessionLostEvent>(&event)) {
    OnLost(process, lost->why);
  } else if (const auto* refused = std::get_if<JoinRefusedEvent>(&event)) {
    process.session->OnJoinRefused(refused->join, refused->why);
  } else if (const auto* where = std::get_if<WhereEvent>(&event)) {
    OnWhere(process, where->ask);
  } else if (const auto* ask = std::get_if<AskProgressEvent>(&event)) {
    OnAskProgress(process, *ask);
  } else if (const auto* late = std::get_if<LateEvent>(&event)) {
    OnLate(process, late->notice);
  }
}

void Sim::OnView(Process& process, const View& view) {
  const bool repeated = view.generation == process.generation() ||
                        view.generation <= process.session->ended_generation();
  if (!repeated) {
    if (view.generation < process.generation()) return Violated("a view of the past");
    if (process.session->IsPresent(process.generation())) Violated("a view without a fence");
    const auto numbers =
        std::count_if(view.members.begin(), view.members.end(),
                      [&process](const Member& member) { return member.pid == process.pid; });
    if (numbers != 1) Violated(StrCat("a view in which a rank is ", numbers, " times"));
  }
  process.session->OnView(view);
}

void Sim::OnLost(Process& process, const Status& why) {
  if (process.doomed) return;
  if (!process.lost) Violated(StrCat("rank ", process.rank, " is told that it is lost"));
  process.session->OnSessionLost(why);
}

// Called in the midst of a step of the machine.
void Sim::OnState(Process& process, SessionState state) {
  if (state == SessionState::kRunning) {
    ++count_.openings;
    process.refusals = process.tries = process.refused_least = 0;
  }
  if (state == SessionState::kFailed) {
    if (!process.lost) ++count_.exhausted;
    process.doomed = true;
    DoAfter(process, Between(0, 200), [this, &process] { End(process, 1 << 8); });
  }
  if (process.doom && process.doom->state == state) {
    const Duration soon = Chance(50) ? Duration::zero() : Between(0, 30);
    DoAfter(process, soon, [this, &process] { Strike(process); });
  }
}

// ---- The program ----

void Sim::MeetFailure(Process& process) {
  const int most = kind_ ? 200 : Chance(15) ? 3000 : 600;
  DoAfter(process, Between(0, most), [this, &process] { Rebuild(process); });
}

void Sim::Rebuild(Process& process) {
  if (process.doomed) return;
  if (process.replay.phase == Replay::Phase::kHealing) return MeetFailure(process);
  const bool hasty = !kind_ && Chance(30);
  process.session->Rebuild(hasty ? Between(0, 500) : kRebuildTimeout, PickWish(process),
                           [this, &process](const Status& status) { OnRebuilt(process, status); });
}

void Sim::OnRebuilt(Process& process, const Status& status) {
  if (process.doomed) return;
  if (status.ok()) {
    // As rebuild() does, which looks again when its wait is over.
    if (process.replay.phase == Replay::Phase::kHealing) return MeetFailure(process);
    ++count_.rebuilds;
    BeginAnew(process);
    process.synced = process.generation();
    return Compute(process);
  }
  if (status.code() == StatusCode::kTimeout) ++count_.given_up;
  const bool refused = process.session->state() == SessionState::kFenced;
  ++process.tries;
  if (refused) {
    const int least = process.session->wish().min_world;
    process.refused_least = least > 0 ? least : process.size;
  }
  if (refused && ++process.refusals > kRefusalsMost) return Destroy(process);
  MeetFailure(process);
}

// An operation needs somebody that has left. Perhaps there is more to it, and a fence on its way;
// otherwise nothing can be rebuilt, and the program ends.
void Sim::MeetLeaver(Process& process) {
  DoAfter(process, kFenceGrace, [this, &process, generation = process.generation()] {
    const bool still = process.running() && process.generation() == generation;
    return still ? Destroy(process) : Rebuild(process);
  });
}

// Another thread, with short operations. It rebuilds now and then, and does not wait for long.
void Sim::Poke(Process& process) {
  DoAfter(process, Between(100, 900), [this, &process] {
    if (process.doomed) return;
    Result<std::shared_ptr<recovery::Flight>> flight = process.session->Enter();
    if (flight.ok()) {
      DoAfter(process, Between(0, 60),
              [&process, flight = *flight] { process.session->Leave(*flight); });
    } else {
      ++count_.refused;
      if (Chance(20)) {
        return process.session->Rebuild(Between(0, kind_ ? 5000 : 700), PickWish(process),
                                        [this, &process](const Status& status) {
                                          if (!status.ok()) ++count_.given_up;
                                          Poke(process);
                                        });
      }
    }
    Poke(process);
  });
}

// Under the generation of the last sync, whatever has become of it since.
void Sim::Commit(Process& process) {
  const bool told = options_.planted != Planted::kCommitsWithoutGeneration;
  Submit(process, *process.request,
         SetOp{StrCat(kCommits, process.rank), StrCat(process.synced, ".", ++process.commit)},
         process.round(), told ? process.synced : 0);
}

// The store puts all changes in one order: no commit of a generation may stand behind one of the
// next.
void Sim::OnCommit(const SetOp& commit, const Reply& reply) {
  if (reply.status.code() == StatusCode::kStaleGeneration) {
    ++count_.stale_commits;
    return;
  }
  if (!reply.status.ok()) return Violated("a commit failed: " + reply.status.ToString());
  if (reply.revision == 0) return Violated("a commit has no revision");
  ++count_.kept_commits;
  const std::uint64_t generation = std::strtoull(commit.value.c_str(), nullptr, 10);
  const auto known =
      commits_.try_emplace(generation, std::pair(reply.revision, reply.revision)).first;
  auto& [lowest, highest] = known->second;
  lowest = std::min(lowest, reply.revision);
  highest = std::max(highest, reply.revision);
  const auto next = std::next(known);
  const bool behind = next != commits_.end() && next->second.first < highest;
  const bool ahead = known != commits_.begin() && std::prev(known)->second.second > lowest;
  if (!behind && !ahead) return;
  Violated(StrCat("two generations commit: ", commit.value, " at revision ", reply.revision, ", ",
                  behind ? "behind" : "ahead of", " one of another generation"));
}

// ---- The end of a process, and what else strikes it ----

// The session is closed, with a goodbye to the peers and to the store, and then the process ends.
void Sim::Destroy(Process& process) {
  if (process.doomed) return;
  ++count_.closes;
  ++count_.Of(Blow::kClose, process.session->state());
  CountHealBlow(Blow::kClose, process);
  process.session->Close();
  process.left = Submit(process, *process.control, LeaveOp{});
  process.doomed = true;
  LoseLinks(process);
  DoAfter(process, kGoodbye, [this, &process] { OnLeft(process); });
}

void Sim::OnLeft(Process& process) { End(process, Chance(50) ? 0 : 1 << 8); }

// Whoever has a link to it finds it broken, or with a goodbye on it. Of a crash the server may be
// the only one to tell.
void Sim::LoseLinks(const Process& gone) {
  const std::uint64_t generation = gone.generation();
  if (generation == 0) return;
  for (Process* member : views_[generation]) {
    if (member == &gone || (!gone.left && Chance(50))) continue;
    const bool goodbye = gone.left && Chance(70);
    DoAfter(*member, Between(0, 50), [this, member, generation, goodbye, rank = gone.rank] {
      Process::Calls& calls = member->calls[generation];
      (goodbye ? calls.left : calls.gone).insert(rank);
      MissLeavers(*member, generation);
      ReportGone(*member, generation);
    });
  }
}

// A link that is well is said to be lost.
void Sim::Accuse(Process& process) {
  if (!process.running() || process.size == 1) return;
  const Status why(StatusCode::kCommFailed, "reset by peer");
  process.session->OnLinkLost(process.generation(), (process.rank + 1) % process.size, why);
}

// Where nobody waits in a circle: this would open it, and the server's verdict come too late.
void Sim::AbortGroup(Process& process) {
  const std::uint64_t generation = process.generation();
  if (process.doomed || !process.calls[generation].waiting) return;
  for (Process* member : views_[generation]) {
    if (member->calls[generation].receives_from >= 0) return;
  }
  if (!process.session->AbortGroup()) return;
  EndCall(process, generation, Status(StatusCode::kCommFailed, "the group was aborted"));
}

// What strikes it in a state that lasts for a moment only is laid out beforehand, and a recovery
// begun.
void Sim::ArmBlow(Process& process) {
  constexpr SessionState kMoments[] = {SessionState::kAborting, SessionState::kJoining,
                                       SessionState::kBuilding, SessionState::kReady};
  constexpr Blow kDooms[] = {Blow::kRestart, Blow::kClose, Blow::kCrash};
  process.doom = {kMoments[random_.Below(std::size(kMoments))],
                  kDooms[random_.Below(std::size(kDooms))]};
  if (Chance(60)) Accuse(process);
}

// For all but one of those that are there.
void Sim::CountBlow(Blow blow, const Process* but) {
  for (const Process* process : at_) {
    if (!process || process == but || !process->alive) continue;
    ++count_.Of(blow, process->session->state());
    CountHealBlow(blow, *process);
  }
}

void Sim::Strike(Process& process) {
  if (!process.doom || process.doomed || kind_) return;
  const Blow blow = std::exchange(process.doom, std::nullopt)->blow;
  switch (blow) {
    case Blow::kFence:
    case Blow::kLoss:
      return;
    case Blow::kRestart:
      if (durable_) CrashServer();
      return;
    case Blow::kClose:
      return Destroy(process);
    case Blow::kCrash:
      return Crash(process);
  }
}

}  // namespace resilient::store::sim
