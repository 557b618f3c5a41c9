#include <optional>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/group.h"

// How a group comes to its shared memory. Links: who connects offers some to a peer on its host.
// Collectives inside a host: rank 0 makes a segment and offers it to everyone, each answers whether
// it has attached, and rank 0 tells the verdict. Until then collectives wait.

namespace resilient {

std::unique_ptr<ShmStreamOffer> CommGroup::OfferStream(int peer, Lane lane) {
  const std::optional<ShmStreamGeometry> geometry = allowance_.Take(peer, lane);
  if (!geometry) return nullptr;
  Result<std::unique_ptr<ShmStreamOffer>> offer = ShmStreamOffer::Make(*geometry);
  if (offer) return std::move(*offer);
  RESILIENT_LOG(kWarn, "group ", spec_.name, " has a TCP link to rank ", peer,
                " on its host: ", offer.status().message());
  return nullptr;
}

std::unique_ptr<ByteStream> CommGroup::AcceptStream(const Hello& hello, FileDescriptor& socket) {
  if (!hello.shm_offer.empty()) {
    const int connection = socket.get();
    Result<std::unique_ptr<ByteStream>> stream = AttachShmStream(hello.shm_offer, socket);
    if (stream) {
      return SendReply(hello, connection, HelloVerdict::kAcceptedShared) ? std::move(*stream)
                                                                         : nullptr;
    }
    if (stream.status().code() != StatusCode::kCancelled) {
      RESILIENT_LOG(kWarn, "group ", spec_.name, " has a TCP link to rank ", hello.from,
                    " on its host: ", stream.status().message());
    }
  }
  return SendReply(hello, socket.get(), HelloVerdict::kAccepted) ? MakeTcpStream(std::move(socket))
                                                                 : nullptr;
}

std::optional<ShmGeometry> CommGroup::BoardGeometry() const {
  return ShmGeometry::Within(context_.shm_limit, port_->size());
}

void CommGroup::OfferSegment() {
  const std::optional<ShmGeometry> geometry = BoardGeometry();
  if (!geometry) return Decide(false);
  Result<std::unique_ptr<ShmSegment>> segment = ShmSegment::Create(geometry->TotalBytes());
  if (!segment.ok()) {
    RESILIENT_LOG(kWarn, "group ", spec_.name,
                  " uses TCP inside the host: ", segment.status().message());
    return Decide(false);
  }
  segment_ = std::move(*segment);
  const std::string offer = ShmSegment::EncodeOffer(segment_->MakeOffer());
  for (int peer = 1; peer < port_->size(); ++peer) SendShm(peer, ShmMessage::kOffer, true, offer);
  DecideWhenAnswered();
}

void CommGroup::SendShm(int peer, ShmMessage message, bool yes, std::string text) {
  MessageLink* link = PeerAt(peer).link.get();
  if (link == nullptr || link->dead()) return;
  MessageHeader header;
  header.type = MessageType::kShm;
  header.phase = static_cast<std::uint8_t>(message);
  header.count = yes ? 1 : 0;
  header.payload_bytes = text.size();
  link->SendOwned(header, std::move(text));
}

void CommGroup::OnShmMessage(int peer, const MessageHeader& header, const std::string& text) {
  if (transport_ != Transport::kUndecided) return;
  switch (static_cast<ShmMessage>(header.phase)) {
    case ShmMessage::kOffer:
      if (peer == 0) Answer(text);
      return;
    case ShmMessage::kAnswer:
      if (segment_ == nullptr || spec_.rank != 0) return;
      PeerAt(peer).answered = true;
      all_attached_ = all_attached_ && header.count == 1;
      return DecideWhenAnswered();
    case ShmMessage::kVerdict:
      if (peer == 0) Decide(header.count == 1);
      return;
  }
}

void CommGroup::Answer(const std::string& text) {
  const std::optional<ShmGeometry> geometry = BoardGeometry();
  const std::optional<ShmSegment::Offer> offer = ShmSegment::DecodeOffer(text);
  Status why(StatusCode::kProtocol, "the offer cannot be read");
  if (!geometry) {
    why = Status(StatusCode::kResourceExhausted,
                 StrCat("RESILIENT_SHM_LIMIT is too little for ", port_->size(), " ranks"));
  } else if (offer) {
    Result<std::unique_ptr<ShmSegment>> segment =
        ShmSegment::Attach(*offer, geometry->TotalBytes());
    if (segment.ok()) segment_ = std::move(*segment);
    why = segment.status();
  }
  if (!why.ok()) {
    RESILIENT_LOG(kWarn, "group ", spec_.name, " uses TCP inside the host: ", why.message());
  }
  SendShm(0, ShmMessage::kAnswer, why.ok(), {});
}

void CommGroup::DecideWhenAnswered() {
  bool all_answered = true;
  for (int peer = 1; peer < port_->size(); ++peer) {
    if (PeerAt(peer).answered) continue;
    // It may have left before the last link was up.
    if (!PeerAt(peer).end.ok()) return Decide(false);
    all_answered = false;
  }
  if (all_answered) Decide(all_attached_);
}

void CommGroup::Decide(bool shared) {
  if (spec_.rank == 0) {
    for (int peer = 1; peer < port_->size(); ++peer)
      SendShm(peer, ShmMessage::kVerdict, shared, {});
  }
  if (shared && segment_ != nullptr) return UseSharedMemory(std::move(segment_));
  segment_.reset();
  transport_ = Transport::kLinks;
}

void CommGroup::UseSharedMemory(std::unique_ptr<ShmSegment> segment) {
  segment->CloseOffer();
  transport_ = Transport::kSharedMemory;
  lane_ = &port_->OpenLane(std::move(segment), *BoardGeometry(), std::exchange(pending_, {}),
                           context_.checksums);
  for (int peer = 0; peer < port_->size(); ++peer) {
    if (!PeerAt(peer).end.ok()) lane_->OnPeerEnded(peer, PeerAt(peer).end);
  }
}

void CommGroup::TakeLaneFailure() {
  if (lane_ == nullptr || state_ != State::kLive) return;
  const std::optional<Status> failure = lane_->TakeFailure();
  if (!failure) return;
  if (failure->code() == StatusCode::kLeft) return FailCollectives(*failure);
  FailCommunicator(*failure);
}

}  // namespace resilient
