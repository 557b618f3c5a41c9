#include "runtime/comm/group.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/mismatch.h"

namespace resilient {
namespace {

// How long a link that has said goodbye goes on reading, so that no reset destroys what the peer
// has not read yet.
constexpr Duration kLinger = Millis(200);
// How long it waits for a peer to which its goodbye cannot go out yet.
constexpr Duration kOpeningPatience = Millis(2000);
constexpr Duration kAttemptReportInterval = Millis(1000);
// Turns of one group before the others get theirs.
constexpr int kTurns = 16;

std::vector<Endpoint> EndpointsOf(const GroupSpec& spec) {
  std::vector<Endpoint> endpoints;
  endpoints.reserve(spec.members.size());
  for (const GroupMember& member : spec.members)
    endpoints.push_back(DecodeEndpoint(member.endpoint));
  return endpoints;
}

HostLayout HostsOf(const std::vector<Endpoint>& endpoints) {
  std::vector<std::string> ids(endpoints.size());
  std::transform(endpoints.begin(), endpoints.end(), ids.begin(),
                 [](const Endpoint& endpoint) { return endpoint.host_id; });
  return LayoutOf(ids);
}

}  // namespace

CommGroup::CommGroup(std::shared_ptr<GroupPort> port, LoopContext& context, std::uint64_t seed)
    : port_(std::move(port)),
      spec_(port_->spec()),
      made_(RanksOf(spec_)),
      context_(context),
      seed_(seed),
      endpoints_(EndpointsOf(spec_)),
      layout_(HostsOf(endpoints_)),
      peers_(spec_.members.size()),
      allowance_(layout_, spec_.rank, context_.shm_limit),
      point_to_point_(spec_, context_.eager_limit, *this) {
  if (const Status mismatch = SettingsMismatch(spec_, endpoints_); !mismatch.ok()) {
    FailCommunicator(mismatch);
    CloseEverything();  // All ranks see the same.
    return;
  }
  if (!layout_.OneHost()) transport_ = Transport::kLinks;
  for (int peer = 0; peer < spec_.rank; ++peer)
    PeerAt(peer).connector = MakeConnector(peer, Lane::kCollective);
  UpdateConnected();
}

std::unique_ptr<Connector> CommGroup::MakeConnector(int peer, Lane lane, int stream) {
  const Hello hello{.generation = spec_.generation,
                    .attempt = spec_.attempt,
                    .from = spec_.rank,
                    .to = peer,
                    .lane = lane,
                    .stream = stream,
                    .group = spec_.name,
                    .made = made_,
                    .from_world = spec_.members[static_cast<std::size_t>(spec_.rank)].global_rank};
  const std::uint64_t seed = seed_ +
                             static_cast<std::uint64_t>(peer * kMaxSocketStreams + stream) * 2 +
                             (lane == Lane::kPointToPoint ? 1 : 0);
  return std::make_unique<Connector>(static_cast<ConnectorListener&>(*this),
                                     endpoints_[static_cast<std::size_t>(peer)].address, hello,
                                     spec_.secret, OfferStream(peer, lane), seed);
}

MessageLink* CommGroup::AddLink(int peer, Lane lane, std::unique_ptr<MessageLink>& slot,
                                std::unique_ptr<ByteStream> stream) {
  // What waits for its links has moved.
  if (!pending_.empty()) pending_.front().timeouts.OnMoved(context_.now);
  slot = std::make_unique<MessageLink>(std::move(stream), static_cast<LinkListener&>(*this), peer,
                                       lane, context_.checksums);
  return slot.get();
}

void CommGroup::UpdateConnected() {
  if (state_ != State::kLive || connected_) return;
  bool all = true;
  resolved_ = true;
  for (int peer = 0; peer < port_->size(); ++peer) {
    if (peer == spec_.rank || PeerAt(peer).link != nullptr) continue;
    all = false;
    if (PeerAt(peer).end.ok()) resolved_ = false;
  }
  if (all) {
    connected_ = true;
    context_.events.OnConnected(spec_.name, spec_.generation);
  }
  if (!resolved_ || spec_.rank != 0 || transport_ != Transport::kUndecided) return;
  if (all) {
    OfferSegment();
  } else {
    Decide(false);
  }
}

CommGroup::~CommGroup() {
  if (lane_ == nullptr) return;
  lane_->Stop(end_status_);
  lane_->Join();
}

void CommGroup::TakeMail() {
  if (state_ == State::kDone) return;
  TakeLaneFailure();
  GroupPort::Mail mail;
  port_->Take(&mail);
  for (SubmittedOp& op : mail.ops) {
    const bool point_to_point = IsPointToPoint(op.op.kind);
    // After the end nothing begins, but everything completes.
    if (point_to_point && mail.aborted.ok() && state_ == State::kLive) {
      point_to_point_.Submit(std::move(op));
    } else {
      pending_.push_back(std::move(op));
    }
  }
  if (!mail.aborted.ok()) {
    if (state_ == State::kLive) aborted_ = true;
    return End(mail.aborted);
  }
  if (mail.leave && state_ == State::kLive) Leave(mail.left);
  if (state_ != State::kLive) return CompleteCollectives(end_status_);
  for (const EnteredCall& call : mail.all_entered) NoteAllEntered(call);
  if (mail.progress_asked) TellProgress();
}

bool CommGroup::Pump() {
  if (state_ == State::kDone) return false;
  for (int turn = 0; turn < kTurns; ++turn) {
    bool moved = false;
    if (state_ == State::kLive) {
      CheckEnds();
      moved = CompleteCurrent();
      moved = StartNext() || moved;
    }
    ForEachLink([&](MessageLink& link) {
      if (link.wants_flush()) {
        link.Flush();
        moved = true;
      }
      if (link.wants_read()) {
        link.Read();
        moved = true;
      }
    });
    if (!moved || state_ == State::kDone) return false;
  }
  return true;
}

void CommGroup::AddInterest(std::vector<PollEntry>& entries, std::vector<Watch>& watches) {
  for (Peer& peer : peers_) {
    for (auto* connector : {&peer.connector, &peer.outbound_connector}) {
      if (*connector != nullptr && (*connector)->done()) connector->reset();
    }
    std::erase_if(peer.more, [](const auto& connector) { return connector->done(); });
    ForEachConnector(peer, [&](Connector& connector) {
      if (connector.Interest() == 0) return;
      entries.push_back({.fd = connector.fd(), .events = connector.Interest()});
      watches.push_back({.connector = &connector});
    });
  }
  NoteMoves();
  ForEachLink([&](MessageLink& link) {
    if (link.Interest() == 0) return;
    entries.push_back({.fd = link.fd(), .events = link.Interest()});
    watches.push_back({.link = &link});
  });
}

Instant CommGroup::NextTime() const {
  if (state_ == State::kDone) return kNever;
  Instant next = std::min({linger_until_, NextDeadline(), NextTell()});
  for (const Peer& peer : peers_) {
    ForEachConnector(
        peer, [&](const Connector& connector) { next = std::min(next, connector.NextTime()); });
  }
  return next;
}

void CommGroup::OnTime() {
  if (state_ == State::kDone) return;
  for (Peer& peer : peers_) {
    ForEachConnector(peer, [&](Connector& connector) { connector.OnTime(context_.now); });
  }
  CheckDeadlines();
  TellWaiting();
  if (state_ != State::kLingering) return;
  bool settled = true;
  ForEachLink([&](MessageLink& link) {
    if (!link.finished_sending() || !link.ended()) settled = false;
  });
  for (int rank = 0; rank < port_->size(); ++rank) {
    const Peer& peer = PeerAt(rank);
    if (peer.connector != nullptr && !peer.connector->done()) settled = false;
    // One that is about to connect shall hear what failed, not that this rank has left.
    if (failed_ && rank != spec_.rank && peer.link == nullptr && peer.end.ok()) settled = false;
  }
  if (!settled && (context_.now < linger_until_ || LingersForOpening())) return;
  // A peer that has not made this group yet finds the goodbye when it does.
  TakeStreamsEarly();
  ForEachLink([&](MessageLink& link) {
    if (!link.finishing()) SayGoodbye(link);
    if (link.wants_flush()) link.Flush();
  });
  CloseEverything();
}

Routing CommGroup::Adopt(const Hello& hello, FileDescriptor& socket) {
  if (!nonces_.Add(hello.nonce)) return Routing::kRefuse;  // Recorded, and sent again.
  // First of all: in another list of ranks the positions mean others.
  if (hello.made.digest != made_.digest) return RefuseOtherRanks(hello, socket);
  if (hello.to != spec_.rank || hello.from >= port_->size()) return Routing::kRefuse;
  if (hello.stream > 0) return AdoptMore(hello, socket);
  Peer& peer = PeerAt(hello.from);
  const bool collective = hello.lane == Lane::kCollective;
  const bool tell_failure = state_ == State::kLingering && failed_ && collective;
  if (state_ != State::kLive && !tell_failure) {
    if (has_left()) SendReply(hello, socket.get(), HelloVerdict::kLeft);
    return Routing::kRefuse;
  }
  if (collective && hello.from < spec_.rank) return Routing::kRefuse;  // That one we connect.
  std::unique_ptr<MessageLink>& slot = collective ? peer.link : peer.inbound;
  const bool taken_back = slot != nullptr && slot->dead() && IsTakenBack(*slot);
  if (slot != nullptr && !taken_back) return Routing::kRefuse;
  // Ahead of the answer: without it the link is there to tell the failure.
  std::unique_ptr<StripedStream> striped = MakeStriped(hello.from);
  std::unique_ptr<ByteStream> stream = AcceptStream(hello, socket);
  if (stream == nullptr) return Routing::kRefuse;
  MessageLink* link = AddLink(
      hello.from, hello.lane, slot,
      Encrypted(WithFirst(std::move(striped), std::move(stream)), TlsRole::kServer, hello.proof));
  if (state_ != State::kLive) {
    SayGoodbye(*link);
  } else if (collective) {
    UpdateConnected();
  } else {
    point_to_point_.SetInbound(hello.from, link);
  }
  return Routing::kTaken;
}

Routing CommGroup::RefuseOtherRanks(const Hello& hello, const FileDescriptor& socket) {
  const bool known = state_ == State::kLive || has_left();
  if (!known) return Routing::kRefuse;  // The end of the generation says why.
  const Status mismatch = OtherRanks(hello, spec_, made_);
  const std::string reply =
      EncodeHelloReply(HelloVerdict::kOtherRanks, hello.proof, spec_.secret, EncodeFault(mismatch));
  send(socket.get(), reply.data(), reply.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  FailCommunicator(mismatch);
  return Routing::kRefuse;
}

bool CommGroup::SendReply(const Hello& hello, int socket, HelloVerdict verdict) const {
  // The first bytes on a new connection: its buffer is empty, they fit.
  const std::string reply = EncodeHelloReply(verdict, hello.proof, spec_.secret);
  const ssize_t n = send(socket, reply.data(), reply.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return n == static_cast<ssize_t>(reply.size());
}

void CommGroup::OnConnected(Connector& connector, std::unique_ptr<ByteStream> stream) {
  const int rank = connector.peer();
  Peer& peer = PeerAt(rank);
  if (connector.hello().stream > 0) return OnMoreConnected(connector, std::move(stream));
  const bool outbound = &connector == peer.outbound_connector.get();
  if (outbound && point_to_point_.HasLeft(rank)) return;
  stream = Encrypted(WithFirst(MakeStriped(rank), std::move(stream)), TlsRole::kClient,
                     connector.proof());
  if (state_ == State::kLive) ConnectMore(rank, connector.hello().lane);
  if (outbound) {
    if (state_ != State::kLive) return;
    MessageLink* link = AddLink(rank, Lane::kPointToPoint, peer.outbound, std::move(stream));
    return point_to_point_.SetOutbound(rank, link);
  }
  MessageLink* link = AddLink(rank, Lane::kCollective, peer.link, std::move(stream));
  if (state_ == State::kLive) return UpdateConnected();
  SayGoodbye(*link);
}

void CommGroup::OnPeerLeft(Connector& connector) {
  const int rank = connector.peer();
  if (state_ != State::kLive || connector.hello().stream > 0) return;  // Its link says so too.
  Peer& peer = PeerAt(rank);
  // What it sent before may still wait on a link that we have: there its goodbye tells how much.
  if (&connector == peer.outbound_connector.get()) return point_to_point_.OnLeft(rank, {});
  SetPeerEnd(rank, PeerLeft(spec_, rank, "", 0));
  point_to_point_.OnLeft(rank,
                         peer.inbound != nullptr ? std::nullopt : std::optional<std::uint64_t>(0));
  UpdateConnected();
}

// To whichever of the two is heard first by the membership service.
void CommGroup::OnOtherRanks(Connector& /*connector*/, const Status& mismatch) {
  FailCommunicator(mismatch);
}

void CommGroup::OnAttemptFailed(Connector& connector, const Status& why) {
  Peer& peer = PeerAt(connector.peer());
  if (state_ != State::kLive || context_.now < peer.next_attempt_report) return;
  peer.next_attempt_report = context_.now + kAttemptReportInterval;
  const GroupMember& member = spec_.members[static_cast<std::size_t>(connector.peer())];
  context_.events.OnUnreached(
      spec_.name, spec_.generation, member.global_rank,
      Status(why.code(), StrCat("no link to ", NameOf(member), " yet: ", why.message())));
}

void CommGroup::OpenOutbound(int peer) {
  if (PeerAt(peer).outbound_connector == nullptr)
    PeerAt(peer).outbound_connector = MakeConnector(peer, Lane::kPointToPoint);
}

void CommGroup::ReportLost(int peer, const Status& why) {
  if (PeerAt(peer).lost_told) return;
  PeerAt(peer).lost_told = true;
  const GroupMember& member = spec_.members[static_cast<std::size_t>(peer)];
  const std::string how = why.ok() ? "it was closed without a goodbye" : why.message();
  context_.events.OnLinkLost(
      spec_.name, spec_.generation, member.global_rank,
      Status(StatusCode::kCommFailed, StrCat("the link to ", NameOf(member), " broke: ", how)));
}

void CommGroup::OnEnd(MessageLink& link, const Status& why) {
  if (state_ != State::kLive) return;
  const int peer = link.peer();
  if (why.code() == StatusCode::kProtocol) {
    const GroupMember& member = spec_.members[static_cast<std::size_t>(peer)];
    return FailCommunicator(
        Status(StatusCode::kCommFailed,
               StrCat("the link to ", NameOf(member),
                      " carries what no rank sends: ", why.message(), " (group ", spec_.name, ")"),
               {.rank = member.global_rank,
                .host = member.host,
                .pid = member.pid,
                .generation = spec_.generation,
                .group = spec_.name}));
  }
  if (IsTakenBack(link)) return link.Kill();
  if (&link == PeerAt(peer).inbound.get()) point_to_point_.OnInboundEnd(peer);
  if (!point_to_point_.HasLeft(peer)) return ReportLost(peer, why);
  if (link.lane() == Lane::kCollective) SetPeerEnd(peer, PeerLeft(spec_, peer, "", 0));
  link.Kill();
}

void CommGroup::OnEndAhead(MessageLink& link, const std::optional<MessageHeader>& goodbye) {
  if (state_ != State::kLive) return;
  // Collectives learn of it in their turn, behind what was sent before.
  if (goodbye) return point_to_point_.OnLeft(link.peer(), goodbye->count);
  if (IsTakenBack(link)) return;  // Its end follows, or does not matter.
  if (!point_to_point_.HasLeft(link.peer())) ReportLost(link.peer(), Status::Ok());
}

void CommGroup::OnGoodbye(MessageLink& link, std::uint64_t announced) {
  const int peer = link.peer();
  if (link.lane() == Lane::kCollective) SetPeerEnd(peer, PeerLeft(spec_, peer, "", 0));
  point_to_point_.OnLeft(peer, announced);
}

void CommGroup::SetPeerEnd(int peer, const Status& end) {
  if (!PeerAt(peer).end.ok()) return;
  PeerAt(peer).end = end;
  if (lane_ != nullptr) lane_->OnPeerEnded(peer, end);
  // An answer or a verdict that will not come any more.
  if (transport_ != Transport::kUndecided || state_ != State::kLive) return;
  if (peer == 0 || (segment_ != nullptr && !PeerAt(peer).answered)) Decide(false);
}

void CommGroup::OnFault(int peer, const std::string& text) {
  const std::optional<Status> fault = DecodeFault(text);
  if (!fault) {
    RESILIENT_LOG(kWarn, "dropped an unreadable failure report of rank ", peer, " of group ",
                  spec_.name);
    return;
  }
  if (fault->code() == StatusCode::kLeft) return SetPeerEnd(peer, *fault);
  FailCommunicator(*fault);
}

void CommGroup::Finish(SubmittedOp op, const Status& status) {
  context_.finished.push_back({.port = port_, .done = std::move(op.done), .status = status});
}

void CommGroup::OnSendRecvMismatch(const Status& mismatch) { FailCommunicator(mismatch); }

void CommGroup::FailCommunicator(const Status& status) {
  if (state_ != State::kLive) return;
  failed_ = true;
  BeginLinger(status);
  if (status.code() == StatusCode::kMismatch)
    context_.events.OnMismatch(spec_.name, spec_.generation, status);
  // What fails a group while it is made has no operation to tell it.
  constexpr std::array kTold = {StatusCode::kCommStalled, StatusCode::kCommFailed,
                                StatusCode::kResourceExhausted};
  if (std::find(kTold.begin(), kTold.end(), status.code()) != kTold.end())
    context_.events.OnStalled(spec_.name, spec_.generation, status);
}

void CommGroup::Leave(const Status& status) {
  if (state_ == State::kLive) BeginLinger(status);
}

void CommGroup::BeginLinger(const Status& status) {
  state_ = State::kLingering;
  end_status_ = status;
  for (SubmittedOp& op : port_->Close(status)) pending_.push_back(std::move(op));
  CompleteCollectives(status);
  point_to_point_.FailAll(status);
  for (Peer& peer : peers_) {
    if (peer.outbound_connector != nullptr) peer.outbound_connector->Cancel();
  }
  TakeStreamsEarly();
  ForEachLink([&](MessageLink& link) { SayGoodbye(link); });
  // Not from the beginning of this turn: copying what was half sent may have taken long.
  const Instant begun = context_.clock.Now();
  linger_until_ = begun + kLinger;
  opening_until_ = begun + kOpeningPatience;
}

bool CommGroup::LingersForOpening() {
  bool opening = false;
  ForEachLink([&](const MessageLink& link) { opening = opening || link.opening(); });
  if (!opening || context_.now >= opening_until_) return false;
  linger_until_ = std::min(context_.now + kLinger, opening_until_);
  return true;
}

void CommGroup::TakeStreamsEarly() {
  for (Peer& peer : peers_) {
    if (peer.connector == nullptr || peer.connector->done()) continue;
    std::unique_ptr<ByteStream> early = peer.connector->TakeStreamEarly();
    const int rank = peer.connector->peer();
    if (early == nullptr) continue;
    AddLink(rank, Lane::kCollective, peer.link,
            Encrypted(WithFirst(MakeStriped(rank), std::move(early)), TlsRole::kClient,
                      peer.connector->proof(), EncryptedStream::Use::kLastWords));
  }
}

void CommGroup::SayGoodbye(MessageLink& link) {
  if (failed_) {
    // On each link: whichever the peer reads first, it hears of the failure before the goodbye.
    MessageHeader header;
    header.type = MessageType::kFault;
    std::string text = EncodeFault(end_status_);
    header.payload_bytes = text.size();
    link.SendOwned(header, std::move(text));
  }
  MessageHeader header;
  header.type = MessageType::kGoodbye;
  header.count = point_to_point_.SentTo(link.peer());
  link.Send(header, {}, 0);
  link.FinishSending();
  link.Resume();  // From now on everything is read and dropped.
}

void CommGroup::End(const Status& cause) {
  if (state_ == State::kDone) return;
  CloseEverything();
  end_status_ = cause;
  for (SubmittedOp& op : port_->Close(cause)) pending_.push_back(std::move(op));
  CompleteCollectives(cause);
  point_to_point_.FailAll(cause);
}

void CommGroup::CloseEverything() {
  ForEachLink([](MessageLink& link) { link.Kill(); });
  for (Peer& peer : peers_) {
    ForEachConnector(peer, [](Connector& connector) { connector.Cancel(); });
  }
  state_ = State::kDone;
}

}  // namespace resilient
