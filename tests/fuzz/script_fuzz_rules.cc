// What a script of script_fuzz.cc takes from the server's core, and the rules that it holds it to.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "runtime/base/log.h"
#include "store/core/codec.h"
#include "store/core/key_ops.h"
#include "tests/fuzz/script_fuzz.h"

namespace resilient::store::fuzz {
namespace {

bool IsMutation(const Op& op) {
  return IsKeyMutation(op) || std::holds_alternative<JoinOp>(op) ||
         std::holds_alternative<ReadyOp>(op) || std::holds_alternative<LeaveOp>(op) ||
         std::holds_alternative<ReportOp>(op) || std::holds_alternative<ExitReportOp>(op);
}

}  // namespace

void Require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what.c_str());
  std::abort();
}

Script::Peer* Script::FindPeer(ConnectionId id) {
  const auto found =
      std::find_if(peers_.begin(), peers_.end(), [id](const Peer& peer) { return peer.id == id; });
  return id == 0 || found == peers_.end() ? nullptr : &*found;
}

void Script::Take(Effects effects) {
  Keep(effects.write);
  for (const LogRecord& record : effects.log) TakeLog(record);
  for (const Effects::Outgoing& out : effects.send) {
    Peer* peer = FindPeer(out.connection);
    Require(peer != nullptr, StrCat("it speaks to connection ", out.connection));
    const Frame frame = EncodeServerMessage(out.message);
    Require(frame.body.size() <= kMessageBytesMax,
            StrCat("a message has ", frame.body.size(), " bytes"));
    if (const auto* reply = std::get_if<Reply>(&out.message)) {
      TakeReply(*peer, *reply);
    } else {
      TakeEvent(*peer, std::get<Event>(out.message));
    }
  }
  for (const ConnectionId id : effects.close) {
    Peer* peer = FindPeer(id);
    Require(peer != nullptr, StrCat("it closes connection ", id));
    *peer = {};
  }
}

void Script::Keep(const std::vector<Write>& writes) {
  for (const Write& write : writes) {
    Require(ParseRowName(write.row).has_value(), "no row's name: " + PrintableRow(write.row));
    if (write.value) {
      rows_[write.row] = *write.value;
    } else {
      rows_.erase(write.row);
    }
  }
}

void Script::TakeReply(Peer& peer, const Reply& reply) {
  Require(peer.due[reply.seq]-- > 0, StrCat("request ", reply.seq, " is answered unasked"));
  peer.waits.erase(reply.seq);
  if (peer.greeted) return TakeAnswer(peer, reply);
  if (!reply.status.ok()) return;
  peer.greeted = true;
  if (peer.hello.role == Role::kAdmin) return;
  Hear(peer);
  const auto line = [this, &peer](Role role) -> Line& {
    return lines_[{peer.hello.job, peer.hello.session, role}];
  };
  if (!reply.welcome->session_known) line(Role::kRequest) = line(Role::kControl) = {};
  peer.line = &line(peer.hello.role);
}

void Script::TakeAnswer(Peer& peer, const Reply& reply) {
  if (!peer.line || reply.seq == 0) return;
  Line& line = *peer.line;
  const auto sent = line.sent.find(reply.seq);
  if (line.confused || sent == line.sent.end()) return;
  const Op& op = sent->second.op;
  const std::string answer = EncodeServerMessage(reply).body;
  const auto known = line.answers.find(reply.seq);
  if (known != line.answers.end() && known->second == answer) return;
  const bool unknown = reply.status.code() == StatusCode::kOutcomeUnknown;
  if (known != line.answers.end() || unknown) {
    const bool may_go = options_.limits.result_bytes_per_job < kResultBytesPerJobMax;
    Require(may_go || reply.seq <= line.acknowledged,
            StrCat("request ", reply.seq, " is answered anew"));
    Require(unknown || !IsMutation(op), StrCat("request ", reply.seq, " is done again"));
    return;
  }
  if (IsMutation(op) || !reply.status.ok()) line.answers[reply.seq] = answer;
  Require(reply.revision == 0 || reply.revision >= revision_, "a revision before the last");
  revision_ = std::max(revision_, reply.revision);
  const auto* add = std::get_if<AddOp>(&op);
  if (add && add->key == kCounter && reply.status.ok() && counters_clean_) {
    Require(reply.number <= adds_[peer.hello.job], "an add was applied twice");
  }
}

void Script::TakeEvent(Peer& peer, const Event& event) {
  Require(peer.greeted && peer.hello.role == Role::kControl, "an event on another connection");
  const std::string& job = peer.hello.job;
  View& last = views_[job];
  if (const View* view = ViewOf(event)) {
    const auto [known, first] = secrets_.try_emplace({job, view->generation}, view->secret);
    Require(known->second == view->secret, "two views of one generation");
    Require(!first || view->generation > last.generation, "an old generation");
    for (std::size_t i = 0; i < view->members.size(); ++i) {
      Require(view->members[i].rank == static_cast<int>(i), "a view out of order");
    }
    if (first) last = *view;
  } else if (const auto* running = std::get_if<RunningEvent>(&event)) {
    Require(secrets_.contains({job, running->generation}), "a generation runs without a view");
  }
}

// Nobody is lost for silence before the lease has ended.
void Script::TakeLog(const LogRecord& record) {
  if (record.event != "expiry") return;
  const auto heard =
      heard_.find({std::string(record.Value("job")), std::string(record.Value("incarnation"))});
  // Of two sessions of a process the other one may have been heard.
  if (heard == heard_.end() || heard->second.size() != 1) return;
  Require(now_ - std::max(heard->second.begin()->second, started_) >= kTtl,
          "lost before its time: " + ToText(record));
}

// ---- Checks ----

void Script::CheckRows() {
  const Rows rows = core_->DumpRows();
  if (rows == rows_) return;
  for (const auto& [row, value] : rows) {
    const auto kept = rows_.find(row);
    Require(kept != rows_.end(), "not written: " + PrintableRow(row));
    Require(kept->second == value, "written as it was: " + PrintableRow(row));
  }
  for (const auto& [row, value] : rows_) {
    Require(rows.contains(row), "not removed: " + PrintableRow(row));
  }
}

void Script::CheckEnd() {
  Require(StatusNumber("revision") >= revision_, "the revision went back");
  for (Peer& peer : peers_) {
    if (peer.id != 0) Cut(peer);
  }
  Require(core_->Gauges().waits == 0, "a wait without a connection");
  Advance(kPatience + 3 * kTtl + kMemory + kPatience, 3 * kTickInterval, true);
  Require(core_->LiveMembers() == 0, "a lease without end");
  Require(core_->Gauges().sessions == 0, "a session without end");
  CheckRows();
}

std::uint64_t Script::StatusNumber(const char* name) const {
  const std::string status = core_->StatusJson(now_);
  const std::string label = StrCat("\"", name, "\":");
  const std::size_t at = status.find(label);
  Require(at != std::string::npos, StrCat("the status has no ", name));
  return std::strtoull(status.c_str() + at + label.size(), nullptr, 10);
}

}  // namespace resilient::store::fuzz
