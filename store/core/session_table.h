#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <resilient/clock.h>

#include "store/core/journal.h"
#include "store/core/keyspace.h"
#include "store/core/messages.h"
#include "store/core/result_quota.h"
#include "store/core/server_core.h"
#include "store/core/shared_results.h"
#include "store/core/storage.h"

namespace resilient::store {

// What a repeated request is told whose result was dropped: kOutcomeUnknown.
Status NoLongerKept(std::uint64_t seq);

// The results of one line of requests (a session's request or control connection), so that a
// repeated request gets the first answer instead of a second effect. A client has at most
// kInFlightPerSessionMax requests open, and answers arrive in the order in which they were given;
// so what a client may still repeat is among the newest results, and older ones are dropped even
// while an older *wait* holds first_unacked back. Where the results of a job take too much, lines
// shed theirs (ResultQuota): a repeat of theirs is told that its outcome is unknown.
//
// In a durable store each result is a row, which also says what had been forgotten when it was
// written. An acknowledgement alone changes no row, or each read behind a mutation would have to
// wait for the disk: the rows that it makes useless go with the next result. Owner: SessionTable.
// Thread: caller-synchronised. Pure.
class ResultLog {
 public:
  ResultLog() = default;
  // All outlive this; journal may be null, and shared is used only with it.
  ResultLog(Journal* journal, SharedResults* shared, ResultQuota* quota, LineId line)
      : journal_(journal && journal->on() ? journal : nullptr),
        shared_(shared),
        quota_(quota),
        line_(line) {}

  // Results below may be forgotten.
  void Acknowledge(std::uint64_t first_unacked);
  // Null when there is none.
  const Reply* Find(std::uint64_t seq) const;
  // True when a result of that number has been dropped: whether it took effect is not known here.
  bool Forgotten(std::uint64_t seq) const;
  // The request of that number waits: it has no result yet, so none is dropped while newer ones
  // are, and a repeat after a lost connection waits again.
  void Open(std::uint64_t seq);
  void Remember(const Reply& reply);
  // Nothing is left but the number of the newest result, and that older ones are forgotten.
  void Shed();
  // Since when the session has no connection.
  void SetIdleSince(std::optional<Instant> since);

  // A row's value back into the log. False: it is none.
  bool Restore(std::uint64_t seq, std::string_view value);
  void AppendRows(Rows& rows) const;
  // The session is forgotten: nothing is kept any more.
  void Clear();

  // Whether a client may still ask for an answer: one that it has not acknowledged, or that waits.
  bool Owes() const {
    return !open_.empty() || results_.upper_bound(acknowledged_) != results_.end();
  }
  std::size_t size() const { return results_.size(); }
  // What was answered, without what keeping it takes.
  std::size_t bytes() const { return bytes_ - results_.size() * ResultQuota::kOverhead; }

 private:
  struct Kept {
    Reply reply;
    std::uint64_t shared = 0;  // The row of its shared values; 0: it has none.
    std::uint64_t order = 0;   // The age: a wait's result is younger than those of later requests.
    // As they were when the row was written.
    std::uint64_t acknowledged = 0;
    std::uint64_t dropped = 0;
    std::vector<std::uint64_t> open;  // Only those up to `dropped`.
  };
  using Results = std::map<std::uint64_t, Kept>;

  std::string Row(std::uint64_t seq) const { return ResultRow(line_.session, line_.role, seq); }
  void DropAcknowledged();
  void DropOldest();
  void Drop(Results::iterator result);
  // What a reply takes is counted, or no longer.
  void Count(const Reply& reply);
  void Discount(const Reply& reply);
  void Write(Kept& kept);

  Journal* journal_ = nullptr;  // Null: nothing is kept beyond memory.
  SharedResults* shared_ = nullptr;
  ResultQuota* quota_ = nullptr;  // Null: nobody counts.
  LineId line_;
  std::optional<Instant> idle_since_;
  // Those up to acknowledged_ only wait for their rows to be removed.
  Results results_;
  std::map<std::uint64_t, std::uint64_t> by_order_;  // To the seq.
  std::uint64_t last_order_ = 0;
  std::set<std::uint64_t> open_;  // Requests that wait; at most kInFlightPerSessionMax.
  std::size_t bytes_ = 0;         // With what keeping them takes.
  std::uint64_t acknowledged_ = 0;
  std::uint64_t dropped_ = 0;  // The highest number whose result had to go unacknowledged.
};

struct Line {
  ConnectionId connection = 0;  // 0: none now.
  ResultLog results;
};

struct Session {
  SessionId id = 0;
  Hello hello;  // Of the control connection; until there is one, of the first.
  Line request;
  Line control;
  std::optional<Instant> idle_since;  // While it has no connection.
  bool said_goodbye = false;          // Its client closes its request line for good.

  bool Connected() const { return request.connection != 0 || control.connection != 0; }
  // A member is remembered beyond its goodbye: others may ask who it was.
  bool Over() const { return said_goodbye && !Connected() && hello.role == Role::kRequest; }
  Line& line(Role role) { return role == Role::kControl ? control : request; }
};

// How many sessions there may be, and what their results may take. Thread: value type.
struct SessionLimits {
  std::size_t sessions = kSessionsMax;
  std::size_t result_bytes_per_job = kResultBytesPerJobMax;
  std::size_t result_bytes = kResultTotalBytesMax;
};

// Connections, the sessions behind them, and how long a session outlives them. An admin connection
// is a session of its own that ends with it, and counts for no limit.
//
// A full table has room for who comes as long as somebody is idle: of the job with most sessions
// one goes that has no connection, the oldest that owes no answer first, so that a job that fills
// the table displaces itself; where that job has none, one of any job. Owner: ServerCore. Thread:
// caller-synchronised. Pure.
class SessionTable {
 public:
  // `journal` outlives this, or is null.
  explicit SessionTable(Duration memory, SessionLimits limits = {}, Journal* journal = nullptr)
      : journal_(journal),
        memory_(memory),
        limits_(limits),
        shared_(journal),
        result_bytes_{.most = limits.result_bytes} {}

  void Connect(ConnectionId connection);
  bool Knows(ConnectionId connection) const { return connections_.contains(connection); }

  struct Opened {
    SessionId session = 0;
    bool known = false;         // The session was there before.
    ConnectionId replaced = 0;  // An older connection of this role, now unknown; to be closed.
  };
  // Binds a connection to its session. kProtocol: another process claims the session;
  // kResourceExhausted above the limit. REQUIRES: Knows(connection), no session yet.
  // Where the table is full Expendable() makes room.
  Result<Opened> Open(ConnectionId connection, const Hello& hello);

  // What a connection belongs to; session == null before Open.
  struct Bound {
    Session* session = nullptr;
    Role role = Role::kRequest;
  };
  Bound Of(ConnectionId connection);
  Session* Find(SessionId session);
  // The session is not to hold a key by its lease any more.
  void DropLeasedKey(SessionId session);
  // Those that are to hold one, in the order of their ids.
  std::vector<SessionId> WithLeasedKey() const;

  // Forgets the connection. The session stays for `memory`, an admin's session does not.
  struct Closed {
    SessionId session = 0;  // 0: it had none, or the connection was not known.
    Role role = Role::kRequest;
  };
  Closed Disconnect(ConnectionId connection, Instant now);

  // Whether a new session finds no place.
  bool IsFull(const Hello& hello) const;
  // Who is to be forgotten for a new session of `job`; nullopt: nobody. `may_go`: whether a session
  // without a connection may be, asked of a few.
  std::optional<SessionId> Expendable(const std::string& job,
                                      const std::function<bool(SessionId)>& may_go) const;

  // Keeps the answer to a request. Where that is too much for the job, lines shed their results.
  // REQUIRES: not of an admin.
  void Remember(Session& session, Role role, const Reply& reply);

  // Sessions without a connection for longer than the memory, oldest first.
  std::vector<SessionId> Idle(Instant now) const;
  void Forget(SessionId session);

  // The rows of sessions, of what results share, and of results, in this order; kInternal says what
  // is wrong with one.
  Status RestoreSession(SessionId session, std::string_view value);
  Status RestoreShared(const RowName& name, std::string_view value);
  Status RestoreResult(const RowName& name, std::string_view value);
  // Ids up to `last` were given; the memory of all sessions begins now.
  void FinishRestore(SessionId last, Instant now);
  void AppendRows(Rows& rows) const;
  // The newest id of a session that is kept.
  SessionId last_kept() const { return last_kept_; }
  // Of all sessions that have one now.
  std::vector<ConnectionId> ControlConnections() const;
  // Jobs that have a session.
  std::vector<std::string> Jobs() const;
  bool Has(const std::string& job) const { return jobs_.contains(job); }

  std::size_t connections() const { return connections_.size(); }
  std::size_t sessions() const { return sessions_.size(); }
  // That results take, over all jobs.
  std::size_t result_bytes() const { return result_bytes_.taken; }

 private:
  struct Bind {
    SessionId session = 0;
    Role role = Role::kRequest;
  };
  bool Keeps() const { return journal_ && journal_->on(); }
  Session& Add(SessionId id, const Hello& hello);
  using IdleSet = std::set<std::pair<Instant, SessionId>>;  // The longest idle first.
  std::optional<SessionId> OldestThatMayGo(const IdleSet& idle,
                                           const std::function<bool(SessionId)>& may_go) const;
  void BeginIdle(Session& session, Instant now);
  void EndIdle(Session& session);
  static void SetIdleSince(Session& session, std::optional<Instant> since);
  void KeepHello(const Session& session);

  Journal* const journal_;
  const Duration memory_;
  const SessionLimits limits_;
  SharedResults shared_;
  Pool result_bytes_;
  SessionId last_id_ = 0;
  SessionId last_kept_ = 0;
  std::unordered_map<ConnectionId, Bind> connections_;
  std::unordered_map<SessionId, Session> sessions_;
  std::map<std::pair<std::string, std::string>, SessionId> by_name_;  // (job, session).
  IdleSet idle_;
  // Without those of admins.
  struct OfJob {
    explicit OfJob(const SessionLimits& limits, Pool* all)
        : results(limits.result_bytes_per_job, all) {}
    std::size_t sessions = 0;
    IdleSet idle;
    ResultQuota results;
  };
  std::map<std::string, OfJob> jobs_;
};

}  // namespace resilient::store
