#include "store/core/codec.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "runtime/base/check.h"
#include "store.pb.h"
#include "store/core/codec_parts.h"
#include "store/core/key_codec.h"
#include "store/core/shortening.h"

namespace resilient::store {
namespace {

namespace pb = ::resilient::store::v1;

// ---- Plain to protobuf ----

void Put(const Status& status, pb::Failure* out) {
  if (status.ok()) return;
  const FailureDetail& detail = status.detail();
  out->set_code(std::string(CodeName(status.code())));
  out->set_message(Utf8(status.message()));
  out->set_rank(detail.rank);
  out->set_host(Utf8(detail.host));
  out->set_pid(detail.pid);
  out->set_generation(detail.generation);
  out->set_group(Utf8(detail.group));
  out->set_seq(detail.seq);
  out->set_since_unix_s(detail.since_unix_s);
}

void Put(const ProcessIdentity& process, pb::ProcessIdentity* out) {
  out->set_host(Utf8(process.host));
  out->set_boot_id(Utf8(process.boot_id));
  out->set_pid_namespace(Utf8(process.pid_namespace));
  out->set_pid(process.pid);
  out->set_start_time(process.start_time);
}

// One overload per operation that is not coded by hand; std::visit makes a missing one a compile
// error.
struct OpWriter {
  pb::Request* out;

  // AppendKeyRequest has taken it.
  template <CodedByHand KeyOp>
  void operator()(const KeyOp&) const {
    RESILIENT_CHECK(false);
  }
  void operator()(const Hello& hello) const {
    pb::Hello* message = out->mutable_hello();
    message->set_job(Utf8(hello.job));
    message->set_session(Utf8(hello.session));
    message->set_incarnation(Utf8(hello.incarnation));
    message->set_role(static_cast<pb::Role>(hello.role));
    Put(hello.process, message->mutable_process());
    message->set_launcher_attempt(hello.launcher_attempt);
    message->set_supervised(hello.supervised);
    for (const std::string& feature : hello.features) message->add_features(Utf8(feature));
    message->set_expected_server(Utf8(hello.expected_server));
    message->set_hosts_store(hello.hosts_store);
    message->set_leased_key(hello.leased_key);
    message->set_leased_value(hello.leased_value);
  }
  void operator()(const ListKeysOp& op) const {
    out->mutable_list_keys()->set_prefix(op.prefix);
    out->mutable_list_keys()->set_after(op.after);
    out->mutable_list_keys()->set_values(op.values);
  }
  void operator()(const BarrierOp& op) const {
    out->mutable_barrier()->set_key(op.key);
    out->mutable_barrier()->set_size(op.size);
  }
  void operator()(const ExchangeOp& op) const {
    pb::ExchangeRequest* message = out->mutable_exchange();
    message->set_key(op.key);
    message->set_rank(op.rank);
    message->set_size(op.size);
    message->set_value(op.value);
    message->set_survivors_of(op.survivors_of);
  }
  void operator()(const CancelOp& op) const { out->mutable_cancel()->set_seq(op.seq); }
  void operator()(const HeartbeatOp& op) const { out->mutable_heartbeat()->set_beat(op.beat); }
  void operator()(const JoinOp& op) const { PutOp(op, out); }
  void operator()(const ReadyOp& op) const {
    out->mutable_ready()->set_generation(op.generation);
    out->mutable_ready()->set_acknowledged(op.acknowledged);
  }
  void operator()(const LeaveOp&) const { out->mutable_leave(); }
  void operator()(const ReportOp& op) const {
    pb::ReportRequest* message = out->mutable_report();
    message->set_kind(static_cast<std::uint32_t>(op.report.kind));
    message->set_generation(op.report.generation);
    message->set_accused_rank(op.report.accused_rank);
    Put(op.report.status, message->mutable_failure());
    message->set_accused_incarnation(Utf8(op.report.accused_incarnation));
    message->set_ended(static_cast<std::uint32_t>(op.report.wait_status) + 1);
    message->set_max_world(op.report.max_world);
    message->set_commit(op.report.commit);
  }
  void operator()(const ExitReportOp& op) const {
    pb::ExitReportRequest* message = out->mutable_exit_report();
    Put(op.process, message->mutable_process());
    message->set_rank(op.rank);
    message->set_exit_code(op.exit_code);
    message->set_signal(op.signal);
    message->set_text(Utf8(op.text));
  }
  void operator()(const StatusOp& op) const {
    pb::StatusRequest* message = out->mutable_status();
    message->set_job(Utf8(op.job));
    message->set_from_job(Utf8(op.from_job));
    message->set_from_round(op.from_round);
    message->set_from_rank(op.from_rank);
  }
  void operator()(const WatchOp& op) const { PutOp(op, out); }
  void operator()(const HoldOp& op) const { PutOp(op, out); }
  void operator()(const ReleaseOp& op) const { PutOp(op, out); }
  void operator()(const DrainOp& op) const { PutOp(op, out); }
  void operator()(const WaitingOp& op) const { PutOp(op, out); }
  void operator()(const WhereaboutsOp& op) const { PutOp(op, out); }
};

struct EventWriter {
  pb::Event* out;

  void operator()(const SharedViewEvent&) const {}  // As it is encoded already.
  void operator()(const View& view) const {
    pb::ViewEvent* message = out->mutable_view();
    message->set_life(view.life);
    message->set_round(view.round);
    message->set_generation(view.generation);
    message->set_attempt(view.attempt);
    message->set_secret(view.secret);
    message->set_world_secret(view.world_secret);
    for (const Member& member : view.members) {
      pb::ViewMember* entry = message->add_members();
      entry->set_rank(member.rank);
      entry->set_incarnation(Utf8(member.incarnation));
      entry->set_host(Utf8(member.host));
      entry->set_pid(member.pid);
      entry->set_endpoint(member.endpoint);
    }
  }
  void operator()(const RunningEvent& event) const {
    out->mutable_running()->set_generation(event.generation);
  }
  void operator()(const Fence& fence) const {
    out->mutable_fence()->set_generation(fence.generation);
    Put(fence.cause, out->mutable_fence()->mutable_cause());
  }
  void operator()(const JoinRefusedEvent& event) const {
    Put(event.why, out->mutable_join_refused()->mutable_why());
    out->mutable_join_refused()->set_join(event.join);
  }
  void operator()(const SessionLostEvent& event) const {
    Put(event.why, out->mutable_session_lost()->mutable_why());
  }
  void operator()(const HeartbeatAckEvent& event) const {
    out->mutable_heartbeat_ack()->set_beat(event.beat);
  }
  void operator()(const PingEvent& event) const { out->mutable_ping()->set_ping(event.ping); }
  void operator()(const HeldEvent& event) const { PutEvent(event, out); }
  void operator()(const DrainingEvent& event) const { PutEvent(event, out); }
  void operator()(const WhereEvent& event) const { PutEvent(event, out); }
  void operator()(const LateEvent& event) const { PutEvent(event, out); }
  void operator()(const AskProgressEvent& event) const { PutEvent(event, out); }
  void operator()(const AllEnteredEvent& event) const { PutEvent(event, out); }
};

void AppendReply(const Reply& reply, std::string* body) {
  if (AppendPlainReply(reply, body)) return;
  pb::Reply message;
  if (!reply.status.ok()) Put(reply.status, message.mutable_failure());
  message.set_value(reply.value);
  message.set_number(reply.number);
  message.set_flag(reply.flag);
  if (reply.welcome) Put(*reply.welcome, message.mutable_welcome());
  message.set_status_json(reply.status_json);
  for (const std::string& value : reply.values) message.add_values(value);
  PutKeyEvents(reply, &message);
  message.AppendToString(body);
}

void AppendRequestBody(const Request& request, std::string* body) {
  if (AppendKeyRequest(request, body)) return;
  pb::Request message;
  message.set_first_unacked(request.first_unacked);
  message.set_generation(request.generation);
  message.set_scope(request.scope);
  std::visit(OpWriter{&message}, request.op);
  message.AppendToString(body);
}

// What a message shares with others, as the end of its body: messages that follow each other in one
// body are one message with the fields of both. Null: it shares nothing.
std::shared_ptr<const std::string> SharedPart(const ServerMessage& message) {
  if (const Reply* reply = std::get_if<Reply>(&message)) {
    if (reply->shared_values == nullptr) return nullptr;
    return {reply->shared_values, &reply->shared_values->encoded};
  }
  const auto* view = std::get_if<SharedViewEvent>(&std::get<Event>(message));
  if (view == nullptr) return nullptr;
  return {*view, &(*view)->encoded};
}

// Without the shared part.
FrameType AppendBody(const ServerMessage& message, std::string* body) {
  if (const Reply* reply = std::get_if<Reply>(&message)) {
    AppendReply(*reply, body);
    return FrameType::kReply;
  }
  pb::Event event;
  std::visit(EventWriter{&event}, std::get<Event>(message));
  event.AppendToString(body);
  return FrameType::kEvent;
}

std::uint64_t SeqOf(const ServerMessage& message) {  // Events have none.
  const Reply* reply = std::get_if<Reply>(&message);
  return reply != nullptr ? reply->seq : 0;
}

// ---- Protobuf to plain ----

// A code of a newer peer keeps its name in the text.
Status ToStatus(const pb::Failure& failure) {
  if (failure.code().empty()) return {};
  FailureDetail detail;
  detail.rank = failure.rank();
  detail.host = failure.host();
  detail.pid = failure.pid();
  detail.generation = failure.generation();
  detail.group = failure.group();
  detail.seq = failure.seq();
  detail.since_unix_s = failure.since_unix_s();
  const std::optional<StatusCode> code = CodeFromName(failure.code());
  if (!code || *code == StatusCode::kOk) {
    return Status(StatusCode::kInternal, failure.code() + ": " + failure.message(),
                  std::move(detail));
  }
  return Status(*code, failure.message(), std::move(detail));
}

ProcessIdentity ToProcess(const pb::ProcessIdentity& process) {
  ProcessIdentity out;
  out.host = process.host();
  out.boot_id = process.boot_id();
  out.pid_namespace = process.pid_namespace();
  out.pid = process.pid();
  out.start_time = process.start_time();
  return out;
}

Status Malformed(std::string what) {
  return Status(StatusCode::kProtocol, "the peer sent a malformed message: " + std::move(what));
}

std::string SizeOf(const Frame& frame) {
  return " of " + std::to_string(frame.body.size()) + " bytes";
}

Result<Op> ToHello(const pb::Hello& message) {
  Hello hello;
  switch (message.role()) {
    case pb::ROLE_REQUEST:
      hello.role = Role::kRequest;
      break;
    case pb::ROLE_CONTROL:
      hello.role = Role::kControl;
      break;
    case pb::ROLE_ADMIN:
      hello.role = Role::kAdmin;
      break;
    default:
      return Malformed("Hello with role " + std::to_string(message.role()));
  }
  hello.job = message.job();
  hello.session = message.session();
  hello.incarnation = message.incarnation();
  hello.process = ToProcess(message.process());
  hello.launcher_attempt = message.launcher_attempt();
  hello.supervised = message.supervised();
  hello.features.assign(message.features().begin(), message.features().end());
  hello.expected_server = message.expected_server();
  hello.hosts_store = message.hosts_store();
  hello.leased_key = message.leased_key();
  hello.leased_value = message.leased_value();
  return Op(std::move(hello));
}

// A status of waitpid has 16 bits.
constexpr std::uint32_t kEndedMax = 1 + 0xffff;

Result<Op> ToReport(const pb::ReportRequest& message) {
  constexpr std::array kKinds = {
      ReportKind::kLinkLost,    ReportKind::kMismatch,  ReportKind::kCommFailed,
      ReportKind::kProcessDied, ReportKind::kRoom,      ReportKind::kNeedsLeaver,
      ReportKind::kEnding,      ReportKind::kUnreached, ReportKind::kRebuild};
  const auto kind = std::find_if(kKinds.begin(), kKinds.end(), [&message](ReportKind known) {
    return static_cast<std::uint32_t>(known) == message.kind();
  });
  if (kind == kKinds.end()) {
    return Status(StatusCode::kUnimplemented,
                  "this store does not know reports of kind " + std::to_string(message.kind()));
  }
  ReportOp op;
  op.report.kind = *kind;
  op.report.generation = message.generation();
  op.report.accused_rank = message.accused_rank();
  op.report.status = ToStatus(message.failure());
  op.report.accused_incarnation = message.accused_incarnation();
  op.report.wait_status = static_cast<int>(std::min(message.ended(), kEndedMax)) - 1;
  op.report.max_world = message.max_world();
  op.report.commit = message.commit();
  return Op(std::move(op));
}

Op ToExitReport(const pb::ExitReportRequest& message) {
  ExitReportOp op;
  op.process = ToProcess(message.process());
  op.rank = message.rank();
  op.exit_code = message.exit_code();
  op.signal = message.signal();
  op.text = message.text();
  return op;
}

template <typename Texts>
std::vector<std::string> ToTexts(const Texts& texts) {
  return {texts.begin(), texts.end()};
}

// nullopt: none of the key operations.
std::optional<Op> ToKeyOp(pb::Request& message) {
  switch (message.op_case()) {
    case pb::Request::kSet:
      return SetOp{message.set().key(), std::move(*message.mutable_set()->mutable_value())};
    case pb::Request::kGet:
      return GetOp{message.get().key(), message.get().wait()};
    case pb::Request::kAdd:
      return AddOp{message.add().key(), message.add().amount()};
    case pb::Request::kCompareSet:
      return CompareSetOp{message.compare_set().key(), message.compare_set().expected(),
                          message.compare_set().desired()};
    case pb::Request::kCheck:
      return CheckOp{ToTexts(message.check().keys())};
    case pb::Request::kWait:
      return WaitOp{ToTexts(message.wait().keys())};
    case pb::Request::kDelete:
      return DeleteOp{message.delete_().key()};
    case pb::Request::kNumKeys:
      return NumKeysOp{};
    case pb::Request::kAppend:
      return AppendOp{message.append().key(), message.append().value()};
    case pb::Request::kMultiGet:
      return MultiGetOp{ToTexts(message.multi_get().keys()), message.multi_get().wait()};
    case pb::Request::kMultiSet:
      return MultiSetOp{ToTexts(message.multi_set().keys()), ToTexts(message.multi_set().values())};
    case pb::Request::kListKeys:
      return ListKeysOp{message.list_keys().prefix(), message.list_keys().after(),
                        message.list_keys().values()};
    case pb::Request::kQueuePush:
      return QueuePushOp{message.queue_push().key(), message.queue_push().value()};
    case pb::Request::kQueuePop:
      return QueuePopOp{message.queue_pop().key(), message.queue_pop().wait()};
    case pb::Request::kQueueLength:
      return QueueLengthOp{message.queue_length().key()};
    case pb::Request::kBarrier:
      return BarrierOp{message.barrier().key(), message.barrier().size()};
    case pb::Request::kExchange:
      return ExchangeOp{message.exchange().key(), message.exchange().rank(),
                        message.exchange().size(), message.exchange().value(),
                        message.exchange().survivors_of()};
    default:
      return std::nullopt;
  }
}

Result<Op> ToOp(pb::Request& message) {
  if (std::optional<Op> op = ToKeyOp(message)) return std::move(*op);
  if (std::optional<Op> op = ToWatchOp(message)) return std::move(*op);
  if (std::optional<Op> op = ToWaitingOp(message)) return std::move(*op);
  switch (message.op_case()) {
    case pb::Request::kHello:
      return ToHello(message.hello());
    case pb::Request::kCancel:
      return Op(CancelOp{message.cancel().seq()});
    case pb::Request::kHeartbeat:
      return Op(HeartbeatOp{message.heartbeat().beat()});
    case pb::Request::kJoin:
      return ToJoin(message.join());
    case pb::Request::kReady:
      return Op(ReadyOp{message.ready().generation(), message.ready().acknowledged()});
    case pb::Request::kLeave:
      return Op(LeaveOp{});
    case pb::Request::kReport:
      return ToReport(message.report());
    case pb::Request::kExitReport:
      return ToExitReport(message.exit_report());
    case pb::Request::kStatus:
      return Op(StatusOp{message.status().job(), message.status().from_job(),
                         message.status().from_round(), message.status().from_rank()});
    default:
      break;
  }
  return Status(StatusCode::kUnimplemented,
                "this store does not know the operation that was asked for: the client is newer; "
                "use a store of the client's version");
}

View ToView(const pb::ViewEvent& message) {
  View view;
  view.life = message.life();
  view.round = message.round();
  view.generation = message.generation();
  view.attempt = message.attempt();
  view.secret = message.secret();
  view.world_secret = message.world_secret();
  view.members.reserve(static_cast<std::size_t>(message.members_size()));
  for (const pb::ViewMember& entry : message.members()) {
    Member member;
    member.rank = entry.rank();
    member.incarnation = entry.incarnation();
    member.host = entry.host();
    member.pid = entry.pid();
    member.endpoint = entry.endpoint();
    view.members.push_back(std::move(member));
  }
  return view;
}

Result<ServerMessage> ToEvent(const pb::Event& message) {
  switch (message.event_case()) {
    case pb::Event::kView:
      return ServerMessage(Event(ToView(message.view())));
    case pb::Event::kRunning:
      return ServerMessage(Event(RunningEvent{message.running().generation()}));
    case pb::Event::kFence:
      return ServerMessage(
          Event(Fence{message.fence().generation(), ToStatus(message.fence().cause())}));
    case pb::Event::kJoinRefused:
      return ServerMessage(Event(
          JoinRefusedEvent{ToStatus(message.join_refused().why()), message.join_refused().join()}));
    case pb::Event::kSessionLost:
      return ServerMessage(Event(SessionLostEvent{ToStatus(message.session_lost().why())}));
    case pb::Event::kHeartbeatAck:
      return ServerMessage(Event(HeartbeatAckEvent{message.heartbeat_ack().beat()}));
    case pb::Event::kPing:
      return ServerMessage(Event(PingEvent{message.ping().ping()}));
    case pb::Event::kHeld:
    case pb::Event::kDraining:
      return ServerMessage(ToNotice(message));
    case pb::Event::kWhere:
    case pb::Event::kLate:
    case pb::Event::kAskProgress:
    case pb::Event::kAllEntered:
      return ServerMessage(ToWaitingEvent(message));
    case pb::Event::EVENT_NOT_SET:
      break;
  }
  return Status(StatusCode::kUnimplemented,
                "the store pushed an event that this build does not know");
}

ServerMessage ToReply(pb::Reply& message, std::uint64_t seq) {
  Reply reply;
  reply.seq = seq;
  reply.status = ToStatus(message.failure());
  reply.value = std::move(*message.mutable_value());
  reply.number = message.number();
  reply.flag = message.flag();
  if (!message.welcome().server().empty()) {
    reply.welcome = std::make_shared<const Welcome>(ToWelcome(message.welcome()));
  }
  reply.status_json = message.status_json();
  reply.values.reserve(static_cast<std::size_t>(message.values_size()));
  for (std::string& value : *message.mutable_values()) reply.values.push_back(std::move(value));
  TakeKeyEvents(message, &reply);
  return reply;
}

// Leaves the reply without it. Null: it is small, or not alone.
std::shared_ptr<const std::string> TakeLargeValue(ServerMessage* message) {
  Reply* reply = std::get_if<Reply>(message);
  if (reply == nullptr || reply->value.size() < kOwnPartBytesMin) return nullptr;
  if (reply->shared_values != nullptr || !reply->events.empty()) return nullptr;
  return std::make_shared<const std::string>(std::exchange(reply->value, {}));
}

}  // namespace

Frame EncodeRequest(const Request& request) {
  Frame frame;
  frame.type = FrameType::kRequest;
  frame.seq = request.seq;
  AppendRequestBody(request, &frame.body);
  return frame;
}

void AppendRequest(const Request& request, std::string* wire) {
  const std::size_t begin = BeginFrame(wire);
  AppendRequestBody(request, wire);
  EndFrame(begin, FrameType::kRequest, request.seq, wire);
}

Frame EncodeServerMessage(const ServerMessage& message) {
  Frame frame;
  frame.type = AppendBody(message, &frame.body);
  if (const auto shared = SharedPart(message)) frame.body += *shared;
  if (frame.body.size() > kMaxFrameBody) {
    return EncodeServerMessage(Shortened(message, frame.body.size()));
  }
  frame.seq = SeqOf(message);
  return frame;
}

std::shared_ptr<const std::string> AppendServerMessage(ServerMessage&& message, std::string* wire) {
  const std::size_t begin = BeginFrame(wire);
  std::shared_ptr<const std::string> part = TakeLargeValue(&message);
  const FrameType type = AppendBody(message, wire);
  if (part != nullptr) {
    BeginReplyValue(part->size(), wire);
  } else {
    part = SharedPart(message);
  }
  const std::size_t rest = part == nullptr ? 0 : part->size();
  if (const std::size_t bytes = wire->size() - begin - kFrameHeaderBytes + rest;
      bytes > kMaxFrameBody) {
    wire->resize(begin);
    return AppendServerMessage(Shortened(message, bytes), wire);
  }
  EndFrame(begin, type, SeqOf(message), wire, rest);
  return part;
}

SharedViewEvent Share(View view) {
  pb::Event event;
  EventWriter{&event}(view);
  auto shared = std::make_shared<SharedView>();
  shared->encoded = event.SerializeAsString();
  shared->view = std::move(view);
  return shared;
}

Result<Request> DecodeRequest(const Frame& frame) {
  if (frame.type != FrameType::kRequest) {
    return Malformed("a frame of type " + std::to_string(static_cast<int>(frame.type)) +
                     " where a request is due");
  }
  if (std::optional<Request> request = ReadKeyRequest(frame.body)) {
    request->seq = frame.seq;
    return std::move(*request);
  }
  pb::Request message;
  if (!message.ParseFromString(frame.body)) {
    return Malformed("a request" + SizeOf(frame) + " that does not parse");
  }
  Result<Op> op = ToOp(message);
  if (!op) return op.status();
  Request request;
  request.seq = frame.seq;
  request.first_unacked = message.first_unacked();
  request.generation = message.generation();
  request.scope = message.scope();
  request.op = std::move(*op);
  return request;
}

Result<ServerMessage> DecodeServerMessage(Frame frame) {
  if (frame.type == FrameType::kReply) {
    if (std::optional<Reply> reply = ReadPlainReply(frame.body)) {
      reply->seq = frame.seq;
      return ServerMessage(std::move(*reply));
    }
    pb::Reply message;
    if (!message.ParseFromString(frame.body)) return Malformed("a reply" + SizeOf(frame));
    return ToReply(message, frame.seq);
  }
  if (frame.type == FrameType::kEvent) {
    pb::Event message;
    if (!message.ParseFromString(frame.body)) return Malformed("an event" + SizeOf(frame));
    return ToEvent(message);
  }
  return Malformed("a frame of type " + std::to_string(static_cast<int>(frame.type)) +
                   " from the store");
}

}  // namespace resilient::store
