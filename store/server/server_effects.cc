// What Server does with the effects of the core's steps, and with the disk that keeps them.

#include <algorithm>
#include <utility>
#include <variant>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "store/server/server.h"

namespace resilient::store {
namespace {

constexpr std::size_t kRowsBetweenPolls = 1024;  // While restoring, for those who watch.

}  // namespace

Status Server::Restore() {
  RESILIENT_CHECK(engine_ != nullptr && core_ == nullptr);
  MakeCore(clock_.Now());
  std::size_t rows = 0;
  Status restored;
  RESILIENT_RETURN_IF_ERROR(engine_->Load([&](std::string_view name, std::string_view value) {
    if (++rows % kRowsBetweenPolls == 0) OnRestoring(rows);
    if (restored.ok()) restored = core_->Restore(name, value);
  }));
  RESILIENT_RETURN_IF_ERROR(restored);
  Effects effects;
  RESILIENT_RETURN_IF_ERROR(core_->FinishRestore(clock_.Now(), effects));
  RESILIENT_RETURN_IF_ERROR(engine_->Commit(effects.write));
  RESILIENT_RETURN_IF_ERROR(engine_->Tend());
  server_id_ = core_->server_id();
  const CoreGauges held = core_->Gauges();
  RESILIENT_LOG_RECORD(
      kInfo, "restore", {{"epoch", std::to_string(held.epoch)}},
      StrCat(rows == 0 ? "made a new store" : "restored the store", ": epoch ", held.epoch, ", ",
             held.jobs, " jobs, ", held.sessions, " sessions, ", held.keys, " keys"));
  persister_ = std::make_unique<Persister>(
      loop_, std::move(engine_),
      PersisterEvents{.on_kept = [this](std::uint64_t ticket) { OnKept(ticket); },
                      .on_failure = options_.on_storage_failure},
      options_.crash_points, CommitMeter{&clock_, &metrics_});
  restored_ = std::move(effects);
  return Status::Ok();
}

void Server::Apply(Effects effects, std::optional<Instant> begun) {
  if (tcpstore_clients_ > 0) AnswerTcpStore(effects);
  if (persister_ == nullptr || (effects.write.empty() && held_.empty())) {
    Perform(effects);
    return Answered(begun);
  }
  SendUnordered(effects);
  if (IsEmpty(effects)) return;
  const std::size_t write_bytes = BytesOf(effects.write);
  const std::uint64_t ticket =
      effects.write.empty() ? persister_->last_ticket() : persister_->Add(std::move(effects.write));
  held_.Push(ticket, write_bytes, std::move(effects), begun);
}

void Server::Answered(std::optional<Instant> begun) {
  if (!begun) return;
  const std::chrono::duration<double> took = clock_.Now() - *begun;
  metrics_.request_seconds.Observe(took.count());
}

// A slow disk must not look like a dead server to those who beat, nor a live member dead to the
// server. These messages tell of nothing that could be lost.
void Server::SendUnordered(Effects& effects) {
  std::erase_if(effects.send, [this](const Effects::Outgoing& outgoing) {
    const Event* event = std::get_if<Event>(&outgoing.message);
    if (event == nullptr || !(std::holds_alternative<HeartbeatAckEvent>(*event) ||
                              std::holds_alternative<PingEvent>(*event))) {
      return false;
    }
    const Connection* connection = Find(outgoing.connection);
    if (connection == nullptr || !connection->welcomed()) return false;
    SendTo(Effects::Outgoing(outgoing));
    return true;
  });
}

void Server::OnKept(std::uint64_t ticket) {
  const ScopedObservation step(clock_, metrics_.step_seconds);
  while (std::optional<HeldEffects::Step> step = held_.Pop(ticket)) {
    Perform(step->effects);
    Answered(step->begun);
  }
  if (held_.bytes() < options_.limits.held_bytes) WakeStalled();
  if (shutting_down_ && held_.empty()) EndConnections();
  Settle();
}

void Server::Perform(Effects& effects) {
  // Before the answer to the leave goes out: its receiver may want the port for another backend.
  if (effects.listens) *effects.listens ? ListenAgain() : StopListening();
  for (const LogRecord& record : effects.log) RESILIENT_LOG_RECORD(kInfo, record);
  for (Effects::Outgoing& outgoing : effects.send) SendTo(std::move(outgoing));
  for (const std::uint64_t watch : effects.unwatch) {
    processes_.Remove(watch);
    std::erase_if(exits_, [watch](const PendingExit& exit) { return exit.watch == watch; });
  }
  if (!shutting_down_) {
    for (const Effects::WatchProcess& watch : effects.watch) {
      processes_.Add(watch.watch, watch.process);
    }
  }
  for (const ConnectionId id : effects.close) {
    Connection* connection = Find(id);
    if (connection == nullptr || connection->ending()) continue;
    newcomers_.Remove(id);
    ending_.insert(id);
    connection->BeginEnd(clock_.Now());
    if (connection->closed()) Drop(*connection);
  }
  if (effects.drain) Shutdown("it is drained");
  if (effects.last_member_left && options_.linger > Duration::zero()) {
    all_left_ = true;
    EndAfterTheLast();
  }
}

void Server::Settle() {
  FlushTouched(kFlushAtOnce);
  while (!disconnected_.empty()) {
    const ConnectionId id = disconnected_.back();
    disconnected_.pop_back();
    if (!shutting_down_) {
      Effects effects;
      if (auto last = last_requests_.extract(id)) {
        core_->OnRequest(id, std::move(last.mapped()), clock_.Now(), effects);
      }
      core_->OnDisconnect(id, clock_.Now(), effects);
      Apply(std::move(effects));
    }
    FlushTouched(kFlushAtOnce);
  }
  if (persister_ != nullptr) persister_->Flush();
  if (ending_connections_ && connections_.empty()) Finish();
}

}  // namespace resilient::store
