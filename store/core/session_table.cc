#include "store/core/session_table.h"

#include <algorithm>

#include "runtime/base/check.h"

namespace resilient::store {
namespace {

std::size_t BytesOf(const Reply& reply) {
  return reply.value.size() + reply.status.message().size();
}

}  // namespace

void ResultLog::Acknowledge(std::uint64_t first_unacked) {
  while (!results_.empty() && results_.begin()->first < first_unacked) {
    bytes_ -= BytesOf(results_.begin()->second);
    results_.erase(results_.begin());
  }
  if (first_unacked > 0) forgotten_ = std::max(forgotten_, first_unacked - 1);
}

const Reply* ResultLog::Find(std::uint64_t seq) const {
  const auto result = results_.find(seq);
  return result == results_.end() ? nullptr : &result->second;
}

void ResultLog::Remember(const Reply& reply) {
  if (Forgotten(reply.seq)) return;
  const auto [entry, is_new] = results_.try_emplace(reply.seq, reply);
  if (!is_new) return;
  bytes_ += BytesOf(reply);
  while (results_.size() > kResultsPerLineMax || bytes_ > kResultBytesPerLineMax) DropOldest();
}

void ResultLog::DropOldest() {
  const auto oldest = results_.begin();
  bytes_ -= BytesOf(oldest->second);
  forgotten_ = std::max(forgotten_, oldest->first);
  results_.erase(oldest);
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
    if (hello.role == Role::kControl) session.hello = hello;  // It is the one that joins.
    if (const auto idle = idle_since_.find(session.id); idle != idle_since_.end()) {
      idle_.erase({idle->second, session.id});
      idle_since_.erase(idle);
    }
  } else {
    if (sessions_.size() >= sessions_max_) {
      return Status(StatusCode::kResourceExhausted,
                    "the store keeps " + std::to_string(sessions_max_) +
                        " sessions, the most it can; use another store or try again later");
    }
    opened.session = ++last_id_;
    Session& session = sessions_[opened.session];
    session.id = opened.session;
    session.hello = hello;
    session.line(hello.role).connection = connection;
    if (!admin) by_name_.emplace(name, opened.session);
  }
  connections_[connection] = {opened.session, hello.role};
  return opened;
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
    idle_since_[bind.session] = now;
    idle_.emplace(now, bind.session);
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
  if (const auto idle = idle_since_.find(id); idle != idle_since_.end()) {
    idle_.erase({idle->second, id});
    idle_since_.erase(idle);
  }
  sessions_.erase(found);
}

}  // namespace resilient::store
