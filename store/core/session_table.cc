#include "store/core/session_table.h"

#include <algorithm>

#include "runtime/base/check.h"
#include "store/core/row_codec.h"

namespace resilient::store {
namespace {

constexpr int kIdleLookedAt = 64;  // Of idle sessions, when one has to go.

std::size_t BytesOf(const Reply& reply) {
  std::size_t bytes = reply.value.size() + reply.status.message().size();
  for (const std::string& value : reply.values) bytes += value.size();
  return bytes + (reply.shared_values ? reply.shared_values->encoded.size() : 0);
}

// The value of a result's row.
template <typename Kept>
std::string EncodeResult(const Kept& kept) {
  RowWriter writer;
  writer(kept.order, kept.acknowledged, kept.dropped, kept.open, kept.shared, kept.reply);
  return writer.Take();
}

}  // namespace

void ResultLog::Acknowledge(std::uint64_t first_unacked) {
  if (first_unacked > 0) acknowledged_ = std::max(acknowledged_, first_unacked - 1);
  open_.erase(open_.begin(), open_.upper_bound(acknowledged_));
  if (!journal_) DropAcknowledged();
}

const Reply* ResultLog::Find(std::uint64_t seq) const {
  const auto result = seq <= acknowledged_ ? results_.end() : results_.find(seq);
  return result == results_.end() ? nullptr : &result->second.reply;
}

bool ResultLog::Forgotten(std::uint64_t seq) const {
  return seq <= acknowledged_ ||
         (seq <= dropped_ && !open_.contains(seq) && !results_.contains(seq));
}

void ResultLog::Open(std::uint64_t seq) {
  if (seq <= acknowledged_) return;
  open_.insert(seq);
  if (open_.size() > kInFlightPerSessionMax) open_.erase(open_.begin());
}

void ResultLog::Remember(const Reply& reply) {
  if (Forgotten(reply.seq) || results_.contains(reply.seq)) return;
  open_.erase(reply.seq);
  Kept& kept = results_[reply.seq];
  kept.reply = reply;
  if (journal_ && reply.shared_values) kept.shared = shared_->Hold(reply.shared_values);
  kept.order = ++last_order_;
  by_order_.emplace(kept.order, reply.seq);
  bytes_ += BytesOf(reply);
  DropAcknowledged();
  while (results_.size() > kResultsPerLineMax ||
         (bytes_ > kResultBytesPerLineMax && results_.size() > 1)) {
    const std::uint64_t oldest = by_order_.begin()->second;
    dropped_ = std::max(dropped_, oldest);
    Drop(oldest);
  }
  kept.acknowledged = acknowledged_;
  kept.dropped = dropped_;
  kept.open.assign(open_.begin(), open_.upper_bound(dropped_));
  if (journal_) journal_->Put(ResultRow(session_, role_, reply.seq), EncodeResult(kept));
}

void ResultLog::DropAcknowledged() {
  while (!results_.empty() && results_.begin()->first <= acknowledged_) {
    Drop(results_.begin()->first);
  }
}

void ResultLog::Drop(std::uint64_t seq) {
  const auto result = results_.find(seq);
  if (journal_) journal_->Remove(ResultRow(session_, role_, seq));
  if (result->second.shared != 0) shared_->Release(result->second.shared);
  bytes_ -= BytesOf(result->second.reply);
  by_order_.erase(result->second.order);
  results_.erase(result);
}

bool ResultLog::Restore(std::uint64_t seq, std::string_view value) {
  Kept kept;
  RowReader reader(value);
  reader(kept.order, kept.acknowledged, kept.dropped, kept.open, kept.shared, kept.reply);
  if (!reader.Done() || kept.reply.seq != seq || results_.contains(seq)) return false;
  if (kept.shared != 0) kept.reply.shared_values = shared_->Take(kept.shared);
  if (kept.shared != 0 && !kept.reply.shared_values) return false;
  bytes_ += BytesOf(kept.reply);
  acknowledged_ = std::max(acknowledged_, kept.acknowledged);
  dropped_ = std::max(dropped_, kept.dropped);
  if (kept.order > last_order_) {
    last_order_ = kept.order;
    open_ = {kept.open.begin(), kept.open.end()};
  }
  return by_order_.emplace(kept.order, seq).second &&
         results_.try_emplace(seq, std::move(kept)).second;
}

void ResultLog::AppendRows(Rows& rows) const {
  for (const auto& [seq, kept] : results_) {
    rows.emplace(ResultRow(session_, role_, seq), EncodeResult(kept));
  }
}

void ResultLog::RemoveRows() {
  if (!journal_) return;
  for (const auto& [seq, kept] : results_) {
    journal_->Remove(ResultRow(session_, role_, seq));
    if (kept.shared != 0) shared_->Release(kept.shared);
  }
}

void SessionTable::Connect(ConnectionId connection) { connections_.try_emplace(connection); }

Result<SessionTable::Opened> SessionTable::Open(ConnectionId connection, const Hello& hello) {
  Bind& bind = connections_.at(connection);
  RESILIENT_CHECK(bind.session == 0);
  Opened opened;
  const std::pair<std::string, std::string> name(hello.job, hello.session);
  const bool admin = hello.role == Role::kAdmin;
  const auto known = admin ? by_name_.end() : by_name_.find(name);
  if (known != by_name_.end()) {
    Session& session = sessions_.at(known->second);
    if (session.hello.incarnation != hello.incarnation) {
      return Status(StatusCode::kProtocol, "session " + hello.session + " belongs to pid " +
                                               std::to_string(session.hello.process.pid) +
                                               " on host " + session.hello.process.host +
                                               ", not to pid " + std::to_string(hello.process.pid) +
                                               " on host " + hello.process.host +
                                               "; a process opens sessions of its own");
    }
    Line& line = session.line(hello.role);
    opened = {session.id, true, line.connection};
    connections_.erase(line.connection);
    line.connection = connection;
    if (hello.role == Role::kControl && session.hello != hello) {
      session.hello = hello;  // It is the one that joins.
      KeepHello(session);
    }
    session.said_goodbye = false;
    EndIdle(session);
  } else {
    if (IsFull(hello)) {
      return Status(StatusCode::kResourceExhausted,
                    "the store keeps " + std::to_string(sessions_max_) +
                        " sessions, the most it can; use another store or try again later");
    }
    opened.session = ++last_id_;
    Session& session = Add(opened.session, hello);
    session.line(hello.role).connection = connection;
    if (!admin) {
      last_kept_ = opened.session;
      KeepHello(session);
    }
  }
  connections_[connection] = {opened.session, hello.role};
  return opened;
}

Session& SessionTable::Add(SessionId id, const Hello& hello) {
  Session& session = sessions_[id];
  session.id = id;
  session.hello = hello;
  // The control line holds it: kept from another's Hello, a new server would take it for set.
  if (hello.role != Role::kControl) session.hello.leased_key.clear();
  if (hello.role == Role::kAdmin) return session;
  session.request.results = ResultLog(journal_, &shared_, id, Role::kRequest);
  session.control.results = ResultLog(journal_, &shared_, id, Role::kControl);
  by_name_.emplace(std::pair(hello.job, hello.session), id);
  ++jobs_[hello.job].sessions;
  return session;
}

void SessionTable::BeginIdle(Session& session, Instant now) {
  session.idle_since = now;
  idle_.emplace(now, session.id);
  jobs_.at(session.hello.job).idle.emplace(now, session.id);
}

void SessionTable::EndIdle(Session& session) {
  if (!session.idle_since) return;
  const std::pair entry(*session.idle_since, session.id);
  idle_.erase(entry);
  jobs_.at(session.hello.job).idle.erase(entry);
  session.idle_since.reset();
}

bool SessionTable::IsFull(const Hello& hello) const {
  return hello.role != Role::kAdmin && by_name_.size() >= sessions_max_ &&
         !by_name_.contains({hello.job, hello.session});
}

std::optional<SessionId> SessionTable::Expendable(
    const std::string& job, const std::function<bool(SessionId)>& may_go) const {
  const OfJob* largest = nullptr;
  std::size_t most = 0;
  for (const auto& [name, of_job] : jobs_) {
    const std::size_t wanted = of_job.sessions + (name == job ? 1 : 0);
    if (wanted < most || (wanted == most && name != job)) continue;
    most = wanted;
    largest = &of_job;
  }
  std::optional<SessionId> found;
  if (largest != nullptr) found = OldestThatMayGo(largest->idle, may_go);
  return found ? found : OldestThatMayGo(idle_, may_go);
}

std::optional<SessionId> SessionTable::OldestThatMayGo(
    const IdleSet& idle, const std::function<bool(SessionId)>& may_go) const {
  std::optional<SessionId> oldest;
  int looked_at = 0;
  for (const auto& [since, id] : idle) {
    if (++looked_at > kIdleLookedAt) break;
    if (!may_go(id)) continue;
    const Session& session = sessions_.at(id);
    if (!session.request.results.Owes() && !session.control.results.Owes()) return id;
    if (!oldest) oldest = id;
  }
  return oldest;
}

void SessionTable::KeepHello(const Session& session) {
  if (Keeps()) journal_->Put(SessionRow(session.id), EncodeRow(session.hello));
}

SessionTable::Bound SessionTable::Of(ConnectionId connection) {
  const auto bind = connections_.find(connection);
  if (bind == connections_.end() || bind->second.session == 0) return {};
  return {&sessions_.at(bind->second.session), bind->second.role};
}

Session* SessionTable::Find(SessionId session) {
  const auto found = sessions_.find(session);
  return found == sessions_.end() ? nullptr : &found->second;
}

void SessionTable::DropLeasedKey(SessionId id) {
  Session* session = Find(id);
  if (!session || session->hello.leased_key.empty()) return;
  session->hello.leased_key.clear();
  session->hello.leased_value.clear();
  KeepHello(*session);
}

std::vector<SessionId> SessionTable::WithLeasedKey() const {
  std::vector<SessionId> found;
  for (const auto& [id, session] : sessions_) {
    if (!session.hello.leased_key.empty()) found.push_back(id);
  }
  std::sort(found.begin(), found.end());
  return found;
}

SessionTable::Closed SessionTable::Disconnect(ConnectionId connection, Instant now) {
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return {};
  const Bind bind = found->second;
  connections_.erase(found);
  if (bind.session == 0) return {};
  Session& session = sessions_.at(bind.session);
  session.line(bind.role).connection = 0;
  if (bind.role == Role::kAdmin) {
    sessions_.erase(bind.session);
  } else if (!session.Connected()) {
    BeginIdle(session, now);
  }
  return {bind.session, bind.role};
}

std::vector<SessionId> SessionTable::Idle(Instant now) const {
  std::vector<SessionId> idle;
  for (const auto& [since, session] : idle_) {
    if (now - since < memory_) break;
    idle.push_back(session);
  }
  return idle;
}

void SessionTable::Forget(SessionId id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  RESILIENT_CHECK(!found->second.Connected());
  by_name_.erase({found->second.hello.job, found->second.hello.session});
  EndIdle(found->second);
  const auto of_job = jobs_.find(found->second.hello.job);
  if (--of_job->second.sessions == 0) jobs_.erase(of_job);
  if (Keeps()) {
    found->second.request.results.RemoveRows();
    found->second.control.results.RemoveRows();
    journal_->Remove(SessionRow(id));
  }
  sessions_.erase(found);
}

Status SessionTable::RestoreSession(SessionId id, std::string_view value) {
  Hello hello;
  if (!DecodeRow(value, hello) || hello.role == Role::kAdmin) {
    return Status(StatusCode::kInternal, "this is no session");
  }
  if (id == 0 || sessions_.contains(id) || by_name_.contains({hello.job, hello.session})) {
    return Status(StatusCode::kInternal, "session " + hello.session + " is there twice");
  }
  Add(id, hello);
  last_kept_ = std::max(last_kept_, id);
  return {};
}

Status SessionTable::RestoreShared(const RowName& name, std::string_view value) {
  if (shared_.Restore(name.index, value)) return {};
  return Status(StatusCode::kInternal, "these are no values of an exchange");
}

Status SessionTable::RestoreResult(const RowName& name, std::string_view value) {
  Session* session = Find(name.session);
  if (!session) return Status(StatusCode::kInternal, "its session is missing");
  if (!session->line(name.role).results.Restore(name.seq, value)) {
    return Status(StatusCode::kInternal, "this is no answer to a request");
  }
  return {};
}

void SessionTable::FinishRestore(SessionId last, Instant now) {
  last_kept_ = std::max(last_kept_, last);
  last_id_ = last_kept_;
  shared_.FinishRestore();
  for (auto& [id, session] : sessions_) BeginIdle(session, now);
}

void SessionTable::AppendRows(Rows& rows) const {
  if (Keeps()) shared_.AppendRows(rows);
  for (const auto& [id, session] : sessions_) {
    if (session.hello.role == Role::kAdmin) continue;
    rows.emplace(SessionRow(id), EncodeRow(session.hello));
    session.request.results.AppendRows(rows);
    session.control.results.AppendRows(rows);
  }
}

std::vector<ConnectionId> SessionTable::ControlConnections() const {
  std::vector<ConnectionId> connections;
  for (const auto& [id, session] : sessions_) {
    if (session.control.connection != 0) connections.push_back(session.control.connection);
  }
  std::sort(connections.begin(), connections.end());
  return connections;
}

std::map<std::string, std::size_t> SessionTable::Jobs() const {
  std::map<std::string, std::size_t> jobs;
  for (const auto& [name, of_job] : jobs_) jobs.emplace(name, of_job.sessions);
  return jobs;
}

}  // namespace resilient::store
