#include <utility>

#include "runtime/comm/group.h"
#include "runtime/comm/mismatch.h"

// The part of CommGroup that runs collectives and takes the messages of its links.

namespace resilient {
namespace {

// Completed collectives against which the headers of ranks that are behind are compared.
constexpr std::size_t kHistory = 1024;
constexpr std::uint64_t kToken = 1;

// Whether the count of a part is that of its payload.
bool SaysItsSize(const MessageHeader& header) {
  return header.count <= header.payload_bytes &&
         header.payload_bytes == header.count * SizeOf(header.dtype);
}

}  // namespace

bool CommGroup::StartNext() {
  if (current_ != nullptr || pending_.empty()) return false;
  if (!collective_failure_.ok()) {
    CompleteCollectives(collective_failure_);
    return true;
  }
  if (!resolved_ || transport_ != Transport::kLinks) return false;
  current_op_ = std::move(pending_.front());
  pending_.pop_front();
  current_header_ = HeaderOf(current_op_.op, current_op_.seq);
  current_since_ = context_.now;
  started_ = current_op_.seq;
  const bool hierarchical = endpoints_.front().hierarchical && layout_.HasLevels();
  current_ = MakeCollective(current_op_.op, spec_.rank, port_->size(), *this,
                            hierarchical ? &layout_ : nullptr);
  const std::size_t bytes = current_->ScratchBytes();
  const std::optional<std::span<std::byte>> scratch = scratch_.Get(bytes);
  if (!scratch) {
    FailCommunicator(NoMemory(spec_, current_op_, bytes));
    return true;
  }
  current_->Start(*scratch);
  CountEntered();
  ForEachLink([](MessageLink& link) {
    if (link.lane() == Lane::kCollective) link.Resume();
  });
  CheckEnds();
  return true;
}

bool CommGroup::CompleteCurrent() {
  if (current_ == nullptr || !current_->Done()) return false;
  current_.reset();
  scratch_.Trim();
  history_.push_back(std::move(current_header_));
  if (history_.size() > kHistory) history_.pop_front();
  Finish(std::exchange(current_op_, {}), Status::Ok());
  return true;
}

void CommGroup::CheckEnds() {
  if (current_ == nullptr || current_->Done()) return;
  for (int peer = 0; peer < port_->size(); ++peer) {
    const Status& end = PeerAt(peer).end;
    if (end.ok() || !current_->Needs(peer)) continue;
    const bool leaver = end.detail().seq == 0;  // Else it passes on the failure that stopped it.
    return FailCollectives(leaver ? PeerLeft(spec_, peer, Describe(current_op_.op), current_op_.seq)
                                  : end);
  }
}

void CommGroup::FailCollectives(const Status& status) {
  collective_failure_ = status;
  CompleteCollectives(status);
  // The others wait for parts that will never come from here.
  const std::string text = EncodeFault(status);
  for (Peer& peer : peers_) {
    if (peer.link == nullptr || peer.link->dead() || !peer.end.ok()) continue;
    MessageHeader header;
    header.type = MessageType::kFault;
    header.payload_bytes = text.size();
    peer.link->SendOwned(header, text);
    peer.link->Resume();
  }
}

void CommGroup::CompleteCollectives(const Status& status) {
  if (lane_ != nullptr) lane_->Stop(status);
  for (Peer& peer : peers_) {
    if (peer.link == nullptr || peer.link->dead()) continue;
    peer.link->DetachSends();
    if (current_ != nullptr) peer.link->DetachReceive();
  }
  if (current_ != nullptr) {
    current_.reset();
    scratch_.Trim();
    Finish(std::exchange(current_op_, {}), status);
  }
  for (SubmittedOp& op : std::exchange(pending_, {})) Finish(std::move(op), status);
}

void CommGroup::SendPart(int peer, std::uint8_t phase, std::span<const std::byte> payload) {
  port_->OnStep();
  MessageLink* link = PeerAt(peer).link.get();
  if (link == nullptr) return;  // It has left; CheckEnds fails the operation.
  MessageHeader header = current_header_;
  header.phase = phase;
  header.payload_bytes = payload.size();
  if (!HasOneCount(header.kind)) header.count = payload.size() / SizeOf(header.dtype);
  link->Send(header, payload, kToken);
}

void CommGroup::SendNote(int peer) {
  MessageLink* link = PeerAt(peer).link.get();
  if (link == nullptr) return;
  MessageHeader header = current_header_;
  header.phase = Collective::kNotePhase;
  link->Send(header, {}, 0);
}

void CommGroup::SpaceFreed(int peer) {
  if (MessageLink* link = PeerAt(peer).link.get()) link->Resume();
}

CommGroup::IncomingText& CommGroup::TextOf(const MessageLink& link) {
  Peer& peer = PeerAt(link.peer());
  if (&link == peer.inbound.get()) return peer.texts[1];
  if (&link == peer.outbound.get()) return peer.texts[2];
  return peer.texts[0];
}

HeaderVerdict CommGroup::OnHeader(MessageLink& link, const MessageHeader& header) {
  using Action = HeaderVerdict::Action;
  if (state_ != State::kLive) return {};
  Peer& from = PeerAt(link.peer());
  if (&link == from.inbound.get()) from.inbound_heard = true;
  switch (header.type) {
    case MessageType::kGoodbye:
      return {};
    case MessageType::kShm:
      if (link.lane() != Lane::kCollective) return {.action = Action::kInvalid};
      [[fallthrough]];
    case MessageType::kFault: {
      IncomingText& incoming = TextOf(link);
      incoming.text.resize(header.payload_bytes);
      incoming.sink = FlatSink(std::as_writable_bytes(std::span<char>(incoming.text)));
      return {.action = Action::kTake, .sink = &incoming.sink};
    }
    case MessageType::kPointToPoint:
      return point_to_point_.OnHeader(link, header);
    case MessageType::kCollective:
      if (link.lane() != Lane::kCollective) return {.action = Action::kInvalid};
      return OnCollectiveHeader(link.peer(), header);
  }
  return {.action = Action::kInvalid};
}

HeaderVerdict CommGroup::OnCollectiveHeader(int peer, const MessageHeader& header) {
  using Action = HeaderVerdict::Action;
  if (!collective_failure_.ok()) return {};
  NoteEntered(peer, header.seq);
  if (header.seq > started_) {
    // Its parts come in order: what the current operation still expects from it will never come.
    if (current_ != nullptr && current_->NextFrom(peer)) {
      FailCommunicator(SkippedMismatch(spec_, peer, header, current_header_));
      return {};
    }
    return {.action = Action::kHold};
  }
  if (current_ == nullptr || header.seq < started_) {
    // A rank that is behind, in an operation that needed nothing of it.
    const std::uint64_t first = started_ - history_.size() + (current_ != nullptr ? 0 : 1);
    if (header.seq < first) return {};
    const MessageHeader& ours = history_[header.seq - first];
    if (!SameCollective(header, ours))
      FailCommunicator(CollectiveMismatch(spec_, peer, header, ours));
    return {};
  }
  if (!SameCollective(header, current_header_)) {
    FailCommunicator(CollectiveMismatch(spec_, peer, header, current_header_));
    return {};
  }
  if (header.phase == Collective::kNotePhase) return {};
  const std::optional<Collective::Due> due = current_->NextFrom(peer);
  if (!due || due->phase != header.phase) return {.action = Action::kInvalid};
  if (due->bytes != header.payload_bytes) {
    // Parts with counts of their own say what they hold; all others are equal by now.
    if (HasOneCount(header.kind) || !SaysItsSize(header)) return {.action = Action::kInvalid};
    MessageHeader ours = current_header_;
    ours.count = due->bytes / SizeOf(ours.dtype);
    FailCommunicator(PartMismatch(spec_, peer, header, spec_.rank, ours));
    return {};
  }
  return {.action = Action::kTake, .sink = current_->Accept(peer)};
}

void CommGroup::OnMessage(MessageLink& link, const MessageHeader& header) {
  if (state_ != State::kLive) return;
  switch (header.type) {
    case MessageType::kGoodbye:
      return OnGoodbye(link, header.count);
    case MessageType::kFault:
      return OnFault(link.peer(), TextOf(link).text);
    case MessageType::kShm:
      return OnShmMessage(link.peer(), header, TextOf(link).text);
    case MessageType::kPointToPoint:
      return point_to_point_.OnMessage(link, header);
    case MessageType::kCollective:
      if (current_ == nullptr || header.seq != started_ || header.phase == Collective::kNotePhase)
        return;
      port_->OnStep();
      return current_->OnMessage(link.peer());
  }
}

void CommGroup::OnDamaged(MessageLink& link, const MessageHeader& header) {
  if (state_ != State::kLive) return;
  std::string call_site;
  if (header.type == MessageType::kPointToPoint)
    call_site = point_to_point_.CallSiteOfRecv(link.peer());
  if (header.type == MessageType::kCollective && current_ != nullptr)
    call_site = current_op_.op.call_site;
  FailCommunicator(DamagedPayload(spec_, link.peer(), header, call_site));
}

void CommGroup::OnSent(MessageLink& link, std::uint64_t /*token*/) {
  if (state_ != State::kLive) return;
  if (link.lane() == Lane::kPointToPoint) return point_to_point_.OnSent(link.peer());
  if (current_ != nullptr) current_->OnSent(link.peer());
}

}  // namespace resilient
