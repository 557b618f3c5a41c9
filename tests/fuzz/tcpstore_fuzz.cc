// Goal: no bytes of a TCPStore client crash the server or make it forget its limits, how they are
// cut never matters, and a client that ends leaves nothing waiting. Method: the first byte seeds
// the cutting, the rest is the stream of one client behind its greeting. One core gets it whole,
// one in pieces, and both answer the same; in a third another client says the same at the same
// time.
#include "store/tcpstore/client.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "runtime/base/check.h"
#include "runtime/base/random.h"
#include "tests/numbered_secrets.h"

namespace {

using resilient::Instant;
using resilient::Random;
using resilient::Result;
using resilient::Status;
using resilient::store::ConnectionId;
using resilient::store::CoreOptions;
using resilient::store::Effects;
using resilient::store::Reply;
using resilient::store::Request;
using resilient::store::ServerCore;
using resilient::store::tcpstore::Client;
using resilient::store::tcpstore::IsBytes;

constexpr std::string_view kGreeting("\x00\xce\xf7\x85\x3c", 5);
constexpr std::size_t kBytesPerJob = 1u << 20;

CoreOptions Options() {
  CoreOptions options;
  options.server_id = "fuzz";
  options.make_secret = resilient::store::NumberedSecrets();
  options.durable = true;
  options.limits.bytes_per_job = kBytesPerJob;
  options.limits.keys_per_job = 64;
  options.limits.queue_items = 64;
  return options;
}

struct Peer {
  explicit Peer(ConnectionId id) : client(id) {}
  Client client;
  std::string answers;
  Status ended;
};

// A server without sockets.
class Server {
 public:
  Server() : core_(Options(), Instant{}) {}

  Peer& Connect(ConnectionId id) {
    core_.OnConnect(id, Instant{});
    Peer& peer = peers_.emplace(id, id).first->second;
    Say(peer, kGreeting);
    RESILIENT_CHECK(peer.ended.ok());
    return peer;
  }

  void Say(Peer& peer, std::string_view bytes) {
    if (!peer.ended.ok()) return;
    peer.ended = peer.client.Feed(bytes);
    while (peer.client.HasQuery()) {
      Effects effects;
      const Status done = peer.client.Answer({core_, Instant{}, effects});
      Deliver(effects);
      peer.ended = done.ok() ? peer.client.status() : done;
      if (!done.ok()) break;
    }
    RESILIENT_CHECK(peer.ended.ok() || !peer.ended.message().empty());
    RESILIENT_CHECK(core_.Gauges().bytes <= kBytesPerJob);
  }

  // All clients end.
  void Close() {
    while (!peers_.empty()) {
      const auto peer = peers_.begin();
      if (std::optional<Request> last = peer->second.client.LastRequest()) {
        Effects effects;
        core_.OnRequest(peer->first, std::move(*last), Instant{}, effects);
        Deliver(effects);
      }
      Effects effects;
      core_.OnDisconnect(peer->first, Instant{}, effects);
      peers_.erase(peer);
    }
    RESILIENT_CHECK(core_.Gauges().waits == 0);
    RESILIENT_CHECK(core_.Gauges().sessions == 0);
  }

 private:
  void Deliver(Effects& effects) {
    for (std::size_t i = 0; i < effects.send.size(); ++i) {  // They may become more.
      const auto peer = peers_.find(effects.send[i].connection);
      RESILIENT_CHECK(peer != peers_.end());
      const Reply reply = std::get<Reply>(std::move(effects.send[i].message));
      if (IsBytes(reply)) {
        peer->second.answers += reply.value;
        continue;
      }
      const Result<std::string> bytes =
          peer->second.client.OnWaitEnded(reply, {core_, Instant{}, effects});
      if (bytes.ok()) peer->second.answers += *bytes;
    }
  }

  ServerCore core_;
  std::map<ConnectionId, Peer> peers_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const std::string_view stream(reinterpret_cast<const char*>(data + 1), size - 1);
  Random random(data[0]);

  Server whole;
  Peer& at_once = whole.Connect(1);
  whole.Say(at_once, stream);

  Server pieces;
  Server crowded;
  Peer& cut = pieces.Connect(1);
  Peer& first = crowded.Connect(1);
  Peer& second = crowded.Connect(2);
  for (std::string_view rest = stream; !rest.empty();) {
    const std::size_t piece = std::min<std::size_t>(1 + random.Below(40), rest.size());
    pieces.Say(cut, rest.substr(0, piece));
    crowded.Say(first, rest.substr(0, piece));
    crowded.Say(second, rest.substr(0, piece));
    rest.remove_prefix(piece);
  }
  RESILIENT_CHECK(at_once.answers == cut.answers);
  RESILIENT_CHECK(at_once.ended.message() == cut.ended.message());
  whole.Close();
  pieces.Close();
  crowded.Close();
  return 0;
}
