#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "runtime/comm/group_port.h"
#include "runtime/comm/message_link.h"

namespace resilient {

// What point-to-point asks of its group. Called on the loop.
class PointToPointHost {
 public:
  virtual ~PointToPointHost() = default;
  // A send waits for a connection to `peer`; PointToPoint::SetOutbound follows.
  virtual void OpenOutbound(int peer) = 0;
  virtual void Finish(SubmittedOp op, const Status& status) = 0;
  // A send and its recv do not agree: the whole communicator fails.
  virtual void OnSendRecvMismatch(const Status& mismatch) = 0;
  virtual Instant Now() const = 0;        // Of this turn.
  virtual Instant HeldUntil() const = 0;  // Until when some rank may stand still.
};

// The sends and recvs of one rank: matching by (peer, tag) in order of submission. A message goes
// to the earliest recv that may take it, and a recv from any rank takes the message that came
// first. Messages that come before their recv are kept, up to kUnexpectedLimitBytes a peer; beyond
// it that peer's messages wait in its own process. Owner: a group, which owns the links. Thread:
// loop-confined.
class PointToPoint {
 public:
  static constexpr std::size_t kUnexpectedLimitBytes = 64u << 20;
  // What a kept message counts beside its payload, so that empty ones are limited too.
  static constexpr std::size_t kUnexpectedOverheadBytes = 256;

  PointToPoint(const GroupSpec& spec, PointToPointHost& host);

  void Submit(SubmittedOp op);
  void SetOutbound(int peer, MessageLink* link);
  void SetInbound(int peer, MessageLink* link);

  HeaderVerdict OnHeader(MessageLink& link, const MessageHeader& header);
  void OnMessage(MessageLink& link);
  void OnSent(int peer);

  // Of the recv that what comes from `peer` right now is for; empty when it is not known.
  std::string CallSiteOfRecv(int peer);

  // `peer` has left, after it had sent us `announced` messages (nullopt: its goodbye on another
  // link will tell).
  void OnLeft(int peer, std::optional<std::uint64_t> announced);
  bool HasLeft(int peer) const { return PeerAt(peer).left; }
  // Nothing more comes over the inbound link.
  void OnInboundEnd(int peer);

  // Bytes have come from `peer`, or have gone there.
  void OnMoved(int peer);
  void OnSendMoved(int peer);
  // No operation takes too long before.
  Instant NextCheck() const { return next_check_; }
  // One that takes too long; null: none.
  SubmittedOp* FindLate();

  // Nothing has waited for kWaitTellAfter before, or is to be told again.
  Instant NextTell() const { return next_tell_; }
  // The oldest `most` operations that have.
  void AddWaiting(std::vector<WaitingOperation>& waiting, std::size_t most);

  // What this rank and `peer`, a rank of the group, have sent each other; `rank` is left open.
  PeerProgress Progress(int peer) const;

  // A message for the recv `seq` is on its way, by its sender's account, or one with another tag: a
  // standstill counts until something comes from there. Unknown numbers are of recvs that have
  // ended.
  void NoteAllEntered(std::uint64_t seq);

  // Completes everything with `status` and forgets all user memory. Only at the end of the group.
  void FailAll(const Status& status);
  // What our goodbye announces. REQUIRES: after FailAll.
  std::uint64_t SentTo(int peer) const { return PeerAt(peer).sent; }

 private:
  struct Unexpected {
    MessageHeader header;
    std::vector<std::byte> payload;
    bool complete = false;
    std::uint64_t arrival = 0;  // Set when it is complete.
  };
  // A message that waits in its sender's process for a recv.
  struct Held {
    std::uint32_t tag = 0;
    std::uint64_t arrival = 0;
  };
  using Queue = std::deque<SubmittedOp>;
  using Messages = std::deque<Unexpected>;
  struct Peer {
    MessageLink* out = nullptr;
    MessageLink* in = nullptr;
    Queue unsent;            // Waiting for the link.
    Queue sending;           // Handed to the link.
    std::uint64_t sent = 0;  // Handed to the link, ever.
    Queue recvs;             // Not matched yet.
    std::optional<SubmittedOp> receiving;
    Messages unexpected;       // Only the last one may be incomplete.
    std::optional<Held> held;  // Not promised to a recv yet.
    std::size_t unexpected_bytes = 0;
    std::uint64_t received = 0;
    FlatSink sink;
    Instant send_moved = Instant::min();  // When bytes went there last.
    bool in_doubt = false;  // A recv waits for a message that is said to be on its way.
    bool left = false;
    bool inbound_ended = false;
    std::optional<std::uint64_t> announced;
  };

  Peer& PeerAt(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  const Peer& PeerAt(int peer) const { return peers_[static_cast<std::size_t>(peer)]; }
  void SubmitSend(SubmittedOp op);
  void SubmitRecv(SubmittedOp op);
  void SubmitRecvFromAny(SubmittedOp op);
  void Send(Peer& peer, SubmittedOp op);
  static Messages::iterator FindKept(Peer& peer, std::uint32_t tag);
  // The earliest recv that a message of `peer` may go to. Its queue is null when there is none.
  struct Match {
    Queue* queue = nullptr;
    Queue::iterator recv;
  };
  Match FindRecv(Peer& peer, std::uint32_t tag);
  static SubmittedOp Take(const Match& match);
  // Gives a kept message to its recv.
  void Deliver(int peer, const Messages::iterator& message, SubmittedOp op);
  bool Agree(int peer, const MessageHeader& header, const SubmittedOp& recv);
  void Received(int peer, SubmittedOp op);
  // Nothing more will come from it.
  static bool IsDrained(const Peer& peer);
  void FailRecvsOfLeaver(int peer);
  void FailRecvsFromAnyIfAllLeft();
  void FailWithLeft(int peer, SubmittedOp op);
  // The recv that what comes from `peer` right now is for; null: none.
  SubmittedOp* Receiver(Peer& peer);
  // Each operation in flight, with the peer that it is bound to; kAnyPeer: none yet.
  template <typename Do>
  void ForEachOp(Do&& each) {
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      Peer& peer = peers_[rank];
      for (Queue* queue : {&peer.unsent, &peer.sending, &peer.recvs})
        for (SubmittedOp& op : *queue) each(op, static_cast<int>(rank));
      if (peer.receiving) each(*peer.receiving, static_cast<int>(rank));
    }
    for (SubmittedOp& op : recvs_from_any_) each(op, kAnyPeer);
  }
  // Whom `op` waits for.
  std::vector<int> MissingFrom(const SubmittedOp& op, int peer);

  const GroupSpec& spec_;
  PointToPointHost& host_;
  std::vector<Peer> peers_;
  Queue recvs_from_any_;  // Not matched yet: no message that is here fits them.
  std::uint64_t arrivals_ = 0;
  Instant next_check_ = kNever;
  Instant next_tell_ = kNever;
};

}  // namespace resilient
