#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/base/check.h"
#include "store/core/key_ops.h"
#include "store/core/keyspace.h"
#include "store/core/lease_table.h"
#include "store/core/membership.h"
#include "store/core/server_core.h"
#include "store/core/session_table.h"
#include "store/core/storage.h"

// The inside of ServerCore, for server_core.cc (requests and what follows from them) and
// server_rows.cc (what is kept).
namespace resilient::store {

inline constexpr Duration kLeaseTtlFloor = std::chrono::seconds(1);
// Ticks may come late by this much before the lateness counts as a pause of the server.
inline constexpr Duration kLateTick = 4 * kTickInterval;

// What the jobs take together.
struct JobPools {
  explicit JobPools(const CoreLimits& limits)
      : bytes{.most = limits.bytes},
        change_bytes{.most = limits.change_total_bytes},
        seats{.most = limits.seats} {}
  Pool bytes;
  Pool change_bytes;
  Pool seats;
};

// Everything of one job name.
struct Job {
  Job(const std::string& name, const KeyspaceLimits& key_limits, JobPools& pools,
      const MembershipLimits& limits, std::uint64_t first_generation,
      const SecretMaker& make_secret, Journal* journal)
      : keys(key_limits, name, journal, &pools.bytes, &pools.change_bytes),
        membership(name, limits, first_generation, make_secret, journal, &pools.seats) {}
  Keyspace keys;
  Membership membership;
  bool has_unread = false;                       // OnUnread, until the next tick.
  std::map<SessionId, std::string> leased;       // Keys that are there by the lease of a session.
  std::map<std::string, std::size_t> leases_on;  // Of each of these keys, how many sessions.
};

// A request being answered. Thread: value type on the stack of OnRequest.
struct Exchange {
  Session& session;
  Role role;
  Request& request;  // Its values are moved where they are kept.
  Moment moment;
  Job* job = nullptr;           // That of the session; null: there is none yet.
  KeyOutcome key{};             // Its reply is the answer to any request.
  bool silent = false;          // There is no answer.
  MembershipEffects members{};  // Carried out after the answer is sent.
};

// Owner: ServerCore. Thread: caller-synchronised. Pure.
class ServerCore::Impl {
 public:
  Impl(CoreOptions options, Instant now)
      : options_(std::move(options)),
        clock_(now, kLateTick),
        leases_(std::max(options_.lease_ttl, kLeaseTtlFloor)),
        journal_(options_.durable),
        sessions_(options_.session_memory,
                  {.sessions = options_.limits.sessions,
                   .result_bytes_per_job = options_.limits.result_bytes_per_job,
                   .result_bytes = options_.limits.result_total_bytes},
                  &journal_),
        server_id_(options_.server_id),
        began_unix_ms_(options_.began_unix_ms) {
    RESILIENT_CHECK(options_.make_secret != nullptr);
  }

  Status Restore(std::string_view row, std::string_view value);
  Status FinishRestore(Instant now, Effects& effects);
  Rows DumpRows() const;
  // The end of each step: what it changed is to be written.
  void Finish(Effects& effects);

  void OnConnect(ConnectionId connection) { sessions_.Connect(connection); }
  void OnRequest(ConnectionId connection, Request& request, Moment moment, Effects& effects);
  void OnDisconnect(ConnectionId connection, Moment moment, Effects& effects);
  void OnProcessExit(std::uint64_t watch, Moment moment, Effects& effects);
  void OnUnread(ConnectionId connection, Instant now);
  std::optional<ConnectionId> ControlConnection(std::uint64_t watch);
  void OnTick(Instant now, bool input_drained, Effects& effects);
  std::string StatusJson(Moment moment, const StatusOp& asked) const;

  Moment At(Instant now) const { return {clock_.At(now), Wall(now)}; }
  const LeaseTable& leases() const { return leases_; }
  const SessionTable& sessions() const { return sessions_; }
  const CoreCounters& counters() const { return counters_; }
  const std::string& server_id() const { return server_id_; }
  CoreGauges Gauges() const;

 private:
  using Jobs = std::map<std::string, Job>;

  double Wall(Instant now) const {
    return options_.wall_offset_s + std::chrono::duration<double>(now.time_since_epoch()).count();
  }

  void OnHello(ConnectionId connection, const Request& request, const Hello& hello, Moment moment,
               Effects& effects);
  Status CheckHello(const Hello& hello) const;
  // Answers with `why` and ends the connection.
  void Reject(ConnectionId connection, const Request& request, Status why, Moment moment,
              Effects& effects);
  void Answer(Exchange& exchange, Effects& effects);
  // False: this is a repeat, and has been answered.
  bool IsFirst(Exchange& exchange, Effects& effects);

  void NoteSignOfLife(Exchange& exchange, Effects& effects);
  Status Execute(Exchange& exchange, Effects& effects);
  Status ExecuteMembershipOp(Exchange& exchange, Job& job, Effects& effects);
  Outcomes& Counts(const Request& request) { return counters_.requests[request.op.index()]; }
  void Cancel(Exchange& exchange, std::uint64_t seq, Effects& effects);
  Status Leave(Exchange& exchange, Job& job, Effects& effects);
  Status ExitReport(Exchange& exchange, const ExitReportOp& report, Effects& effects);
  // What an admin asks for beyond status and reports: server_admin.cc.
  static bool IsAdminOp(const Op& op);
  Status Administer(Exchange& exchange, Effects& effects);
  Status Drain(const Exchange& exchange, bool force, Effects& effects);

  // Keys that are there as long as a lease (Hello::leased_key): server_leased_keys.cc.
  // The session has said Hello: its key is there, and it has a lease.
  void LeaseKey(Job& job, const Session& session, Moment moment, Effects& effects);
  static void Hold(Job& job, const Session& session);
  // For good; no-op without one. `how`: "has ended".
  void EndLeasedKey(Job& job, SessionId session, const std::string& how, Moment moment,
                    Effects& effects);
  void Unlease(Job& job, SessionId session, const std::string& how, Moment moment,
               Effects& effects);
  // All of that process, which has ended by its launcher's report.
  void EndLeasedKeysOf(Job& job, const ExitReportOp& report, Moment moment, Effects& effects);
  // As the end; a client that lives after all connects again, and its Hello brings the key back.
  void ExpireLeasedKey(Job& job, const LeaseTable::Expired& expired, Moment moment,
                       Effects& effects);
  // The keys of the job were dropped: those that are leased are there again.
  void SetLeasedKeys(Job& job, std::vector<EndedWait>& ended);
  void RestoreLeasedKeys(Moment moment, Effects& effects);

  Status RestoreRow(const RowName& name, std::string_view value);
  Status RestoreStore(std::string_view value);
  std::string StoreRowValue() const;

  // Jobs whose ranks wait for each other's are told so, once: server_crossed_jobs.cc.
  void LookForCrossedJobs(Moment moment, Effects& effects);

  // Exchanges of survivors to which all have come that are left.
  static void FinishSurvived(Job& job, std::vector<EndedWait>& ended);
  void Apply(Job& job, MembershipEffects& members, Moment moment, Effects& effects);
  void AnswerWaits(std::vector<EndedWait>& ended, Effects& effects);
  // Whether nothing but its client's memory needs a session that has no connection.
  bool MayForget(SessionId id);
  // REQUIRES: MayForget(id).
  void ForgetSession(SessionId id, Effects& effects);
  void MakeRoomForSession(const Hello& hello, Effects& effects);
  void ForgetIdle(Instant now, Effects& effects);
  void ForgetJob(Jobs::iterator job, Effects& effects);
  Job* FindJob(const std::string& name);
  const Job* FindJob(const std::string& name) const;
  // The job of that name, which is made if there is none: where the limit of jobs allows it, or
  // whatever the limit is.
  Result<Job*> MakeJob(const std::string& name);
  Job* AddJob(const std::string& name);
  Status CheckRoomForJob() const;

  const CoreOptions options_;
  AwakeClock clock_;
  LeaseTable leases_;
  Instant crossed_look_{};  // When LookForCrossedJobs last looked.
  Journal journal_;
  SessionTable sessions_;
  std::string server_id_;
  std::uint64_t began_unix_ms_;
  CoreCounters counters_;
  std::uint64_t epoch_ = 0;
  SessionId restored_last_session_ = 0;
  std::string store_row_;  // As it was written last.
  JobPools pools_{options_.limits};
  Jobs jobs_;
  // A job that is forgotten and comes back goes on above its old generations.
  std::uint64_t generation_floor_ = 0;
};

}  // namespace resilient::store
