#include "tests/ranks/hostile_peers.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <utility>
#include <variant>

#include "runtime/base/log.h"
#include "runtime/net/frame.h"
#include "store/core/codec.h"
#include "tests/ranks/store_server_support.h"

namespace resilient::store {
namespace {

constexpr std::size_t kSessions = 12;
constexpr std::uint64_t kBurst = 64;

// What no frame holds is cut, and is no message any more.
std::string Encoded(const Request& request) {
  Frame frame = EncodeRequest(request);
  if (frame.body.size() > kMaxFrameBody) frame.body.resize(kMaxFrameBody);
  return EncodeFrame(std::move(frame));
}

}  // namespace

void HostilePeers::Meet(const HostPort& store) {
  store_ = store;
  // Each in turn, so that few lives have all of them.
  favourite_ = static_cast<Favourite>((static_cast<unsigned>(favourite_) + 1) % kFavourites);
  for (Peer& peer : peers_) peer = {};
}

void HostilePeers::Act() {
  ++acts_;
  Peer& peer = peers_[random_.Below(kPeers)];
  if (!peer.socket.valid()) return Connect(peer, AnyHello());
  if (peer.withheld > 1) return SendOn(peer);
  const auto wants = [this](Favourite what) {
    return favourite_ == what ? Rarely(3) : Rarely(100);
  };
  if (wants(Favourite::kWithhold)) return Withhold(peer);
  if (wants(Favourite::kLargeAnswers)) return AskForLarge(peer);
  const std::uint64_t what = random_.Below(100);
  if (what < 4) {
    peer = {};
  } else if (what < 6) {
    Send(peer, std::string(random_.Below(40), static_cast<char>(random_.Below(256))));
  } else if (what < 14) {
    // A part of a frame; the rest of what this one sends is its body.
    const std::string frame = Encoded(AnyRequest(peer));
    Send(peer, frame.substr(0, random_.Below(frame.size())));
  } else if (what < 18) {
    std::string many;
    const Request request = AnyRequest(peer);
    const std::string frame = Encoded(request);
    const std::uint64_t count = frame.size() < 4096 ? kBurst : 2;
    for (std::uint64_t i = 0; i < count; ++i) many += frame;
    Send(peer, many);
  } else if (what < 40) {
    Read(peer);
  } else {
    Send(peer, Encoded(AnyRequest(peer)));
  }
}

void HostilePeers::Connect(Peer& peer, Hello hello) {
  peer = {};
  Result<FileDescriptor> socket = StartConnectTcp(store_);
  if (!socket.ok()) return;
  peer.socket = std::move(*socket);
  std::vector<PollEntry> entries = {{peer.socket.get(), POLLOUT, 0}};
  PollUntil(entries, SystemClock(), In(Millis(100)));
  if (Rarely(20)) return;  // It says nothing.
  Request first;
  first.seq = Rarely(10) ? random_.Next() : 1;
  peer.next = 2;
  first.op = std::move(hello);
  Send(peer, EncodePreamble() + Encoded(first));
}

std::size_t HostilePeers::Send(Peer& peer, const std::string& bytes) {
  const ssize_t sent =
      send(peer.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && errno != EAGAIN && errno != EINTR) peer = {};
  return sent < 0 ? 0 : static_cast<std::size_t>(sent);
}

// A large request is begun, and its last byte never sent.
void HostilePeers::Withhold(Peer& peer) {
  ConnectAlone(peer);
  if (!peer.socket.valid()) return;
  std::string frame =
      EncodeFrame(Frame{.type = FrameType::kRequest, .body = std::string(kMaxFrameBody, 'w')});
  frame.resize(frame.size() - kMaxFrameBody);
  Send(peer, frame);
  peer.withheld = kMaxFrameBody;
}

// As a session of its own, whose place nobody takes.
void HostilePeers::ConnectAlone(Peer& peer) {
  Hello hello = AnyHello();
  hello.session = StrCat("alone", random_.Next());
  hello.role = Role::kRequest;
  Connect(peer, std::move(hello));
}

// A refused compare_set is answered with the value, which is kept until it is acknowledged: never.
void HostilePeers::AskForLarge(Peer& peer) {
  if (Rarely(8)) ConnectAlone(peer);
  if (!peer.socket.valid()) return;
  Request request;
  request.seq = peer.next++;
  request.op = CompareSetOp{"large", "", ""};
  if (Rarely(10)) request.op = SetOp{"large", std::string(kValueBytesMax / 4, 'l')};
  Send(peer, Encoded(request));
}

void HostilePeers::SendOn(Peer& peer) {
  if (Rarely(500)) {
    peer = {};
    return;
  }
  const std::string part(std::min<std::size_t>(peer.withheld - 1, 1u << 20), 'w');
  const std::size_t sent = Send(peer, part);
  peer.withheld -= sent;  // Both are 0 after an error.
}

void HostilePeers::Read(Peer& peer) {
  std::array<char, 16384> buffer{};
  const ssize_t count = recv(peer.socket.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (count == 0) peer = {};
  if (count <= 0) return;
  // Where a frame begins is mostly the beginning: good enough to hear of a view now and then.
  FrameSplitter splitter(kMaxFrameBody);
  std::string stream = EncodePreamble();
  std::string_view read(buffer.data(), static_cast<std::size_t>(count));
  if (read.starts_with(EncodePreamble())) read.remove_prefix(kPreambleBytes);
  if (!splitter.Feed(stream.append(read)).ok()) return;
  while (splitter.HasFrame()) {
    const Result<ServerMessage> message = DecodeServerMessage(splitter.TakeFrame());
    const Event* event = message.ok() ? std::get_if<Event>(&*message) : nullptr;
    const View* view = event != nullptr ? std::get_if<View>(event) : nullptr;
    if (view == nullptr) continue;
    generation_ = view->generation;
    round_ = view->round;
  }
}

std::int64_t HostilePeers::AnyNumber() {
  constexpr std::array<std::int64_t, 14> kEdges = {
      -2,     -1, 0, 1, 2, 3, 4, 63, 64, 65, kWorldSizeMax - 1, kWorldSizeMax, kWorldSizeMax + 1,
      INT_MAX};
  if (!Rarely(3)) return static_cast<std::int64_t>(random_.Below(4));
  if (Rarely(20)) return static_cast<std::int64_t>(random_.Next());
  return kEdges[random_.Below(kEdges.size())];
}

std::string HostilePeers::AnyKey() {
  if (Rarely(50)) return std::string(kKeyBytesMax + random_.Below(2), 'k');
  if (Rarely(50)) return {};
  return StrCat("k", random_.Below(8));
}

std::vector<std::string> HostilePeers::AnyKeys() {
  std::vector<std::string> keys;
  const std::uint64_t count = Rarely(60) ? kKeysPerRequestMax + random_.Below(2) : random_.Below(4);
  for (std::uint64_t i = 0; i < count; ++i) {
    keys.push_back(count > 4 ? std::to_string(i) : AnyKey());
  }
  return keys;
}

std::string HostilePeers::AnyValue() {
  if (Rarely(80)) return std::string(kValueBytesMax + random_.Below(2), 'v');
  if (Rarely(20)) return std::string(random_.Below(1u << 20), 'v');
  return std::to_string(random_.Below(1000));
}

std::string HostilePeers::AnyText() {
  if (Rarely(100)) return std::string(1u << 20, 't');
  if (Rarely(8)) return std::string("\x1b[2J\n\xff\xc2\x9b", 9);
  return std::string(random_.Below(20), 't');
}

ProcessIdentity HostilePeers::AnyProcess() {
  ProcessIdentity process = ThisProcess();
  if (Rarely(2)) process.pid = AnyNumber();
  if (Rarely(4)) process.start_time = random_.Below(3);
  if (Rarely(4)) process.boot_id = AnyText().substr(0, 64);
  if (Rarely(4)) process.host = AnyText().substr(0, 64);
  // The watched end of this process would be a leave of its session's, and nothing else.
  if (process.pid == getpid()) process.start_time = 1;
  return process;
}

Hello HostilePeers::AnyHello() {
  Hello hello;
  hello.job = Rarely(30) ? StrCat("j", random_.Below(100)) : StrCat("hostile", random_.Below(3));
  hello.session = StrCat("s", random_.Below(Rarely(10) ? 100000 : kSessions));
  hello.incarnation = StrCat("i", random_.Below(6));
  const std::uint64_t role = random_.Below(10);
  hello.role = role < 4 ? Role::kControl : role < 9 ? Role::kRequest : Role::kAdmin;
  hello.process = AnyProcess();
  hello.launcher_attempt = Rarely(5) ? static_cast<std::uint64_t>(AnyNumber()) : 0;
  hello.supervised = Rarely(2);
  hello.hosts_store = Rarely(10);
  if (Rarely(4)) hello.leased_key = AnyKey().substr(0, 64);
  if (Rarely(4)) hello.leased_value = AnyText().substr(0, 64);
  if (hello.role == Role::kAdmin) hello.job = Rarely(2) ? "hostile0" : "nowhere";
  return hello;
}

Request HostilePeers::AnyRequest(Peer& peer) {
  Request request;
  request.op = AnyOp();
  request.seq = Rarely(10) ? static_cast<std::uint64_t>(AnyNumber()) : peer.next++;
  if (Rarely(8) && peer.next > 2) request.seq = 1 + random_.Below(peer.next);
  if (Rarely(3)) request.first_unacked = Rarely(10) ? random_.Next() : peer.next - 1;
  if (Rarely(3)) request.scope = Rarely(10) ? random_.Next() : round_;
  if (Rarely(3)) request.generation = Rarely(10) ? random_.Next() : generation_;
  return request;
}

Op HostilePeers::AnyOp() {
  const std::uint64_t which = random_.Below(20);
  return which < 10 ? AnyKeyOp(random_.Below(18)) : AnyMembershipOp(random_.Below(16));
}

Op HostilePeers::AnyKeyOp(std::uint64_t which) {
  switch (which) {
    case 0:
      return GetOp{AnyKey(), Rarely(2)};
    case 1:
      return AddOp{AnyKey(), AnyNumber()};
    case 2:
      return CompareSetOp{AnyKey(), AnyValue(), AnyValue()};
    case 3:
      return CheckOp{AnyKeys()};
    case 4:
      return WaitOp{AnyKeys()};
    case 5:
      return DeleteOp{AnyKey()};
    case 6:
      return AppendOp{AnyKey(), AnyValue()};
    case 7:
      return MultiGetOp{AnyKeys(), Rarely(2)};
    case 8: {
      std::vector<std::string> keys = AnyKeys();
      std::vector<std::string> values(Rarely(10) ? 1 : keys.size(), AnyValue().substr(0, 100));
      return MultiSetOp{std::move(keys), std::move(values)};
    }
    case 9:
      return ListKeysOp{AnyKey().substr(0, 1), AnyKey(), Rarely(2)};
    case 10:
      return WatchOp{AnyKey().substr(0, random_.Below(3)), random_.Below(2000), Rarely(2)};
    case 11:
      return QueuePushOp{AnyKey(), AnyValue()};
    case 12:
      return QueuePopOp{AnyKey(), Rarely(2)};
    case 13:
      return QueueLengthOp{AnyKey()};
    case 14:
      return BarrierOp{AnyKey(), AnyNumber()};
    case 15:
      return ExchangeOp{AnyKey(), AnyNumber(), AnyNumber(), AnyValue(),
                        Rarely(4) ? generation_ : 0};
    case 16:
      return CancelOp{random_.Below(100)};
    default:
      return SetOp{AnyKey(), AnyValue()};
  }
}

Op HostilePeers::AnyMembershipOp(std::uint64_t which) {
  switch (which) {
    case 0:
      return HeartbeatOp{random_.Next()};
    case 1:
      return ReadyOp{generation_ - random_.Below(2), Rarely(3)};
    case 2:
      return LeaveOp{};
    case 3:
    case 4:
      return ReportOp{AnyReport()};
    case 5: {
      ExitReportOp report;
      report.process = AnyProcess();
      report.rank = AnyRank();
      report.exit_code = AnyRank();
      report.signal = AnyRank();
      report.text = AnyText();
      return report;
    }
    case 6:
      return StatusOp{AnyText(), AnyText(), random_.Below(5000), random_.Below(5000)};
    case 7:
      return HoldOp{AnyRank(), AnyText(), random_.Below(5000), AnyText()};
    case 8:
      return ReleaseOp{AnyRank(), AnyText()};
    case 9:
    case 10:
      return WaitingOp{AnyWaiting()};
    case 11:
      return WhereaboutsOp{generation_, {AnyText(), AnyText(), AnyText()}};
    case 12:
      return AnyHello();
    default:
      return JoinOp{AnyJoin()};
  }
}

JoinRequest HostilePeers::AnyJoin() {
  JoinRequest join;
  join.world_size = AnyRank();
  join.rank = Rarely(4) ? AnyRank() : static_cast<int>(random_.Below(2));
  join.endpoint = AnyText().substr(0, 5000);
  join.join_timeout = Millis(random_.Below(3000));
  join.seat_wait = Millis(random_.Below(3000));
  join.generation = Rarely(2) ? generation_ : 0;
  join.min_world = Rarely(3) ? AnyRank() : 0;
  join.number = random_.Below(5);
  join.spare_if_taken = Rarely(2);
  if (Rarely(4)) {
    DeviceClaim& device = join.device.emplace();
    device.uuid = AnyText().substr(0, 300);
    device.host = AnyText().substr(0, 300);
    device.ordinal = AnyRank();
  }
  return join;
}

Report HostilePeers::AnyReport() {
  Report report;
  report.kind = static_cast<ReportKind>(1 + random_.Below(10));
  report.generation = Rarely(4) ? random_.Next() : generation_;
  report.accused_rank = AnyRank();
  FailureDetail detail;
  detail.host = AnyText();
  detail.group = AnyText();
  detail.rank = AnyRank();
  if (!Rarely(6)) report.status = Status(StatusCode::kMismatch, AnyText(), detail);
  report.accused_incarnation = StrCat("i", random_.Below(6));
  report.wait_status = AnyRank();
  report.max_world = AnyRank();
  report.commit = random_.Below(4);
  return report;
}

WaitingReport HostilePeers::AnyWaiting() {
  WaitingReport report;
  report.generation = Rarely(4) ? 0 : generation_;
  report.blocked = Rarely(2);
  report.tell = Rarely(2);
  report.stall = Millis(random_.Below(2000));
  report.present = {AnyRank(), AnyRank()};
  report.unverified = {AnyRank()};
  const bool many = Rarely(40);  // Then short texts, or making them takes all the time.
  const std::uint64_t count = many ? 3000 : random_.Below(3);
  for (std::uint64_t i = 0; i < count; ++i) {
    WaitingCall& call = report.calls.emplace_back();
    call.group = StrCat("g", i);
    call.operation.what = many ? "w" : AnyText().substr(0, 5000);
    call.operation.seq = random_.Below(3);
    call.operation.missing = {AnyRank(), AnyRank()};
    call.operation.any = Rarely(2);
    call.blocked = report.blocked;
    report.made.push_back({call.group, {random_.Below(3), many ? "" : AnyText(), ""}, Rarely(2)});
    GroupProgress& progress = report.progress.emplace_back();
    progress.group = call.group;
    progress.entered = random_.Below(3);
    progress.peers.push_back({AnyRank(), random_.Next(), random_.Next()});
  }
  return report;
}

}  // namespace resilient::store
