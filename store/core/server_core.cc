#include "store/core/server_core.h"

#include <algorithm>
#include <utility>

#include <resilient/ladder.h>

#include "runtime/base/check.h"
#include "runtime/base/json.h"
#include "runtime/net/frame.h"
#include "store/core/server_impl.h"
#include "store/core/text_limits.h"

namespace resilient::store {
namespace {

// Whether a repeat must not take effect again. Reads are simply done again.
bool IsMutation(const Op& op) {
  return IsKeyMutation(op) || std::holds_alternative<JoinOp>(op) ||
         std::holds_alternative<ReadyOp>(op) || std::holds_alternative<LeaveOp>(op) ||
         std::holds_alternative<ReportOp>(op) || std::holds_alternative<ExitReportOp>(op);
}

bool IsMembershipOp(const Op& op) {
  return std::holds_alternative<HeartbeatOp>(op) || std::holds_alternative<JoinOp>(op) ||
         std::holds_alternative<ReadyOp>(op) || std::holds_alternative<LeaveOp>(op) ||
         std::holds_alternative<ReportOp>(op) || std::holds_alternative<WaitingOp>(op) ||
         std::holds_alternative<WhereaboutsOp>(op);
}

std::string Describe(const Session& session) {
  const ProcessIdentity& process = session.hello.process;
  return "pid " + std::to_string(process.pid) + " on host " + process.host;
}

bool Watchable(const ProcessIdentity& process) {
  return process.pid > 0 && process.start_time > 0 && !process.boot_id.empty();
}

}  // namespace

// ---- Connections ----

Status ServerCore::Impl::CheckHello(const Hello& hello) const {
  if (!hello.expected_server.empty() && hello.expected_server != server_id_) {
    return Status(StatusCode::kJob,
                  "this address is served by store " + server_id_ + ", not by " +
                      hello.expected_server +
                      " which the job was told about: another job has taken the port, or the "
                      "address is of an earlier run");
  }
  if (hello.role == Role::kAdmin) return {};
  if (hello.job.empty()) return Status(StatusCode::kJob, "Hello names no job");
  if (hello.session.empty()) return Status(StatusCode::kProtocol, "Hello names no session");
  return FindJob(hello.job) != nullptr ? Status() : CheckRoomForJob();
}

void ServerCore::Impl::OnHello(ConnectionId connection, const Request& request, const Hello& hello,
                               Moment moment, Effects& effects) {
  if (Status why = CheckHello(hello); !why.ok()) {
    return Reject(connection, request, std::move(why), moment, effects);
  }
  MakeRoomForSession(hello, effects);
  const Result<SessionTable::Opened> opened = sessions_.Open(connection, hello);
  if (!opened) return Reject(connection, request, opened.status(), moment, effects);
  Counts(request).Add(StatusCode::kOk);
  ++(opened->known ? counters_.sessions_resumed : counters_.sessions_opened);
  const auto ttl = std::chrono::duration_cast<Millis>(leases_.ttl());
  Welcome welcome;
  welcome.server = server_id_;
  welcome.version = kProtocolVersionMax;
  welcome.lease_ttl_ms = static_cast<std::uint64_t>(ttl.count());
  welcome.heartbeat_interval_ms = static_cast<std::uint64_t>(ttl.count()) / kHeartbeatsPerLease;
  welcome.key_bytes_max = kKeyBytesMax;
  welcome.value_bytes_max = kValueBytesMax;
  welcome.keys_per_request_max = kKeysPerRequestMax;
  welcome.requests_in_flight_max = kInFlightPerSessionMax;
  welcome.frame_body_bytes_max = kMaxFrameBody;
  welcome.session_known = opened->known;
  welcome.began_unix_ms = began_unix_ms_;
  Reply reply;
  reply.seq = request.seq;
  reply.welcome = std::make_shared<const Welcome>(std::move(welcome));
  effects.send.push_back({connection, std::move(reply)});
  if (opened->replaced != 0) effects.close.push_back(opened->replaced);
  if (hello.role == Role::kAdmin) return;
  Job& job = *AddJob(hello.job);
  if (hello.role == Role::kRequest) return job.keys.DropWaits(opened->session);
  leases_.Renew(opened->session, moment.now);
  LeaseKey(job, *sessions_.Find(opened->session), moment, effects);
  MembershipEffects members;
  job.membership.OnControlOpen(opened->session, moment, members);
  Apply(job, members, moment, effects);
}

void ServerCore::Impl::Reject(ConnectionId connection, const Request& request, Status why,
                              Moment moment, Effects& effects) {
  Counts(request).Add(why.code());
  Reply reply;
  reply.seq = request.seq;
  reply.status = std::move(why);
  effects.send.push_back({connection, std::move(reply)});
  effects.close.push_back(connection);
  OnDisconnect(connection, moment, effects);
}

void ServerCore::Impl::OnDisconnect(ConnectionId connection, Moment moment, Effects& effects) {
  const SessionTable::Bound bound = sessions_.Of(connection);
  Job* job = bound.session ? FindJob(bound.session->hello.job) : nullptr;
  const SessionTable::Closed closed = sessions_.Disconnect(connection, moment.now);
  if (!job) return;
  if (closed.role == Role::kControl) return job->membership.OnControlClosed(closed.session, moment);
  // Repeated requests register the waits again.
  job->keys.DropWaits(closed.session);
  const Session* session = sessions_.Find(closed.session);
  if (session != nullptr && session->Over()) ForgetSession(closed.session, effects);
}

void ServerCore::Impl::OnProcessExit(std::uint64_t watch, Moment moment, Effects& effects) {
  const Session* session = sessions_.Find(watch);
  Job* job = session ? FindJob(session->hello.job) : nullptr;
  if (!job) return;
  EndLeasedKey(*job, watch, "has ended", moment, effects);
  MembershipEffects members;
  job->membership.OnProcessExit(watch, moment, members);
  Apply(*job, members, moment, effects);
}

// ---- Requests ----

void ServerCore::Impl::OnRequest(ConnectionId connection, Request& request, Moment moment,
                                 Effects& effects) {
  if (!sessions_.Knows(connection)) return;  // Closed by us; what was under way is void.
  CutTexts(request.op);
  const SessionTable::Bound bound = sessions_.Of(connection);
  const Hello* hello = std::get_if<Hello>(&request.op);
  if (hello && !bound.session) return OnHello(connection, request, *hello, moment, effects);
  if (hello || !bound.session) {
    return Reject(
        connection, request,
        Status(StatusCode::kProtocol, hello ? "Hello was sent twice on one connection"
                                            : "the first message on a connection must be Hello"),
        moment, effects);
  }
  Exchange exchange{*bound.session, bound.role, request, moment};
  exchange.key.reply.seq = request.seq;
  exchange.job = FindJob(bound.session->hello.job);
  // That an accused rank lives says less than what it reports.
  const bool reports = std::holds_alternative<ReportOp>(request.op);
  if (bound.role == Role::kControl) {
    leases_.Renew(bound.session->id, moment.now);
    if (!reports) NoteSignOfLife(exchange, effects);
  }
  if (!IsFirst(exchange, effects)) return;
  exchange.key.reply.status = Execute(exchange, effects);
  if (reports && bound.role == Role::kControl) NoteSignOfLife(exchange, effects);
  if (exchange.key.waits && exchange.key.reply.status.ok()) {
    Counts(request).Add(Outcomes::kWaits);
  } else {
    Counts(request).Add(exchange.key.reply.status.code());
  }
  Answer(exchange, effects);
  AnswerWaits(exchange.key.ended, effects);
  if (exchange.job) Apply(*exchange.job, exchange.members, moment, effects);
}

bool ServerCore::Impl::IsFirst(Exchange& exchange, Effects& effects) {
  const Request& request = exchange.request;
  if (exchange.role == Role::kAdmin) return true;  // Without memory.
  ResultLog& results = exchange.session.line(exchange.role).results;
  // Number 0 is of the connection: nothing is kept for it, and it is never sent again.
  results.Acknowledge(request.seq == 0 ? request.first_unacked
                                       : std::min(request.first_unacked, request.seq));
  if (request.seq == 0) return true;
  const ConnectionId connection = exchange.session.line(exchange.role).connection;
  if (const Reply* first = results.Find(request.seq)) {
    Counts(request).Add(Outcomes::kRepeated);
    effects.send.push_back({connection, *first});
    return false;
  }
  // What was read is simply read again.
  if (!results.Forgotten(request.seq) || !IsMutation(request.op)) return true;
  exchange.key.reply.status = NoLongerKept(request.seq);
  Counts(request).Add(exchange.key.reply.status.code());
  effects.send.push_back({connection, exchange.key.reply});
  return false;
}

void ServerCore::Impl::Answer(Exchange& exchange, Effects& effects) {
  if (exchange.silent) return;
  Line& line = exchange.session.line(exchange.role);
  const bool mutation = exchange.role != Role::kAdmin && IsMutation(exchange.request.op);
  if (exchange.key.waits && exchange.key.reply.status.ok()) {
    if (mutation) line.results.Open(exchange.request.seq);
    return;
  }
  const bool keep = mutation || (exchange.role != Role::kAdmin && !exchange.key.reply.status.ok());
  if (keep) sessions_.Remember(exchange.session, exchange.role, exchange.key.reply);
  effects.send.push_back({line.connection, std::move(exchange.key.reply)});
}

void ServerCore::Impl::NoteSignOfLife(Exchange& exchange, Effects& effects) {
  MembershipEffects members;
  exchange.job->membership.OnControlFrame(exchange.session.id, exchange.moment, members);
  Apply(*exchange.job, members, exchange.moment, effects);
}

Status ServerCore::Impl::Execute(Exchange& exchange, Effects& effects) {
  const Request& request = exchange.request;
  const SessionId session = exchange.session.id;
  const Moment moment = exchange.moment;
  const bool control = exchange.role == Role::kControl;
  const bool leaves = std::holds_alternative<LeaveOp>(request.op);
  if (leaves && exchange.role == Role::kRequest && request.seq == 0) {  // A goodbye.
    exchange.silent = true;
    exchange.session.said_goodbye = true;
    return {};
  }
  if (control ? IsKeyOp(request.op) : IsMembershipOp(request.op)) {
    return Status(StatusCode::kInvalidArgument,
                  control ? "key operations go over the request connection"
                          : "membership operations go over the control connection");
  }
  if (const auto* op = std::get_if<CancelOp>(&request.op)) {
    exchange.silent = true;
    // Its numbers are others than those of the request connection, whose waits these would be.
    if (control) return Status(StatusCode::kInvalidArgument, "nothing waits on this connection");
    Cancel(exchange, op->seq, effects);
    return {};
  }
  if (const auto* op = std::get_if<StatusOp>(&request.op)) {
    exchange.key.reply.status_json = StatusJson(moment, *op);
    return {};
  }
  if (const auto* op = std::get_if<ExitReportOp>(&request.op)) {
    return ExitReport(exchange, *op, effects);
  }
  if (IsAdminOp(request.op)) return Administer(exchange, effects);
  if (!exchange.job) {
    const Result<Job*> made = MakeJob(exchange.session.hello.job);
    if (!made) return made.status();
    exchange.job = *made;
  }
  Job& job = *exchange.job;
  if (IsKeyOp(request.op)) {
    if (exchange.role != Role::kAdmin) {
      RESILIENT_RETURN_IF_ERROR(
          job.membership.CheckAccess(session, request.scope, request.generation));
    }
    Status done = ExecuteKeyOp(job.keys, session, exchange.request, exchange.key);
    if (request.generation != 0 && job.keys.AwaitsMembers(request.scope)) {
      job.membership.NeedAll(request.scope, moment, exchange.members);
    }
    const auto* met = std::get_if<ExchangeOp>(&request.op);
    if (met && met->survivors_of != 0) FinishSurvived(job, exchange.key.ended);
    const Session* rival = exchange.key.rival == 0 ? nullptr : sessions_.Find(exchange.key.rival);
    if (!rival) return done;
    return Status(done.code(), done.message() + " (" + Describe(*rival) + " waits, " +
                                   Describe(exchange.session) + " came)");
  }
  return ExecuteMembershipOp(exchange, job, effects);
}

Status ServerCore::Impl::ExecuteMembershipOp(Exchange& exchange, Job& job, Effects& effects) {
  const Request& request = exchange.request;
  const SessionId session = exchange.session.id;
  const Moment moment = exchange.moment;
  Membership& membership = job.membership;
  if (const auto* op = std::get_if<HeartbeatOp>(&request.op)) {
    exchange.silent = true;
    const Status standing = membership.Standing(session);
    Event event = HeartbeatAckEvent{op->beat};
    if (!standing.ok()) event = SessionLostEvent{standing};
    effects.send.push_back({exchange.session.control.connection, std::move(event)});
    return {};
  }
  if (const auto* op = std::get_if<WaitingOp>(&request.op)) {
    exchange.silent = true;
    membership.Waiting(session, op->report, moment, exchange.members);
    return {};
  }
  if (const auto* op = std::get_if<WhereaboutsOp>(&request.op)) {
    exchange.silent = true;
    membership.OnWhereabouts(session, *op, moment);
    return {};
  }
  if (const auto* op = std::get_if<JoinOp>(&request.op)) {
    return membership.Join(session, exchange.session.hello, op->request, moment, exchange.members);
  }
  if (const auto* op = std::get_if<ReadyOp>(&request.op)) {
    if (op->acknowledged) {
      return membership.Acknowledge(session, op->generation, exchange.members);
    }
    return membership.Ready(session, op->generation, moment, exchange.members);
  }
  if (const auto* op = std::get_if<ReportOp>(&request.op)) {
    return membership.Report(session, op->report, moment, exchange.members);
  }
  RESILIENT_CHECK(std::holds_alternative<LeaveOp>(request.op));
  return Leave(exchange, job, effects);
}

// The answer goes out under the number of the request that is given up, and stays: should that
// request still be under way, it takes no effect any more.
void ServerCore::Impl::Cancel(Exchange& exchange, std::uint64_t seq, Effects& effects) {
  Session& session = exchange.session;
  Line& line = session.line(exchange.role);
  Job* job = FindJob(session.hello.job);
  const std::optional<std::string> late =
      job ? job->keys.CancelWait({session.id, seq}) : std::nullopt;
  if (const Reply* known = line.results.Find(seq)) {
    effects.send.push_back({line.connection, *known});
    return;
  }
  // Acknowledged or given up: nobody waits for the answer.
  if (!late && line.results.Forgotten(seq)) return;
  Reply reply;
  reply.seq = seq;
  reply.status = Status(StatusCode::kCancelled, late && !late->empty()
                                                    ? *late
                                                    : "request " + std::to_string(seq) +
                                                          " was given up before it took effect");
  if (exchange.role != Role::kAdmin) sessions_.Remember(session, exchange.role, reply);
  effects.send.push_back({line.connection, std::move(reply)});
}

Status ServerCore::Impl::Leave(Exchange& exchange, Job& job, Effects& effects) {
  const SessionId session = exchange.session.id;
  const bool had_lease = leases_.Has(session);
  EndLeasedKey(job, session, "has ended", exchange.moment, effects);
  Status left = job.membership.Leave(session, exchange.moment, exchange.members);
  const std::size_t others = leases_.size() - (leases_.Has(session) ? 1 : 0);
  if (!had_lease || others > 0) return left;
  effects.last_member_left = std::all_of(jobs_.begin(), jobs_.end(), [](const auto& entry) {
    return entry.second.membership.EndedWell();
  });
  return left;
}

Status ServerCore::Impl::ExitReport(Exchange& exchange, const ExitReportOp& report,
                                    Effects& effects) {
  const std::string& name = exchange.session.hello.job;
  for (auto& [job_name, job] : jobs_) {
    if (!name.empty() && name != job_name) continue;
    EndLeasedKeysOf(job, report, exchange.moment, effects);
    MembershipEffects members;
    job.membership.OnExitReport(report, exchange.moment, members);
    Apply(job, members, exchange.moment, effects);
  }
  return {};
}

// ---- Consequences ----

void ServerCore::Impl::FinishSurvived(Job& job, std::vector<EndedWait>& ended) {
  job.keys.FinishSurvived(
      [&job](std::uint64_t round, const Gathering& gathering) {
        return job.membership.HaveSurvivorsCome(round, gathering);
      },
      ended);
}

void ServerCore::Impl::Apply(Job& job, MembershipEffects& members, Moment moment,
                             Effects& effects) {
  for (const std::uint64_t round : std::exchange(members.left, {})) {
    if (job.keys.AwaitsMembers(round)) job.membership.NeedAll(round, moment, members);
  }
  for (const StatusCode cause : members.fenced) counters_.fences.Add(cause);
  std::vector<EndedWait> ended;
  for (const auto& lost : members.lost) job.keys.EndScopedWaits(lost.session, lost.why, ended);
  for (const auto& scope : members.ended) {
    // The survivors of a generation may be deciding what to do about its end.
    job.keys.EndWaits(scope.round, scope.why, /*of_survivors=*/scope.drop_keys, ended);
    if (scope.drop_keys) job.keys.DropKeys(scope.round);
  }
  if (members.new_life) {
    job.keys.DropAllKeys(Status(StatusCode::kStaleGeneration, "a new life of the job has begun"),
                         ended);
    SetLeasedKeys(job, ended);
  }
  if (!members.lost.empty() || members.gone_on) FinishSurvived(job, ended);
  job.keys.AnswerWatches(ended);
  AnswerWaits(ended, effects);
  for (const SessionId session : members.released) {
    EndLeasedKey(job, session, "is out", moment, effects);
    leases_.Remove(session);
    const Session* known = sessions_.Find(session);
    if (known && Watchable(known->hello.process)) effects.unwatch.push_back(session);
  }
  for (const SessionId session : members.granted) {
    // Lost again within the same step: there is nothing to hold.
    if (std::count(members.released.begin(), members.released.end(), session) != 0) continue;
    leases_.Grant(session, moment.now);
    const Session* known = sessions_.Find(session);
    if (known && Watchable(known->hello.process)) {
      effects.watch.push_back({session, known->hello.process});
    }
  }
  for (const SessionId session : members.held) leases_.Hold(session);
  for (const SessionId session : members.unheld) leases_.Resume(session, moment.now);
  for (MembershipEffects::Push& push : members.push) {
    const Session* session = sessions_.Find(push.session);
    if (!session || session->control.connection == 0) continue;
    effects.send.push_back({session->control.connection, std::move(push.event)});
  }
  job.membership.Keep();
  if (members.listens) effects.listens = members.listens;
  std::move(members.log.begin(), members.log.end(), std::back_inserter(effects.log));
}

void ServerCore::Impl::AnswerWaits(std::vector<EndedWait>& ended, Effects& effects) {
  effects.send.reserve(effects.send.size() + ended.size());
  for (EndedWait& end : ended) {
    counters_.waits_ended.Add(end.status.code());
    Session* session = sessions_.Find(end.wait.session);
    if (!session) continue;
    Reply reply;
    reply.seq = end.wait.seq;
    reply.status = std::move(end.status);
    reply.value = std::move(end.value);
    reply.values = std::move(end.values);
    reply.shared_values = std::move(end.shared_values);
    reply.events = std::move(end.events);
    reply.revision = end.revision != 0 ? end.revision : journal_.revision();
    reply.number = static_cast<std::int64_t>(end.oldest);
    if ((end.mutation || !reply.status.ok()) && session->hello.role != Role::kAdmin) {
      sessions_.Remember(*session, Role::kRequest, reply);
    }
    effects.send.push_back({session->request.connection, std::move(reply)});
  }
}

void ServerCore::Impl::OnUnread(ConnectionId connection, Instant now) {
  const SessionTable::Bound bound = sessions_.Of(connection);
  if (!bound.session || bound.role != Role::kControl) return;
  leases_.Renew(bound.session->id, At(now).now);
  if (Job* job = FindJob(bound.session->hello.job)) job->has_unread = true;
}

std::optional<ConnectionId> ServerCore::Impl::ControlConnection(std::uint64_t watch) {
  Session* session = sessions_.Find(watch);
  if (session == nullptr) return std::nullopt;
  const ConnectionId connection = session->line(Role::kControl).connection;
  return connection != 0 ? std::optional(connection) : std::nullopt;
}

void ServerCore::Impl::OnTick(Instant now, bool input_drained, Effects& effects) {
  const Moment moment{clock_.Tick(now), Wall(now)};
  for (const LeaseTable::Expired& expired : leases_.Tick(moment.now, input_drained)) {
    Session* session = sessions_.Find(expired.session);
    Job* job = session ? FindJob(session->hello.job) : nullptr;
    if (!job) continue;
    ++counters_.leases_expired;
    ExpireLeasedKey(*job, expired, moment, effects);
    MembershipEffects members;
    job->membership.OnLeaseExpired(expired.session, expired.silent, leases_.ttl(), moment, members);
    Apply(*job, members, moment, effects);
  }
  for (auto& [name, job] : jobs_) {
    MembershipEffects members;
    const bool drained = !std::exchange(job.has_unread, false) && input_drained;
    job.membership.OnTick(moment, drained, members);
    Apply(job, members, moment, effects);
  }
  LookForCrossedJobs(moment, effects);
  ForgetIdle(moment.now, effects);
}

std::string ServerCore::Impl::StatusJson(Moment moment, const StatusOp& asked) const {
  StatusPage page(asked);
  std::string out = "{\"server\":" + JsonString(server_id_) +
                    ",\"epoch\":" + std::to_string(epoch_) +
                    ",\"lease_ttl_s\":" + Seconds(leases_.ttl()) +
                    ",\"live_members\":" + std::to_string(leases_.size()) +
                    ",\"connections\":" + std::to_string(sessions_.connections()) +
                    ",\"sessions\":" + std::to_string(sessions_.sessions()) +
                    ",\"revision\":" + std::to_string(journal_.revision()) + ",\"jobs\":[";
  const char* comma = "";
  for (auto at = jobs_.lower_bound(std::max(page.first_job(), page.only_job())); at != jobs_.end();
       ++at) {
    const auto& [name, job] = *at;
    if (!page.only_job().empty() && name != page.only_job()) break;
    if (!page.Take(StatusPage::kTold, name, page.first_round(name), 0)) break;
    out += std::exchange(comma, ",");
    out += "{\"job\":" + JsonString(name) + ",";
    job.membership.AppendJson(out, moment, page);
    out += ",\"keys\":" + std::to_string(job.keys.keys()) +
           ",\"bytes\":" + std::to_string(job.keys.bytes()) +
           ",\"waits\":" + std::to_string(job.keys.waits()) + "}";
  }
  out += ']';
  page.AppendNext(out);
  return out + "}";
}

CoreGauges ServerCore::Impl::Gauges() const {
  CoreGauges gauges;
  gauges.epoch = epoch_;
  gauges.connections = sessions_.connections();
  gauges.sessions = sessions_.sessions();
  gauges.jobs = jobs_.size();
  gauges.result_bytes = sessions_.result_bytes();
  gauges.live_members = leases_.size();
  for (const auto& [name, job] : jobs_) {
    gauges.worlds += job.membership.worlds();
    gauges.seats += job.membership.seats();
    gauges.change_bytes += job.keys.change_bytes();
    gauges.keys += job.keys.keys();
    gauges.bytes += job.keys.bytes();
    gauges.waits += job.keys.waits();
  }
  return gauges;
}

// ---- The facade ----

ServerCore::ServerCore(CoreOptions options, Instant now)
    : impl_(std::make_unique<Impl>(std::move(options), now)) {}
ServerCore::~ServerCore() = default;

void ServerCore::OnConnect(ConnectionId connection, Instant) { impl_->OnConnect(connection); }

void ServerCore::OnRequest(ConnectionId connection, Request request, Instant now,
                           Effects& effects) {
  impl_->OnRequest(connection, request, impl_->At(now), effects);
  impl_->Finish(effects);
}

void ServerCore::OnDisconnect(ConnectionId connection, Instant now, Effects& effects) {
  impl_->OnDisconnect(connection, impl_->At(now), effects);
  impl_->Finish(effects);
}

void ServerCore::OnProcessExit(std::uint64_t watch, Instant now, Effects& effects) {
  impl_->OnProcessExit(watch, impl_->At(now), effects);
  impl_->Finish(effects);
}

void ServerCore::OnUnread(ConnectionId connection, Instant now) {
  impl_->OnUnread(connection, now);
}

std::optional<ConnectionId> ServerCore::ControlConnection(std::uint64_t watch) const {
  return impl_->ControlConnection(watch);
}

void ServerCore::OnTick(Instant now, bool input_drained, Effects& effects) {
  impl_->OnTick(now, input_drained, effects);
  impl_->Finish(effects);
}

Status ServerCore::Restore(std::string_view row, std::string_view value) {
  return impl_->Restore(row, value);
}

Status ServerCore::FinishRestore(Instant now, Effects& effects) {
  Status done = impl_->FinishRestore(now, effects);
  impl_->Finish(effects);
  return done;
}

std::map<std::string, std::string> ServerCore::DumpRows() const { return impl_->DumpRows(); }

const std::string& ServerCore::server_id() const { return impl_->server_id(); }
std::size_t ServerCore::LiveMembers() const { return impl_->leases().size(); }
std::size_t ServerCore::Connections() const { return impl_->sessions().connections(); }
const CoreCounters& ServerCore::counters() const { return impl_->counters(); }
CoreGauges ServerCore::Gauges() const { return impl_->Gauges(); }
std::string ServerCore::StatusJson(Instant now, const StatusOp& asked) const {
  return impl_->StatusJson(impl_->At(now), asked);
}

}  // namespace resilient::store
