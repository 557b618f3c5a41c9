#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "runtime/base/random.h"
#include "runtime/comm/shm_stream.h"
#include "runtime/comm/wire.h"
#include "runtime/net/socket.h"

namespace resilient {

class Connector;

// Told by a Connector, on the loop.
class ConnectorListener {
 public:
  virtual ~ConnectorListener() = default;
  // The peer has accepted; the connector is done.
  virtual void OnConnected(Connector& connector, std::unique_ptr<ByteStream> stream) = 0;
  // The peer has left this group; the connector is done.
  virtual void OnPeerLeft(Connector& connector) = 0;
  // The peer has made the group of other ranks; the connector is done.
  virtual void OnOtherRanks(Connector& connector, const Status& mismatch) = 0;
  // One more attempt has failed; the next one follows by itself.
  virtual void OnAttemptFailed(Connector& connector, const Status& why) = 0;
};

// Makes one connection to a peer: connect, send the hello, wait for the reply. The peer may not be
// there yet, may not know the group yet, or may be dead; who can tell is the membership service, so
// this tries for ever, with growing delays. Each side proves to the other that it knows the secret
// of the view: what answers without is another program, and the attempt has failed. The peer
// chooses whether the stream goes through the shared memory that is offered with it. Owner: a
// group. Thread: loop-confined.
class Connector {
 public:
  // `address` as in Endpoint; `offer` may be null. The listener outlives the connector.
  Connector(ConnectorListener& listener, std::string address, Hello hello, std::string secret,
            std::unique_ptr<ShmStreamOffer> offer, std::uint64_t seed);

  int peer() const { return peer_; }
  const Hello& hello() const { return hello_; }
  // Of the hello of this attempt. REQUIRES: one has been sent.
  std::string_view proof() const { return ProofOf(greeting_); }
  bool done() const { return stage_ == Stage::kDone; }

  // What poll() shall wait for; fd() is -1 while waiting for the next attempt.
  int fd() const { return socket_.get(); }
  short Interest() const;
  // When OnTime wants to be called; kNever when only the socket matters.
  Instant NextTime() const;

  void OnReady(Instant now);
  void OnTime(Instant now);
  // Gives the stream away without waiting for the reply: for a goodbye to a peer that does not know
  // the group yet. Null when there is no connection that has said hello.
  std::unique_ptr<ByteStream> TakeStreamEarly();
  // No more attempts and no callback.
  void Cancel();

 private:
  enum class Stage { kWaiting, kConnecting, kSendingHello, kAwaitingReply, kDone };

  void Start(Instant now);
  // The hello of a new attempt, encoded.
  std::string Greeting() const;
  void SendHello(Instant now);
  void ReadReply(Instant now);
  void OnReply(Instant now, const HelloReply& reply);
  void Fail(Instant now, const Status& why);

  ConnectorListener& listener_;
  const int peer_;
  const std::string endpoint_;
  const Hello hello_;  // But for what belongs to an attempt.
  const std::string secret_;
  std::unique_ptr<ShmStreamOffer> offer_;
  Random random_;
  HostPort address_;
  Stage stage_ = Stage::kWaiting;
  Instant when_ = Instant::min();  // Of the next attempt, or when this one is given up.
  int failures_ = 0;
  FileDescriptor socket_;
  std::string greeting_;  // The hello of this attempt, encoded.
  std::size_t sent_ = 0;
  std::string reply_;
};

}  // namespace resilient
