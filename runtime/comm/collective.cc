#include "runtime/comm/collective.h"

#include <sys/mman.h>

#include "runtime/base/check.h"

namespace resilient {
namespace {

// Of the message between two ranks that has `index`, on the wire.
std::uint8_t PhaseOf(std::size_t index) {
  return static_cast<std::uint8_t>(index % Collective::kNotePhase);
}

}  // namespace

std::optional<std::span<std::byte>> Scratch::Get(std::size_t bytes) {
  if (bytes > size()) {
    Release();
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return std::nullopt;
    memory_ = {static_cast<std::byte*>(memory), bytes};
  }
  return memory_.first(bytes);
}

void Scratch::Release() {
  if (!memory_.empty()) munmap(memory_.data(), memory_.size());
  memory_ = {};
}

Collective::Collective(CollectiveHost& host, int rank, int size)
    : host_(host), rank_(rank), size_(size), peers_(static_cast<std::size_t>(size)) {}

void Collective::Expect(int peer, std::size_t messages) {
  peers_[static_cast<std::size_t>(peer)].expected = messages;
  parts_due_ += messages;
}

void Collective::Send(int peer, std::span<const std::byte> payload) {
  PeerState& state = peers_[static_cast<std::size_t>(peer)];
  ++state.unsent;
  ++sends_left_;
  host_.SendPart(peer, PhaseOf(state.sent++), payload);
}

std::optional<Collective::Due> Collective::NextFrom(int peer) const {
  const PeerState& state = peers_[static_cast<std::size_t>(peer)];
  if (state.received >= state.expected) return std::nullopt;
  return Due{.phase = PhaseOf(state.received), .bytes = BytesFrom(peer, state.received)};
}

PayloadSink* Collective::Accept(int peer) {
  return SinkFor(peer, peers_[static_cast<std::size_t>(peer)].received);
}

void Collective::OnMessage(int peer) {
  PeerState& state = peers_[static_cast<std::size_t>(peer)];
  RESILIENT_CHECK(state.received < state.expected);
  const std::size_t index = state.received++;
  --parts_due_;
  OnPart(peer, index);
}

void Collective::OnSent(int peer) {
  PeerState& state = peers_[static_cast<std::size_t>(peer)];
  RESILIENT_CHECK(state.unsent > 0);
  --state.unsent;
  --sends_left_;
}

bool Collective::Needs(int peer) const {
  const PeerState& state = peers_[static_cast<std::size_t>(peer)];
  return state.received < state.expected || state.unsent > 0;
}

bool Collective::HearsOf(int peer) const {
  const PeerState& state = peers_[static_cast<std::size_t>(peer)];
  return state.expected > 0 || state.sent > 0;  // A part, or the note for ours.
}

std::unique_ptr<Collective> MakeCollective(const Operation& op, int rank, int size,
                                           CollectiveHost& host, const HostLayout* levels) {
  switch (op.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter:
      return levels != nullptr ? MakeHierarchicalReduction(op, rank, *levels, host)
                               : MakeReduction(op, rank, size, host);
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
