#include "store/server/server.h"

#include <algorithm>
#include <csignal>
#include <optional>
#include <utility>
#include <variant>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "runtime/net/resolver.h"
#include "store/core/codec.h"

namespace resilient::store {
namespace {

constexpr std::size_t kSecretBytes = 32;
// Loop turns that must pass before something is judged to have been silent: in the first one a
// waiting connection is accepted, in the second its bytes are read.
constexpr std::uint64_t kDrainTurns = 2;
constexpr Duration kPauseGap = std::chrono::seconds(1);  // Between ticks: we were stopped.

CoreOptions MakeCoreOptions(const ServerOptions& options, const std::string& server_id,
                            bool durable, const Clock& clock) {
  CoreOptions core;
  core.durable = durable;
  core.server_id = server_id;
  core.began_unix_ms = static_cast<std::uint64_t>(clock.WallSeconds() * 1e3);
  core.lease_ttl = options.lease_ttl;
  core.limits = options.limits.core;
  core.make_secret = [] { return RandomHex(kSecretBytes); };
  core.wall_offset_s =
      clock.WallSeconds() - std::chrono::duration<double>(clock.Now().time_since_epoch()).count();
  return core;
}

Reply Failure(std::uint64_t seq, Status why) {
  Reply reply;
  reply.seq = seq;
  reply.status = std::move(why);
  return reply;
}

std::uint64_t ToMillis(Duration duration) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<Millis>(duration).count());
}

}  // namespace

bool IsWildcardHost(const std::string& host) {
  if (host.empty() || host == "*") return true;
  const std::optional<std::string> number = NumericForm(host);
  return number == "0.0.0.0" || number == "::" || number == "::ffff:0.0.0.0";
}

Server::Server(UvLoop& loop, const Clock& clock, ServerOptions options,
               std::unique_ptr<Engine> engine)
    : loop_(loop),
      clock_(clock),
      options_(std::move(options)),
      server_id_(RandomHexId()),
      connections_max_(MakeRoomForConnections(options_.limits.connections)),
      access_(loop, clock, options_.token_file, options_.one_user),
      encryption_(loop, clock, options_.tls),
      started_unix_s_(clock.WallSeconds()),
      engine_(std::move(engine)),
      listeners_(loop, [this] { OnConnectionWaiting(); }),
      newcomers_(std::clamp<std::size_t>(connections_max_ / 4, 1, options_.limits.before_hello),
                 std::chrono::seconds(options_.limits.hello_seconds)),
      processes_(loop, [this](std::uint64_t watch) { OnProcessExit(watch); }),
      tick_timer_(loop, [this] { OnTickDue(); }),
      turn_check_(loop, [this] { OnTurn(); }),
      idle_(loop),
      sigterm_(loop, SIGTERM, [this] { Shutdown("SIGTERM"); }),
      sigint_(loop, SIGINT, [this] { Shutdown("SIGINT"); }) {}

Server::~Server() = default;

void Server::MakeCore(Instant now) {
  core_ = std::make_unique<ServerCore>(
      MakeCoreOptions(options_, server_id_, engine_ != nullptr, clock_), now);
}

Status Server::Start() {
  RESILIENT_CHECK(engine_ == nullptr);
  RESILIENT_RETURN_IF_ERROR(access_.Open());
  RESILIENT_RETURN_IF_ERROR(encryption_.Open());
  Result<FileDescriptor> bound = ListenTcp(options_.listen, Listeners::kBacklog);
  if (!bound.ok()) return bound.status();
  Result<HostPort> local = LocalAddress(*bound);
  if (!local.ok()) return local.status();
  if (IsWildcardHost(local->host) && !access_.asks_for_token() &&
      !encryption_.asks_for_certificates()) {
    return Status(StatusCode::kSetting,
                  StrCat(options_.listen.host,
                         " means every address, which needs a token file or certificates of the "
                         "clients (--tls-ca)"));
  }
  address_ = {options_.listen.host, local->port};

  const Instant now = clock_.Now();
  if (core_ == nullptr) MakeCore(now);
  last_tick_ = last_used_ = now;
  RESILIENT_RETURN_IF_ERROR(Listen(*bound));
  tick_timer_.Start(ToMillis(kTickInterval), ToMillis(kTickInterval));
  access_.Watch();
  encryption_.Watch();
  Perform(restored_);
  if (connections_max_ < options_.limits.connections) {
    RESILIENT_LOG_RECORD(
        kInfo, "limit", {{"connections", std::to_string(connections_max_)}},
        StrCat("takes ", connections_max_, " connections instead of ", options_.limits.connections,
               ", as the limit of open files (ulimit -n) leaves no "
               "more"));
  }
  if (options_.notifier != nullptr) {
    options_.notifier->Ready(StrCat("listens on ", FormatHostPort(address_)));
  }
  return Status::Ok();
}

Status Server::Listen(const FileDescriptor& bound) {
  const Result<HostPort> numeric = LocalAddress(bound);
  if (!numeric.ok()) return numeric.status();
  return listeners_.Listen(bound, *numeric, options_.tcp_only);
}

void Server::StopListening() {
  if (!listeners_.listening()) return;
  RESILIENT_LOG_RECORD(kInfo, "stop_listening", {{"address", FormatHostPort(address_)}},
                       StrCat("stopped listening on ", FormatHostPort(address_),
                              ": the process that hosts this store has left"));
  listeners_.Close();
}

void Server::ListenAgain() {
  if (listeners_.listening() || shutting_down_) return;
  const std::string address = FormatHostPort(address_);
  Result<FileDescriptor> bound = ListenTcp(address_, Listeners::kBacklog);
  Status status = bound.status();
  if (status.ok()) status = Listen(*bound);
  if (status.ok()) {
    RESILIENT_LOG_RECORD(kInfo, "listen", {{"address", address}},
                         StrCat("listens on ", address, " again: ranks of its world are lost, and ",
                                "others may take their seats"));
    return;
  }
  RESILIENT_LOG_RECORD(kWarn, "listen", {{"address", address}},
                       StrCat("cannot listen on ", address, " again, so nobody can take the lost ",
                              "seats of its world: ", status.message(), "; start the job again, ",
                              "or give it a store of its own (RESILIENT_STORE)"));
}

// ---- Connections ----

void Server::OnConnectionWaiting() {
  // Many ranks start at once: who cannot be taken yet waits in the kernel's queue, unharmed.
  if (newcomers_.Full()) return;
  Accept();
  Settle();
}

void Server::TakeWaiting() {
  if (!listeners_.waiting()) return;
  if (newcomers_.Full()) {
    const Instant now = clock_.Now();
    const auto goes = newcomers_.WhoGoes(now, [this](ConnectionId id) {
      const Connection& connection = *connections_.at(id);
      return connection.has_spoken() || MustWait(connection);
    });
    if (!goes) return;
    EndSilent(*connections_.at(*goes), now);
  }
  while (listeners_.waiting() && !newcomers_.Full()) Accept();
}

void Server::Accept() {
  const Instant now = clock_.Now();
  auto connection =
      std::make_unique<Connection>(next_connection_, loop_, static_cast<Connection::Owner&>(*this),
                                   now, encryption_.NewStream());
  const Arrival arrival = listeners_.AcceptInto(*connection);
  if (arrival == Arrival::kNone) return;
  if (connections_.size() + processes_.size() >= connections_max_ + kAdminReserve) {
    metrics_.Refused(Refusal::kConnections);
    if (MayComplain("connections")) {
      RESILIENT_LOG_RECORD(
          kWarn,
          connection->Record(
              "refused", StrCat("refused a connection from ", connection->name(), ": ",
                                connections_.size(), " are open, the limit is ", connections_max_,
                                " (for more raise --limit connections and the limit of open "
                                "files, ulimit -n)")));
    }
    return;
  }
  ++metrics_.accepted;
  if (arrival == Arrival::kLocal) ++metrics_.accepted_local;
  const ConnectionId id = next_connection_++;
  Connection& added = *connections_.emplace(id, std::move(connection)).first->second;
  newcomers_.Add(id, added.name(), now);
  access_.Begin(id, added.descriptor());
  if (ServesTcpStore(added)) added.RecogniseTcpStore();
  Touch(added);
  added.UpdateReading();
  core_->OnConnect(id, now);
}

void Server::Handle(Connection& connection, Frame frame, Instant now) {
  if (encryption_.on() && !connection.encrypted()) return RefusePlain(connection);
  if (access_.Admitted(connection.id())) return HandleRequest(connection, frame, now);
  const ServerHandshake::Step step =
      access_.OnFrame(connection.id(), connection.name(), std::move(frame));
  if (step.send) {
    connection.Send(*step.send);
    Touch(connection);
  }
  if (!step.refused.ok()) {
    metrics_.Refused(Refusal::kAccess);
    return AnswerAndEnd(connection, 0, step.refused);  // Access has logged it.
  }
  if (step.hello) HandleRequest(connection, *step.hello, now);
}

void Server::HandleRequest(Connection& connection, const Frame& frame, Instant begun) {
  Result<Request> request = DecodeRequest(frame);
  if (!request.ok()) return HandleBadRequest(connection, frame, request.status());
  if (const std::string* job = access_.ConfinedTo(connection.id())) {
    if (std::holds_alternative<DrainOp>(request->op)) {
      const Status confined(StatusCode::kAuth, StrCat("the token of job ", *job,
                                                      " does not open the store as a whole;",
                                                      " draining it needs a token of every job"));
      return SendTo({connection.id(), Failure(frame.seq, confined)});
    }
    if (StatusOp* status = std::get_if<StatusOp>(&request->op)) status->job = *job;
  }
  std::optional<Hello> hello;
  if (const Hello* said = std::get_if<Hello>(&request->op)) hello = *said;
  if (hello && hello->role != Role::kAdmin && IsFull()) {
    metrics_.Refused(Refusal::kConnections);
    return Refuse(connection, frame.seq, Full());
  }
  Effects effects;
  core_->OnRequest(connection.id(), std::move(*request), begun, effects);
  if (hello) NoteWelcome(connection, *hello, effects);
  const bool answered =
      std::any_of(effects.send.begin(), effects.send.end(), [&](const Effects::Outgoing& out) {
        const Reply* reply = std::get_if<Reply>(&out.message);
        return out.connection == connection.id() && reply != nullptr && reply->seq == frame.seq;
      });
  Apply(std::move(effects), answered ? std::optional(begun) : std::nullopt);
}

void Server::HandleBadRequest(Connection& connection, const Frame& frame, const Status& why) {
  // A newer client asks for something this build does not have: it can live with the answer.
  if (why.code() == StatusCode::kUnimplemented) {
    return SendTo({connection.id(), Failure(frame.seq, why)});
  }
  metrics_.Refused(Refusal::kRequest);
  Refuse(connection, frame.seq, why);
}

bool Server::IsFull() const { return connections_.size() + processes_.size() > connections_max_; }

Status Server::Full() const {
  return Status(StatusCode::kResourceExhausted,
                StrCat("the store has ", connections_max_,
                       " connections, the most it takes; try again later, or raise its "
                       "limits (--limit connections, ulimit -n)"));
}

void Server::Refuse(Connection& connection, std::uint64_t seq, const Status& why) {
  if (MayComplain(CodeName(why.code()))) {
    RESILIENT_LOG_RECORD(
        kWarn, connection.Record("refused", StrCat("closed the connection of ", connection.name(),
                                                   ": ", why.message())));
  }
  AnswerAndEnd(connection, seq, why);
}

void Server::AnswerAndEnd(Connection& connection, std::uint64_t seq, const Status& why) {
  connection.Send(ServerMessage(Failure(seq, why)));
  Touch(connection);
  EndGently(connection);
}

// In plain words, as the peer would understand no others.
void Server::RefusePlain(Connection& connection) {
  metrics_.Refused(Refusal::kAccess);
  access_.NoteRefusal(connection.name(), StatusCode::kAuth, "it does not speak TLS");
  AnswerAndEnd(connection, 0,
               Status(StatusCode::kAuth,
                      "this store speaks TLS only; set RESILIENT_TLS_CA (or --tls-ca) to the file "
                      "with the certificate of its CA"));
}

// The alert that says why has to reach the peer before the connection ends.
void Server::EndTls(Connection& connection, const Status& why) {
  metrics_.Refused(why.code() == StatusCode::kAuth ? Refusal::kAccess : Refusal::kProtocol);
  access_.NoteRefusal(connection.name(), why.code(), why.message());
  EndGently(connection);
}

void Server::EndGently(Connection& connection) {
  NoteLastRequest(connection);
  newcomers_.Remove(connection.id());
  ending_.insert(connection.id());
  disconnected_.push_back(connection.id());
  connection.BeginEnd(clock_.Now());
}

void Server::NoteWelcome(Connection& connection, const Hello& hello, const Effects& effects) {
  const bool welcome =
      std::any_of(effects.send.begin(), effects.send.end(), [&](const Effects::Outgoing& out) {
        const Reply* reply = std::get_if<Reply>(&out.message);
        return out.connection == connection.id() && reply != nullptr && reply->status.ok() &&
               reply->welcome;
      });
  if (!welcome || connection.greeted()) return;
  connection.SetHello(hello);
  newcomers_.Remove(connection.id());
  if (hello.role != Role::kAdmin) ++clients_;
}

void Server::OnEnd(Connection& connection, const Status& why) {
  const ScopedObservation step(clock_, metrics_.step_seconds);
  if (connection.tcpstore() != nullptr && !why.ok() && why.code() != StatusCode::kUnreachable) {
    EndTcpStore(connection, why);
    return Settle();
  }
  const bool refused = why.code() == StatusCode::kAuth || why.code() == StatusCode::kProtocol;
  if (refused && connection.encrypted() && !connection.greeted()) {
    EndTls(connection, why);
    return Settle();
  }
  if (why.code() == StatusCode::kProtocol) {
    metrics_.Refused(Refusal::kProtocol);
    // The text names what speaks there; ports and lengths in it do not make another kind.
    if (MayComplain(why.message().substr(0, why.message().find_first_of("0123456789\"'(")))) {
      RESILIENT_LOG_RECORD(
          kWarn, connection.Record("refused", StrCat("closed the connection from ",
                                                     connection.name(), ": ", why.message())));
    }
  } else if (!why.ok()) {
    RESILIENT_LOG_RECORD(
        kDebug, connection.Record("disconnected", StrCat("lost the connection of ",
                                                         connection.name(), ": ", why.message())));
  }
  Drop(connection);
  Settle();
}

void Server::Drop(Connection& connection) {
  const ConnectionId id = connection.id();
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  if (connection.greeted() && connection.role() != Role::kAdmin) --clients_;
  if (!connection.ending()) {
    NoteLastRequest(connection);
    disconnected_.push_back(id);
  }
  connection.Close();
  access_.Forget(id);
  newcomers_.Remove(id);
  ending_.erase(id);
  deferred_.erase(id);
  turns_.Forget(id);
  control_turns_.Forget(id);
  handshakes_.Forget(id);
  stalled_.erase(id);
  output_.Forget(id);
  input_.Note(id, 0);
  graveyard_.push_back(std::move(found->second));
  connections_.erase(found);
}

Connection* Server::Find(ConnectionId id) {
  const auto found = connections_.find(id);
  return found == connections_.end() ? nullptr : found->second.get();
}

// ---- Time ----

void Server::OnTickDue() {
  if (!tick_due_in_turn_) tick_due_in_turn_ = turn_;
  UpdateIdle();
}

void Server::OnProcessExit(std::uint64_t watch) {
  // Its last words (a leave) may wait unread in its socket: they come first.
  exits_.push_back({watch, turn_});
  UpdateIdle();
}

// After every poll for events. libuv runs timers before the poll, so a timer alone must not judge.
void Server::OnTurn() {
  const ScopedObservation step(clock_, metrics_.step_seconds);
  graveyard_.clear();
  ++turn_;
  TakeDeferred();
  TakeWaiting();
  for (PendingExit& exit : exits_) {
    if (HasUnread(exit.watch)) exit.seen_in_turn = turn_;  // There may be more than was read.
  }
  std::vector<PendingExit> ripe;
  std::erase_if(exits_, [&](const PendingExit& exit) {
    if (turn_ < exit.seen_in_turn + kDrainTurns) return false;
    ripe.push_back(exit);
    return true;
  });
  for (const PendingExit& exit : ripe) {
    Effects effects;
    core_->OnProcessExit(exit.watch, clock_.Now(), effects);
    Apply(std::move(effects));
  }
  if (tick_due_in_turn_ && turn_ >= *tick_due_in_turn_ + kDrainTurns) {
    tick_due_in_turn_.reset();
    Tick();
  }
  FlushForAWhile();
  UpdateIdle();
  Settle();
}

void Server::Tick() {
  const Instant now = clock_.Now();
  if (!shutting_down_) {
    Effects effects;
    // Nobody is silent whom we do not read.
    for (const ConnectionId id : control_turns_.Waiting()) core_->OnUnread(id, now);
    const bool drained = std::none_of(stalled_.begin(), stalled_.end(), [this](ConnectionId id) {
      return connections_.at(id)->role() == Role::kControl;
    });
    core_->OnTick(now, drained, effects);
    Apply(std::move(effects));
  }
  if (options_.notifier != nullptr) options_.notifier->Alive(now);
  EndOverdue(now);
  CutStuck(now);
  if (!shutting_down_) CheckLinger(now);
  if (shutting_down_ && !held_.empty() && now - shutdown_since_ >= kFlushLimit) {
    options_.on_storage_failure(Status(
        StatusCode::kInternal,
        StrCat("the disk did not take what was to be kept within ", ToSeconds(kFlushLimit), " s")));
  }
  last_tick_ = now;
}

void Server::EndSilent(Connection& connection, Instant now) {
  metrics_.Refused(Refusal::kSilent);
  if (MayComplain("silent")) {
    RESILIENT_LOG_RECORD(
        kWarn, connection.Record("refused", StrCat("closed the connection from ", connection.name(),
                                                   ": it did not say Hello in ",
                                                   ToSeconds(now - connection.accepted()), " s")));
  }
  Drop(connection);
}

void Server::EndOverdue(Instant now) {
  for (const ConnectionId id : newcomers_.Overdue(now)) {
    Connection& connection = *connections_.at(id);
    if (!MustWait(connection)) EndSilent(connection, now);  // Else it may have said it.
  }
  for (const ConnectionId id : std::set<ConnectionId>(ending_)) {
    Connection* connection = Find(id);
    if (connection == nullptr) continue;
    if (connection->closed() || now - connection->ending_since() >= kEndingLimit) {
      Drop(*connection);
    }
  }
}

// Clients of torch's TCPStore do not come back: theirs ends with the last of them.
void Server::EndAfterTheLast() {
  if (core_->LiveMembers() > 0) all_left_ = false;
  if (all_left_ && tcpstore_clients_ == 0) Shutdown("the last member has left");
}

void Server::CheckLinger(Instant now) {
  if (options_.linger == Duration::zero()) return;
  EndAfterTheLast();
  // A pause of this process is nobody's absence.
  if (now - last_tick_ > kPauseGap) last_used_ = now;
  if (clients_ > 0 || core_->LiveMembers() > 0) last_used_ = now;
  had_members_ = had_members_ || core_->LiveMembers() > 0;
  const Duration patience =
      had_members_ ? options_.linger : std::min(options_.linger, options_.arrival);
  if (now - last_used_ < patience) return;
  Shutdown(StrCat("nobody was here for ", ToSeconds(patience), " s"));
}

void Server::Shutdown(std::string_view why) {
  if (shutting_down_) return;
  shutting_down_ = true;
  RESILIENT_LOG_RECORD(kInfo, "stop", {}, StrCat("ends: ", why));
  if (options_.notifier != nullptr) options_.notifier->Stopping(StrCat("ends: ", why));
  listeners_.Close();
  processes_.Clear();
  exits_.clear();
  newcomers_.Clear();
  deferred_.clear();
  turns_.Clear();
  control_turns_.Clear();
  handshakes_.Clear();
  stalled_.clear();
  shutdown_since_ = clock_.Now();
  // Otherwise when the disk has what the clients wait to be told.
  if (held_.empty()) EndConnections();
}

void Server::EndConnections() {
  if (std::exchange(ending_connections_, true)) return;
  const Instant now = clock_.Now();
  for (auto& [id, connection] : connections_) {
    connection->BeginEnd(now);
    ending_.insert(id);
  }
  // Those that were closed already, or close at once, go in the next turn.
  tick_due_in_turn_ = turn_;
  UpdateIdle();
}

void Server::Finish() {
  if (persister_ != nullptr) persister_->Stop();
  access_.Close();
  encryption_.Close();
  http_.reset();
  tick_timer_.Close();
  turn_check_.Close();
  idle_.Close();
  sigterm_.Close();
  sigint_.Close();
}

bool Server::MayComplain(std::string_view kind) {
  const auto [limit, added] = complaints_.try_emplace(std::string(kind), kComplaintInterval);
  return limit->second.May(clock_.Now()).has_value();
}

}  // namespace resilient::store
