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
  next_check_ = std::min(next_check_, op.timeouts.NextCheck(host_.Now(), host_.HeldUntil()));
  next_tell_ = std::min(next_tell_, op.submitted + kWaitTellAfter);
  if (op.op.kind == OpKind::kSend) return SubmitSend(std::move(op));
  if (op.op.peer == kAnyPeer) return SubmitRecvFromAny(std::move(op));
  SubmitRecv(std::move(op));
}

void PointToPoint::SubmitSend(SubmittedOp op) {
  const int rank = op.op.peer;
  Peer& peer = PeerAt(rank);
  if (peer.left) return FailWithLeft(rank, std::move(op));
  if (peer.out != nullptr) return Send(peer, std::move(op));
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

PointToPoint::Messages::iterator PointToPoint::FindKept(Peer& peer, std::uint32_t tag) {
  return std::find_if(peer.unexpected.begin(), peer.unexpected.end(),
                      [&](const Unexpected& kept) { return kept.header.tag == tag; });
}

PointToPoint::Match PointToPoint::FindRecv(Peer& peer, std::uint32_t tag) {
  Match match;
  for (Queue* queue : {&peer.recvs, &recvs_from_any_}) {
    const auto recv = std::find_if(queue->begin(), queue->end(),
                                   [&](const SubmittedOp& op) { return op.op.tag == tag; });
    if (recv == queue->end()) continue;
    if (match.queue == nullptr || recv->seq < match.recv->seq) match = {queue, recv};
  }
  return match;
}

SubmittedOp PointToPoint::Take(const Match& match) {
  SubmittedOp op = std::move(*match.recv);
  match.queue->erase(match.recv);
  return op;
}

void PointToPoint::SubmitRecv(SubmittedOp op) {
  const int rank = op.op.peer;
  Peer& peer = PeerAt(rank);
  const auto message = FindKept(peer, op.op.tag);
  if (message != peer.unexpected.end() && message->complete)
    return Deliver(rank, message, std::move(op));
  if (peer.held && peer.held->tag == op.op.tag) peer.held.reset();
  if (message != peer.unexpected.end()) op.timeouts.OnAllEntered(host_.Now());
  peer.recvs.push_back(std::move(op));
  if (peer.in != nullptr) peer.in->Resume();
  FailRecvsOfLeaver(rank);
}

void PointToPoint::SubmitRecvFromAny(SubmittedOp op) {
  const std::uint32_t tag = op.op.tag;
  std::optional<int> sender;
  std::uint64_t first = 0;
  const auto consider = [&](std::size_t rank, std::uint64_t arrival) {
    if (sender && first < arrival) return;
    sender = static_cast<int>(rank);
    first = arrival;
  };
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    const auto message = FindKept(peer, tag);
    if (message != peer.unexpected.end()) {
      if (message->complete) consider(rank, message->arrival);
    } else if (peer.held && peer.held->tag == tag) {
      consider(rank, peer.held->arrival);
    }
  }
  if (!sender) {
    recvs_from_any_.push_back(std::move(op));
    return FailRecvsFromAnyIfAllLeft();
  }
  Peer& peer = PeerAt(*sender);
  const auto message = FindKept(peer, tag);
  if (message != peer.unexpected.end()) return Deliver(*sender, message, std::move(op));
  // From here on it is a recv from that rank: the message that waits there is promised to it.
  peer.held.reset();
  peer.recvs.push_back(std::move(op));
  peer.in->Resume();
}

bool PointToPoint::Agree(int peer, const MessageHeader& header, const SubmittedOp& recv) {
  if (header.dtype == recv.op.dtype && header.count == recv.op.count) return true;
  host_.OnSendRecvMismatch(SendRecvMismatch(spec_, peer, header, recv.op, recv.seq));
  return false;
}

void PointToPoint::Deliver(int rank, const Messages::iterator& message, SubmittedOp op) {
  Peer& peer = PeerAt(rank);
  // The recv is back in its queue while the two are compared: a mismatch fails all of them.
  peer.recvs.push_front(std::move(op));
  if (!Agree(rank, message->header, peer.recvs.front())) return;
  op = std::move(peer.recvs.front());
  peer.recvs.pop_front();
  if (!message->payload.empty())
    std::memcpy(op.op.data, message->payload.data(), message->payload.size());
  peer.unexpected_bytes -= message->payload.size() + kUnexpectedOverheadBytes;
  peer.unexpected.erase(message);
  if (peer.in != nullptr) peer.in->Resume();
  Received(rank, std::move(op));
}

void PointToPoint::Received(int peer, SubmittedOp op) {
  if (op.op.sender != nullptr) *op.op.sender = peer;
  host_.Finish(std::move(op), Status::Ok());
}

HeaderVerdict PointToPoint::OnHeader(MessageLink& link, const MessageHeader& header) {
  using Action = HeaderVerdict::Action;
  Peer& peer = PeerAt(link.peer());
  const bool whole = header.count <= header.payload_bytes &&
                     header.payload_bytes == header.count * SizeOf(header.dtype);
  if (&link != peer.in || !whole) return {.action = Action::kInvalid};
  if (const Match match = FindRecv(peer, header.tag); match.queue != nullptr) {
    if (!Agree(link.peer(), header, *match.recv)) return {};
    peer.held.reset();
    peer.receiving = Take(match);
    peer.receiving->timeouts.OnAllEntered(host_.Now());
    peer.sink = FlatSink({static_cast<std::byte*>(peer.receiving->op.data), header.payload_bytes});
    return {.action = Action::kTake, .sink = &peer.sink};
  }
  const std::uint64_t room = kUnexpectedLimitBytes - peer.unexpected_bytes;
  if (header.payload_bytes > kUnexpectedLimitBytes ||
      header.payload_bytes + kUnexpectedOverheadBytes > room) {
    if (!peer.held) peer.held = Held{.tag = header.tag, .arrival = ++arrivals_};
    return {.action = Action::kHold};
  }
  peer.held.reset();
  peer.unexpected_bytes += header.payload_bytes + kUnexpectedOverheadBytes;
  Unexpected& kept = peer.unexpected.emplace_back();
  kept.header = header;
  kept.payload.resize(header.payload_bytes);
  peer.sink = FlatSink(kept.payload);
  return {.action = Action::kTake, .sink = &peer.sink};
}

void PointToPoint::OnMessage(MessageLink& link) {
  const int rank = link.peer();
  Peer& peer = PeerAt(rank);
  ++peer.received;
  if (peer.receiving) {
    SubmittedOp op = std::move(*peer.receiving);
    peer.receiving.reset();
    Received(rank, std::move(op));
  } else if (!peer.unexpected.empty() && !peer.unexpected.back().complete) {
    Unexpected& kept = peer.unexpected.back();
    kept.complete = true;
    kept.arrival = ++arrivals_;
    // A recv with this tag may have been submitted while the message was on its way.
    const Match match = FindRecv(peer, kept.header.tag);
    if (match.queue != nullptr) Deliver(rank, std::prev(peer.unexpected.end()), Take(match));
  }
  FailRecvsOfLeaver(rank);
}

std::string PointToPoint::CallSiteOfRecv(int peer) {
  const SubmittedOp* recv = Receiver(PeerAt(peer));
  return recv != nullptr ? recv->op.call_site : std::string();
}

void PointToPoint::OnLeft(int peer, std::optional<std::uint64_t> announced) {
  Peer& state = PeerAt(peer);
  state.left = true;
  if (announced) state.announced = announced;
  if (state.out != nullptr) state.out->DetachSends();
  for (SubmittedOp& op : std::exchange(state.sending, {})) FailWithLeft(peer, std::move(op));
  for (SubmittedOp& op : std::exchange(state.unsent, {})) FailWithLeft(peer, std::move(op));
  FailRecvsOfLeaver(peer);
}

void PointToPoint::OnInboundEnd(int peer) {
  PeerAt(peer).inbound_ended = true;
  FailRecvsOfLeaver(peer);
}

bool PointToPoint::IsDrained(const Peer& peer) {
  // What it sent before its goodbye may still be on its way on this connection.
  const bool all_here = peer.announced && peer.received >= *peer.announced;
  return peer.left && (all_here || peer.inbound_ended);
}

void PointToPoint::FailRecvsOfLeaver(int rank) {
  Peer& peer = PeerAt(rank);
  if (!IsDrained(peer)) return;
  for (SubmittedOp& op : std::exchange(peer.recvs, {})) FailWithLeft(rank, std::move(op));
  if (peer.inbound_ended && peer.receiving) {
    peer.in->DetachReceive();
    FailWithLeft(rank, *std::exchange(peer.receiving, std::nullopt));
  }
  FailRecvsFromAnyIfAllLeft();
}

void PointToPoint::FailRecvsFromAnyIfAllLeft() {
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (static_cast<int>(rank) != spec_.rank && !IsDrained(peers_[rank])) return;
  }
  for (SubmittedOp& op : std::exchange(recvs_from_any_, {})) {
    const Status left = AllLeft(spec_, Describe(op.op), op.seq);
    host_.Finish(std::move(op), left);
  }
}

void PointToPoint::FailWithLeft(int peer, SubmittedOp op) {
  const Status left = PeerLeft(spec_, peer, Describe(op.op), op.seq);
  host_.Finish(std::move(op), left);
}

SubmittedOp* PointToPoint::Receiver(Peer& peer) {
  if (peer.receiving) return &*peer.receiving;
  if (peer.unexpected.empty() || peer.unexpected.back().complete) return nullptr;
  const Match match = FindRecv(peer, peer.unexpected.back().header.tag);
  return match.queue != nullptr ? &*match.recv : nullptr;
}

void PointToPoint::OnMoved(int peer) {
  Peer& state = PeerAt(peer);
  SubmittedOp* const receiver = Receiver(state);
  if (receiver != nullptr) receiver->timeouts.OnMoved(host_.Now());
  if (!std::exchange(state.in_doubt, false)) return;
  // What was on its way is here, and these still wait: it was for another recv.
  for (SubmittedOp& recv : state.recvs) {
    if (&recv != receiver) recv.timeouts.WithdrawAllEntered();
  }
}

// A standstill is judged by who receives. A send cannot tell it from a rank that is late with its
// recv, which may take as long as that rank lives.
SubmittedOp* PointToPoint::FindLate() {
  const Instant now = host_.Now();
  if (now < next_check_) return nullptr;
  const Instant held_until = host_.HeldUntil();
  next_check_ = kNever;
  SubmittedOp* late = nullptr;
  ForEachOp([&](SubmittedOp& op, int /*peer*/) {
    if (op.timeouts.Check(now, held_until) != OpTimeouts::Verdict::kInTime) late = &op;
    next_check_ = std::min(next_check_, op.timeouts.NextCheck(now, held_until));
  });
  return late;
}

void PointToPoint::OnSendMoved(int peer) { PeerAt(peer).send_moved = host_.Now(); }

void PointToPoint::AddWaiting(std::vector<WaitingOperation>& waiting, std::size_t most) {
  struct Waiting {
    const SubmittedOp* op = nullptr;
    int peer = kAnyPeer;
  };
  const Instant now = host_.Now();
  std::vector<Waiting> late;
  next_tell_ = kNever;
  ForEachOp([&](const SubmittedOp& op, int peer) {
    const Instant due = op.submitted + kWaitTellAfter;
    if (due <= now) late.push_back({.op = &op, .peer = peer});
    next_tell_ = std::min(next_tell_, due <= now ? now + kWaitTellAfter : due);
  });
  const auto told = static_cast<std::ptrdiff_t>(std::min(most, late.size()));
  std::partial_sort(late.begin(), late.begin() + told, late.end(),
                    [](const Waiting& a, const Waiting& b) { return a.op->seq < b.op->seq; });
  late.resize(static_cast<std::size_t>(told));
  waiting.reserve(waiting.size() + late.size());
  for (const Waiting& one : late) {
    WaitingOperation& said = waiting.emplace_back(ToldOf(*one.op, now));
    said.missing = GlobalRanks(spec_, MissingFrom(*one.op, one.peer));
    said.any = one.peer == kAnyPeer && !said.missing.empty();
  }
}

std::vector<int> PointToPoint::MissingFrom(const SubmittedOp& op, int peer) {
  // Of a send that nobody takes, what buffers hold goes at once, and then nothing.
  constexpr Duration kStill = kWaitTellAfter / 2;
  if (op.op.kind == OpKind::kSend) {
    const bool moves = PeerAt(peer).send_moved + kStill > host_.Now();
    return moves ? std::vector<int>() : std::vector<int>{peer};
  }
  std::vector<int> missing;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    const int sender = static_cast<int>(rank);
    if (sender == spec_.rank || (peer != kAnyPeer && peer != sender)) continue;
    if (Receiver(peers_[rank]) == &op) return {};
    if (!IsDrained(peers_[rank])) missing.push_back(sender);
  }
  return missing;
}

PeerProgress PointToPoint::Progress(int peer) const {
  const Peer& state = PeerAt(peer);
  PeerProgress progress;
  progress.sent = state.sent + state.unsent.size();
  progress.received = state.received;
  const bool arriving = !state.unexpected.empty() && !state.unexpected.back().complete;
  if (state.receiving || arriving) ++progress.received;
  if (state.held) ++progress.received;
  progress.unclaimed = state.held.has_value();
  return progress;
}

void PointToPoint::NoteAllEntered(std::uint64_t seq) {
  // The receiver judges a standstill.
  for (Peer& peer : peers_) {
    for (SubmittedOp& recv : peer.recvs) {
      if (recv.seq != seq) continue;
      recv.timeouts.OnAllEntered(host_.Now());
      peer.in_doubt = true;
      next_check_ = host_.Now();
    }
  }
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
    peer.held.reset();
    for (SubmittedOp& op : all) host_.Finish(std::move(op), status);
  }
  for (SubmittedOp& op : std::exchange(recvs_from_any_, {})) host_.Finish(std::move(op), status);
}

}  // namespace resilient
