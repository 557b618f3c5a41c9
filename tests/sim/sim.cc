#include "tests/sim/sim.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "runtime/base/log.h"

namespace resilient::store::sim {
namespace {

constexpr Duration kTtl = std::chrono::seconds(2);
constexpr Duration kBeat = kTtl / 5;
constexpr Duration kLateTick = 4 * kTickInterval;  // What a pause of the server counts at most.
constexpr Duration kLong = std::chrono::minutes(10);
constexpr int kOpenAddsMax = 4;

CoreOptions CoreOptionsOf(std::uint64_t seed) {
  CoreOptions options;
  options.server_id = "sim";
  options.lease_ttl = kTtl;
  options.seed = seed;
  return options;
}

double SecondsOf(Instant when) {
  return std::chrono::duration<double>(when.time_since_epoch()).count() - 3600;
}

}  // namespace

struct Sim::Connection {
  ConnectionId id = 0;
  Process* process = nullptr;
  Line* line = nullptr;
  Instant last_up{};  // Deliveries keep their order.
  Instant last_down{};
  bool broken = false;      // Nothing passes any more.
  bool server_open = true;  // The server has not closed it nor heard that it is closed.
};

// One of the two lines of a process to the store.
struct Sim::Line {
  Line(Hello hello, std::uint64_t seed) : core(std::move(hello)), backoff(seed) {}
  ClientCore core;
  Backoff backoff;
  std::shared_ptr<Connection> connection;
  bool welcomed = false;
};

// A rank of the job: joins, builds, runs, adds to a counter of its own, is fenced, joins again.
struct Sim::Process {
  int rank = 0;
  std::int64_t pid = 0;
  bool alive = true;
  bool stopped = false;
  bool doomed = false;  // Told that it is out: it ends.
  std::deque<std::function<void()>> deferred;
  std::unique_ptr<Line> control;
  std::unique_ptr<Line> request;

  std::uint64_t round = 0;
  std::uint64_t generation = 0;  // Of the last view.
  std::uint64_t ended = 0;       // Newest generation whose fence has come.
  bool running = false;
  bool fenced = false;  // Until the next view.
  std::int64_t applied = 0;
  int open_adds = 0;
  std::map<std::uint64_t, std::uint64_t> waits;  // Seq to generation.
  std::uint64_t beat = 0;

  // Ghosts of the server's side.
  Instant last_arrival{};  // Of a frame of the control line, read or not.
  Instant last_hello{};
  ConnectionId greeted = 0;  // The control connection whose Hello came last.
  Instant last_close{};
  bool lost = false;
};

Sim::Sim(SimOptions options)
    : options_(options),
      random_(options.seed * 0x9E3779B97F4A7C15u + 1),
      core_(CoreOptionsOf(options.seed), now_) {}

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
  supervised_ = Chance(50);
  at_.resize(static_cast<std::size_t>(ranks_), nullptr);
  for (int rank = 0; rank < ranks_; ++rank) After(Between(0, 500), [this, rank] { Spawn(rank); });
  Tick();
  PlanFaults();
  const auto never = [] { return false; };
  RunUntil(now_ + options_.faults, never);
  kind_ = true;
  RunUntil(now_ + options_.settle, [this] { return AllRun(); });
  // A report made just before may still be looked into.
  RunUntil(now_ + kTtl, never);
  RunUntil(now_ + options_.settle, [this] { return AllRun(); });
  if (violation_.empty() && !AllRun()) {
    Violated("not all ranks run after the faults: " + core_.StatusJson(now_));
  }
  // A while of peace: nobody is fenced, every wait of a past generation has ended.
  const int fences = count_.fences;
  RunUntil(now_ + 2 * kTtl, never);
  if (count_.fences != fences || !AllRun()) Violated("a fence without any fault");
  for (const Process* process : at_) {
    for (const auto& [seq, generation] : process->waits) {
      if (generation != process->generation) {
        Violated(StrCat("a wait of generation ", generation, " goes on in ", process->generation));
      }
    }
  }
  for (Process* process : at_) Submit(*process, *process->control, LeaveOp{});
  RunUntil(now_ + kTtl, [this] { return last_member_left_; });
  if (!last_member_left_) Violated("all have left and the server was not told so");
  return violation_;
}

bool Sim::AllRun() const {
  if (server_paused_ || input_held_back_) return false;
  return std::all_of(at_.begin(), at_.end(), [this](const Process* process) {
    return process && process->alive && !process->stopped && !process->doomed && process->running &&
           process->generation == at_.front()->generation && process->control->core.InFlight() == 0;
  });
}

// ---- The server and its shell ----

void Sim::ToServer(std::function<void(Effects&)> input) {
  if (server_paused_ || input_held_back_) {
    inbox_.push_back(std::move(input));
  } else {
    Input(input);
  }
}

void Sim::Input(const std::function<void(Effects&)>& input) {
  Effects effects;
  input(effects);
  Perform(std::move(effects));
}

void Sim::Tick() {
  if (!server_paused_) {
    const bool drained = inbox_.empty() || options_.planted == Planted::kAlwaysDrained;
    Effects effects;
    core_.OnTick(now_, drained, effects);
    Perform(std::move(effects));
  }
  After(kTickInterval, [this] { Tick(); });
}

void Sim::Perform(Effects effects) {
  for (const std::string& line : effects.log) {
    if (options_.trace) std::printf("%9.4f %s\n", SecondsOf(now_), line.c_str());
    CheckLoss(line);
  }
  for (const auto& watch : effects.watch) {
    watches_[watch.watch] = processes_.at(static_cast<std::size_t>(watch.process.pid - 1)).get();
  }
  for (const std::uint64_t watch : effects.unwatch) watches_.erase(watch);
  std::map<std::uint64_t, std::set<Process*>> fenced;
  for (const Effects::Outgoing& out : effects.send) {
    const auto found = connections_.find(out.connection);
    if (found == connections_.end()) continue;  // The launcher's.
    OnServerSent(*found->second, out.message, fenced);
    SendDown(*found->second, out.message);
  }
  CheckFencesReachAll(fenced);
  for (const ConnectionId id : effects.close) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) continue;
    const std::shared_ptr<Connection> connection = found->second;
    connection->server_open = false;
    At(std::max(connection->last_down, now_), [this, connection] { Break(connection); });
  }
  last_member_left_ = last_member_left_ || effects.last_member_left;
}

void Sim::OnServerSent(const Connection& connection, const ServerMessage& message,
                       std::map<std::uint64_t, std::set<Process*>>& fenced) {
  const Event* event = std::get_if<Event>(&message);
  if (!event) return;
  if (const auto* fence = std::get_if<Fence>(event)) {
    fenced[fence->generation].insert(connection.process);
  } else if (const auto* running = std::get_if<RunningEvent>(event)) {
    for (Process* member : views_[running->generation]) {
      if (!ready_.contains({member, running->generation})) {
        Violated(StrCat("generation ", running->generation, " runs, but rank ", member->rank,
                        " was not ready"));
      }
    }
  } else if (const auto* view = std::get_if<View>(event)) {
    const auto known = secrets_.find(view->generation);
    if (known != secrets_.end()) {
      if (known->second != view->secret) Violated("two views of one generation");
      return;
    }
    if (!secrets_.empty() && secrets_.rbegin()->first > view->generation) {
      Violated(StrCat("generation ", view->generation, " after ", secrets_.rbegin()->first));
    }
    secrets_[view->generation] = view->secret;
    ++count_.views;
    if (static_cast<int>(view->members.size()) != ranks_) return Violated("an incomplete view");
    for (int rank = 0; rank < ranks_; ++rank) {
      const Member& member = view->members[static_cast<std::size_t>(rank)];
      Process* process = processes_.at(static_cast<std::size_t>(member.pid - 1)).get();
      if (member.rank != rank || process->rank != rank) Violated("a view out of order");
      if (process->lost) Violated(StrCat("rank ", rank, " is in a view and was lost before"));
      views_[view->generation].push_back(process);
    }
  }
}

// A fence goes at once to every member that is not lost and has a connection; to the others when
// they have one again.
void Sim::CheckFencesReachAll(const std::map<std::uint64_t, std::set<Process*>>& fenced) {
  for (const auto& [generation, reached] : fenced) {
    if (!fenced_.insert(generation).second) continue;
    ++count_.fences;
    for (Process* member : views_[generation]) {
      const std::shared_ptr<Connection>& connection = member->control->connection;
      const bool connected = connection && connection->server_open && member->control->welcomed;
      if (connected && !member->lost && !reached.contains(member)) {
        Violated(
            StrCat("the fence of generation ", generation, " does not reach rank ", member->rank));
      }
    }
  }
}

// How much of the time since then the server was awake, as it counts.
Duration Sim::AwakeSince(Instant when) const {
  Duration awake = now_ - when;
  for (const auto& [end, counted] : stalls_) {
    if (end > when) awake -= std::min(counted, end - when);
  }
  return awake;
}

void Sim::CheckLoss(const std::string& line) {
  constexpr char kStart[] = "job sim: rank ";
  if (line.rfind(kStart, 0) != 0) return;
  const std::size_t pid_at = line.find("pid ");
  if (pid_at == std::string::npos) return;
  const auto pid = std::strtoll(line.c_str() + pid_at + 4, nullptr, 10);
  Process& process = *processes_.at(static_cast<std::size_t>(pid - 1));
  const auto says = [&line](const char* text) { return line.find(text) != std::string::npos; };
  if (says("sent no heartbeat")) {
    if (AwakeSince(process.last_arrival) < kTtl) {
      Violated("lost before its lease ended: " + line);
    }
  } else if (says("lost its connection")) {
    if (process.last_hello >= process.last_close || AwakeSince(process.last_close) < Millis(300)) {
      Violated("lost although its connection came back: " + line);
    }
  } else if (says("lost its links")) {
    if (process.last_hello >= process.last_close) Violated("lost while connected: " + line);
  } else if (says("is gone") || says("was killed")) {
    if (process.alive) Violated("lost while alive: " + line);
  } else {
    return;
  }
  process.lost = true;
  ++count_.losses;
}

// ---- The network ----

void Sim::Connect(Process& process, Line& line) {
  auto connection = std::make_shared<Connection>();
  connection->id = ++last_connection_;
  connection->process = &process;
  connection->line = &line;
  connections_[connection->id] = connection;
  line.connection = connection;
  line.welcomed = false;
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
      if (std::holds_alternative<Hello>(request.op)) core_.OnConnect(connection->id, now_);
      if (const auto* ready = std::get_if<ReadyOp>(&request.op)) {
        // Ahead of its view it does not count.
        if (connection->process->generation >= ready->generation) {
          ready_.insert({connection->process, ready->generation});
        }
      }
      core_.OnRequest(connection->id, request, now_, effects);
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
  connection->broken = true;
  Process& process = *connection->process;
  After(Between(0, 200), [this, connection, &process] {
    if (process.greeted == connection->id) process.last_close = now_;
    ToServer([this, connection](Effects& effects) {
      connection->server_open = false;
      core_.OnDisconnect(connection->id, now_, effects);
      connections_.erase(connection->id);
    });
  });
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

void Sim::Spawn(int rank) {
  processes_.push_back(std::make_unique<Process>());
  Process& process = *processes_.back();
  process.rank = rank;
  process.pid = static_cast<std::int64_t>(processes_.size());
  Hello hello;
  hello.job = "sim";
  hello.session = StrCat("session", process.pid);
  hello.incarnation = StrCat("incarnation", process.pid);
  hello.process = {"host", "boot", "ns", process.pid, 1};
  hello.supervised = supervised_;
  hello.role = Role::kControl;
  process.control = std::make_unique<Line>(hello, random_.Next());
  hello.role = Role::kRequest;
  process.request = std::make_unique<Line>(hello, random_.Next());
  at_[static_cast<std::size_t>(rank)] = &process;
  Connect(process, *process.control);
  Connect(process, *process.request);
  JoinWorld(process);
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

// The kernel closes its sockets, the server's watch and the launcher see its end, in any order.
void Sim::Crash(Process& process) {
  if (!process.alive) return;
  process.alive = false;
  for (Line* line : {process.control.get(), process.request.get()}) {
    if (line->connection) Break(line->connection);
  }
  for (const auto& [watch, watched] : watches_) {
    if (watched != &process || Chance(30)) continue;
    After(Between(0, 100), [this, watch = watch] {
      ToServer([this, watch](Effects& effects) { core_.OnProcessExit(watch, now_, effects); });
    });
  }
  if (supervised_) {
    ExitReportOp report;
    report.process = process.control->core.hello().process;
    report.rank = process.rank;
    report.signal = 9;
    After(Between(0, 150), [this, report] {
      const ConnectionId id = ++last_connection_;
      ToServer([this, id, report](Effects& effects) {
        Hello hello;
        hello.job = "sim";
        hello.role = Role::kAdmin;
        core_.OnConnect(id, now_);
        core_.OnRequest(id, Request{.op = hello}, now_, effects);
        core_.OnRequest(id, Request{.seq = 1, .op = report}, now_, effects);
        core_.OnDisconnect(id, now_, effects);
      });
    });
  }
  After(Between(100, 1500), [this, rank = process.rank] { Spawn(rank); });
}

void Sim::Receive(Process& process, Line& line, const ServerMessage& message) {
  if (const auto* event = std::get_if<Event>(&message)) return OnEvent(process, *event);
  OnReply(process, line, std::get<Reply>(message));
}

void Sim::OnReply(Process& process, Line& line, const Reply& reply) {
  if (!reply.welcome.server.empty()) {
    line.welcomed = true;
    line.backoff.Reset();
    if (&line == process.control.get()) {
      SendUp(line, Request{.op = HeartbeatOp{++process.beat}});  // It lives.
    }
    for (const Request& request : line.core.Unanswered()) {
      const bool add = std::holds_alternative<AddOp>(request.op);
      count_.repeats += add ? 1 : 0;
      if (options_.planted == Planted::kRetryUnderNewSeq && add) {
        line.core.Forget(request.seq);
        SendUp(line, *line.core.Submit(request.op, request.scope, request.generation));
      } else {
        SendUp(line, request);
      }
    }
    return;
  }
  if (!line.core.OnReply(reply)) return;
  if (&line == process.request.get() && process.waits.erase(reply.seq) != 0) {
    if (reply.status.ok()) Violated("a wait for a key that nobody sets was met");
    return;
  }
  if (&line == process.control.get()) {
    const StatusCode code = reply.status.code();
    if (code != StatusCode::kOk && code != StatusCode::kStaleGeneration) {
      Violated("a membership request failed: " + reply.status.ToString());
    }
    return;
  }
  --process.open_adds;
  if (reply.status.code() == StatusCode::kStaleGeneration) return;
  if (!reply.status.ok()) return Violated("an add failed: " + reply.status.ToString());
  ++count_.adds;
  if (reply.number != ++process.applied) {
    Violated(StrCat("add number ", process.applied, " of rank ", process.rank, " returned ",
                    reply.number, ": applied twice or not at all"));
  }
}

void Sim::OnEvent(Process& process, const Event& event) {
  if (process.doomed) return;
  if (const auto* view = std::get_if<View>(&event)) {
    OnView(process, *view);
  } else if (const auto* running = std::get_if<RunningEvent>(&event)) {
    if (running->generation != process.generation) Violated("running without a view");
    if (!process.fenced) process.running = true;
  } else if (const auto* fence = std::get_if<Fence>(&event)) {
    // Told twice; or else of a generation whose view may not have come: its join is spent.
    if (fence->generation < process.generation || fence->generation <= process.ended) return;
    process.ended = fence->generation;
    process.fenced = true;
    process.running = false;
    DoAfter(process, Between(0, 200), [this, &process] { JoinWorld(process); });
  } else if (std::holds_alternative<SessionLostEvent>(event)) {
    if (!process.lost) Violated(StrCat("rank ", process.rank, " is told that it is lost"));
    process.doomed = true;
    process.running = false;
    DoAfter(process, Between(0, 200), [this, &process] { Crash(process); });
  } else if (const auto* refused = std::get_if<JoinRefusedEvent>(&event)) {
    Violated("a join was refused: " + refused->why.ToString());
  } else if (std::holds_alternative<PingEvent>(event)) {
    SendUp(*process.control, Request{.op = HeartbeatOp{++process.beat}});
  }
}

void Sim::OnView(Process& process, const View& view) {
  if (view.generation == process.generation || view.generation <= process.ended) return;
  if (view.generation < process.generation) return Violated("a view of the past");
  if (process.generation != 0 && !process.fenced) Violated("a view without a fence");
  if (view.members[static_cast<std::size_t>(process.rank)].pid != process.pid) {
    Violated("a view with somebody else in this seat");
  }
  process.generation = view.generation;
  process.round = view.round;
  process.fenced = false;
  process.running = false;
  DoAfter(process, Between(0, 150), [this, &process, generation = view.generation] {
    Submit(process, *process.control, ReadyOp{generation});
  });
}

void Sim::JoinWorld(Process& process) {
  JoinOp join;
  join.request.rank = process.rank;
  join.request.world_size = ranks_;
  join.request.endpoint = StrCat("endpoint", process.pid);
  join.request.join_timeout = kLong;
  join.request.seat_wait = kLong;
  join.request.generation = process.generation;
  Submit(process, *process.control, join);
  if (options_.planted == Planted::kReadyForAll) {
    for (std::uint64_t ahead = 1; ahead <= 3; ++ahead) {
      Submit(process, *process.control, ReadyOp{process.generation + ahead});
    }
  }
}

void Sim::Submit(Process& process, Line& line, Op op, std::uint64_t scope,
                 std::uint64_t generation) {
  if (process.doomed) return;
  const bool wait = std::holds_alternative<GetOp>(op);
  const Result<Request> request = line.core.Submit(std::move(op), scope, generation);
  if (!request) return Violated("too much in flight: " + request.status().ToString());
  if (wait) process.waits[request->seq] = process.generation;
  if (line.welcomed) SendUp(line, *request);
}

void Sim::Beat(Process& process) {
  if (process.control->welcomed) {
    SendUp(*process.control, Request{.op = HeartbeatOp{++process.beat}});
  }
  DoAfter(process, kBeat, [this, &process] { Beat(process); });
}

void Sim::Work(Process& process) {
  if (process.running && process.open_adds < kOpenAddsMax) {
    ++process.open_adds;
    Submit(process, *process.request, AddOp{StrCat("count", process.pid), 1}, process.round,
           process.generation);
    const bool waits =
        std::any_of(process.waits.begin(), process.waits.end(),
                    [&process](const auto& wait) { return wait.second == process.generation; });
    if (!waits) {
      Submit(process, *process.request, GetOp{"never", true}, process.round, process.generation);
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
  Process* victim = at_[random_.Below(at_.size())];
  const std::uint64_t kind = random_.Below(100);
  if (!victim || !victim->alive) return;
  if (kind < 45) {
    Line& line = Chance(40) ? *victim->control : *victim->request;
    ++count_.cuts;
    if (line.connection) Break(line.connection);
  } else if (kind < 60) {
    ++count_.crashes;
    Crash(*victim);
  } else if (kind < 75) {
    if (victim->stopped) return;
    victim->stopped = true;
    After(Between(50, 4000), [this, victim] {
      victim->stopped = false;
      std::deque<std::function<void()>> deferred = std::move(victim->deferred);
      victim->deferred.clear();
      for (std::function<void()>& what : deferred) Do(*victim, std::move(what));
    });
  } else if (kind < 90) {
    if (server_paused_ || input_held_back_) return;
    const Duration pause = Between(50, 4000);
    const bool hold = Chance(50);
    (hold ? input_held_back_ : server_paused_) = true;
    After(pause, [this, pause, hold] {
      // As the shell wakes up: timers first, then what has arrived.
      (hold ? input_held_back_ : server_paused_) = false;
      if (!hold && pause > kLateTick) stalls_.emplace_back(now_, pause - kLateTick);
      Effects effects;
      core_.OnTick(now_, inbox_.empty() || options_.planted == Planted::kAlwaysDrained, effects);
      Perform(std::move(effects));
      std::deque<std::function<void(Effects&)>> inbox = std::move(inbox_);
      inbox_.clear();
      for (const auto& input : inbox) Input(input);
    });
  } else if (victim->running) {
    Report report;
    report.kind = ReportKind::kLinkLost;
    report.generation = victim->generation;
    report.accused_rank = (victim->rank + 1) % ranks_;
    report.status = Status(StatusCode::kCommFailed, "reset by peer");
    Submit(*victim, *victim->control, ReportOp{report});
  }
}

}  // namespace resilient::store::sim
