#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "store/tcpstore/client.h"
#include "tests/unit/store/core_fixture.h"
#include "tests/unit/tcpstore/wire.h"

namespace resilient::store::tcpstore {

// Goal: torch's clients against the real core. Method: as the server does it, without sockets: what
// a client says is bytes, what it gets is bytes; each step of the core is checked as CoreFixture
// does.
class ClientFixture : public CoreFixture {
 protected:
  struct Peer {
    explicit Peer(ConnectionId connection) : id(connection), client(connection) {}
    ConnectionId id;
    Client client;
    std::string answers;
    Status ended;  // Why its connection had to end.
  };

  // A client that has said VALIDATE.
  Peer& NewPeer() {
    const ConnectionId id = Connect();
    Peer& peer = peers_.emplace(id, id).first->second;
    Say(peer, kValidate);
    EXPECT_TRUE(peer.ended.ok()) << peer.ended.ToString();
    return peer;
  }

  void Say(Peer& peer, std::string_view bytes) {
    Status done = peer.client.Feed(bytes);
    while (peer.client.HasQuery() && peer.ended.ok()) {
      Effects effects;
      const Status answered = peer.client.Answer({*core_, now_, effects});
      Deliver(std::move(effects));
      done = answered.ok() ? peer.client.status() : answered;
    }
    if (!done.ok()) peer.ended = done;
  }

  // What it answers at once.
  std::string Ask(Peer& peer, std::string_view bytes) {
    peer.answers.clear();
    Say(peer, bytes);
    return Take(peer);
  }
  // What has come since the last answer was looked at.
  static std::string Take(Peer& peer) { return std::exchange(peer.answers, {}); }

  std::string Get(Peer& peer, const std::string& key) {
    return Ask(peer, Texts(QueryType::kGet, {key}));
  }
  void Set(Peer& peer, const std::string& key, const std::string& value) {
    EXPECT_EQ(Ask(peer, Texts(QueryType::kSet, {key, value})), "");
  }
  std::string Add(Peer& peer, const std::string& key, std::int64_t amount) {
    return Ask(peer, Texts(QueryType::kAdd, {key}) + Number(amount));
  }
  std::string Wait(Peer& peer, const std::vector<std::string>& keys) {
    return Ask(peer, Keys(QueryType::kWait, keys));
  }
  void Push(Peer& peer, const std::string& key, const std::string& item) {
    EXPECT_EQ(Ask(peer, Texts(QueryType::kQueuePush, {key, item})), "");
  }
  std::string Pop(Peer& peer, const std::string& key) {
    return Ask(peer, Texts(QueryType::kQueuePop, {key}));
  }
  std::string Cancel(Peer& peer) { return Ask(peer, Byte(QueryType::kCancelWait)); }

  // As Advance, and what the ticks bring is delivered.
  void Pass(Duration duration) {
    for (const Instant end = now_ + duration; now_ < end;) {
      now_ += kTickInterval;
      Effects effects;
      core_->OnTick(now_, /*input_drained=*/true, effects);
      Deliver(std::move(effects));
    }
  }

  // Its connection ends.
  void End(Peer& peer) {
    if (std::optional<Request> last = peer.client.LastRequest()) {
      Effects effects;
      core_->OnRequest(peer.id, std::move(*last), now_, effects);
      Deliver(std::move(effects));
    }
    Effects effects;
    core_->OnDisconnect(peer.id, now_, effects);
    Deliver(std::move(effects));
    peers_.erase(peer.id);
  }

  void Deliver(Effects effects) {
    for (std::size_t i = 0; i < effects.send.size(); ++i) {  // They may become more.
      const auto peer = peers_.find(effects.send[i].connection);
      if (peer == peers_.end()) continue;
      const Reply reply = std::get<Reply>(std::move(effects.send[i].message));
      if (IsBytes(reply)) {
        peer->second.answers += reply.value;
        continue;
      }
      const Result<std::string> bytes =
          peer->second.client.OnWaitEnded(reply, {*core_, now_, effects});
      if (bytes.ok()) {
        peer->second.answers += *bytes;
      } else {
        peer->second.ended = bytes.status();
      }
    }
    std::erase_if(effects.send,
                  [this](const auto& out) { return peers_.contains(out.connection); });
    Collect(std::move(effects));
  }

  std::size_t Waits() const { return core_->Gauges().waits; }

  std::map<ConnectionId, Peer> peers_;
};

}  // namespace resilient::store::tcpstore
