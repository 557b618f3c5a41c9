#include "tests/sim/sim_parts.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "runtime/base/log.h"

namespace resilient::store::sim {
namespace {

constexpr Duration kBeat = kTtl / 5;
constexpr Duration kBudget = std::chrono::seconds(20);
constexpr Duration kLittleBudget = Millis(1500);
constexpr int kSigkill = 9;
constexpr int kOpenOpsMax = 4;
constexpr Duration kSeatWait = std::chrono::seconds(8);
constexpr Duration kShortSeatWait = Millis(1500);

}  // namespace

Sim::Sim(SimOptions options)
    : options_(options),
      random_(options.seed * 0x9E3779B97F4A7C15u + 1),
      budget_(options.seed % 5 == 0 ? kLittleBudget : kBudget),
      durable_(options.seed % 4 != 0) {
  // Not of the schedule's chance, which stays what it is where nobody wants less.
  Random policy(options.seed);
  constexpr Policy kPolicies[] = {Policy::kNobody, Policy::kNobody, Policy::kNobody,
                                  Policy::kAll,    Policy::kSome,   Policy::kSecondThoughts};
  policy_ = kPolicies[policy.Below(std::size(kPolicies))];
  const bool short_wait = policy_ != Policy::kNobody && policy.Below(2) == 0;
  const bool spares = policy.Below(policy_ == Policy::kNobody ? 2 : 8) == 0;
  spare_count_ = spares ? 1 + static_cast<int>(policy.Below(2)) : 0;
  room_ = spares && policy.Below(2) == 0 ? 1 + static_cast<int>(policy.Below(2)) : 0;
  PlanReplays();
  seat_wait_ = short_wait || (spares && policy.Below(2) == 0) ? kShortSeatWait : kSeatWait;
  ran_before_ = policy_ != Policy::kNobody && spare_count_ == 0 && policy.Below(3) == 0;
}

Sim::~Sim() = default;

// ---- Time and chance ----

void Sim::At(Instant when, std::function<void()> what) { queue_.emplace(when, std::move(what)); }

Duration Sim::Between(int low_ms, int high_ms) {
  const auto span = static_cast<std::uint64_t>(high_ms - low_ms) * 1000 + 1;
  return Millis(low_ms) + std::chrono::microseconds(random_.Below(span));
}

void Sim::RunUntil(Instant end, const std::function<bool()>& done) {
  while (violation_.empty() && !queue_.empty() && queue_.begin()->first <= end && !done()) {
    now_ = queue_.begin()->first;
    const std::function<void()> what = std::move(queue_.begin()->second);
    queue_.erase(queue_.begin());
    what();
  }
}

void Sim::Violated(const std::string& what) {
  if (!violation_.empty()) return;
  violation_ = StrCat("seed ", options_.seed, " at ", SecondsOf(now_), " s: ", what,
                      "\n  (run again with --seed=", options_.seed, ")");
}

std::string Sim::Run() {
  ranks_ = 2 + static_cast<int>(random_.Below(4));
  last_place_ = ranks_ - 1;
  max_world_ = room_ > 0 ? ranks_ + room_ : 0;
  supervised_ = Chance(50);
  at_.resize(static_cast<std::size_t>(ranks_), nullptr);
  for (int place = 0; place < ranks_; ++place) {
    After(Between(0, 500), [this, place] { Spawn(place); });
  }
  for (int i = 0; i < spare_count_; ++i) After(Between(0, 2000), [this] { SpawnSpare(); });
  StartServer();
  Tick();
  PlanFaults();
  const auto never = [] { return false; };
  RunUntil(now_ + options_.faults, never);
  if (!violation_.empty()) return violation_;
  kind_ = true;
  for (const auto& process : processes_) process->will_receive = process->will_stand_still = false;
  RunUntil(now_ + options_.settle, [this] { return AllRun(); });
  // A report made just before may still be looked into.
  RunUntil(now_ + kTtl, never);
  RunUntil(now_ + options_.settle, [this] { return AllRun(); });
  if (!violation_.empty()) return violation_;
  if (!AllRun()) {
    Violated("not all ranks run after the faults: " +
             (core_ ? core_->StatusJson(now_) : "no server"));
  }
  if (!violation_.empty()) return violation_;
  // A while of peace: nobody is fenced, every wait of a past generation has ended.
  const int fences = count_.fences;
  RunUntil(now_ + 2 * kTtl, never);
  RunUntil(now_ + kTtl, [this] { return AllRun(); });  // What they say of room may be on its way.
  if (count_.fences != fences || !AllRun()) Violated("a fence without any fault");
  CheckWaits();
  CheckDeadlockIsFound();
  CheckSpares();
  CheckShrinks();
  quiet_ = true;
  RunUntil(now_ + kTtl, never);
  CheckWatches();
  CheckPresence();
  last_member_left_ = false;
  for (Process* process : at_) Submit(*process, *process->control, LeaveOp{});
  for (Process* process : spares_) Submit(*process, *process->control, LeaveOp{});
  RunUntil(now_ + kTtl, [this] { return last_member_left_; });
  CheckRows();
  if (!last_member_left_) Violated("all have left and the server was not told so");
  return violation_;
}

bool Sim::AllRun() const {
  if (server_paused_ || input_held_back_ || server_down_) return false;
  if (spare_count_ > 0) {
    const auto members = views_.find(at_.front() ? at_.front()->generation() : 0);
    // Otherwise somebody is between two places.
    if (members == views_.end() || members->second.size() != at_.size()) return false;
    if (GrowthIsDue()) return false;
  }
  return std::all_of(at_.begin(), at_.end(), [this](const Process* process) {
    return process && process->alive && !process->stopped && !process->doomed &&
           process->replay.phase == Replay::Phase::kOpen &&
           process->replay.epoch == at_.front()->replay.epoch && process->running() &&
           process->generation() == at_.front()->generation() &&
           process->control->core.InFlight() == 0 && !StandsInTheWay(*process);
  });
}

// ---- The network ----

void Sim::Connect(Process& process, Line& line) {
  auto connection = std::make_shared<Connection>();
  connection->id = ++last_connection_;
  connection->process = &process;
  connection->line = &line;
  line.connection = connection;
  line.welcomed = false;
  if (server_down_) return BreakAtClient(connection);  // Refused.
  connections_[connection->id] = connection;
  SendUp(line, line.core.MakeHello());
}

void Sim::SendUp(Line& line, const Request& request) {
  const std::shared_ptr<Connection> connection = line.connection;
  if (!connection || connection->broken) return;
  connection->last_up = std::max(connection->last_up, now_ + Between(0, kind_ ? 5 : 40));
  At(connection->last_up, [this, connection, request] {
    if (connection->broken) return;
    Process& process = *connection->process;
    if (connection->line == process.control.get()) {
      process.last_arrival = now_;
      if (std::holds_alternative<Hello>(request.op)) {
        process.last_hello = now_;
        process.greeted = connection->id;
      }
    }
    ToServer([this, connection, request](Effects& effects) {
      if (std::holds_alternative<Hello>(request.op)) core_->OnConnect(connection->id, now_);
      if (const auto* ready = std::get_if<ReadyOp>(&request.op)) {
        // Ahead of its view it does not count.
        if (connection->process->generation() >= ready->generation) {
          ready_.insert({connection->process, ready->generation});
        }
      }
      if (const auto* join = std::get_if<JoinOp>(&request.op)) {
        NoteJoin(*connection->process, join->request);
      }
      core_->OnRequest(connection->id, request, now_, effects);
    });
  });
}

void Sim::SendDown(Connection& connection, const ServerMessage& message) {
  if (connection.broken) return;
  const Event* event = std::get_if<Event>(&message);
  if (options_.planted == Planted::kFenceDropped && event &&
      std::holds_alternative<Fence>(*event) && connection.process->rank == 0) {
    return;
  }
  connection.last_down = std::max(connection.last_down, now_ + Between(0, kind_ ? 5 : 40));
  const std::shared_ptr<Connection> kept = connections_.at(connection.id);
  At(connection.last_down, [this, kept, message] {
    if (kept->broken) return;
    Process& process = *kept->process;
    Do(process, [this, kept, message, &process] {
      if (kept->line->connection == kept) Receive(process, *kept->line, message);
    });
  });
}

// Both sides learn of it in their own time; what was under way is gone.
void Sim::Break(const std::shared_ptr<Connection>& connection) {
  if (connection->broken) return;
  BreakAtClient(connection);
  Process& process = *connection->process;
  After(Between(0, 200), [this, connection, &process, start = start_] {
    if (start != start_) return;
    if (process.greeted == connection->id) process.last_close = now_;
    ToServer([this, connection](Effects& effects) {
      connection->server_open = false;
      core_->OnDisconnect(connection->id, now_, effects);
      connections_.erase(connection->id);
    });
  });
}

void Sim::BreakAtClient(const std::shared_ptr<Connection>& connection) {
  connection->broken = true;
  Process& process = *connection->process;
  DoAfter(process, Between(0, 150), [this, connection, &process] {
    Line& line = *connection->line;
    if (line.connection != connection) return;
    line.connection.reset();
    line.welcomed = false;
    DoAfter(process, line.backoff.Next(), [this, &process, &line] {
      if (!line.connection) Connect(process, line);
    });
  });
}

// ---- Processes and their launcher ----

void Sim::Spawn(int place) {
  const auto before = std::find_if(at_.begin(), at_.end(), [place](const Process* other) {
    return other && other->place == place;
  });
  const bool first = before == at_.end();  // Others may have gone on without it by now.
  const auto [rank, size] = first ? std::pair(place, ranks_) : *NumberOf(place);
  Process& process = NewProcess(place, rank, size);
  process.ran_before = first && ran_before_;
  const auto own = at_.begin() + std::min<std::ptrdiff_t>(place, std::ssize(at_) - 1);
  const auto empty = *own == nullptr ? own : std::find(at_.begin(), at_.end(), nullptr);
  *(first ? empty : before) = &process;
  Begin(process);
}

Sim::Process& Sim::NewProcess(int place, int rank, int size) {
  processes_.push_back(std::make_unique<Process>());
  Process& process = *processes_.back();
  process.place = process.home = place;
  process.rank = rank;
  process.size = size;
  process.pid = static_cast<std::int64_t>(processes_.size());
  process.presence = PresenceOf(process);
  Hello hello;
  hello.job = "sim";
  hello.session = StrCat("session", process.pid);
  hello.incarnation = StrCat("incarnation", process.pid);
  hello.process = {"host", "boot", "ns", process.pid, 1};
  hello.supervised = supervised_;
  hello.role = Role::kControl;
  hello.leased_key = process.presence;
  hello.leased_value = "here";
  process.control = std::make_unique<Line>(hello, random_.Next());
  hello.role = Role::kRequest;
  process.request = std::make_unique<Line>(hello, random_.Next());
  return process;
}

void Sim::Begin(Process& process) {
  Connect(process, *process.control);
  Connect(process, *process.request);
  StartSession(process);
  AskWatch(process);
  Beat(process);
  Work(process);
}

void Sim::Do(Process& process, std::function<void()> what) {
  if (!process.alive) return;
  if (process.stopped) {
    process.deferred.push_back(std::move(what));
  } else {
    what();
  }
}

void Sim::DoAfter(Process& process, Duration delay, std::function<void()> what) {
  After(delay, [this, &process, what = std::move(what)] { Do(process, what); });
}

void Sim::Crash(Process& process) {
  if (!process.alive) return;
  ++count_.crashes;
  ++count_.Of(Blow::kCrash, process.session->state());
  CountHealBlow(Blow::kCrash, process);
  if (WantsLess(process)) ++count_.shrink_crashes;
  End(process, kSigkill);
}

// The kernel closes its sockets, the server's watch, neighbours and the launcher see its end, in
// any order.
void Sim::End(Process& process, int wait_status) {
  if (!process.alive) return;
  process.alive = false;
  process.ended_at = now_;
  for (Line* line : {process.control.get(), process.request.get()}) {
    if (line->connection) Break(line->connection);
  }
  for (const auto& [watch, watched] : watches_) {
    if (watched != &process || Chance(30)) continue;
    After(Between(0, 100), [this, watch = watch, start = start_] {
      if (start != start_) return;
      ToServer([this, watch](Effects& effects) { core_->OnProcessExit(watch, now_, effects); });
    });
  }
  if (!process.left) {
    TellNeighbours(process, wait_status);
    LoseLinks(process);
  }
  if (supervised_) {
    ExitReportOp report;
    report.process = process.control->core.hello().process;
    report.rank = process.rank;
    report.signal = wait_status & 0x7f;
    report.exit_code = wait_status >> 8;
    After(Between(0, 150), [this, report] { AskAsAdmin(report); });
  }
  const bool may_be_late = policy_ != Policy::kNobody || spare_count_ > 0;
  const bool late = may_be_late && !kind_ && Chance(40);
  ++coming_;
  After(Between(100, late ? 7000 : 1500), [this, &process] {
    --coming_;
    Respawn(process);
  });
}

// Of a place that is no more nobody comes again.
void Sim::Respawn(Process& process) {
  if (spare_count_ > 0) return RespawnAtHome(process);
  if (NumberOf(process.place)) return Spawn(process.place);
  std::erase(at_, &process);
}

// Those that had it in a view, as far as they see it.
void Sim::TellNeighbours(const Process& dead, int wait_status) {
  if (dead.generation() == 0 || Chance(30)) return;
  Report report;
  report.kind = ReportKind::kProcessDied;
  report.accused_incarnation = dead.control->core.hello().incarnation;
  report.wait_status = Chance(50) ? wait_status : -1;
  for (Process* neighbour : at_) {
    if (neighbour == &dead || neighbour->generation() == 0 || Chance(30)) continue;
    DoAfter(*neighbour, Between(0, 50), [this, neighbour, report, &dead] {
      ++count_.deaths_seen;
      Report told = report;
      told.generation = neighbour->generation();
      const std::vector<Process*>& members = views_[told.generation];
      const auto seat = std::find(members.begin(), members.end(), &dead);
      // Its world has been numbered anew since.
      if (seat == members.end() && dead.rank >= static_cast<int>(members.size())) return;
      told.accused_rank =
          seat == members.end() ? dead.rank : static_cast<int>(seat - members.begin());
      Submit(*neighbour, *neighbour->control, ReportOp{told});
    });
  }
}

void Sim::Receive(Process& process, Line& line, const ServerMessage& message) {
  if (const auto* event = std::get_if<Event>(&message)) return OnEvent(process, *event);
  OnReply(process, line, std::get<Reply>(message));
}

void Sim::OnReply(Process& process, Line& line, const Reply& reply) {
  if (reply.welcome) return OnWelcome(process, line, reply);
  if (!line.core.OnReply(reply)) return;
  if (&line == process.control.get()) {
    const StatusCode code = reply.status.code();
    if (process.left == reply.seq) return OnLeft(process);
    if (code == StatusCode::kStaleGeneration) {
      OnLost(process, reply.status);
    } else if (code != StatusCode::kOk) {
      Violated("a membership request failed: " + reply.status.ToString());
    }
    return;
  }
  const auto sent = process.sent.extract(reply.seq);
  if (sent.empty()) return Violated("an answer to nothing");
  OnResult(process, sent.mapped(), reply);
  process.waits.erase(reply.seq);
}

void Sim::OnWelcome(Process& process, Line& line, const Reply& reply) {
  if (server_id_.empty()) server_id_ = reply.welcome->server;
  if (reply.welcome->server != server_id_) Violated("the store that was kept has another name");
  line.welcomed = true;
  line.backoff.Reset();
  if (&line == process.control.get()) {
    SendUp(line, Request{.op = HeartbeatOp{++process.beat}});  // It lives.
  }
  for (const Request& request : line.core.Unanswered()) {
    const bool mutation = process.sent.contains(request.seq) &&
                          !process.waits.contains(request.seq) &&
                          !std::holds_alternative<WatchOp>(request.op) &&
                          !std::holds_alternative<ListKeysOp>(request.op);
    count_.repeats += mutation && &line == process.request.get() ? 1 : 0;
    const bool add = std::holds_alternative<AddOp>(request.op);
    if (options_.planted == Planted::kRetryUnderNewSeq && add) {
      line.core.Forget(request.seq);
      const Request again = **line.core.Submit(request.op, request.scope, request.generation);
      process.sent.erase(request.seq);
      process.sent.emplace(again.seq, request.op);
      SendUp(line, again);
    } else {
      SendUp(line, request);
    }
  }
}

// What an answer must be, by what was asked before and answered to whom.
void Sim::OnResult(Process& process, const Op& op, const Reply& reply) {
  const bool done = reply.status.ok();
  if (std::holds_alternative<WatchOp>(op) || std::holds_alternative<ListKeysOp>(op)) {
    return OnWatched(process, reply);
  }
  if (const auto* set = std::get_if<SetOp>(&op); set && set->key.starts_with(kCommits)) {
    return OnCommit(*set, reply);
  }
  if (std::holds_alternative<SetOp>(op) || std::holds_alternative<DeleteOp>(op)) {
    process.writing = false;
    if (!done) return Violated("a change of a key failed: " + reply.status.ToString());
    if (std::holds_alternative<DeleteOp>(op) && !reply.flag) return;
    return CheckRevision(StrCat("watched/", process.pid), process.written, reply.revision);
  }
  if (const auto* barrier = std::get_if<BarrierOp>(&op)) {
    if (!done) return;
    ++count_.barriers;
    const std::uint64_t generation = std::strtoull(barrier->key.c_str(), nullptr, 10);
    const int passed = ++process.passed[generation];
    for (Process* member : views_[generation]) {
      if (member->arrivals[generation] >= passed) continue;
      Violated(StrCat("barrier ", passed, " of generation ", generation, " let rank ", process.rank,
                      " pass before rank ", member->rank, " came"));
    }
    return;
  }
  if (std::holds_alternative<GetOp>(op)) {
    if (done) Violated("a wait for a key that nobody sets was met");
    return;
  }
  --process.open_ops;
  if (std::holds_alternative<QueuePopOp>(op)) {
    if (!done) return;
    ++count_.pops;
    if (!process.items.empty() && process.items.front() == reply.value) {
      return process.items.pop_front();
    }
    // An item that went straight to this pop, and the answer to its push comes behind, as the
    // repeats are answered in the order of the requests.
    const bool under_way =
        std::any_of(process.sent.begin(), process.sent.end(), [&reply](const auto& open) {
          const auto* push = std::get_if<QueuePushOp>(&open.second);
          return push && push->value == reply.value;
        });
    if (!under_way || !process.early.insert(reply.value).second) {
      Violated(StrCat("a pop of rank ", process.rank, " returned ", reply.value,
                      ": popped twice or out of order"));
    }
    return;
  }
  if (reply.status.code() == StatusCode::kStaleGeneration) return;
  if (!done) return Violated("an add or push failed: " + reply.status.ToString());
  if (const auto* push = std::get_if<QueuePushOp>(&op)) {
    if (process.early.erase(push->value) == 0) process.items.push_back(push->value);
    return;
  }
  ++count_.adds;
  if (reply.number != ++process.applied) {
    Violated(StrCat("add number ", process.applied, " of rank ", process.rank, " returned ",
                    reply.number, ": applied twice or not at all"));
  }
}

std::uint64_t Sim::Submit(Process& process, Line& line, Op op, std::uint64_t scope,
                          std::uint64_t generation) {
  if (process.doomed) return 0;
  const bool wait = std::holds_alternative<GetOp>(op) || std::holds_alternative<BarrierOp>(op) ||
                    std::holds_alternative<QueuePopOp>(op);
  const Result<const Request*> open = line.core.Submit(op, scope, generation);
  if (!open) {
    Violated("too much in flight: " + open.status().ToString());
    return 0;
  }
  Request request = **open;
  if (&line == process.request.get()) process.sent.emplace(request.seq, std::move(op));
  if (wait) process.waits[request.seq] = process.generation();
  if (options_.planted == Planted::kAckTooEarly) request.first_unacked = request.seq;
  if (line.welcomed) SendUp(line, request);
  return request.seq;
}

void Sim::Beat(Process& process) {
  if (process.control->welcomed) {
    SendUp(*process.control, Request{.op = HeartbeatOp{++process.beat}});
  }
  DoAfter(process, kBeat, [this, &process] { Beat(process); });
}

void Sim::Work(Process& process) {
  WriteKey(process);
  const auto ask = [this, &process](Op op) {
    Submit(process, *process.request, std::move(op), process.round(), process.generation());
  };
  if (process.running() && process.open_ops < kOpenOpsMax && !process.doomed) {
    ++process.open_ops;
    const std::uint64_t kind = random_.Below(10);
    if (kind < 5) {
      ask(AddOp{StrCat("count", process.pid), 1});
    } else if (kind < 8 || process.pushed == process.popped) {
      ask(QueuePushOp{StrCat("queue", process.pid), StrCat("item", ++process.pushed)});
    } else {
      ++process.popped;
      ask(QueuePopOp{StrCat("queue", process.pid), true});
    }
    const auto waits = [&process](bool barrier) {
      return std::any_of(process.waits.begin(), process.waits.end(), [&](const auto& wait) {
        const bool of_barrier = std::holds_alternative<BarrierOp>(process.sent.at(wait.first));
        const bool of_get = std::holds_alternative<GetOp>(process.sent.at(wait.first));
        return wait.second == process.generation() && (barrier ? of_barrier : of_get);
      });
    };
    if (!waits(false)) ask(GetOp{"never", true});
    if (!waits(true) && Chance(30)) {
      ++process.arrivals[process.generation()];
      ask(BarrierOp{StrCat(process.generation()), process.size});
    }
  }
  DoAfter(process, Between(10, 150), [this, &process] { Work(process); });
}

// ---- Faults ----

void Sim::PlanFaults() {
  const Instant end = now_ + options_.faults - std::chrono::seconds(2);
  for (Instant when = now_ + Between(500, 2000); when < end; when += Between(50, 2500)) {
    At(when, [this] { Fault(); });
  }
}

void Sim::Fault() {
  Process* victim = PickVictim();
  const std::uint64_t kind = random_.Below(140);
  if (!victim || !victim->alive) return;
  if (kind < 42) {
    Line& line = Chance(40) ? *victim->control : *victim->request;
    ++count_.cuts;
    if (line.connection && !line.connection->broken) Break(line.connection);
  } else if (kind < 55) {
    Crash(*victim);
  } else if (kind < 69) {
    StopProcess(*victim);
  } else if (kind < 82) {
    StopServer();
  } else if (kind < 90) {
    if (durable_) CrashServer();
  } else if (kind < 96) {
    HoldSomebody(*victim);
  } else if (kind < 98) {
    victim->will_receive = true;
  } else if (kind < 101) {
    victim->will_stand_still = true;
  } else if (kind < 106) {
    Accuse(*victim);
  } else if (kind < 109) {
    AbortGroup(*victim);
  } else if (kind < 111) {
    Destroy(*victim);
  } else if (kind >= 130) {
    SilenceLink();
  } else if (replays_ && Chance(50)) {
    Accuse(*victim);
  } else {
    ArmBlow(*victim);
  }
}

void Sim::StopProcess(Process& process) {
  if (process.stopped) return;
  process.stopped = true;
  After(Between(50, 4000), [this, &process] {
    process.stopped = false;
    std::deque<std::function<void()>> deferred = std::move(process.deferred);
    process.deferred.clear();
    for (std::function<void()>& what : deferred) Do(process, std::move(what));
  });
}

}  // namespace resilient::store::sim
