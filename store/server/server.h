#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "runtime/base/log_limit.h"
#include "runtime/net/socket.h"
#include "store/core/server_core.h"
#include "store/server/access.h"
#include "store/server/connection.h"
#include "store/server/crash_points.h"
#include "store/server/descriptors.h"
#include "store/server/encryption.h"
#include "store/server/engine.h"
#include "store/server/fair_turns.h"
#include "store/server/held_effects.h"
#include "store/server/http_endpoint.h"
#include "store/server/input_ledger.h"
#include "store/server/limits.h"
#include "store/server/listeners.h"
#include "store/server/metrics.h"
#include "store/server/newcomers.h"
#include "store/server/notify.h"
#include "store/server/output_ledger.h"
#include "store/server/persister.h"
#include "store/server/process_watch.h"
#include "store/server/uv_handle.h"

namespace resilient::store {

inline constexpr Duration kEndingLimit = std::chrono::seconds(1);
// Of one connection, before others have their turn.
inline constexpr int kRequestsPerTurn = 64;
inline constexpr Duration kTimePerConnection = std::chrono::milliseconds(1);
// Of the requests of one job in a turn of the loop, and of those that had to wait for their turn;
// as much again of what its control connections send.
inline constexpr Duration kTimePerJob = std::chrono::milliseconds(2);
inline constexpr Duration kDeferredPerTurn = std::chrono::milliseconds(4);
// Of the TLS handshakes of one address in a turn of the loop, and of all of them: a stranger's
// costs a signature.
inline constexpr Duration kTimePerAddress = std::chrono::milliseconds(1);
inline constexpr Duration kHandshakesPerTurn = std::chrono::milliseconds(2);
// Connections that are flushed after a step of the loop, and for how long others are in each turn.
inline constexpr std::size_t kFlushAtOnce = 32;
inline constexpr Duration kFlushPerTurn = std::chrono::milliseconds(2);
inline constexpr Duration kComplaintInterval = std::chrono::seconds(10);
inline constexpr Duration kFlushLimit = std::chrono::seconds(10);  // Of a shutdown, for the disk.

// Every spelling of "all addresses of this host": "*", "0.0.0.0", "0", "::", "::ffff:0.0.0.0".
bool IsWildcardHost(const std::string& host);

// Whose connections may speak torch's TCPStore protocol, which knows neither tokens nor TLS.
enum class TcpStoreAccess : std::uint8_t { kOff, kLoopback, kAll };

struct ServerOptions {
  HostPort listen;
  Duration lease_ttl = std::chrono::seconds(5);
  // Not zero: an auto-spawned server. It ends when the last member has said goodbye, or when for
  // this long there was neither a live member nor a connected client.
  Duration linger = Duration::zero();
  Duration arrival = Duration::max();  // The linger until there was a member, where it is less.
  // Of a durable store. Called on any thread when the disk refused: must not return, as nothing may
  // be acknowledged any more.
  std::function<void(const Status& why)> on_storage_failure;
  std::string token_file;               // Empty: whoever connects is admitted.
  bool one_user = false;                // Of this host only this process's user is admitted.
  TlsFiles tls;                         // Empty: connections are plain.
  CrashPoints* crash_points = nullptr;  // For tests; outlives the server.
  std::optional<HostPort> metrics;      // Where /metrics, /healthz and /readyz are served.
  std::string version;                  // Of this build, for metrics.
  ServerLimits limits;
  ServiceNotifier* notifier = nullptr;  // Null: no service manager. Outlives the server.
  TcpStoreAccess tcpstore = TcpStoreAccess::kOff;
  bool tcp_only = false;  // No unix socket for clients of this host beside the TCP address.
};

// The server around ServerCore: sockets, timers, signals, process exits, and for a durable store
// the disk: what a step of the core says goes out when the step's writes are kept, and not before
// what earlier steps say. It decides nothing about keys and members. Owner: the serve command or a
// test. Thread: the one that runs the loop. Lifetime: ends its handles by itself after Shutdown (or
// a signal, or the linger), so that UvLoop::Run returns; destroyed after that, before the loop.
class Server final : private Connection::Owner {
 public:
  // `engine`: null for a store in memory.
  Server(UvLoop& loop, const Clock& clock, ServerOptions options,
         std::unique_ptr<Engine> engine = nullptr);
  ~Server() override;

  // Serves ServerOptions::metrics; before Restore, so that probes are answered meanwhile. Errors as
  // ListenTcp.
  Status StartHttp();
  // REQUIRES: StartHttp was OK.
  const HostPort& http_address() const { return http_->address(); }
  // Reads the data directory; for a durable store before Start. Blocks. As OpenSqliteEngine.
  Status Restore();
  // Listens. kRefused when the port is taken, kSetting for a wildcard address without a token or a
  // CA of the clients, or for a file that cannot be used.
  Status Start();
  // REQUIRES: Start was OK. As asked for, with the real port: a name stays a name, which other
  // hosts may resolve to another address than this one.
  const HostPort& address() const { return address_; }
  const std::string& server_id() const { return server_id_; }

  // Stops listening, flushes, closes. Idempotent.
  void Shutdown(std::string_view why);

 private:
  struct PendingExit {
    std::uint64_t watch;
    std::uint64_t seen_in_turn;
  };

  void OnFrames(Connection& connection) override;
  void OnPartialInput(Connection& connection, std::size_t bytes) override;
  void OnHandshake(Connection& connection) override;
  void OnEnd(Connection& connection, const Status& why) override;
  void OnConnectionWaiting();
  // Takes one that found no place, where another has to give its own up for it.
  void TakeWaiting();
  void EndSilent(Connection& connection, Instant now);
  void OnTurn();
  void OnTickDue();
  void OnProcessExit(std::uint64_t watch);

  void MakeCore(Instant now);
  void Accept();
  // What waits for a later turn of the loop: server_turns.cc.
  void TakeFrames(Connection& connection, Instant begun);
  Instant Charge(const Connection& connection, Instant begun);
  void TakeDeferred();
  void TakeHandshakes();
  // In which it waits for the turn of its job; null: it is of none yet.
  FairTurns* TurnsOf(const Connection& connection);
  void TakeTurns(FairTurns& turns);
  // Of a process that has exited: its last words may still be unread.
  bool HasUnread(std::uint64_t watch);
  void Defer(Connection& connection);
  void Handle(Connection& connection, Frame frame, Instant now);
  void HandleRequest(Connection& connection, const Frame& frame, Instant begun);
  void HandleBadRequest(Connection& connection, const Frame& frame, const Status& why);
  // Logs it, answers, then ends the connection.
  void Refuse(Connection& connection, std::uint64_t seq, const Status& why);
  void AnswerAndEnd(Connection& connection, std::uint64_t seq, const Status& why);
  void RefusePlain(Connection& connection);
  void EndTls(Connection& connection, const Status& why);
  void EndGently(Connection& connection);
  bool IsFull() const;
  Status Full() const;
  void NoteWelcome(Connection& connection, const Hello& hello, const Effects& effects);
  // Clients of torch's TCPStore: server_tcpstore.cc.
  bool ServesTcpStore(const Connection& connection) const;
  void HandleQuery(Connection& connection, Instant begun);
  void EndTcpStore(Connection& connection, const Status& why);
  // Replies of the core to such clients become the bytes of their answers.
  void AnswerTcpStore(Effects& effects);
  void NoteLastRequest(Connection& connection);
  // Carries the effects out, at once or when what they tell of is kept. `begun`: of the request
  // that they answer.
  void Apply(Effects effects, std::optional<Instant> begun = std::nullopt);
  void Answered(std::optional<Instant> begun);
  Status Listen(const FileDescriptor& bound);
  void StopListening();
  void ListenAgain();  // Where it did not: the port may be somebody else's by now.
  void Perform(Effects& effects);
  void SendUnordered(Effects& effects);
  void OnKept(std::uint64_t ticket);
  // Too much is under way to the disk for this connection to be read.
  bool MustWait(const Connection& connection) const;
  void WakeStalled();
  void EndConnections();
  void SendTo(Effects::Outgoing&& outgoing);
  void Touch(Connection& connection);
  void Settle();
  void FlushTouched(std::size_t most);  // So many of those that were touched, in their order.
  void FlushTouched(Connection& connection);
  void FlushForAWhile();
  // What clients leave unread: server_output.cc. False when the connection is gone.
  bool FlushOut(Connection& connection);
  void NoteOutput(Connection& connection);
  void RenewOutput();  // Of all, as some have read since they were noted.
  void CutWorst();
  void CutStuck(Instant now);
  // Closes the socket and, when the core still counts on it, tells the core in Settle.
  void Drop(Connection& connection);
  void Cut(Connection& connection, std::string_view why);
  void Tick();
  void EndOverdue(Instant now);
  void EndAfterTheLast();
  void CheckLinger(Instant now);
  void UpdateIdle();
  void Finish();
  Connection* Find(ConnectionId id);
  // What people and their tools ask: server_status.cc.
  void OnRestoring(std::size_t rows);
  HttpAnswer AnswerHttp(std::string_view path);
  HttpAnswer AnswerHealth() const;
  HttpAnswer AnswerReady() const;
  std::string WhyNotReady() const;  // Empty: ready.
  std::string MetricsText();

  // A line about what a peer does wrong is due: at most one of a kind in kComplaintInterval.
  bool MayComplain(std::string_view kind);

  UvLoop& loop_;
  const Clock& clock_;
  const ServerOptions options_;
  std::string server_id_;
  const std::size_t connections_max_;
  HostPort address_;
  Access access_;
  Encryption encryption_;
  std::unique_ptr<ServerCore> core_;

  const double started_unix_s_;
  ServerMetrics metrics_;
  std::unique_ptr<HttpEndpoint> http_;  // Null when not asked for.

  std::unique_ptr<Engine> engine_;        // Until the persister has it.
  std::unique_ptr<Persister> persister_;  // Null for a store in memory.
  Effects restored_;                      // What Restore left to be done when we listen.
  HeldEffects held_;                      // Empty for a store in memory.
  std::set<ConnectionId> stalled_;        // Frames wait for the disk.

  Listeners listeners_;
  std::unordered_map<ConnectionId, std::unique_ptr<Connection>> connections_;
  std::vector<std::unique_ptr<Connection>> graveyard_;  // Closed; freed in the next turn.
  Newcomers newcomers_;                                 // Have not said Hello.
  std::set<ConnectionId> ending_;
  std::set<ConnectionId> deferred_;  // Frames left over from this turn, of those without a job,
  FairTurns turns_{kTimePerJob};     // and of those that wait for the turn of their job: requests,
  FairTurns control_turns_{kTimePerJob};   // and what keeps leases and tells of ranks.
  FairTurns handshakes_{kTimePerAddress};  // Of those that have not said Hello, by address.
  Duration handshakes_took_{};             // In this turn.
  std::deque<ConnectionId> touched_;       // To be flushed; each that is to be says so itself.
  std::size_t unflushed_ = 0;              // Bytes of those, roughly.
  OutputLedger output_;
  InputLedger input_;
  std::vector<ConnectionId> disconnected_;  // To be told to the core in Settle.
  // Of these, what is to be asked before in their name.
  std::unordered_map<ConnectionId, Request> last_requests_;
  bool all_left_ = false;             // Every member, so that a server with a linger ends.
  std::size_t tcpstore_clients_ = 0;  // Connected, or in disconnected_ still.
  ConnectionId next_connection_ = 1;
  std::size_t clients_ = 0;  // Connections that said Hello, but for the command line's.

  ProcessWatch processes_;
  std::vector<PendingExit> exits_;
  std::optional<std::uint64_t> tick_due_in_turn_;
  std::uint64_t turn_ = 0;
  Instant last_tick_{};
  Instant last_used_{};
  bool had_members_ = false;  // Since it was started.
  std::map<std::string, LogLimit> complaints_;
  bool shutting_down_ = false;
  bool ending_connections_ = false;  // The last part of it, when all is kept.
  Instant shutdown_since_{};

  UvTimer tick_timer_;
  UvCheck turn_check_;
  UvIdle idle_;  // Started while something waits for the next turn.
  bool idle_started_ = false;
  UvSignal sigterm_;
  UvSignal sigint_;
};

}  // namespace resilient::store
