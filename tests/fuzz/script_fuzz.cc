// Goal: no script of requests, repeats, lost connections, pauses and crashes brings the server's
// core to break a rule (script_fuzz.h has them). Method: the input is decoded, a byte for a choice,
// into steps against the real ServerCore, which is durable; what it writes is kept in memory. Seeds
// named "found" reach what no other seed reaches; the others are short scenes of their name. Here
// are the steps; script_fuzz_rules.cc has what is checked.
#include "tests/fuzz/script_fuzz.h"

#include <algorithm>
#include <array>
#include <utility>

#include "runtime/base/log.h"
#include "store/core/codec.h"
#include "tests/numbered_secrets.h"

namespace resilient::store::fuzz {
namespace {

constexpr std::uint64_t kStepsMax = 400;
constexpr std::uint64_t kStepsPerCheck = 8;
constexpr int kSessions = 5;

Hello HelloOf(int session, Role role) {
  Hello hello;
  hello.job = session < 4 ? "a" : "b";
  hello.session = StrCat("s", session);
  const int process = session == 3 ? 2 : session;  // One has two sessions.
  hello.incarnation = StrCat("i", process);
  hello.role = role;
  hello.process.host = StrCat("h", process % 2);
  hello.process.boot_id = "boot";
  hello.process.pid_namespace = "ns";
  hello.process.pid = 100 + process;
  hello.process.start_time = 1000;
  return hello;
}

// No script waits longer than its end does.
void Shorten(Op& op) {
  if (auto* join = std::get_if<JoinOp>(&op)) {
    join->request.seat_wait = std::clamp<Duration>(join->request.seat_wait, {}, kPatience);
    join->request.join_timeout = std::clamp<Duration>(join->request.join_timeout, {}, kPatience);
  } else if (auto* hold = std::get_if<HoldOp>(&op)) {
    // 0 is an hour.
    hold->for_ms = std::clamp<std::uint64_t>(hold->for_ms, 1, kPatience / Millis(1));
  }
}

Rows WithoutStore(Rows rows) {
  rows.erase(StoreRow());
  return rows;
}

}  // namespace

std::string Bytes::Text(std::size_t size) {
  size = std::min(size, static_cast<std::size_t>(end_ - at_));
  std::string text(at_, at_ + size);
  at_ += size;
  return text;
}

Script::Script(Bytes bytes) : bytes_(bytes) {
  const std::uint8_t kind = bytes_.Next();
  options_.server_id = "first";
  options_.durable = true;
  options_.lease_ttl = kTtl;
  options_.session_memory = kMemory;
  if (kind % 2 != 0) options_.changes_per_job = 4;
  if (kind % 4 / 2 != 0) {
    options_.limits = {.sessions = 6,
                       .jobs = 2,
                       .worlds_per_job = 2,
                       .keys_per_job = 6,
                       .bytes_per_job = 12000,
                       .queue_items = 4,
                       .bytes = 18000,
                       .seats_per_job = 5,
                       .seats = 7,
                       .result_bytes_per_job = 4096,
                       .result_total_bytes = 6000,
                       .change_total_bytes = 1000};
  }
  Start();
}

void Script::Run() {
  while (!bytes_.Done() && steps_ < kStepsMax) {
    Step();
    if (++steps_ % kStepsPerCheck == 0) CheckRows();
  }
  CheckRows();
  CheckEnd();
}

void Script::Step() {
  Peer& peer = AnyPeer();
  switch (bytes_.Below(16)) {
    case 0:
    case 1:
    case 2:
      Connect(peer);
      return SayHello(peer);
    case 3:
      return SayHello(peer);  // Twice, or before there is a connection.
    case 4:
    case 5:
    case 6:
    case 7:
      return AskKeys(peer);
    case 8:
    case 9:
    case 10:
      return AskMembership(peer);
    case 11:
      return bytes_.Below(4) == 0 ? AskAdmin(peer) : Repeat(peer);
    case 12:
      return Cut(peer);
    case 13:
      return PassTime();
    case 14:
      return bytes_.Below(2) == 0 ? Restart() : ExitProcess();
    default:
      return SendRaw(peer);
  }
}

// ---- Connections ----

void Script::Connect(Peer& peer) {
  if (peer.id != 0) Cut(peer);
  peer.id = ++last_connection_;
  core_->OnConnect(peer.id, now_);
}

void Script::SayHello(Peer& peer) {
  const int session = static_cast<int>(bytes_.Below(kSessions));
  const std::uint8_t how = bytes_.Next();
  constexpr std::array kRoles{Role::kRequest, Role::kControl, Role::kControl, Role::kAdmin};
  Hello hello = HelloOf(session, kRoles[how % kRoles.size()]);
  hello.supervised = (how & 4) != 0;
  hello.launcher_attempt = (how & 8) != 0 ? 1 : 0;
  hello.hosts_store = (how & 48) == 48;
  if ((how & 48) == 16) hello.leased_key = (how & 64) != 0 ? "resilient/presence/2/1" : "leased";
  if ((how & 0xc0) == 0xc0) {
    switch (bytes_.Below(5)) {
      case 0:
        hello.incarnation = "another";
        break;
      case 1:
        hello.expected_server = "another";
        break;
      case 2:
        hello.job.clear();
        break;
      case 3:
        hello.job = StrCat("job", bytes_.Below(4));
        break;
      default:
        hello.process.start_time = 2000;  // The pid is somebody else's by now.
        hello.incarnation += "'";
    }
  }
  Send(peer, Request{.op = std::move(hello)});
}

void Script::Cut(Peer& peer) {
  const ConnectionId id = std::exchange(peer, {}).id;
  Effects effects;
  core_->OnDisconnect(id, now_, effects);  // Also of one that the server has closed.
  Take(std::move(effects));
}

// ---- Requests ----

std::string Script::AnyKey() {
  const std::uint64_t which = bytes_.Below(8);
  return which == 7 ? std::string(kKeyBytesMax + bytes_.Below(2), 'k') : StrCat("k", which % 5);
}

std::vector<std::string> Script::Keys() {
  std::vector<std::string> keys(bytes_.Below(4));
  for (std::string& key : keys) key = AnyKey();
  return keys;
}

Op Script::KeyOp(bool* counted) {
  const std::uint8_t which = bytes_.Next();
  const bool wait = (which & 0x80) != 0;
  const auto value = [this] { return std::string(bytes_.Next() * std::size_t{4}, 'v'); };
  switch (which % 20) {
    case 0:
    case 1:
      *counted = true;
      return AddOp{kCounter, 1};
    case 2:
      return SetOp{AnyKey(), value()};
    case 3:
      return GetOp{AnyKey(), wait};
    case 4:
      return AddOp{AnyKey(), static_cast<std::int8_t>(bytes_.Next())};
    case 5:
      return CompareSetOp{AnyKey(), value(), value()};
    case 6:
      return CheckOp{Keys()};
    case 7:
      return WaitOp{Keys()};
    case 8:
      return DeleteOp{AnyKey()};
    case 9:
      return NumKeysOp{};
    case 10:
      return AppendOp{AnyKey(), value()};
    case 11:
      return MultiGetOp{Keys(), wait};
    case 12: {
      std::vector<std::string> keys = Keys();
      std::vector<std::string> values(wait ? bytes_.Below(4) : keys.size());
      for (std::string& each : values) each = value();
      return MultiSetOp{std::move(keys), std::move(values)};
    }
    case 13:
      return ListKeysOp{bytes_.Below(2) != 0 ? "k" : "", AnyKey(), wait};
    case 14:
      return WatchOp{bytes_.Below(2) != 0 ? "k" : "", revision_ + 2 - bytes_.Below(8), wait};
    case 15:
      return QueuePushOp{AnyKey(), value()};
    case 16:
      return QueuePopOp{AnyKey(), wait};
    case 17:
      return QueueLengthOp{AnyKey()};
    case 18:
      return BarrierOp{AnyKey(), static_cast<std::int64_t>(bytes_.Below(4))};
    default: {
      const auto rank = static_cast<std::int64_t>(bytes_.Below(4));
      return ExchangeOp{AnyKey(), rank, static_cast<std::int64_t>(bytes_.Below(4)), value()};
    }
  }
}

void Script::AskKeys(Peer& peer) {
  bool counted = false;
  Op op = KeyOp(&counted);
  if (counted) ++adds_[peer.hello.job];
  Ask(peer, std::move(op));
}

Op Script::MembershipOp(const Peer& peer) {
  const std::uint8_t which = bytes_.Next();
  const auto found = views_.find(peer.hello.job);
  const std::uint64_t generation = found == views_.end() ? 0 : found->second.generation;
  switch (which % 8) {
    case 0:
    case 1:
    case 2: {
      JoinOp join;
      const auto session = static_cast<int>(peer.hello.process.pid - 100);
      // A spare among them.
      join.request.rank = (which & 0x80) != 0 ? static_cast<int>(bytes_.Below(6)) - 2 : session;
      join.request.world_size = static_cast<int>(which / 8 % 4);
      if (join.request.rank > 2) {  // Ranks far beyond the sizes of others.
        join.request.world_size = static_cast<int>(bytes_.Below(65));
        join.request.rank = static_cast<int>(bytes_.Below(65));
      }
      join.request.endpoint = "e";
      join.request.join_timeout = Millis(bytes_.Below(4) * 1000);
      join.request.seat_wait = Millis((which & 0x40) != 0 ? 2000 : 0);
      join.request.generation = (which & 0x20) != 0 ? generation : 0;
      const auto wish = static_cast<int>(bytes_.Below(6));
      join.request.min_world = wish / 2;
      join.request.spare_if_taken = wish % 2 != 0;
      return join;
    }
    case 3:
      return ReadyOp{generation - (which & 0x80) / 0x80};
    case 4:
      return LeaveOp{};
    case 5: {
      const auto kind = static_cast<ReportKind>(1 + bytes_.Below(9));
      const int accused = static_cast<int>(bytes_.Below(5)) - 1;
      FailureDetail detail;
      detail.host = Words();
      detail.group = Words();
      ReportOp op{{kind, generation, accused, Status(StatusCode::kMismatch, Words(), detail)}};
      if (kind == ReportKind::kRoom) {
        op.report.max_world = static_cast<int>(bytes_.Below(8));
        op.report.commit = bytes_.Below(4);
      }
      if (kind != ReportKind::kProcessDied) return op;
      op.report.accused_incarnation = HelloOf(accused, Role::kControl).incarnation;
      op.report.wait_status = static_cast<int>(bytes_.Below(3)) * 9 - 1;  // Not known, 8, 17.
      return op;
    }
    case 6: {
      ExitReportOp report;
      report.process = HelloOf(static_cast<int>(bytes_.Below(kSessions)), Role::kControl).process;
      report.rank = static_cast<int>(bytes_.Below(4)) - 1;
      report.exit_code = static_cast<int>(bytes_.Below(2));
      report.signal = bytes_.Below(2) != 0 ? 9 : 0;
      report.text = Words();
      return report;
    }
    default:
      if ((which & 0x10) != 0) return WaitingOp{WaitingOf(generation)};
      if ((which & 0x20) != 0) return WhereaboutsOp{generation, {Words(), Words(), Words()}};
      return HeartbeatOp{which};
  }
}

bool Script::IsSilent(const Op& op) {
  return std::holds_alternative<HeartbeatOp>(op) || std::holds_alternative<WaitingOp>(op) ||
         std::holds_alternative<WhereaboutsOp>(op);
}

// What a peer says for people to read may be long.
std::string Script::Words() {
  const std::uint8_t which = bytes_.Next();
  return std::string(which % 64 == 0 ? kLongText : which % 4, 'w');
}

WaitingReport Script::WaitingOf(std::uint64_t generation) {
  WaitingReport report;
  const std::uint8_t which = bytes_.Next();
  if (which % 8 == 7) {  // It waits for its join.
    report.present = {static_cast<int>(bytes_.Below(4))};
    report.unverified = {static_cast<int>(bytes_.Below(66)) - 1};
    return report;
  }
  report.generation = generation;
  report.tell = which % 2 != 0;
  report.blocked = which % 4 / 2 != 0;
  for (std::uint64_t left = which / 4 % 3; left > 0; --left) {
    WaitingCall& call = report.calls.emplace_back();
    call.group = Words();
    call.operation.what = Words();
    call.operation.call_site = Words();
    call.operation.seq = bytes_.Below(3);
    call.operation.missing = {static_cast<int>(bytes_.Below(66)) - 1};
    call.blocked = report.blocked;
    report.made.push_back({call.group, {bytes_.Below(3), Words(), Words()}, true});
    GroupProgress& progress = report.progress.emplace_back();
    progress.group = call.group;
    progress.entered = bytes_.Below(3);
    if (bytes_.Below(2) == 0) continue;
    progress.device.emplace();
    progress.device->name = Words();
    progress.device->last = Words();
  }
  return report;
}

void Script::AskMembership(Peer& peer) {
  // Number 0 is for what has no answer.
  Op op = MembershipOp(peer);
  if (IsSilent(op)) return Send(peer, Request{.op = std::move(op)});
  Ask(peer, std::move(op));
}

void Script::AskAdmin(Peer& peer) {
  const std::uint8_t which = bytes_.Next();
  const int rank = static_cast<int>(bytes_.Below(4)) - 1;
  switch (which % 4) {
    case 0:
      return Ask(peer, StatusOp{"", rank == 2 ? "" : "job", bytes_.Below(4), bytes_.Below(8)});
    case 1:
      return Ask(peer, HoldOp{rank, "", 1 + bytes_.Below(4) * 1000, Words()});
    case 2:
      return Ask(peer, ReleaseOp{rank, ""});
    default:
      return Ask(peer, DrainOp{(which & 0x80) != 0});
  }
}

void Script::Ask(Peer& peer, Op op) {
  const std::uint8_t how = bytes_.Next();
  Line* line = peer.line;
  const auto view = views_.find(peer.hello.job);
  Request request;
  request.op = std::move(op);
  if ((how & 3) == 3 && view != views_.end()) request.scope = view->second.round;
  if ((how & 12) == 12 && view != views_.end()) request.generation = view->second.generation;
  request.seq = line ? line->next : 1 + bytes_.Below(8);
  request.first_unacked = line ? line->acknowledged + 1 : 0;
  if ((how & 0x30) == 0x30) {  // All that was asked before was answered, says the client.
    request.first_unacked = request.seq;
  } else if ((how & 0xc0) == 0xc0) {  // A client that has lost count.
    request.seq = bytes_.Next();
    request.first_unacked = bytes_.Next();
    request.scope = bytes_.Below(4);
    request.generation = bytes_.Below(8);
  }
  Send(peer, request);
}

void Script::Repeat(Peer& peer) {
  if (!peer.line || peer.line->sent.empty()) return;
  auto sent = peer.line->sent.lower_bound(bytes_.Next());
  if (sent == peer.line->sent.end()) --sent;
  if (bytes_.Below(4) == 0) return GiveUp(peer, sent->first);
  Request request = sent->second;
  request.first_unacked = std::min(request.seq, peer.line->acknowledged + 1);
  Send(peer, request);
}

void Script::SendRaw(Peer& peer) {
  Frame frame;
  frame.seq = bytes_.Next();
  frame.body = bytes_.Text(bytes_.Next());
  Result<Request> request = DecodeRequest(frame);
  if (request.ok()) {
    counters_clean_ = false;
    Shorten(request->op);
    return Send(peer, *request);
  }
  if (request.status().code() == StatusCode::kProtocol) Cut(peer);
}

// Each goes the way over the wire.
void Script::Send(Peer& peer, const Request& request) {
  const Result<Request> arrived = DecodeRequest(EncodeRequest(request));
  if (!arrived.ok()) return;  // What no client can ask for.
  if (Line* line = peer.line; line && request.seq != 0) {
    const auto [sent, first] = line->sent.try_emplace(request.seq, *arrived);
    const std::string before = EncodeRequest(sent->second).body;
    Request again = *arrived;
    again.first_unacked = sent->second.first_unacked;
    if (!first && EncodeRequest(again).body != before) line->confused = true;
    line->next = std::max(line->next, request.seq + 1);
  }
  if (Line* line = peer.line; line && request.first_unacked > 0) {
    const std::uint64_t acknowledged =
        request.seq == 0 ? request.first_unacked : std::min(request.first_unacked, request.seq);
    line->acknowledged = std::max(line->acknowledged, acknowledged - 1);
  }
  ++peer.due[request.seq];
  if (const auto* cancel = std::get_if<CancelOp>(&request.op)) ++peer.due[cancel->seq];
  const auto* hello = std::get_if<Hello>(&arrived->op);
  if (hello && !peer.greeted) peer.hello = *hello;
  if (peer.greeted && !hello) Hear(peer);  // A second Hello is refused.
  Effects effects;
  core_->OnRequest(peer.id, *arrived, now_, effects);
  const bool answered = std::any_of(effects.send.begin(), effects.send.end(), [&](const auto& out) {
    const auto* reply = std::get_if<Reply>(&out.message);
    return out.connection == peer.id && reply && reply->seq == request.seq;
  });
  const bool goodbye = std::holds_alternative<LeaveOp>(request.op) && request.seq == 0 &&
                       peer.hello.role == Role::kRequest;
  const bool silent =
      goodbye || std::holds_alternative<CancelOp>(request.op) || IsSilent(request.op);
  const ConnectionId id = peer.id;
  if (id != 0 && peer.greeted && !answered && !silent)
    peer.waits[request.seq] = now_ + kPatience / 2;
  Take(std::move(effects));
  Require(id == 0 || peer.greeted || peer.id == 0 || !hello, "a Hello is not answered");
}

void Script::Hear(const Peer& peer) {
  const Hello& hello = peer.hello;
  if (hello.role != Role::kControl) return;
  heard_[{hello.job, hello.incarnation}][hello.session] = now_;
}

void Script::GiveUp(Peer& peer, std::uint64_t seq) {
  const bool waits = peer.waits.contains(seq);
  Send(peer, Request{.op = CancelOp{seq}});
  Require(!waits || !peer.waits.contains(seq), StrCat("a wait is not ended: request ", seq));
}

// ---- Time and crashes ----

void Script::PassTime() {
  constexpr std::array kDurations{Millis(1),    Millis(50),   Millis(300),  Millis(500),
                                  Millis(1000), Millis(1100), Millis(2500), Millis(6000)};
  const std::uint8_t how = bytes_.Next();
  const Duration duration = kDurations[how % kDurations.size()];
  // A pause of the server is a tick that comes late.
  const Duration tick = (how & 8) != 0 ? duration : Duration(2 * kTickInterval);
  Advance(duration, tick, (how & 16) == 0, (how & 32) != 0);
}

void Script::Advance(Duration duration, Duration tick, bool drained, bool unread) {
  const Instant end = now_ + duration;
  while (now_ < end) {
    now_ += std::min<Duration>(tick, end - now_);
    Effects effects;
    for (const Peer& peer : peers_) {
      if (unread) core_->OnUnread(peer.id, now_);  // Closed ones, too.
    }
    core_->OnTick(now_, drained, effects);
    Take(std::move(effects));
    for (Peer& peer : peers_) {
      std::vector<std::uint64_t> late;
      for (const auto& [seq, until] : peer.waits) {
        if (until <= now_) late.push_back(seq);
      }
      for (const std::uint64_t seq : late) {
        if (peer.waits.contains(seq)) GiveUp(peer, seq);
      }
    }
  }
}

void Script::Start() {
  options_.make_secret = NumberedSecrets(++epoch_ * 1'000'000);
  core_ = std::make_unique<ServerCore>(options_, now_);
  for (const auto& [row, value] : rows_) {
    const Status restored = core_->Restore(row, value);
    Require(restored.ok(), restored.ToString());
  }
  Effects effects;
  const Status finished = core_->FinishRestore(now_, effects);
  Require(finished.ok(), finished.ToString());
  started_ = now_;
  Require(WithoutStore(core_->DumpRows()) == WithoutStore(rows_), "another store was restored");
  Take(std::move(effects));
  CheckRows();
  Require(StatusNumber("epoch") == epoch_, "an epoch is missing");
}

void Script::Restart() {
  const std::size_t members = core_->LiveMembers();
  for (Peer& peer : peers_) peer = {};
  options_.server_id = "another";  // The one that was kept goes on.
  Start();
  Require(core_->StatusJson(now_).find("\"server\":\"first\"") != std::string::npos,
          "the store has another name");
  Require(core_->LiveMembers() == members, "members got lost");
}

void Script::ExitProcess() {
  Effects effects;
  core_->OnProcessExit(1 + bytes_.Below(8), now_, effects);
  Take(std::move(effects));
}

}  // namespace resilient::store::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using resilient::store::fuzz::Bytes;
  using resilient::store::fuzz::Script;
  Script(Bytes(data, size)).Run();
  return 0;
}
