#include "runtime/comm/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/comm/mismatch.h"

namespace resilient {
namespace {

std::size_t PayloadBytes(const Operation& op) { return op.count * SizeOf(op.dtype); }

// Without overflow.
bool CoversEager(std::size_t credit, std::uint64_t payload_bytes) {
  return credit >= PointToPoint::kEagerOverheadBytes &&
         payload_bytes <= credit - PointToPoint::kEagerOverheadBytes;
}

}  // namespace

PointToPoint::PointToPoint(const GroupSpec& spec, std::size_t eager_limit, PointToPointHost& host)
    : spec_(spec), eager_limit_(eager_limit), host_(host), peers_(spec.members.size()) {
  for (Peer& peer : peers_) peer.credit = eager_limit;
}

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
  const std::uint64_t number = ++peer.numbered;
  const std::size_t bytes = PayloadBytes(op.op);
  if (CoversEager(peer.credit, bytes)) {
    peer.credit -= bytes + kEagerOverheadBytes;
    return SendPayload(peer, std::move(op), number, PointToPointPhase::kEager);
  }
  MessageHeader header = HeaderOf(op.op, number);
  header.phase = static_cast<std::uint8_t>(PointToPointPhase::kAnnounced);
  peer.announced.emplace(number, Announced{.op = std::move(op)});
  peer.out->Send(header, {}, 0);
}

void PointToPoint::SendPayload(Peer& peer, SubmittedOp op, std::uint64_t number,
                               PointToPointPhase phase) {
  MessageHeader header = HeaderOf(op.op, number);
  header.phase = static_cast<std::uint8_t>(phase);
  header.payload_bytes = PayloadBytes(op.op);
  const std::span<const std::byte> payload(static_cast<const std::byte*>(op.op.data),
                                           header.payload_bytes);
  peer.sending.push_back(std::move(op));
  ++peer.sent;
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

bool PointToPoint::IsReplyExpected(const Peer& peer, std::size_t eager_limit,
                                   const MessageHeader& reply) {
  if (peer.left) return true;  // What it was for has failed.
  if (reply.count > eager_limit - peer.credit) return false;
  const bool about_credit = reply.phase == static_cast<std::uint8_t>(PointToPointPhase::kCredit);
  return about_credit || peer.announced.count(reply.seq) == 1;
}

void PointToPoint::OnReply(Peer& peer, const MessageHeader& reply) {
  if (peer.left) return;
  peer.credit += reply.count;
  const auto phase = static_cast<PointToPointPhase>(reply.phase);
  if (phase == PointToPointPhase::kCredit) return;
  const auto found = peer.announced.find(reply.seq);
  if (phase == PointToPointPhase::kUnmatched) {
    found->second.unmatched = true;
    return;
  }
  SubmittedOp op = std::move(found->second.op);
  peer.announced.erase(found);
  SendPayload(peer, std::move(op), reply.seq, PointToPointPhase::kPayload);
}

PointToPoint::Messages::iterator PointToPoint::FindKept(Peer& peer, std::uint32_t tag,
                                                        bool from_any) {
  const bool passes_over = from_any && IsDrained(peer);
  return std::find_if(peer.unexpected.begin(), peer.unexpected.end(), [&](const Unexpected& kept) {
    return kept.header.tag == tag && !(passes_over && kept.state == Unexpected::State::kAnnounced);
  });
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
  const auto message = FindKept(peer, op.op.tag, false);
  if (message != peer.unexpected.end()) {
    if (message->state != Unexpected::State::kArriving)
      return Deliver(rank, message, std::move(op));
    op.timeouts.OnAllEntered(host_.Now());
  }
  peer.recvs.push_back(std::move(op));
  FailRecvsOfLeaver(rank);
}

void PointToPoint::SubmitRecvFromAny(SubmittedOp op) {
  const std::uint32_t tag = op.op.tag;
  std::optional<int> sender;
  Messages::iterator first;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    const auto message = FindKept(peer, tag, true);
    if (message == peer.unexpected.end() || message->state == Unexpected::State::kArriving)
      continue;
    if (sender && first->arrival < message->arrival) continue;
    sender = static_cast<int>(rank);
    first = message;
  }
  if (sender) return Deliver(*sender, first, std::move(op));
  recvs_from_any_.push_back(std::move(op));
  FailRecvsFromAnyIfAllLeft();
}

bool PointToPoint::Agree(int peer, const MessageHeader& header, const SubmittedOp& recv) {
  if (header.dtype == recv.op.dtype && header.count == recv.op.count) return true;
  host_.OnSendRecvMismatch(SendRecvMismatch(spec_, peer, header, recv.op, recv.seq));
  return false;
}

void PointToPoint::Deliver(int rank, const Messages::iterator& message, SubmittedOp op) {
  Peer& peer = PeerAt(rank);
  const bool announced = message->state == Unexpected::State::kAnnounced;
  if (announced && IsDrained(peer)) {
    peer.unexpected.erase(message);
    return FailWithLeft(rank, std::move(op));
  }
  // The recv is back in its queue while the two are compared: a mismatch fails all of them.
  peer.recvs.push_front(std::move(op));
  if (!Agree(rank, message->header, peer.recvs.front())) return;
  op = std::move(peer.recvs.front());
  peer.recvs.pop_front();
  const std::uint64_t number = message->header.seq;
  const std::vector<std::byte> payload = std::move(message->payload);
  peer.unexpected.erase(message);
  if (announced) return Clear(rank, number, std::move(op));
  if (!payload.empty()) std::memcpy(op.op.data, payload.data(), payload.size());
  ReturnCredit(peer, payload.size());
  Received(rank, std::move(op));
}

void PointToPoint::Clear(int rank, std::uint64_t number, SubmittedOp op) {
  Peer& peer = PeerAt(rank);
  op.timeouts.OnAllEntered(host_.Now());
  peer.cleared.emplace(number, std::move(op));
  Reply(peer, PointToPointPhase::kClearToSend, number);
}

void PointToPoint::ReturnCredit(Peer& peer, std::size_t payload_bytes) {
  peer.returning += payload_bytes + kEagerOverheadBytes;
  if (peer.returning >= eager_limit_ / 4) Reply(peer, PointToPointPhase::kCredit, 0);
}

void PointToPoint::Reply(Peer& peer, PointToPointPhase phase, std::uint64_t number) {
  MessageHeader reply;
  reply.type = MessageType::kPointToPoint;
  reply.phase = static_cast<std::uint8_t>(phase);
  reply.seq = number;
  reply.count = std::exchange(peer.returning, 0);
  peer.eager -= reply.count;
  peer.in->Send(reply, {}, 0);
}

void PointToPoint::Received(int peer, SubmittedOp op) {
  if (op.op.sender != nullptr) *op.op.sender = peer;
  host_.Finish(std::move(op), Status::Ok());
}

HeaderVerdict PointToPoint::OnHeader(MessageLink& link, const MessageHeader& header) {
  constexpr HeaderVerdict kInvalid = {.action = HeaderVerdict::Action::kInvalid};
  const auto phase = static_cast<PointToPointPhase>(header.phase);
  Peer& peer = PeerAt(link.peer());
  if (&link != (phase >= PointToPointPhase::kClearToSend ? peer.out : peer.in)) return kInvalid;
  switch (phase) {
    case PointToPointPhase::kEager:
      return OnEager(link.peer(), header);
    case PointToPointPhase::kPayload:
      return OnClearedPayload(peer, header);
    case PointToPointPhase::kAnnounced:
      return IsAnnouncementValid(peer, header) ? HeaderVerdict() : kInvalid;
    case PointToPointPhase::kClearToSend:
    case PointToPointPhase::kUnmatched:
    case PointToPointPhase::kCredit:
      return IsReplyExpected(peer, eager_limit_, header) ? HeaderVerdict() : kInvalid;
  }
  return kInvalid;
}

HeaderVerdict PointToPoint::OnEager(int rank, const MessageHeader& header) {
  Peer& peer = PeerAt(rank);
  const bool whole = header.count <= header.payload_bytes &&
                     header.payload_bytes == header.count * SizeOf(header.dtype);
  if (!whole || header.seq <= peer.last_number ||
      !CoversEager(eager_limit_ - peer.eager, header.payload_bytes))
    return {.action = HeaderVerdict::Action::kInvalid};
  peer.last_number = header.seq;
  peer.eager += header.payload_bytes + kEagerOverheadBytes;
  if (const Match match = FindRecv(peer, header.tag); match.queue != nullptr) {
    if (!Agree(rank, header, *match.recv)) return {};
    peer.receiving = Take(match);
    peer.receiving->timeouts.OnAllEntered(host_.Now());
    peer.sink = FlatSink({static_cast<std::byte*>(peer.receiving->op.data), header.payload_bytes});
    return {.sink = &peer.sink};
  }
  Unexpected& kept = peer.unexpected.emplace_back();
  kept.header = header;
  kept.payload.resize(header.payload_bytes);
  peer.sink = FlatSink(kept.payload);
  return {.sink = &peer.sink};
}

bool PointToPoint::IsAnnouncementValid(const Peer& peer, const MessageHeader& header) const {
  // No rank has more in flight.
  const std::size_t most = eager_limit_ / kEagerOverheadBytes + GroupPort::kMaxOperations;
  return header.seq > peer.last_number && peer.unexpected.size() < most;
}

HeaderVerdict PointToPoint::OnClearedPayload(Peer& peer, const MessageHeader& header) {
  const auto found = peer.cleared.find(header.seq);
  if (found == peer.cleared.end()) return {.action = HeaderVerdict::Action::kInvalid};
  // As its announcement said: that has no checksum.
  const Operation& recv = found->second.op;
  if (header.tag != recv.tag || header.dtype != recv.dtype || header.count != recv.count ||
      header.payload_bytes != PayloadBytes(recv))
    return {.action = HeaderVerdict::Action::kInvalid};
  peer.receiving = std::move(found->second);
  peer.cleared.erase(found);
  peer.sink = FlatSink({static_cast<std::byte*>(peer.receiving->op.data), header.payload_bytes});
  return {.sink = &peer.sink};
}

void PointToPoint::OnMessage(MessageLink& link, const MessageHeader& header) {
  switch (static_cast<PointToPointPhase>(header.phase)) {
    case PointToPointPhase::kEager:
    case PointToPointPhase::kPayload:
      return OnPayloadComplete(link.peer(), header);
    case PointToPointPhase::kAnnounced:
      return OnAnnouncement(link.peer(), header);
    case PointToPointPhase::kClearToSend:
    case PointToPointPhase::kUnmatched:
    case PointToPointPhase::kCredit:
      return OnReply(PeerAt(link.peer()), header);
  }
}

void PointToPoint::OnAnnouncement(int rank, const MessageHeader& header) {
  Peer& peer = PeerAt(rank);
  peer.last_number = header.seq;
  // What a rank that is gone has announced never comes: that is for a recv that names it to hear.
  const Match match = IsDrained(peer) ? Match() : FindRecv(peer, header.tag);
  if (match.queue != nullptr) {
    if (Agree(rank, header, *match.recv)) Clear(rank, header.seq, Take(match));
    return;
  }
  Unexpected& kept = peer.unexpected.emplace_back();
  kept.header = header;
  kept.state = Unexpected::State::kAnnounced;
  kept.arrival = ++arrivals_;
  Reply(peer, PointToPointPhase::kUnmatched, header.seq);
}

void PointToPoint::OnPayloadComplete(int rank, const MessageHeader& header) {
  Peer& peer = PeerAt(rank);
  ++peer.received;
  if (peer.receiving) {
    SubmittedOp op = std::move(*peer.receiving);
    peer.receiving.reset();
    if (header.phase == static_cast<std::uint8_t>(PointToPointPhase::kEager))
      ReturnCredit(peer, header.payload_bytes);
    Received(rank, std::move(op));
  } else if (IsArriving(peer)) {
    Unexpected& kept = peer.unexpected.back();
    kept.state = Unexpected::State::kComplete;
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
  if (announced) state.last_sent = announced;
  if (state.out != nullptr) state.out->DetachSends();
  for (SubmittedOp& op : std::exchange(state.sending, {})) FailWithLeft(peer, std::move(op));
  for (auto& [number, one] : std::exchange(state.announced, {}))
    FailWithLeft(peer, std::move(one.op));
  for (SubmittedOp& op : std::exchange(state.unsent, {})) FailWithLeft(peer, std::move(op));
  FailRecvsOfLeaver(peer);
}

void PointToPoint::OnInboundEnd(int peer) {
  PeerAt(peer).inbound_ended = true;
  FailRecvsOfLeaver(peer);
}

bool PointToPoint::IsDrained(const Peer& peer) {
  // What it sent before its goodbye may still be on its way on this connection.
  const bool all_here = peer.last_sent && peer.received >= *peer.last_sent;
  return peer.left && (all_here || peer.inbound_ended);
}

void PointToPoint::FailRecvsOfLeaver(int rank) {
  Peer& peer = PeerAt(rank);
  if (!IsDrained(peer)) return;
  for (SubmittedOp& op : std::exchange(peer.recvs, {})) FailWithLeft(rank, std::move(op));
  for (auto& [number, op] : std::exchange(peer.cleared, {})) FailWithLeft(rank, std::move(op));
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

bool PointToPoint::IsArriving(const Peer& peer) {
  return !peer.unexpected.empty() && peer.unexpected.back().state == Unexpected::State::kArriving;
}

bool PointToPoint::IsInPayload(const Peer& peer) {
  return peer.receiving || IsArriving(peer) || !peer.cleared.empty();
}

SubmittedOp* PointToPoint::Receiver(Peer& peer) {
  if (peer.receiving) return &*peer.receiving;
  if (!IsArriving(peer)) return nullptr;
  const Match match = FindRecv(peer, peer.unexpected.back().header.tag);
  return match.queue != nullptr ? &*match.recv : nullptr;
}

void PointToPoint::OnMoved(int peer) {
  Peer& state = PeerAt(peer);
  state.moved = host_.Now();
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
  for (Peer& peer : peers_) {
    // Each payload may come after others.
    for (auto& [number, op] : peer.cleared) op.timeouts.OnMoved(peer.moved);
  }
  ForEachOp([&](SubmittedOp& op, int /*peer*/, Step /*step*/) {
    if (op.timeouts.Check(now, held_until) != OpTimeouts::Verdict::kInTime) late = &op;
    next_check_ = std::min(next_check_, op.timeouts.NextCheck(now, held_until));
  });
  return late;
}

void PointToPoint::AddWaiting(std::vector<WaitingOperation>& waiting, std::size_t most) {
  struct Waiting {
    const SubmittedOp* op = nullptr;
    int peer = kAnyPeer;
    Step step = Step::kMatched;
  };
  const Instant now = host_.Now();
  std::vector<Waiting> late;
  next_tell_ = kNever;
  ForEachOp([&](const SubmittedOp& op, int peer, Step step) {
    const Instant due = op.submitted + kWaitTellAfter;
    if (due <= now) late.push_back({.op = &op, .peer = peer, .step = step});
    next_tell_ = std::min(next_tell_, due <= now ? now + kWaitTellAfter : due);
  });
  const auto told = static_cast<std::ptrdiff_t>(std::min(most, late.size()));
  std::partial_sort(late.begin(), late.begin() + told, late.end(),
                    [](const Waiting& a, const Waiting& b) { return a.op->seq < b.op->seq; });
  late.resize(static_cast<std::size_t>(told));
  waiting.reserve(waiting.size() + late.size());
  for (const Waiting& one : late) {
    WaitingOperation& said = waiting.emplace_back(ToldOf(*one.op, now));
    said.missing = GlobalRanks(spec_, MissingFrom(*one.op, one.peer, one.step));
    said.any = one.peer == kAnyPeer && !said.missing.empty();
    const bool stands = one.op->timeouts.StandsFor(kWaitTellAfter, now);
    if (stands && one.peer != kAnyPeer) said.silent = GlobalRanks(spec_, {one.peer});
  }
}

std::vector<int> PointToPoint::MissingFrom(const SubmittedOp& op, int peer, Step step) {
  if (step == Step::kMatched || step == Step::kAnnounced) return {};
  if (op.op.kind == OpKind::kSend) return {peer};
  std::vector<int> missing;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    const int sender = static_cast<int>(rank);
    if (sender == spec_.rank || (peer != kAnyPeer && peer != sender)) continue;
    // What comes after it is not known yet.
    if (IsInPayload(peers_[rank])) return {};
    if (!IsDrained(peers_[rank])) missing.push_back(sender);
  }
  return missing;
}

PeerProgress PointToPoint::Progress(int peer) const {
  const Peer& state = PeerAt(peer);
  PeerProgress progress;
  progress.sent = state.numbered + state.unsent.size();
  progress.received = state.last_number;
  progress.unclaimed = std::ranges::any_of(state.unexpected, [](const Unexpected& kept) {
    return kept.state == Unexpected::State::kAnnounced;
  });
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
    for (auto& [number, one] : std::exchange(peer.announced, {})) all.push_back(std::move(one.op));
    for (auto& [number, op] : std::exchange(peer.cleared, {})) all.push_back(std::move(op));
    if (peer.receiving) all.push_back(std::move(*peer.receiving));
    peer.receiving.reset();
    peer.unexpected.clear();
    for (SubmittedOp& op : all) host_.Finish(std::move(op), status);
  }
  for (SubmittedOp& op : std::exchange(recvs_from_any_, {})) host_.Finish(std::move(op), status);
}

}  // namespace resilient
