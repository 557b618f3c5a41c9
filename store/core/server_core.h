#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "runtime/base/log_record.h"
#include "store/core/counters.h"
#include "store/core/journal.h"
#include "store/core/limits.h"
#include "store/core/messages.h"
#include "store/core/secret_maker.h"

namespace resilient::store {

using ConnectionId = std::uint64_t;

struct CoreOptions {
  // Random, anew at each start; of a durable store the one that was kept goes on.
  std::string server_id;
  std::uint64_t began_unix_ms = 0;               // Likewise; told to clients and not looked at.
  bool durable = false;                          // Steps note what has to be kept (Effects::write).
  Duration lease_ttl = std::chrono::seconds(5);  // Floor 1 s.
  Duration lone_close_grace = Millis(300);       // A control connection closed without goodbye.
  Duration ping_grace = Millis(500);             // A live holder of a seat answers within this.
  // For a supervised process: the launcher's report adds the how, and makes a leave of code 0. It
  // comes from a process of its own, which a busy host may be slow to start.
  Duration exit_report_grace = std::chrono::seconds(1);
  Duration session_memory = std::chrono::hours(1);
  std::size_t changes_per_job = kChangesPerJobMax;  // For watches; less in the simulator.
  CoreLimits limits;
  SecretMaker make_secret;   // REQUIRES: not null.
  double wall_offset_s = 0;  // Wall clock minus Instant, for the `since` of messages only.
};

// What the shell must do after a call, in order. The core itself touches nothing.
struct Effects {
  struct Outgoing {
    ConnectionId connection;
    ServerMessage message;
  };
  struct WatchProcess {
    std::uint64_t watch;
    ProcessIdentity process;
  };

  std::vector<Write> write;  // First of all: nothing below may be seen before these are kept.
  std::vector<Outgoing> send;
  std::vector<ConnectionId> close;  // After what was sent is flushed.
  std::vector<WatchProcess>
      watch;  // Watch by pidfd if boot id, pid namespace and start time are this host's.
  std::vector<std::uint64_t> unwatch;
  std::vector<LogRecord> log;  // Level info: join, expiry, fence, refusal.
  bool drain = false;          // The server is to end, as an admin asked for.
  // False: the seat that hosts the store has left its last world. True: that world goes on.
  std::optional<bool> listens;
  bool last_member_left = false;  // An auto-spawned server ends now.
};

// The whole server but sockets, clock and files: keys, sessions with exactly-once results, leases,
// membership. apply(now, connection, request) -> effects. Its parts: Keyspace, SessionTable,
// LeaseTable, Membership (own headers).
//
// Exactly once: a mutation's result is kept under (session, seq) until first_unacked passes it; a
// repeated seq gets the stored result. Waiting gets are re-registered by the repeated request.
// Leases: granted by Join, renewed by any frame on the session's control connection. Expiry is
// two-phase: OnTick marks suspects, and only a later OnTick with `input_drained` expires those that
// stayed silent; a gap between ticks (a paused server) extends every lease by the gap. Owner: the
// server shell or the simulator. Thread: caller-synchronised. Pure: time is an argument.
class ServerCore {
 public:
  explicit ServerCore(CoreOptions options, Instant now);
  ~ServerCore();

  // For a durable store, before anything else: each row that was kept, in order, then once
  // FinishRestore, whose writes (a new epoch) are kept before anybody is served. Sessions, keys,
  // results and members are as before; every lease has a full TTL; no connection exists. kInternal:
  // the rows do not belong together; the store must not be served.
  Status Restore(std::string_view row, std::string_view value);
  Status FinishRestore(Instant now, Effects& effects);

  void OnConnect(ConnectionId connection, Instant now);
  void OnRequest(ConnectionId connection, Request request, Instant now, Effects& effects);
  // Without goodbye: the peer closed, or the shell cut it for `why`.
  void OnDisconnect(ConnectionId connection, Instant now, Effects& effects);
  // The process behind `watch` has exited (pidfd).
  void OnProcessExit(std::uint64_t watch, Instant now, Effects& effects);
  // Right before OnTick, for each control connection of which requests have arrived and were not
  // handed in: its lease is renewed, and verdicts on its job that need all of them wait.
  void OnUnread(ConnectionId connection, Instant now);
  // Call at least every kTickInterval; `input_drained`: everything that had arrived before `now`
  // has been handed in, but for what OnUnread has said.
  void OnTick(Instant now, bool input_drained, Effects& effects);

  // Of the session behind a watch, if it is open: what it has sent says more than its end.
  std::optional<ConnectionId> ControlConnection(std::uint64_t watch) const;

  // For tests, metrics and the shell's linger: members with a live lease, over all jobs.
  std::size_t LiveMembers() const;
  std::size_t Connections() const;
  const std::string& server_id() const;  // Of a durable store, after FinishRestore: the kept one.
  const CoreCounters& counters() const;
  CoreGauges Gauges() const;  // Costs one step for each job.
  // A page of all that a person wants to know, as JSON: jobs, lives, rounds, generations, members,
  // leases. It has "next" when there is more.
  std::string StatusJson(Instant now, const StatusOp& asked = {}) const;
  // For tests: the rows that a new store would need. What all steps wrote comes to the same.
  std::map<std::string, std::string> DumpRows() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

inline constexpr Duration kTickInterval = Millis(50);

}  // namespace resilient::store
