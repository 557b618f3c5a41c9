#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
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
// first.
//
// A message travels eagerly, without asking, while the link's eager limit covers it; its receiver
// keeps it until there is a recv. All others are announced: the header travels, and the payload
// follows when the receiver, once it has a recv for it, says that it is clear to send. Until then
// the receiver has said that the message is unmatched. So a receiver reads everything that is on a
// link, and no message waits for the recv of another one.
//
// The eager limit is a credit of the sender. An eager message takes its payload and
// kEagerOverheadBytes of it, and the receiver returns them when a recv has the message: alone when
// a quarter of the limit has gathered, or with the next clear-to-send. Where the credit does not
// cover a message there is no wait for it: the message is announced. What a receiver keeps of one
// peer is thus at most the limit, and a header for each send that the peer has in flight.
//
// A send completes when the stream has all of its payload: an eager one whether it has a recv or
// not, an announced one after it has. Payloads of one link follow each other whole.
//
// Who waits for whom is told only where it is known. A send names its receiver where that has said
// that the message is unmatched, and where the link is not up yet. A recv names its sender unless a
// payload from there is on its way: what comes after that is not known.
//
// Owner: a group, which owns the links. Thread: loop-confined.
class PointToPoint {
 public:
  // What an eager message counts beside its payload, so that empty ones are limited too.
  static constexpr std::size_t kEagerOverheadBytes = 256;

  // `eager_limit`: bytes a link; the same on all ranks.
  PointToPoint(const GroupSpec& spec, std::size_t eager_limit, PointToPointHost& host);

  void Submit(SubmittedOp op);
  void SetOutbound(int peer, MessageLink* link);
  void SetInbound(int peer, MessageLink* link);

  HeaderVerdict OnHeader(MessageLink& link, const MessageHeader& header);
  void OnMessage(MessageLink& link, const MessageHeader& header);
  void OnSent(int peer);

  // Of the recv that what comes from `peer` right now is for; empty when it is not known.
  std::string CallSiteOfRecv(int peer);

  // `peer` has left, after it had sent us `announced` messages (nullopt: its goodbye on another
  // link will tell).
  void OnLeft(int peer, std::optional<std::uint64_t> announced);
  bool HasLeft(int peer) const { return PeerAt(peer).left; }
  // Nothing more comes over the inbound link.
  void OnInboundEnd(int peer);

  // Bytes have come from `peer`.
  void OnMoved(int peer);
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
  // A message that came before its recv.
  struct Unexpected {
    enum class State { kArriving, kComplete, kAnnounced };
    MessageHeader header;
    std::vector<std::byte> payload;
    State state = State::kArriving;
    std::uint64_t arrival = 0;  // From kComplete or kAnnounced on.
  };
  // A send that waits to be clear.
  struct Announced {
    SubmittedOp op;
    bool unmatched = false;  // The receiver has said that it has no recv yet.
  };
  using Queue = std::deque<SubmittedOp>;
  using Messages = std::deque<Unexpected>;
  struct Peer {
    MessageLink* out = nullptr;
    Queue unsent;                // Waiting for the link.
    std::uint64_t numbered = 0;  // Messages that the link has had, or their announcement.
    std::size_t credit = 0;      // For eager messages.
    std::map<std::uint64_t, Announced> announced;  // By number.
    Queue sending;                                 // Payloads handed to the link.
    std::uint64_t sent = 0;                        // The same, ever.

    MessageLink* in = nullptr;
    Queue recvs;                // Not matched yet.
    Messages unexpected;        // In order. Only the last one may be kArriving.
    std::size_t eager = 0;      // Credit that the peer has used and not got back;
    std::size_t returning = 0;  // of it, what it can get back.
    std::map<std::uint64_t, SubmittedOp>
        cleared;  // Recvs whose message may be sent, by its number.
    std::optional<SubmittedOp> receiving;
    FlatSink sink;
    std::uint64_t last_number = 0;
    std::uint64_t received = 0;      // Payloads.
    Instant moved = Instant::min();  // When bytes came last.
    bool in_doubt = false;           // A recv waits for a message that is said to be on its way.
    bool left = false;
    bool inbound_ended = false;
    std::optional<std::uint64_t> last_sent;  // What its goodbye announced.
  };

  Peer& PeerAt(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  const Peer& PeerAt(int peer) const { return peers_[static_cast<std::size_t>(peer)]; }
  void SubmitSend(SubmittedOp op);
  void SubmitRecv(SubmittedOp op);
  void SubmitRecvFromAny(SubmittedOp op);

  // Sending.
  void Send(Peer& peer, SubmittedOp op);
  void SendPayload(Peer& peer, SubmittedOp op, std::uint64_t number, PointToPointPhase phase);
  static bool IsReplyExpected(const Peer& peer, std::size_t eager_limit,
                              const MessageHeader& reply);
  void OnReply(Peer& peer, const MessageHeader& reply);

  // Receiving.
  HeaderVerdict OnEager(int peer, const MessageHeader& header);
  bool IsAnnouncementValid(const Peer& peer, const MessageHeader& header) const;
  HeaderVerdict OnClearedPayload(Peer& peer, const MessageHeader& header);
  void OnAnnouncement(int peer, const MessageHeader& header);
  void OnPayloadComplete(int peer, const MessageHeader& header);
  void Clear(int peer, std::uint64_t number, SubmittedOp op);
  void ReturnCredit(Peer& peer, std::size_t payload_bytes);
  static void Reply(Peer& peer, PointToPointPhase phase, std::uint64_t number);
  // The first one for a recv with `tag`. A recv from any rank passes over those that will not come.
  static Messages::iterator FindKept(Peer& peer, std::uint32_t tag, bool from_any);
  // The earliest recv that a message of `peer` may go to. Its queue is null when there is none.
  struct Match {
    Queue* queue = nullptr;
    Queue::iterator recv;
  };
  Match FindRecv(Peer& peer, std::uint32_t tag);
  static SubmittedOp Take(const Match& match);
  // Gives a message that is not kArriving to its recv: now, or when it has come.
  void Deliver(int peer, const Messages::iterator& message, SubmittedOp op);
  bool Agree(int peer, const MessageHeader& header, const SubmittedOp& recv);
  void Received(int peer, SubmittedOp op);

  // Nothing more will come from it.
  static bool IsDrained(const Peer& peer);
  void FailRecvsOfLeaver(int peer);
  void FailRecvsFromAnyIfAllLeft();
  void FailWithLeft(int peer, SubmittedOp op);
  // An eager message without a recv is on its way.
  static bool IsArriving(const Peer& peer);
  // A payload of it is, or comes as soon as it can.
  static bool IsInPayload(const Peer& peer);
  // The recv that what comes from `peer` right now is for; null: none.
  SubmittedOp* Receiver(Peer& peer);

  // How far an operation in flight is.
  enum class Step {
    kUnlinked,   // A send without a link.
    kAnnounced,  // A send; whether it has a recv is not known.
    kUnmatched,  // A send that has no recv, or a recv that has no message.
    kMatched     // Both ranks have entered it.
  };
  // Each operation in flight, with the peer that it is bound to; kAnyPeer: none yet.
  template <typename Do>
  void ForEachOp(Do&& each) {
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      Peer& peer = peers_[rank];
      const int bound = static_cast<int>(rank);
      for (SubmittedOp& op : peer.unsent) each(op, bound, Step::kUnlinked);
      for (auto& [number, one] : peer.announced)
        each(one.op, bound, one.unmatched ? Step::kUnmatched : Step::kAnnounced);
      for (SubmittedOp& op : peer.sending) each(op, bound, Step::kMatched);
      for (SubmittedOp& op : peer.recvs) each(op, bound, Step::kUnmatched);
      for (auto& [number, op] : peer.cleared) each(op, bound, Step::kMatched);
      if (peer.receiving) each(*peer.receiving, bound, Step::kMatched);
    }
    for (SubmittedOp& op : recvs_from_any_) each(op, kAnyPeer, Step::kUnmatched);
  }
  // Whom `op` waits for.
  std::vector<int> MissingFrom(const SubmittedOp& op, int peer, Step step);

  const GroupSpec& spec_;
  const std::size_t eager_limit_;
  PointToPointHost& host_;
  std::vector<Peer> peers_;
  Queue recvs_from_any_;  // Not matched yet: no message that is here fits them.
  std::uint64_t arrivals_ = 0;
  Instant next_check_ = kNever;
  Instant next_tell_ = kNever;
};

}  // namespace resilient
