#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/clock.h>
#include <resilient/communicator.h>

#include "runtime/comm/collective.h"
#include "runtime/comm/connector.h"
#include "runtime/comm/endpoint.h"
#include "runtime/comm/group_port.h"
#include "runtime/comm/link_encryption.h"
#include "runtime/comm/message_link.h"
#include "runtime/comm/point_to_point.h"
#include "runtime/comm/seen_nonces.h"
#include "runtime/comm/shm_allowance.h"
#include "runtime/comm/striped_stream.h"
#include "runtime/comm/switchboard.h"
#include "runtime/net/socket.h"

namespace resilient {

// What all groups of one loop share. Owner: the loop. Thread: loop-confined.
struct LoopContext {
  CommunicatorEvents& events;
  const Clock& clock;
  Instant now;                                 // Of this turn.
  std::size_t shm_limit = 0;                   // Bytes of shared memory a group; 0: none.
  bool checksums = false;                      // With what is sent.
  std::size_t eager_limit = 0;                 // PointToPoint's.
  std::unique_ptr<LinkEncryption> encryption;  // Null: links are plain.
  std::vector<FinishedOp> finished;            // Completions to run at the end of this turn.
};

// Who a poll entry belongs to.
struct Watch {
  MessageLink* link = nullptr;
  Connector* connector = nullptr;
};

// One communicator on the comm thread: its links, its collectives one after the other, its
// point-to-point operations, and its end. Where all members share memory the collectives are left
// to the port's lane. Live until an abort (everything is closed at once) or a
// leave or failure (the peers are told, then the links linger until what was sent has arrived).
// Owner: the loop. Thread: loop-confined.
class CommGroup final : private LinkListener,
                        private ConnectorListener,
                        private CollectiveHost,
                        private PointToPointHost {
 public:
  CommGroup(std::shared_ptr<GroupPort> port, LoopContext& context, std::uint64_t seed);
  ~CommGroup() override;  // Joins the lane's thread.

  const GroupSpec& spec() const { return spec_; }
  bool live() const { return state_ == State::kLive; }
  bool done() const { return state_ == State::kDone; }
  // Whether a peer that comes to connect is to hear that this rank has left. Otherwise it hears
  // nothing here, and by the fence why the generation is over.
  bool has_left() const { return state_ != State::kLive && !failed_ && !aborted_; }
  const GroupRanks& made() const { return made_; }

  // Takes what callers have left at the port.
  void TakeMail();
  // Moves everything that can move without waiting. True: call again before waiting.
  bool Pump();
  // What to wait for; the watches match the entries one to one.
  void AddInterest(std::vector<PollEntry>& entries, std::vector<Watch>& watches);
  Instant NextTime() const;
  void OnTime();
  // A connection for this group, its secret checked. One of a rank that has made the group of other
  // ranks hears so, and this rank has then failed with kMismatch.
  Routing Adopt(const Hello& hello, FileDescriptor& socket);
  // As Communicator::Leave, with what operations complete with.
  void Leave(const Status& status);
  // Ends everything at once.
  void End(const Status& cause);

 private:
  enum class State { kLive, kLingering, kDone };
  // How collectives travel. Rank 0 decides for all, once every link is up.
  enum class Transport { kUndecided, kLinks, kSharedMemory };
  // Of a fault, or about shared memory.
  struct IncomingText {
    std::string text;
    FlatSink sink;
  };
  struct Peer {
    std::unique_ptr<Connector> connector;
    std::unique_ptr<Connector> outbound_connector;
    std::vector<std::unique_ptr<Connector>> more;  // Further sockets of links that are up.
    std::unique_ptr<MessageLink> link;             // Collectives.
    std::unique_ptr<MessageLink> outbound;         // Point-to-point, from here.
    std::unique_ptr<MessageLink> inbound;          // Point-to-point, to here.
    bool inbound_heard = false;                    // A message has begun to come over it.
    Status end;                                    // Not OK: it takes part in no more collectives.
    std::uint64_t entered = 0;  // The latest collective that it is known to have entered.
    bool lost_told = false;
    Instant next_attempt_report = Instant::min();
    bool answered = false;              // What rank 0 has offered.
    std::array<IncomingText, 3> texts;  // A link each; see TextOf.
  };

  HeaderVerdict OnHeader(MessageLink& link, const MessageHeader& header) override;
  void OnMessage(MessageLink& link, const MessageHeader& header) override;
  void OnDamaged(MessageLink& link, const MessageHeader& header) override;
  void OnSent(MessageLink& link, std::uint64_t token) override;
  void OnEnd(MessageLink& link, const Status& why) override;
  void OnEndAhead(MessageLink& link, const std::optional<MessageHeader>& goodbye) override;
  void OnConnected(Connector& connector, std::unique_ptr<ByteStream> stream) override;
  void OnPeerLeft(Connector& connector) override;
  void OnOtherRanks(Connector& connector, const Status& mismatch) override;
  void OnAttemptFailed(Connector& connector, const Status& why) override;
  void SendPart(int peer, std::uint8_t phase, std::span<const std::byte> payload) override;
  void SendNote(int peer) override;
  void SpaceFreed(int peer) override;
  void OpenOutbound(int peer) override;
  void Finish(SubmittedOp op, const Status& status) override;
  void OnSendRecvMismatch(const Status& mismatch) override;
  Instant Now() const override { return context_.now; }
  Instant HeldUntil() const override { return port_->held_until(); }

  Peer& PeerAt(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  // A rank that leaves while it connects takes the connection back, ahead of its goodbye on another
  // link: nothing was sent over this one. A process that dies ends the other one, too.
  bool IsTakenBack(const MessageLink& link) {
    const Peer& peer = PeerAt(link.peer());
    return &link == peer.inbound.get() && !peer.inbound_heard;
  }
  // What is being received on `link`. Each link has its own: they are read in turns.
  IncomingText& TextOf(const MessageLink& link);
  template <typename Do>
  void ForEachLink(Do&& each) {
    for (Peer& peer : peers_) {
      for (MessageLink* link : {peer.link.get(), peer.outbound.get(), peer.inbound.get()}) {
        if (link != nullptr && !link->dead()) each(*link);
      }
    }
  }
  template <typename PeerOrConst, typename Do>
  static void ForEachConnector(PeerOrConst& peer, Do&& each) {
    for (auto* connector : {&peer.connector, &peer.outbound_connector}) {
      if (*connector != nullptr) each(**connector);
    }
    for (auto& connector : peer.more) each(*connector);
  }
  std::unique_ptr<Connector> MakeConnector(int peer, Lane lane, int stream = 0);
  MessageLink* AddLink(int peer, Lane lane, std::unique_ptr<MessageLink>& slot,
                       std::unique_ptr<ByteStream> stream);
  bool SendReply(const Hello& hello, int socket, HelloVerdict verdict) const;
  Routing RefuseOtherRanks(const Hello& hello, const FileDescriptor& socket);
  void UpdateConnected();

  // Links over several sockets: group_streams.cc.
  int StreamsTo(int peer) const;
  // The stream of a link to `peer`, its sockets to be attached. Null where it has only one, or this
  // process has no descriptor left: then the communicator has failed, which one socket can tell.
  std::unique_ptr<StripedStream> MakeStriped(int peer);
  // Encrypted, where this rank encrypts its links and the stream leaves the host. `role`: kClient
  // for the side that has sent the hello with that proof.
  std::unique_ptr<ByteStream> Encrypted(std::unique_ptr<ByteStream> stream, TlsRole role,
                                        std::string_view hello_proof,
                                        EncryptedStream::Use use = EncryptedStream::Use::kBothWays);
  static std::unique_ptr<ByteStream> WithFirst(std::unique_ptr<StripedStream> striped,
                                               std::unique_ptr<ByteStream> first);
  void ConnectMore(int peer, Lane lane);
  void OnMoreConnected(Connector& connector, std::unique_ptr<ByteStream> stream);
  Routing AdoptMore(const Hello& hello, FileDescriptor& socket);

  bool StartNext();
  bool CompleteCurrent();
  HeaderVerdict OnCollectiveHeader(int peer, const MessageHeader& header);
  void CheckEnds();
  // This rank's collectives are over, its point-to-point operations are not.
  void FailCollectives(const Status& status);
  void CompleteCollectives(const Status& status);

  // Operations that take too long: group_deadlines.cc.
  void NoteEntered(int peer, std::uint64_t seq);
  void CountEntered();
  void NoteMoves();
  Instant NextDeadline() const;
  void CheckDeadlines();
  Status LateCollective(const SubmittedOp& op, OpTimeouts::Verdict verdict) const;

  // Operations that wait: group_waiting.cc.
  Instant NextTell() const;
  void TellWaiting();
  std::optional<WaitingOperation> WaitingCollective() const;
  void TellProgress();
  void NoteAllEntered(const EnteredCall& call);

  // Shared memory: group_shm.cc.
  std::unique_ptr<ShmStreamOffer> OfferStream(int peer, Lane lane);
  std::unique_ptr<ByteStream> AcceptStream(const Hello& hello, FileDescriptor& socket);
  std::optional<ShmGeometry> BoardGeometry() const;
  void OfferSegment();
  void OnShmMessage(int peer, const MessageHeader& header, const std::string& text);
  void SendShm(int peer, ShmMessage message, bool yes, std::string text);
  void Answer(const std::string& offer);
  void DecideWhenAnswered();
  void Decide(bool shared);
  void UseSharedMemory(std::unique_ptr<ShmSegment> segment);
  void TakeLaneFailure();

  void SetPeerEnd(int peer, const Status& end);
  void OnFault(int peer, const std::string& text);
  void OnGoodbye(MessageLink& link, std::uint64_t announced);
  void ReportLost(int peer, const Status& why);
  // The whole communicator is over because of `status`; the peers are told.
  void FailCommunicator(const Status& status);
  void BeginLinger(const Status& status);
  // A goodbye waits for a peer that has not answered yet.
  bool LingersForOpening();
  // Connectors that have said hello give their streams up for a goodbye.
  void TakeStreamsEarly();
  void SayGoodbye(MessageLink& link);
  void CloseEverything();

  const std::shared_ptr<GroupPort> port_;
  const GroupSpec& spec_;  // The port's.
  const GroupRanks made_;
  LoopContext& context_;
  const std::uint64_t seed_;
  const std::vector<Endpoint> endpoints_;  // By rank.
  const HostLayout layout_;
  State state_ = State::kLive;
  Status end_status_;     // Not OK unless kLive.
  bool failed_ = false;   // end_status_ is a failure that the peers must hear.
  bool aborted_ = false;  // Before it had left.
  Instant linger_until_ = kNever;
  Instant opening_until_ = kNever;
  std::vector<Peer> peers_;
  SeenNonces nonces_;
  bool connected_ = false;  // OnConnected was told.
  bool resolved_ = false;   // Every peer has connected or left: collectives may start.

  ShmAllowance allowance_;
  Transport transport_ = Transport::kUndecided;
  std::unique_ptr<ShmSegment> segment_;  // Offered or attached, until the decision.
  bool all_attached_ = true;             // Rank 0: of those that have answered.
  ShmLane* lane_ = nullptr;              // The port's.

  Scratch scratch_;
  std::deque<SubmittedOp> pending_;
  SubmittedOp current_op_;
  MessageHeader current_header_;
  std::unique_ptr<Collective> current_;
  Instant current_since_;              // When current_ started.
  std::uint64_t started_ = 0;          // Highest sequence number that has started.
  int entered_ = 0;                    // Peers that have entered it, or a later one.
  std::deque<MessageHeader> history_;  // The latest collectives that have completed.
  Status collective_failure_;
  PointToPoint point_to_point_;
  Instant told_ = Instant::min();  // When OnWaiting was, or would have been.
};

}  // namespace resilient
