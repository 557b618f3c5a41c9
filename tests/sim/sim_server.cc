// The server of a Sim: its shell, its disk, and what is looked at in each of its steps.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "runtime/base/log.h"
#include "tests/numbered_secrets.h"
#include "tests/sim/sim_parts.h"

namespace resilient::store::sim {
namespace {

constexpr std::uint64_t kCommitsPerCrash = 300;  // Crashes of the shell at a commit.
constexpr std::uint64_t kSeedsPerFullCheck = 16;
constexpr std::uint64_t kStepsPerCheck = 32;
constexpr std::size_t kFewChanges = 6;

bool IsOf(RowKind kind, const std::string& row) { return row.front() == static_cast<char>(kind); }

std::uint64_t EpochOf(const std::string& status_json) {
  constexpr char kName[] = "\"epoch\":";
  const std::size_t at = status_json.find(kName);
  if (at == std::string::npos) return 0;
  return std::strtoull(status_json.c_str() + at + sizeof(kName) - 1, nullptr, 10);
}

}  // namespace

// ---- Its life ----

// With a durable store nobody is served before the start itself is kept.
void Sim::StartServer() {
  CoreOptions options;
  options.server_id = StrCat("sim", start_);  // The one that was kept goes on.
  options.lease_ttl = kTtl;
  options.make_secret = NumberedSecrets(static_cast<std::uint64_t>(start_) * 1'000'000);
  options.durable = durable_;
  if (options_.seed % 3 != 0) options.changes_per_job = kFewChanges;
  const bool stale = options_.planted == Planted::kStaleLeases && start_ > 0;
  const Instant began = stale ? started_at_ : now_;
  core_ = std::make_unique<ServerCore>(options, began);
  started_at_ = now_;
  if (!durable_) {
    server_down_ = false;
    return;
  }
  if (options_.planted == Planted::kResultsNotRestored) {
    std::erase_if(disk_, [](const auto& row) { return IsOf(RowKind::kResult, row.first); });
  }
  for (const auto& [row, value] : disk_) {
    if (Status why = core_->Restore(row, value); !why.ok()) {
      return Violated("what was kept cannot be read: " + why.ToString());
    }
  }
  Effects effects;
  if (Status why = core_->FinishRestore(began, effects); !why.ok()) {
    return Violated("what was kept cannot be read: " + why.ToString());
  }
  CheckRestored();
  written_ = disk_;
  if (options_.planted == Planted::kHoldsForgotten) ForgetHolds(effects);
  for (Instant when = began; when < now_; when += kTickInterval) {
    core_->OnTick(when, true, effects);
  }
  Finish(std::move(effects));
}

// Nobody is told.
void Sim::ForgetHolds(Effects& effects) {
  Effects unsaid;
  Hello hello;
  hello.job = "sim";
  hello.role = Role::kAdmin;
  const ConnectionId id = ++last_connection_;
  core_->OnConnect(id, now_);
  core_->OnRequest(id, Request{.op = hello}, now_, unsaid);
  core_->OnRequest(id, Request{.seq = 1, .op = ReleaseOp{}}, now_, unsaid);
  core_->OnDisconnect(id, now_, unsaid);
  std::move(unsaid.write.begin(), unsaid.write.end(), std::back_inserter(effects.write));
}

// kill -9: what is not kept is lost, and so is what was not said yet.
void Sim::CrashServer() {
  if (!core_) return;
  CheckRows();
  if (options_.trace) std::printf("%9.4f -- the server crashes\n", SecondsOf(now_));
  ++count_.restarts;
  CountBlow(Blow::kRestart, nullptr);
  truth_ = kept_truth_;
  const bool shrinks = std::any_of(at_.begin(), at_.end(), [this](const Process* process) {
    return process && process->alive && WantsLess(*process);
  });
  count_.shrink_restarts += shrinks ? 1 : 0;
  ++start_;
  server_down_ = true;
  started_at_ = now_;
  core_.reset();
  held_.clear();
  committing_ = false;
  inbox_.clear();
  server_paused_ = input_held_back_ = false;
  watches_.clear();
  const std::map<ConnectionId, std::shared_ptr<Connection>> connections =
      std::exchange(connections_, {});
  for (const auto& [id, connection] : connections) {
    connection->server_open = false;
    BreakAtClient(connection);
  }
  After(Between(50, 3000), [this, start = start_] {
    if (start == start_) StartServer();
  });
}

void Sim::ToServer(std::function<void(Effects&)> input) {
  if (server_down_) return;
  if (server_paused_ || input_held_back_) {
    inbox_.push_back(std::move(input));
  } else {
    Input(input);
  }
}

void Sim::Input(const std::function<void(Effects&)>& input) {
  Effects effects;
  input(effects);
  Finish(std::move(effects));
}

void Sim::Tick() {
  if (!server_paused_ && !server_down_) Wake();
  After(kTickInterval, [this] { Tick(); });
}

void Sim::Wake() {
  const bool drained = inbox_.empty() || options_.planted == Planted::kAlwaysDrained;
  Effects effects;
  core_->OnTick(now_, drained, effects);
  Finish(std::move(effects));
}

// It neither reads nor ticks for a while, or it only does not read.
void Sim::StopServer() {
  if (server_paused_ || input_held_back_ || server_down_) return;
  const Duration pause = Between(50, 4000);
  const bool hold = Chance(50);
  (hold ? input_held_back_ : server_paused_) = true;
  After(pause, [this, pause, hold, start = start_] {
    if (start != start_) return;
    // As the shell wakes up: timers first, then what has arrived.
    (hold ? input_held_back_ : server_paused_) = false;
    if (!hold && pause > kLateTick) stalls_.emplace_back(now_, pause - kLateTick);
    Wake();
    std::deque<std::function<void(Effects&)>> inbox = std::move(inbox_);
    inbox_.clear();
    for (const auto& input : inbox) Input(input);
  });
}

// ---- Its disk ----

void Sim::Finish(Effects effects) {
  Step step;
  for (const LogRecord& record : effects.log) {
    if (options_.trace) std::printf("%9.4f %s\n", SecondsOf(now_), ToText(record).c_str());
    if (Process* lost = CheckLoss(record)) step.lost.push_back(lost);
    NoteHolds(record, false);
    NoteSeats(record);
    if (record.event == "leave") ProcessOf(record).has_left = true;
  }
  if (options_.planted == Planted::kNumberedAnew) NumberAnew(effects);
  if (options_.planted == Planted::kChangeNotNoted) {
    std::erase_if(effects.write, [](const Write& write) {
      return IsOf(RowKind::kSeat, write.row) && write.value.has_value();
    });
  }
  if (!durable_ && !effects.write.empty()) Violated("a store in memory writes");
  Keep(effects.write, effects.write.size(), written_);
  if (options_.seed % kSeedsPerFullCheck == 1 || ++steps_ % kStepsPerCheck == 0) CheckRows();
  step.effects = std::move(effects);
  NoteDecided(step);
  if (held_.empty() && step.effects.write.empty()) return Release(step);
  if (options_.planted == Planted::kReleasedBeforeCommit) {
    Release(step);
    Effects rest;
    rest.write = std::move(step.effects.write);
    step = {std::move(rest), {}, std::move(step.truth)};
  }
  held_.push_back(std::move(step));
  Commit();
}

// One at a time, each of all that is held by then.
void Sim::Commit() {
  if (committing_ || held_.empty()) return;
  committing_ = true;
  const Duration takes = !kind_ && Chance(3) ? Between(50, 400) : Between(0, 6);
  After(takes, [this, steps = held_.size(), start = start_] {
    if (start == start_) OnCommitted(steps);
  });
}

void Sim::OnCommitted(std::size_t steps) {
  committing_ = false;
  ++count_.commits;
  std::vector<Write> writes;
  for (std::size_t i = 0; i < steps; ++i) {
    const std::vector<Write>& more = held_[i].effects.write;
    writes.insert(writes.end(), more.begin(), more.end());
  }
  const std::uint64_t fate = kind_ ? kCommitsPerCrash : random_.Below(kCommitsPerCrash);
  if (fate == 0) {
    if (options_.planted == Planted::kTornCommit) Keep(writes, writes.size() / 2, disk_);
    return CrashServer();
  }
  Keep(writes, writes.size(), disk_);
  for (std::size_t i = 0; i < steps; ++i) {
    if (held_[i].truth) kept_truth_ = *std::move(held_[i].truth);
  }
  if (fate == 1) {
    // Nobody was told yet, but it is decided.
    for (std::size_t i = 0; i < steps; ++i) {
      for (Process* process : held_[i].lost) process->lost = true;
    }
    return CrashServer();
  }
  server_down_ = false;
  for (std::size_t i = 0; i < steps; ++i) {
    const Step step = std::move(held_.front());
    held_.pop_front();
    Release(step);
  }
  Commit();
}

void Sim::Keep(const std::vector<Write>& writes, std::size_t most, Rows& rows) const {
  const Planted planted = &rows == &disk_ ? options_.planted : Planted::kNone;
  for (std::size_t i = 0; i < most; ++i) {
    const auto& [row, value] = writes[i];
    if (!value) {
      if (planted != Planted::kRemovalsNotKept) rows.erase(row);
    } else if (planted == Planted::kResultsNotKept && IsOf(RowKind::kResult, row)) {
      continue;
    } else if (planted == Planted::kJobNotKept && IsOf(RowKind::kJob, row)) {
      rows.emplace(row, *value);
    } else {
      rows[row] = *value;
    }
  }
}

// What the steps wrote is what a new store would need.
void Sim::CheckRows() {
  if (!durable_ || !core_ || !violation_.empty()) return;
  const Rows rows = core_->DumpRows();
  if (rows == written_) return;
  for (const auto& [row, value] : rows) {
    const auto written = written_.find(row);
    if (written == written_.end()) return Violated("not written: row " + PrintableRow(row));
    if (written->second != value) return Violated("written as it was: row " + PrintableRow(row));
  }
  for (const auto& [row, value] : written_) {
    if (!rows.contains(row)) return Violated("not removed: row " + PrintableRow(row));
  }
}

void Sim::CheckRestored() {
  const std::uint64_t epoch = EpochOf(core_->StatusJson(now_));
  if (epoch <= epoch_ && !disk_.empty()) Violated(StrCat("epoch ", epoch, " after ", epoch_));
  if (disk_.contains(StoreRow())) epoch_ = epoch - 1;  // Of a start that was kept.
  Rows rows = core_->DumpRows();
  Rows kept = disk_;
  rows.erase(StoreRow());
  kept.erase(StoreRow());
  if (rows != kept) Violated("a store that was restored is not the one that was kept");
  for (const Process* process : at_) {
    if (!process || !process->alive || process->lost || process->applied == 0) continue;
    if (!disk_.contains(WorldRow("sim", process->round()))) continue;
    const auto count = disk_.find(KeyRow("sim", process->round(), StrCat("count", process->pid)));
    if (count == disk_.end() || std::atoll(count->second.c_str()) < process->applied) {
      Violated(StrCat("rank ", process->rank, " was told of ", process->applied,
                      " adds, and they are not kept"));
    }
  }
}

// ---- What it says ----

void Sim::Release(const Step& step) {
  for (const LogRecord& record : step.effects.log) NoteHolds(record, true);
  for (Process* process : step.lost) {
    process->lost = true;
    ++count_.losses;
    CountBlow(Blow::kLoss, process);
  }
  for (const auto& watch : step.effects.watch) {
    Process* watched = processes_.at(static_cast<std::size_t>(watch.process.pid - 1)).get();
    watches_[watch.watch] = watched;
    if (watched->alive) continue;
    After(Between(0, 100), [this, id = watch.watch, start = start_] {
      if (start != start_) return;
      ToServer([this, id](Effects& effects) { core_->OnProcessExit(id, now_, effects); });
    });
  }
  for (const std::uint64_t watch : step.effects.unwatch) watches_.erase(watch);
  std::map<std::uint64_t, std::set<Process*>> fenced;
  for (const Effects::Outgoing& out : step.effects.send) {
    const auto found = connections_.find(out.connection);
    if (found == connections_.end()) continue;  // The launcher's, or closed meanwhile.
    OnServerSent(*found->second, out.message, fenced);
    SendDown(*found->second, out.message);
  }
  CheckFencesReachAll(fenced);
  for (const ConnectionId id : step.effects.close) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) continue;
    const std::shared_ptr<Connection> connection = found->second;
    connection->server_open = false;
    At(std::max(connection->last_down, now_), [this, connection] { Break(connection); });
  }
  last_member_left_ = last_member_left_ || step.effects.last_member_left;
}

void Sim::OnServerSent(const Connection& connection, const ServerMessage& message,
                       std::map<std::uint64_t, std::set<Process*>>& fenced) {
  const Event* event = std::get_if<Event>(&message);
  if (!event) return;
  if (const auto* fence = std::get_if<Fence>(event)) {
    if (!fenced_.contains(fence->generation) && !fenced.contains(fence->generation)) {
      CheckVerdict(fence->generation, fence->cause);
      CheckGrowth(fence->generation, fence->cause);
    }
    fenced[fence->generation].insert(connection.process);
  } else if (const auto* running = std::get_if<RunningEvent>(event)) {
    running_ = running->generation;
    for (Process* member : views_[running->generation]) {
      if (!ready_.contains({member, running->generation})) {
        Violated(StrCat("generation ", running->generation, " runs, but rank ", member->rank,
                        " was not ready"));
      }
    }
  } else if (const View* view = ViewOf(*event)) {
    const auto known = secrets_.find(view->generation);
    if (known != secrets_.end()) {
      if (known->second != view->secret) Violated("two views of one generation");
      return;
    }
    if (!secrets_.empty() && secrets_.rbegin()->first > view->generation) {
      Violated(StrCat("generation ", view->generation, " after ", secrets_.rbegin()->first));
    }
    secrets_[view->generation] = view->secret;
    const auto of_round = world_secrets_.try_emplace({view->life, view->round}, view->world_secret);
    if (of_round.first->second != view->world_secret || view->world_secret.empty()) {
      Violated(StrCat("round ", view->round, " has two secrets, or none"));
    }
    ++count_.views;
    std::vector<Process*>& members = views_[view->generation];
    for (const Member& member : view->members) {
      Process* process = processes_.at(static_cast<std::size_t>(member.pid - 1)).get();
      if (process->lost) {
        Violated(StrCat("rank ", member.rank, " is in a view and was lost before"));
      }
      members.push_back(process);
    }
    FollowWorld(members);
  }
}

// A fence goes at once to every member that is neither lost nor has left, and has a connection; to
// the others when they have one again.
void Sim::CheckFencesReachAll(const std::map<std::uint64_t, std::set<Process*>>& fenced) {
  for (const auto& [generation, reached] : fenced) {
    if (!fenced_.insert(generation).second) continue;
    ++count_.fences;
    for (Process* member : views_[generation]) {
      const std::shared_ptr<Connection>& connection = member->control->connection;
      const bool connected = connection && connection->server_open && member->control->welcomed;
      if (connected && !member->lost && !member->has_left && !reached.contains(member)) {
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

// Its pid is its place among all that ever were.
Sim::Process& Sim::ProcessOf(const LogRecord& record) {
  const auto pid = std::stoll(std::string(record.Value("pid")));
  return *processes_.at(static_cast<std::size_t>(pid - 1));
}

// Whether it is a member of the present generation, and that one runs.
bool Sim::Runs(const Process& process) const {
  const auto members = views_.find(running_);
  return members != views_.end() && views_.rbegin()->first == running_ &&
         !fenced_.contains(running_) && std::ranges::count(members->second, &process) > 0;
}

// Who is lost by it, once it is said.
Sim::Process* Sim::CheckLoss(const LogRecord& record) {
  if (record.event != "lost" && record.event != "expiry") return nullptr;
  Process& process = ProcessOf(record);
  const std::string& line = record.text;
  const auto says = [&line](const char* text) { return line.find(text) != std::string::npos; };
  if (process.held && (says("sent no heartbeat") || says("lost its "))) {
    Violated("lost for its silence while it is held: " + line);
  }
  if (says("sent no heartbeat")) {
    if (AwakeSince(std::max({process.last_arrival, started_at_, process.held_until})) < kTtl) {
      Violated("lost before its lease ended: " + line);
    }
  } else if (says("lost its connection")) {
    if (process.last_hello >= process.last_close || process.last_close < started_at_ ||
        AwakeSince(process.last_close) < Millis(300)) {
      Violated("lost although its connection came back: " + line);
    }
    if (process.alive && Runs(process) && !says(" and its links")) {
      Violated("lost by a network that ended its connection: " + line);
    }
  } else if (says("lost its links")) {
    if (process.last_hello >= process.last_close || process.last_close < started_at_) {
      Violated("lost while connected: " + line);
    }
  } else if (says("is gone") || says("was killed") || says("exited with")) {
    if (process.alive) Violated("lost while alive: " + line);
  } else {
    return nullptr;
  }
  return &process;
}

}  // namespace resilient::store::sim
