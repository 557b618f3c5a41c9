#include "runtime/comm/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/comm/mismatch.h"

namespace resilient {

PointToPoint::PointToPoint(const GroupSpec& spec, PointToPointHost& host)
    : spec_(spec), host_(host), peers_(spec.members.size()) {}

void PointToPoint::Submit(SubmittedOp op) {
  Peer& peer = PeerAt(op.op.peer);
  if (op.op.kind == OpKind::kSend) {
    SubmitSend(peer, std::move(op));
  } else {
    SubmitRecv(peer, std::move(op));
  }
}

void PointToPoint::SubmitSend(Peer& peer, SubmittedOp op) {
  if (peer.left) return FailWithLeft(std::move(op));
  if (peer.out != nullptr) return Send(peer, std::move(op));
  const int rank = op.op.peer;
  peer.unsent.push_back(std::move(op));
  if (peer.unsent.size() == 1) host_.OpenOutbound(rank);
}

void PointToPoint::Send(Peer& peer, SubmittedOp op) {
  MessageHeader header = HeaderOf(op.op, ++peer.sent);
  header.payload_bytes = op.op.count * SizeOf(op.op.dtype);
  const std::span<const std::byte> payload(static_cast<const std::byte*>(op.op.data),
                                           header.payload_bytes);
  peer.sending.push_back(std::move(op));
  peer.out->Send(header, payload, 1);
}

void PointToPoint::SetOutbound(int peer, MessageLink* link) {
  Peer& state = PeerAt(peer);
  state.out = link;
  for (SubmittedOp& op : std::exchange(state.unsent, {})) Send(state, std::move(op));
}

void PointToPoint::SetInbound(int peer, MessageLink* link) { PeerAt(peer).in = link; }

void PointToPoint::OnSent(int peer) {
  Peer& state = PeerAt(peer);
  RESILIENT_CHECK(!state.sending.empty());
  SubmittedOp op = std::move(state.sending.front());
  state.sending.pop_front();
  host_.Finish(std::move(op), Status::Ok());
}

void PointToPoint::SubmitRecv(Peer& peer, SubmittedOp op) {
  const auto message =
      std::find_if(peer.unexpected.begin(), peer.unexpected.end(),
                   [&](const Unexpected& kept) { return kept.header.tag == op.op.tag; });
  if (message != peer.unexpected.end() && message->complete)
    return Deliver(peer, message, std::move(op));
  peer.recvs.push_back(std::move(op));
  if (peer.in != nullptr) peer.in->Resume();
  FailRecvsOfLeaver(peer);
}

bool PointToPoint::Agree(int peer, const MessageHeader& header, const SubmittedOp& recv) {
  if (header.dtype == recv.op.dtype && header.count == recv.op.count) return true;
  host_.OnSendRecvMismatch(SendRecvMismatch(spec_, peer, header, recv.op, recv.seq));
  return false;
}

void PointToPoint::Deliver(Peer& peer, const std::deque<Unexpected>::iterator& message,
                           SubmittedOp op) {
  // The recv is back in its queue while the two are compared: a mismatch fails all of them.
  peer.recvs.push_front(std::move(op));
  if (!Agree(peer.recvs.front().op.peer, message->header, peer.recvs.front())) return;
  op = std::move(peer.recvs.front());
  peer.recvs.pop_front();
  if (!message->payload.empty())
    std::memcpy(op.op.data, message->payload.data(), message->payload.size());
  peer.unexpected_bytes -= message->payload.size() + kUnexpectedOverheadBytes;
  peer.unexpected.erase(message);
  if (peer.in != nullptr) peer.in->Resume();
  host_.Finish(std::move(op), Status::Ok());
}

HeaderVerdict PointToPoint::OnHeader(MessageLink& link, const MessageHeader& header) {
  using Action = HeaderVerdict::Action;
  Peer& peer = PeerAt(link.peer());
  const bool whole = header.count <= header.payload_bytes &&
                     header.payload_bytes == header.count * SizeOf(header.dtype);
  if (&link != peer.in || !whole) return {.action = Action::kInvalid};
  const auto recv = std::find_if(peer.recvs.begin(), peer.recvs.end(),
                                 [&](const SubmittedOp& op) { return op.op.tag == header.tag; });
  if (recv != peer.recvs.end()) {
    if (!Agree(link.peer(), header, *recv)) return {};
    peer.receiving = std::move(*recv);
    peer.recvs.erase(recv);
    const Operation& op = peer.receiving->op;
    peer.sink = FlatSink({static_cast<std::byte*>(op.data), header.payload_bytes});
    return {.action = Action::kTake, .sink = &peer.sink};
  }
  const std::uint64_t room = kUnexpectedLimitBytes - peer.unexpected_bytes;
  if (header.payload_bytes > kUnexpectedLimitBytes ||
      header.payload_bytes + kUnexpectedOverheadBytes > room)
    return {.action = Action::kHold};
  peer.unexpected_bytes += header.payload_bytes + kUnexpectedOverheadBytes;
  Unexpected& kept = peer.unexpected.emplace_back();
  kept.header = header;
  kept.payload.resize(header.payload_bytes);
  peer.sink = FlatSink(kept.payload);
  return {.action = Action::kTake, .sink = &peer.sink};
}

void PointToPoint::OnMessage(MessageLink& link) {
  Peer& peer = PeerAt(link.peer());
  ++peer.received;
  if (peer.receiving) {
    SubmittedOp op = std::move(*peer.receiving);
    peer.receiving.reset();
    host_.Finish(std::move(op), Status::Ok());
  } else if (!peer.unexpected.empty() && !peer.unexpected.back().complete) {
    Unexpected& kept = peer.unexpected.back();
    kept.complete = true;
    // A recv with this tag may have been submitted while the message was on its way.
    const auto recv =
        std::find_if(peer.recvs.begin(), peer.recvs.end(),
                     [&](const SubmittedOp& op) { return op.op.tag == kept.header.tag; });
    if (recv != peer.recvs.end()) {
      SubmittedOp op = std::move(*recv);
      peer.recvs.erase(recv);
      Deliver(peer, std::prev(peer.unexpected.end()), std::move(op));
    }
  }
  FailRecvsOfLeaver(peer);
}

void PointToPoint::OnLeft(int peer, std::optional<std::uint64_t> announced) {
  Peer& state = PeerAt(peer);
  state.left = true;
  if (announced) state.announced = announced;
  if (state.out != nullptr) state.out->DetachSends();
  for (SubmittedOp& op : std::exchange(state.sending, {})) FailWithLeft(std::move(op));
  for (SubmittedOp& op : std::exchange(state.unsent, {})) FailWithLeft(std::move(op));
  FailRecvsOfLeaver(state);
}

void PointToPoint::OnInboundEnd(int peer) {
  PeerAt(peer).inbound_ended = true;
  FailRecvsOfLeaver(PeerAt(peer));
}

void PointToPoint::FailRecvsOfLeaver(Peer& peer) {
  // What it sent before its goodbye may still be on its way on this connection.
  const bool all_here = peer.announced && peer.received >= *peer.announced;
  if (!peer.left || !(all_here || peer.inbound_ended)) return;
  for (SubmittedOp& op : std::exchange(peer.recvs, {})) FailWithLeft(std::move(op));
  if (peer.inbound_ended && peer.receiving) {
    peer.in->DetachReceive();
    FailWithLeft(*std::exchange(peer.receiving, std::nullopt));
  }
}

void PointToPoint::FailWithLeft(SubmittedOp op) {
  const Status left = PeerLeft(spec_, op.op.peer, Describe(op.op), op.seq);
  host_.Finish(std::move(op), left);
}

void PointToPoint::FailAll(const Status& status) {
  for (Peer& peer : peers_) {
    if (peer.out != nullptr) peer.sent -= peer.out->DetachSends();
    if (peer.in != nullptr) peer.in->DetachReceive();
    std::vector<SubmittedOp> all;
    for (auto* queue : {&peer.unsent, &peer.sending, &peer.recvs}) {
      std::move(queue->begin(), queue->end(), std::back_inserter(all));
      queue->clear();
    }
    if (peer.receiving) all.push_back(std::move(*peer.receiving));
    peer.receiving.reset();
    peer.unexpected.clear();
    peer.unexpected_bytes = 0;
    for (SubmittedOp& op : all) host_.Finish(std::move(op), status);
  }
}

}  // namespace resilient
