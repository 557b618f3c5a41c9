// What Server does with the effects of the core's steps, and with the disk that keeps them.

#include <algorithm>
#include <utility>
#include <variant>

#include <nlohmann/json.hpp>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "store/core/codec.h"
#include "store/server/server.h"

namespace resilient::store {
namespace {

// Large answers are handed to the kernel as they come, so that the queue limit counts only what the
// peer really leaves unread.
constexpr std::size_t kFlushAtBytes = 256u << 10;
// What a person wants to know of a store that was restored.
struct StoreSummary {
  std::string server;
  std::uint64_t epoch = 0;
  std::size_t jobs = 0;
  std::uint64_t sessions = 0;
  std::uint64_t keys = 0;
};

StoreSummary Summarize(const std::string& status_json) {
  const nlohmann::json status = nlohmann::json::parse(status_json);
  StoreSummary summary;
  summary.server = status.value("server", "");
  summary.epoch = status.value("epoch", std::uint64_t{0});
  summary.sessions = status.value("sessions", std::uint64_t{0});
  for (const nlohmann::json& job : status.value("jobs", nlohmann::json::array())) {
    ++summary.jobs;
    summary.keys += job.value("keys", std::uint64_t{0});
  }
  return summary;
}

// What the holder of one job's token is told of the store.
std::string OnlyJob(const std::string& status_json, const std::string& job) {
  nlohmann::json status = nlohmann::json::parse(status_json);
  nlohmann::json kept = nlohmann::json::array();
  for (nlohmann::json& one : status["jobs"]) {
    if (one.value("job", "") == job) kept.push_back(std::move(one));
  }
  status["jobs"] = std::move(kept);
  return status.dump();
}

}  // namespace

Status Server::Restore() {
  RESILIENT_CHECK(engine_ != nullptr && core_ == nullptr);
  MakeCore(clock_.Now());
  std::size_t rows = 0;
  Status restored;
  RESILIENT_RETURN_IF_ERROR(engine_->Load([&](std::string_view name, std::string_view value) {
    ++rows;
    if (restored.ok()) restored = core_->Restore(name, value);
  }));
  RESILIENT_RETURN_IF_ERROR(restored);
  Effects effects;
  const Instant now = clock_.Now();
  RESILIENT_RETURN_IF_ERROR(core_->FinishRestore(now, effects));
  RESILIENT_RETURN_IF_ERROR(engine_->Commit(effects.write));
  RESILIENT_RETURN_IF_ERROR(engine_->Tend());
  const StoreSummary summary = Summarize(core_->StatusJson(now));
  server_id_ = summary.server;
  RESILIENT_LOG(kInfo, rows == 0 ? "made a new store" : "restored the store", ": epoch ",
                summary.epoch, ", ", summary.jobs, " jobs, ", summary.sessions, " sessions, ",
                summary.keys, " keys");
  persister_ = std::make_unique<Persister>(
      loop_, std::move(engine_),
      PersisterEvents{.on_kept = [this](std::uint64_t ticket) { OnKept(ticket); },
                      .on_failure = options_.on_storage_failure},
      options_.crash_points);
  restored_ = std::move(effects);
  return Status::Ok();
}

void Server::Apply(Effects effects) {
  if (persister_ == nullptr || (effects.write.empty() && held_.empty())) return Perform(effects);
  SendUnordered(effects);
  if (IsEmpty(effects)) return;
  const std::size_t write_bytes = BytesOf(effects.write);
  const std::uint64_t ticket =
      effects.write.empty() ? persister_->last_ticket() : persister_->Add(std::move(effects.write));
  held_.Push(ticket, write_bytes, std::move(effects));
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
    SendTo(outgoing);
    return true;
  });
}

void Server::OnKept(std::uint64_t ticket) {
  while (std::optional<Effects> effects = held_.Pop(ticket)) Perform(*effects);
  if (held_.bytes() < kHeldBytesMax) WakeStalled();
  if (shutting_down_ && held_.empty()) EndConnections();
  Settle();
}

bool Server::MustWait(const Connection& connection) const {
  if (shutting_down_) return true;
  // Whoever is silent loses his lease, so control connections are read for longer.
  const bool request = connection.greeted() && connection.role() == Role::kRequest;
  return held_.bytes() >= (request ? kHeldBytesMax : 2 * kHeldBytesMax);
}

void Server::WakeStalled() {
  if (stalled_.empty() || shutting_down_) return;
  deferred_.merge(stalled_);
  stalled_.clear();
  UpdateIdle();
}

void Server::Perform(Effects& effects) {
  // Before the answer to the leave goes out: its receiver may want the port for another backend.
  if (effects.stop_listening && listener_ != nullptr) {
    RESILIENT_LOG(kInfo, "stopped listening on ", FormatHostPort(address_),
                  ": the process that hosts this store has left");
    listener_.reset();
    connection_waiting_ = false;
  }
  for (const std::string& line : effects.log) RESILIENT_LOG(kInfo, line);
  for (const Effects::Outgoing& outgoing : effects.send) SendTo(outgoing);
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
    before_hello_.erase(id);
    ending_.insert(id);
    connection->BeginEnd(clock_.Now());
    if (connection->closed()) Drop(*connection);
  }
  if (effects.drain) Shutdown("it is drained");
  if (effects.last_member_left && options_.linger > Duration::zero()) {
    Shutdown("the last member has left");
  }
}

void Server::SendTo(const Effects::Outgoing& outgoing) {
  Connection* connection = Find(outgoing.connection);
  if (connection == nullptr || connection->ending()) return;
  const Reply* reply = std::get_if<Reply>(&outgoing.message);
  const std::string* job = access_.ConfinedTo(outgoing.connection);
  if (job != nullptr && reply != nullptr && !reply->status_json.empty()) {
    Reply confined = *reply;
    confined.status_json = OnlyJob(reply->status_json, *job);
    connection->Send(EncodeServerMessage(confined));
  } else {
    connection->Send(EncodeServerMessage(outgoing.message));
  }
  if (reply != nullptr && !reply->welcome.server.empty()) connection->SetWelcomed();
  touched_.insert(outgoing.connection);
  if (connection->UnflushedBytes() < kFlushAtBytes || connection->Flush()) return;
  const std::size_t queued = connection->QueuedBytes();
  if (queued > kOutputHardLimit) {
    Cut(*connection, StrCat("it does not read: ", queued >> 20, " MiB wait for it, the limit is ",
                            kOutputHardLimit >> 20, " MiB"));
  } else {
    Drop(*connection);
  }
}

void Server::FlushTouched() {
  while (!touched_.empty()) {
    const ConnectionId id = *touched_.begin();
    touched_.erase(touched_.begin());
    Connection* connection = Find(id);
    if (connection == nullptr) continue;
    if (!connection->Flush()) {
      Drop(*connection);
      continue;
    }
    // Room again without a word from libuv: everything fitted at once.
    if (connection->WantsInput() && connection->HasFrame()) deferred_.insert(id);
    connection->UpdateReading();
  }
  UpdateIdle();
}

void Server::Settle() {
  FlushTouched();
  while (!disconnected_.empty()) {
    const ConnectionId id = disconnected_.back();
    disconnected_.pop_back();
    if (!shutting_down_) {
      Effects effects;
      core_->OnDisconnect(id, clock_.Now(), effects);
      Apply(std::move(effects));
    }
    FlushTouched();
  }
  if (persister_ != nullptr) persister_->Flush();
  if (ending_connections_ && connections_.empty()) Finish();
}

}  // namespace resilient::store
