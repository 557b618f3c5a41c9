#include "store/core/session_table.h"

#include <algorithm>

#include "runtime/base/check.h"
#include "store/core/row_codec.h"

namespace resilient::store {
namespace {

constexpr int kIdleLookedAt = 64;  // Of idle sessions, when one has to go.

// The value of a result's row.
template <typename Kept>
std::string EncodeResult(const Kept& kept) {
  RowWriter writer;
  writer(kept.order, kept.acknowledged, kept.dropped, kept.open, kept.shared, kept.reply);
  return writer.Take();
}

}  // namespace

Status NoLongerKept(std::uint64_t seq) {
  return Status(StatusCode::kOutcomeUnknown, "request " + std::to_string(seq) +
                                                 " was answered before, and the store no longer "
                                                 "keeps the answer");
}

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
  Count(reply);
  DropAcknowledged();
  while (results_.size() > kResultsPerLineMax ||
         (bytes() > kResultBytesPerLineMax && results_.size() > 1)) {
    DropOldest();
  }
  Write(kept);
}

void ResultLog::Shed() {
  while (results_.size() > 1) DropOldest();
  if (results_.empty()) return;
  Kept& newest = results_.begin()->second;
  if (ResultQuota::BytesOf(newest.reply) >= ResultQuota::kSmallLineBytes) {
    Discount(newest.reply);
    if (newest.shared != 0) shared_->Release(std::exchange(newest.shared, 0));
    const std::uint64_t seq = newest.reply.seq;
    Reply told{.seq = seq, .status = NoLongerKept(seq)};
    std::swap(newest.reply, told);  // An assignment would keep the memory of the value.
    Count(newest.reply);
  }
  Write(newest);
}

void ResultLog::SetIdleSince(std::optional<Instant> since) {
  if (quota_) quota_->Move(line_, {idle_since_, bytes_}, {since, bytes_});
  idle_since_ = since;
}

void ResultLog::Count(const Reply& reply) {
  const std::size_t before = bytes_;
  bytes_ += ResultQuota::BytesOf(reply);
  if (!quota_) return;
  quota_->Take(reply);
  quota_->Move(line_, {idle_since_, before}, {idle_since_, bytes_});
}

void ResultLog::Discount(const Reply& reply) {
  const std::size_t before = bytes_;
  bytes_ -= ResultQuota::BytesOf(reply);
  if (!quota_) return;
  quota_->GiveBack(reply);
  quota_->Move(line_, {idle_since_, before}, {idle_since_, bytes_});
}

void ResultLog::Write(Kept& kept) {
  kept.acknowledged = acknowledged_;
  kept.dropped = dropped_;
  kept.open.assign(open_.begin(), open_.upper_bound(dropped_));
  if (journal_) journal_->Put(Row(kept.reply.seq), EncodeResult(kept));
}

void ResultLog::DropAcknowledged() {
  while (!results_.empty() && results_.begin()->first <= acknowledged_) Drop(results_.begin());
}

void ResultLog::DropOldest() {
  const auto oldest = results_.find(by_order_.begin()->second);
  dropped_ = std::max(dropped_, oldest->first);
  Drop(oldest);
}

void ResultLog::Drop(Results::iterator result) {
  if (journal_) journal_->Remove(Row(result->first));
  if (result->second.shared != 0) shared_->Release(result->second.shared);
  Discount(result->second.reply);
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
  Count(kept.reply);
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
    rows.emplace(Row(seq), EncodeResult(kept));
  }
}

void ResultLog::Clear() {
  while (!results_.empty()) Drop(results_.begin());
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
                    "the store keeps " + std::to_string(limits_.sessions) +
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
  OfJob& job = jobs_.try_emplace(hello.job, limits_, &result_bytes_).first->second;
  ++job.sessions;
  for (const Role role : {Role::kRequest, Role::kControl}) {
    session.line(role).results = ResultLog(journal_, &shared_, &job.results, {id, role});
  }
  by_name_.emplace(std::pair(hello.job, hello.session), id);
  return session;
}

void SessionTable::BeginIdle(Session& session, Instant now) {
  SetIdleSince(session, now);
  idle_.emplace(now, session.id);
  jobs_.at(session.hello.job).idle.emplace(now, session.id);
}

void SessionTable::EndIdle(Session& session) {
  if (!session.idle_since) return;
  const std::pair entry(*session.idle_since, session.id);
  idle_.erase(entry);
  jobs_.at(session.hello.job).idle.erase(entry);
  SetIdleSince(session, std::nullopt);
}

void SessionTable::SetIdleSince(Session& session, std::optional<Instant> since) {
  session.idle_since = since;
  session.request.results.SetIdleSince(since);
  session.control.results.SetIdleSince(since);
}

void SessionTable::Remember(Session& session, Role role, const Reply& reply) {
  session.line(role).results.Remember(reply);
  ResultQuota& quota = jobs_.at(session.hello.job).results;
  while (quota.Over()) {
    const std::optional<LineId> first = quota.First();
    if (!first) return;
    sessions_.at(first->session).line(first->role).results.Shed();
  }
}

bool SessionTable::IsFull(const Hello& hello) const {
  return hello.role != Role::kAdmin && by_name_.size() >= limits_.sessions &&
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
  found->second.request.results.Clear();
  found->second.control.results.Clear();
  if (Keeps()) journal_->Remove(SessionRow(id));
  const auto of_job = jobs_.find(found->second.hello.job);
  sessions_.erase(found);
  if (--of_job->second.sessions == 0) jobs_.erase(of_job);
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

std::vector<std::string> SessionTable::Jobs() const {
  std::vector<std::string> jobs;
  jobs.reserve(jobs_.size());
  for (const auto& [name, of_job] : jobs_) jobs.push_back(name);
  return jobs;
}

}  // namespace resilient::store
