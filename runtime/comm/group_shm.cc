#include <optional>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/endpoint.h"
#include "runtime/comm/group.h"

// How a group comes to its shared memory: rank 0 makes a segment and offers it to everyone, each
// answers whether it has attached, and rank 0 tells the verdict. Until then collectives wait.

namespace resilient {

// Looks only at what is equal on all ranks: where one waits for a verdict, rank 0 gives it.
bool CommGroup::MayShareMemory() const {
  const std::string host = DecodeEndpoint(spec_.members.front().endpoint).host_id;
  if (host.empty()) return false;
  for (const GroupMember& member : spec_.members) {
    if (DecodeEndpoint(member.endpoint).host_id != host) return false;
  }
  return true;
}

void CommGroup::OfferSegment() {
  const std::optional<ShmGeometry> geometry =
      ShmGeometry::Within(context_.shm_limit, port_->size());
  if (!geometry) return Decide(false);
  Result<std::unique_ptr<ShmSegment>> segment = ShmSegment::Create(*geometry);
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
  const std::optional<ShmGeometry> geometry =
      ShmGeometry::Within(context_.shm_limit, port_->size());
  const std::optional<ShmSegment::Offer> offer = ShmSegment::DecodeOffer(text);
  Status why(StatusCode::kProtocol, "the offer cannot be read");
  if (!geometry) {
    why = Status(StatusCode::kResourceExhausted,
                 StrCat("RESILIENT_SHM_LIMIT is too little for ", port_->size(), " ranks"));
  } else if (offer) {
    Result<std::unique_ptr<ShmSegment>> segment = ShmSegment::Attach(*offer, *geometry);
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
  lane_ = &port_->OpenLane(std::move(segment), std::exchange(pending_, {}), context_.checksums);
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
