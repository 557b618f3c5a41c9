// The watches and holds of a Sim. Each process changes a key of its own, "watched/<pid>": its n-th
// change sets it to n, each fifth deletes it. So what a watch tells must count on without a gap.
#include <cstdlib>
#include <optional>
#include <set>
#include <string>

#include "runtime/base/log.h"
#include "store/core/presence_key.h"
#include "tests/sim/sim_parts.h"

namespace resilient::store::sim {
namespace {

constexpr std::int64_t kDeleteEach = 5;

}  // namespace

void Sim::WriteKey(Process& process) {
  if (quiet_ || process.writing || process.doomed || !Chance(40)) return;
  process.writing = true;
  const std::string key = StrCat("watched/", process.pid);
  if (++process.written % kDeleteEach == 0) {
    Submit(process, *process.request, DeleteOp{key});
  } else {
    Submit(process, *process.request, SetOp{key, StrCat(process.written)});
  }
}

void Sim::AskWatch(Process& process) {
  Op op = process.watch.Next();
  auto* watch = std::get_if<WatchOp>(&op);
  if (options_.planted == Planted::kWatchFromLast && watch) --watch->from_revision;
  Submit(process, *process.request, std::move(op));
}

void Sim::OnWatched(Process& process, Reply reply) {
  if (options_.planted == Planted::kCompactedIgnored && process.snapshots > 0 &&
      reply.status.code() == StatusCode::kCompacted) {
    const auto oldest = static_cast<std::uint64_t>(reply.number);
    Submit(process, *process.request, WatchOp{"watched/", oldest, false});
    return;
  }
  Result<std::optional<WatchBatch>> batch = process.watch.OnReply(std::move(reply));
  if (!batch) {
    return Violated(StrCat("the watch of rank ", process.rank, ": ", batch.status().ToString()));
  }
  if (*batch && (*batch)->snapshot) {
    OnSnapshot(process, **batch);
  } else if (*batch) {
    for (const KeyChange& change : (*batch)->changes) OnChange(process, change);
  }
  AskWatch(process);
}

void Sim::OnSnapshot(Process& process, const WatchBatch& batch) {
  count_.snapshots += process.snapshots++ > 0 ? 1 : 0;
  std::map<std::string, Process::Watched> before;
  before.swap(process.watched);
  for (auto& [key, watched] : before) process.watched[key] = {watched.number, false};
  for (const KeyChange& change : batch.changes) {
    const std::int64_t number = std::atoll(change.value.value_or("").c_str());
    if (number < process.watched[change.key].number) {
      Violated(StrCat("a snapshot has change ", number, " of ", change.key, ", and change ",
                      process.watched[change.key].number, " was told before"));
    }
    process.watched[change.key] = {number, true};
  }
}

void Sim::OnChange(Process& process, const KeyChange& change) {
  ++count_.changes;
  Process::Watched& watched = process.watched[change.key];
  const std::int64_t due = watched.number + 1;
  std::int64_t number = change.value ? std::atoll(change.value->c_str()) : due;
  // A key that was gone in a snapshot comes back with some later change.
  if (!watched.exact && !change.value) {
    number = (due + kDeleteEach - 1) / kDeleteEach * kDeleteEach;
  }
  const bool fits = watched.exact ? number == due : number >= due;
  if (!fits || (number % kDeleteEach == 0) == change.value.has_value()) {
    return Violated(StrCat("rank ", process.rank, " is told of change ", number, " of ", change.key,
                           " where ", due, " is due: one was missed or told twice"));
  }
  if (watched.exact || change.value) CheckRevision(change.key, number, change.revision);
  watched = {number, true};
}

// One change has one revision, whoever tells of it.
void Sim::CheckRevision(const std::string& key, std::int64_t number, std::uint64_t revision) {
  const auto [told, first] = revisions_.try_emplace({key, number}, revision);
  if (told->second == revision) return;
  Violated(
      StrCat("change ", number, " of ", key, " has revision ", told->second, " and ", revision));
}

// Nothing is under way any more: everybody knows everything.
void Sim::CheckWatches() {
  for (const Process* process : at_) {
    for (const Process* writer : at_) {
      const auto watched = process->watched.find(StrCat("watched/", writer->pid));
      if (watched == process->watched.end() || !watched->second.exact) continue;
      if (!writer->writing && watched->second.number == writer->written) continue;
      Violated(StrCat("rank ", process->rank, " was told of change ", watched->second.number,
                      " of rank ", writer->rank, " and not of ", writer->written,
                      ": it was missed"));
    }
  }
}

// Of every other one the key of its rank, which its successor may not have.
std::string Sim::PresenceOf(const Process& process) const {
  if (process.pid % 2 == 0 || spare_count_ > 0) return StrCat(kPresent, process.pid);
  return PresenceKey({.world_size = process.size, .rank = process.rank});
}

// Who is here is present, and nobody else.
void Sim::CheckPresence() {
  std::set<std::string> present;
  for (const auto& [row, value] : core_->DumpRows()) {
    const std::optional<RowName> name = ParseRowName(row);
    if (!name || name->kind != RowKind::kKey) continue;
    const bool leased = name->key.starts_with(kPresent) || ParsePresenceKey(name->key);
    if (leased) present.insert(name->key);
  }
  std::set<std::string> here;
  for (const Process* process : at_) here.insert(process->presence);
  for (const Process* process : spares_) here.insert(process->presence);
  if (present == here) return;
  std::string names;
  for (const std::string& key : present) names += StrCat(" ", key);
  for (const std::string& key : here) {
    if (!present.contains(key)) names += StrCat(" not ", key);
  }
  Violated(StrCat("present are", names));
}

// ---- Holds ----

void Sim::AskAsAdmin(Op op) {
  const ConnectionId id = ++last_connection_;
  ToServer([this, id, op = std::move(op)](Effects& effects) {
    Hello hello;
    hello.job = "sim";
    hello.role = Role::kAdmin;
    core_->OnConnect(id, now_);
    core_->OnRequest(id, Request{.op = hello}, now_, effects);
    if (const auto* report = std::get_if<ExitReportOp>(&op)) NoteExit(*report);
    core_->OnRequest(id, Request{.seq = 1, .op = op}, now_, effects);
    core_->OnDisconnect(id, now_, effects);
  });
}

void Sim::HoldSomebody(Process& process) {
  if (process.rank == kSpareRank) return;
  const auto for_ms = static_cast<std::uint64_t>(Between(500, 5000) / Millis(1));
  AskAsAdmin(HoldOp{process.rank, "", for_ms, "a test"});
  // What it was announced for.
  if (Chance(40)) After(Between(100, 1000), [this, &process] { StopProcess(process); });
  if (!Chance(50)) return;
  After(Between(100, 3000), [this, rank = process.rank] { AskAsAdmin(ReleaseOp{rank, ""}); });
}

// A hold counts from when it is kept, its end from when it is decided; what was decided before the
// hold was kept is kept behind it.
void Sim::NoteHolds(const LogRecord& record, bool kept) {
  const bool held = record.event == "hold";
  const bool ended = record.event == "hold_end";
  if ((!held && !ended) || (held && !kept)) return;
  Process& process = ProcessOf(record);
  process.held = held;
  if (held) ++count_.holds;
  if (ended && !kept) process.held_until = now_;
}

}  // namespace resilient::store::sim
