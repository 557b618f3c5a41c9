#include "runtime/comm/collective.h"

#include "runtime/base/check.h"

namespace resilient {

std::span<std::byte> Scratch::Get(std::size_t bytes) {
  if (bytes > size_) {
    memory_.reset();
    memory_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    size_ = bytes;
  }
  return {memory_.get(), bytes};
}

Collective::Collective(CollectiveHost& host, int rank, int size)
    : host_(host), rank_(rank), size_(size), peers_(static_cast<std::size_t>(size)) {}

void Collective::Expect(int peer, std::uint8_t messages) {
  peers_[static_cast<std::size_t>(peer)].expected = messages;
  parts_due_ += messages;
}

void Collective::Send(int peer, std::uint8_t phase, std::span<const std::byte> payload) {
  ++peers_[static_cast<std::size_t>(peer)].unsent;
  ++sends_left_;
  host_.SendPart(peer, phase, payload);
}

std::optional<Collective::Due> Collective::NextFrom(int peer) const {
  const PeerState& state = peers_[static_cast<std::size_t>(peer)];
  if (state.phase >= state.expected) return std::nullopt;
  return Due{.phase = state.phase, .bytes = BytesFrom(peer, state.phase)};
}

PayloadSink* Collective::Accept(int peer) {
  return SinkFor(peer, peers_[static_cast<std::size_t>(peer)].phase);
}

void Collective::OnMessage(int peer) {
  PeerState& state = peers_[static_cast<std::size_t>(peer)];
  RESILIENT_CHECK(state.phase < state.expected);
  const std::uint8_t phase = state.phase++;
  --parts_due_;
  OnPart(peer, phase);
}

void Collective::OnSent(int peer) {
  PeerState& state = peers_[static_cast<std::size_t>(peer)];
  RESILIENT_CHECK(state.unsent > 0);
  --state.unsent;
  --sends_left_;
}

bool Collective::Needs(int peer) const {
  const PeerState& state = peers_[static_cast<std::size_t>(peer)];
  return state.phase < state.expected || state.unsent > 0;
}

std::unique_ptr<Collective> MakeCollective(const Operation& op, int rank, int size,
                                           CollectiveHost& host, Scratch& scratch) {
  switch (op.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter:
      return MakeReduction(op, rank, size, host, scratch);
    case OpKind::kBroadcast:
    case OpKind::kAllGather:
    case OpKind::kBarrier:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
      return MakeExchange(op, rank, size, host);
    case OpKind::kSend:
    case OpKind::kRecv:
      break;
  }
  RESILIENT_CHECK(!"point-to-point is no collective");
}

}  // namespace resilient
