#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "store/core/server_core.h"
#include "store/core/storage.h"
#include "tests/numbered_secrets.h"

namespace resilient::store {

// Of joins in tests that end before it.
inline constexpr Duration kWait = std::chrono::seconds(60);

// Goal: drive the server core by hand. Method: virtual time that advances in ticks, connections
// that are numbers, and what the core sent, sorted by connection. The store is durable: in each
// step of each test what was written is compared with what a new store would need, and a second
// store is made of it.
class CoreFixture : public ::testing::Test {
 protected:
  explicit CoreFixture(CoreOptions options = Options()) { Restart(std::move(options)); }

  // A new server that knows nothing; connections of the old one are void.
  void Restart(CoreOptions options = Options()) {
    durable_ = options.durable;
    rows_.clear();
    core_ = std::make_unique<ServerCore>(std::move(options), now_);
  }
  // The server has crashed, and starts again from what was kept.
  void Recover(CoreOptions options = Options()) {
    options.server_id = "server-2";
    options.make_secret = NumberedSecrets(1'000);
    const Rows kept = rows_;
    core_ = std::make_unique<ServerCore>(std::move(options), now_);
    for (const auto& [row, value] : kept) {
      const Status restored = core_->Restore(row, value);
      ASSERT_TRUE(restored.ok()) << restored.ToString();
    }
    watched_.clear();
    Effects effects;
    const Status finished = core_->FinishRestore(now_, effects);
    ASSERT_TRUE(finished.ok()) << finished.ToString();
    Collect(std::move(effects));
  }

  static CoreOptions Options() {
    CoreOptions options;
    options.server_id = "server-1";
    options.durable = true;
    options.make_secret = NumberedSecrets();
    return options;
  }

  static Hello HelloOf(int process, Role role, std::string session = {}) {
    Hello hello;
    hello.job = "job";
    hello.session = session.empty() ? "s" + std::to_string(process) : std::move(session);
    hello.incarnation = "i" + std::to_string(process);
    hello.role = role;
    hello.process.host = "h" + std::to_string(process);
    hello.process.boot_id = "boot";
    hello.process.pid_namespace = "ns";
    hello.process.pid = 100 + process;
    hello.process.start_time = 1000 + static_cast<std::uint64_t>(process);
    return hello;
  }

  static JoinRequest JoinOf(int rank, int size, Duration seat_wait = {}) {
    JoinRequest request;
    request.rank = rank;
    request.world_size = size;
    request.endpoint = "e" + std::to_string(rank);
    request.join_timeout = std::chrono::seconds(60);
    request.seat_wait = seat_wait;
    return request;
  }

  // A connection without Hello.
  ConnectionId Connect() {
    core_->OnConnect(++last_connection_, now_);
    return last_connection_;
  }

  // A connection that said Hello; its reply is taken.
  ConnectionId Open(const Hello& hello) {
    const ConnectionId connection = Connect();
    const Reply reply = Ask(connection, Op(hello), 0);
    EXPECT_TRUE(reply.status.ok()) << reply.status.ToString();
    return connection;
  }
  ConnectionId OpenControl(int process) { return Open(HelloOf(process, Role::kControl)); }
  ConnectionId OpenRequest(int process) { return Open(HelloOf(process, Role::kRequest)); }

  void Send(ConnectionId connection, Request request) {
    Effects effects;
    core_->OnRequest(connection, request, now_, effects);
    Collect(std::move(effects));
  }
  void Send(ConnectionId connection, Op op, std::optional<std::uint64_t> seq = {},
            std::uint64_t scope = 0, std::uint64_t generation = 0) {
    Request request;
    request.seq = seq ? *seq : ++last_seq_;
    request.scope = scope;
    request.generation = generation;
    request.op = std::move(op);
    Send(connection, std::move(request));
  }
  // Sends and takes the reply.
  Reply Ask(ConnectionId connection, Op op, std::optional<std::uint64_t> seq = {},
            std::uint64_t scope = 0, std::uint64_t generation = 0) {
    const std::uint64_t number = seq ? *seq : ++last_seq_;
    Send(connection, std::move(op), number, scope, generation);
    std::optional<Reply> reply = TakeReply(connection, number);
    EXPECT_TRUE(reply) << "no reply to request " << number;
    return reply.value_or(Reply{});
  }

  void Close(ConnectionId connection) {
    Effects effects;
    core_->OnDisconnect(connection, now_, effects);
    Collect(std::move(effects));
  }
  void Tick(bool drained = true) {
    Effects effects;
    core_->OnTick(now_, drained, effects);
    Collect(std::move(effects));
  }
  // A member's word that its link to `accused` has ended.
  static Report Broken(int accused, std::uint64_t generation = 1) {
    Report report;
    report.kind = ReportKind::kLinkLost;
    report.generation = generation;
    report.accused_rank = accused;
    report.status = Status(StatusCode::kCommFailed, "connection reset");
    return report;
  }
  // Takes the fence that it was sent: its cause.
  std::string CauseAt(ConnectionId connection) {
    const std::optional<Fence> fence = Take<Fence>(connection);
    return fence ? fence->cause.message() : "no fence";
  }
  // In ticks, `beating` connections sending a heartbeat at each.
  void Advance(Duration duration, const std::vector<ConnectionId>& beating = {}) {
    const Instant end = now_ + duration;
    while (now_ < end) {
      now_ += std::min<Duration>(kTickInterval, end - now_);
      for (const ConnectionId connection : beating) Send(connection, HeartbeatOp{1}, 0);
      Tick();
    }
  }

  std::optional<Reply> TakeReply(ConnectionId connection, std::uint64_t seq) {
    auto& replies = replies_[connection];
    for (auto reply = replies.begin(); reply != replies.end(); ++reply) {
      if (reply->seq != seq) continue;
      Reply taken = std::move(*reply);
      replies.erase(reply);
      return taken;
    }
    return std::nullopt;
  }
  // The oldest event of a kind that was pushed and not taken; others stay.
  template <typename Kind>
  std::optional<Kind> Take(ConnectionId connection) {
    auto& events = events_[connection];
    for (auto event = events.begin(); event != events.end(); ++event) {
      if (!std::holds_alternative<Kind>(*event)) continue;
      Kind taken = std::get<Kind>(std::move(*event));
      events.erase(event);
      return taken;
    }
    return std::nullopt;
  }
  bool Closed(ConnectionId connection) const {
    for (const ConnectionId closed : closed_) {
      if (closed == connection) return true;
    }
    return false;
  }
  void Forget() {
    replies_.clear();
    events_.clear();
  }

  // Processes 0..n-1 join as ranks of one world and get ready; their control connections.
  std::vector<ConnectionId> Run(int n, Duration seat_wait = {}) {
    std::vector<ConnectionId> control;
    for (int i = 0; i < n; ++i) control.push_back(OpenControl(i));
    for (int i = 0; i < n; ++i) Send(control[At(i)], JoinOp{JoinOf(i, n, seat_wait)});
    BecomeReady(control);
    return control;
  }
  // Takes a view on each, answers Ready, takes Running. The generation.
  std::uint64_t BecomeReady(const std::vector<ConnectionId>& control) {
    std::uint64_t generation = 0;
    for (const ConnectionId connection : control) {
      const std::optional<View> view = Take<View>(connection);
      EXPECT_TRUE(view);
      if (!view) return 0;
      generation = view->generation;
      Send(connection, ReadyOp{generation});
    }
    for (const ConnectionId connection : control) {
      const auto running = Take<RunningEvent>(connection);
      EXPECT_TRUE(running && running->generation == generation);
    }
    return generation;
  }
  static std::size_t At(int i) { return static_cast<std::size_t>(i); }

  Instant now_{std::chrono::hours(1)};
  std::unique_ptr<ServerCore> core_;
  std::vector<Effects::WatchProcess> watched_;
  std::vector<std::uint64_t> unwatched_;
  std::vector<ConnectionId> closed_;
  bool listens_ = true;
  bool last_member_left_ = false;
  std::uint64_t last_seq_ = 0;
  Rows rows_;  // What was kept.

 private:
  // Of large stores only now and then.
  static constexpr std::size_t kRowsPerSkip = 64;

  static Rows WithoutStore(Rows rows) {
    rows.erase(StoreRow());
    return rows;
  }
  void Keep(const std::vector<Write>& writes) {
    for (const Write& write : writes) {
      if (write.value) {
        rows_[write.row] = *write.value;
      } else {
        rows_.erase(write.row);
      }
    }
    if (++kept_ % (1 + rows_.size() / kRowsPerSkip) != 0) return;
    const Rows rows = core_->DumpRows();
    for (const auto& [row, value] : rows) {
      const auto kept = rows_.find(row);
      ASSERT_NE(kept, rows_.end()) << "not written: " << PrintableRow(row);
      ASSERT_EQ(kept->second, value) << "written as it was: " << PrintableRow(row);
    }
    for (const auto& [row, value] : rows_) {
      ASSERT_TRUE(rows.contains(row)) << "not removed: " << PrintableRow(row);
    }
    ServerCore second(Options(), now_);
    for (const auto& [row, value] : rows) {
      const Status restored = second.Restore(row, value);
      ASSERT_TRUE(restored.ok()) << restored.ToString();
    }
    ASSERT_TRUE(WithoutStore(second.DumpRows()) == WithoutStore(rows));
    Effects effects;
    const Status finished = second.FinishRestore(now_, effects);
    ASSERT_TRUE(finished.ok()) << finished.ToString();
    ASSERT_TRUE(WithoutStore(second.DumpRows()) == WithoutStore(rows));
    ASSERT_EQ(second.LiveMembers(), core_->LiveMembers());
  }

 protected:
  void Collect(Effects effects) {
    if (durable_) Keep(effects.write);
    for (Effects::Outgoing& out : effects.send) {
      if (auto* reply = std::get_if<Reply>(&out.message)) {
        replies_[out.connection].push_back(std::move(*reply));
      } else {
        const View* view = ViewOf(std::get<Event>(out.message));  // As it is once decoded.
        events_[out.connection].push_back(
            view != nullptr ? Event(*view) : std::get<Event>(std::move(out.message)));
      }
    }
    closed_.insert(closed_.end(), effects.close.begin(), effects.close.end());
    watched_.insert(watched_.end(), effects.watch.begin(), effects.watch.end());
    unwatched_.insert(unwatched_.end(), effects.unwatch.begin(), effects.unwatch.end());
    listens_ = effects.listens.value_or(listens_);
    last_member_left_ = last_member_left_ || effects.last_member_left;
  }

 private:
  bool durable_ = false;
  std::uint64_t kept_ = 0;
  ConnectionId last_connection_ = 0;
  std::map<ConnectionId, std::vector<Reply>> replies_;
  std::map<ConnectionId, std::vector<Event>> events_;
};

}  // namespace resilient::store
