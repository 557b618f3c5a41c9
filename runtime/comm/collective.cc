#include "runtime/comm/collective.h"

#include <algorithm>
#include <cstring>

#include "runtime/base/check.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/schedule.h"

namespace resilient {
namespace {

// What one peer may be ahead of the slowest one, in a two-round all_reduce. Beyond it that peer is
// read no further: memory stays bounded, and the reduction reads what is still in the cache.
constexpr std::size_t kWindowBytes = 256u << 10;
// Reducing less at a time costs more than it gains.
constexpr std::size_t kReduceStepBytes = 16u << 10;

std::byte* Bytes(void* memory) { return static_cast<std::byte*>(memory); }

// All ranks tell all that they are here.
class Barrier final : public Collective {
 public:
  Barrier(CollectiveHost& host, int rank, int size) : Collective(host, rank, size) {}

  void Start() override {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      Expect(peer, 1);
      Send(peer, 0, {});
    }
  }

 private:
  std::size_t BytesFrom(int, std::uint8_t) const override { return 0; }
  PayloadSink* SinkFor(int, std::uint8_t) override { return nullptr; }
};

// The root sends to all. The others send it a note: without it, ranks that all take another rank
// for the root would wait for ever, and a root that runs ahead would never hear of a mismatch.
class Broadcast final : public Collective {
 public:
  Broadcast(const Operation& op, CollectiveHost& host, int rank, int size)
      : Collective(host, rank, size),
        root_(op.root),
        memory_(Bytes(op.data), op.count * SizeOf(op.dtype)) {}

  void Start() override {
    if (rank() != root_) {
      sink_ = FlatSink(memory_);
      Expect(root_, 1);
      host().SendNote(root_);
      return;
    }
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) Send(peer, 0, memory_);
    }
  }

 private:
  std::size_t BytesFrom(int, std::uint8_t) const override { return memory_.size(); }
  PayloadSink* SinkFor(int, std::uint8_t) override { return &sink_; }

  const int root_;
  const std::span<std::byte> memory_;
  FlatSink sink_;
};

// Everyone sends its input to all.
class AllGather final : public Collective {
 public:
  AllGather(const Operation& op, CollectiveHost& host, int rank, int size)
      : Collective(host, rank, size), op_(op), bytes_(op.count * SizeOf(op.dtype)) {}

  void Start() override {
    void* own = op_.outputs[static_cast<std::size_t>(rank())].data;
    if (bytes_ > 0 && own != op_.data) std::memmove(own, op_.data, bytes_);
    for (int peer = 0; peer < size(); ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      sinks_.emplace_back(std::span(Bytes(op_.outputs[p].data), bytes_));
      if (peer == rank()) continue;
      Expect(peer, 1);
      Send(peer, 0, std::span(Bytes(op_.data), bytes_));
    }
  }

 private:
  std::size_t BytesFrom(int, std::uint8_t) const override { return bytes_; }
  PayloadSink* SinkFor(int peer, std::uint8_t) override {
    return &sinks_[static_cast<std::size_t>(peer)];
  }

  const Operation& op_;
  const std::size_t bytes_;
  std::vector<FlatSink> sinks_;
};

// Small all_reduce: everyone gets all inputs and reduces them all, in rank order.
class OneRoundAllReduce final : public Collective {
 public:
  OneRoundAllReduce(const Operation& op, CollectiveHost& host, int rank, int size, Scratch& scratch)
      : Collective(host, rank, size), op_(op), bytes_(op.count * SizeOf(op.dtype)) {
    const std::size_t slot = (bytes_ + 15) / 16 * 16;
    const std::span<std::byte> all = scratch.Get(slot * static_cast<std::size_t>(size));
    for (int r = 0; r < size; ++r)
      slots_.push_back(all.subspan(slot * static_cast<std::size_t>(r), bytes_));
    for (const std::span<std::byte> one : slots_) sinks_.emplace_back(one);
  }

  void Start() override {
    // Sent from the copy: the result overwrites `data` while the kernel may still owe us a send.
    const std::span<std::byte> own = slots_[static_cast<std::size_t>(rank())];
    if (bytes_ > 0) std::memcpy(own.data(), op_.data, bytes_);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      Expect(peer, 1);
      Send(peer, 0, own);
    }
    missing_ = size() - 1;
    if (missing_ == 0) Reduce();
  }

 private:
  std::size_t BytesFrom(int, std::uint8_t) const override { return bytes_; }
  PayloadSink* SinkFor(int peer, std::uint8_t) override {
    return &sinks_[static_cast<std::size_t>(peer)];
  }
  void OnPart(int, std::uint8_t) override {
    if (--missing_ == 0) Reduce();
  }
  void Reduce() {
    std::vector<const std::byte*> inputs;
    for (const std::span<std::byte> one : slots_) inputs.push_back(one.data());
    if (op_.count > 0)
      ReduceInRankOrder(op_.dtype, op_.reduce, op_.factor, inputs, op_.count, Bytes(op_.data));
  }

  const Operation& op_;
  const std::size_t bytes_;
  std::vector<std::span<std::byte>> slots_;
  std::vector<FlatSink> sinks_;
  int missing_ = 0;
};

// Large all_reduce: rank r takes part r from everyone, reduces it in rank order, sends it to all.
class TwoRoundAllReduce final : public Collective {
 public:
  TwoRoundAllReduce(const Operation& op, CollectiveHost& host, int rank, int size, Scratch& scratch)
      : Collective(host, rank, size), op_(op), element_(SizeOf(op.dtype)) {
    own_ = Part(rank);
    window_ = std::min(kWindowBytes, (own_.size() + 15) / 16 * 16);
    const std::span<std::byte> all = scratch.Get(window_ * static_cast<std::size_t>(size));
    for (int r = 0; r < size; ++r) {
      windows_.push_back(
          Window(*this, all.subspan(window_ * static_cast<std::size_t>(r), window_)));
      finals_.emplace_back(Part(r));
    }
  }

  void Start() override {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      Expect(peer, 2);
      Send(peer, kScatter, Part(peer));
    }
    // With more ranks than elements a part may be empty: no message will then move it on.
    if (size() == 1 || own_.empty()) Advance();
  }

 private:
  static constexpr std::uint8_t kScatter = 0;
  static constexpr std::uint8_t kGather = 1;

  // A ring over the bytes [reduced_, reduced_ + window_) of what one peer sends for our part.
  class Window final : public PayloadSink {
   public:
    Window(TwoRoundAllReduce& owner, std::span<std::byte> ring) : owner_(owner), ring_(ring) {}
    std::span<std::byte> Space() override {
      const std::size_t end = std::min(owner_.reduced_ + ring_.size(), owner_.own_.size());
      const std::size_t at = received_ % ring_.size();
      return ring_.subspan(at, std::min(end - received_, ring_.size() - at));
    }
    void Commit(std::size_t bytes) override {
      received_ += bytes;
      owner_.Advance();
    }
    std::size_t received() const { return received_; }
    const std::byte* At(std::size_t offset) const { return ring_.data() + offset % ring_.size(); }

   private:
    TwoRoundAllReduce& owner_;
    std::span<std::byte> ring_;
    std::size_t received_ = 0;
  };

  std::span<std::byte> Part(int index) const {
    const Chunk chunk = ChunkOf(op_.count, size(), index);
    return {Bytes(op_.data) + chunk.begin * element_, chunk.count * element_};
  }

  std::size_t BytesFrom(int peer, std::uint8_t phase) const override {
    return phase == kScatter ? own_.size() : Part(peer).size();
  }
  PayloadSink* SinkFor(int peer, std::uint8_t phase) override {
    const auto p = static_cast<std::size_t>(peer);
    if (phase == kScatter) return &windows_[p];
    return &finals_[p];
  }

  // Reduces what has come from everyone; when it is all, sends our part out.
  void Advance() {
    std::size_t ready = own_.size();
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank())
        ready = std::min(ready, windows_[static_cast<std::size_t>(peer)].received());
    }
    ready -= ready % element_;
    if (ready - reduced_ < std::min(kReduceStepBytes, own_.size() - reduced_)) return;
    if (ready == reduced_ && !own_.empty()) return;
    while (reduced_ < ready) ReduceUpTo(ready);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) host().SpaceFreed(peer);
    }
    if (reduced_ < own_.size()) return;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) Send(peer, kGather, own_);
    }
  }

  void ReduceUpTo(std::size_t ready) {
    const std::size_t until_wrap = size() == 1 ? ready : window_ - reduced_ % window_;
    const std::size_t bytes = std::min(ready - reduced_, until_wrap);
    inputs_.clear();
    for (int r = 0; r < size(); ++r) {
      inputs_.push_back(r == rank() ? own_.data() + reduced_
                                    : windows_[static_cast<std::size_t>(r)].At(reduced_));
    }
    ReduceInRankOrder(op_.dtype, op_.reduce, op_.factor, inputs_, bytes / element_,
                      own_.data() + reduced_);
    reduced_ += bytes;
  }

  const Operation& op_;
  const std::size_t element_;
  std::span<std::byte> own_;
  std::size_t window_ = 0;
  std::size_t reduced_ = 0;  // Bytes of own_ that are final.
  std::vector<Window> windows_;
  std::vector<FlatSink> finals_;
  std::vector<const std::byte*> inputs_;
};

}  // namespace

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
    case OpKind::kBarrier:
      return std::make_unique<Barrier>(host, rank, size);
    case OpKind::kBroadcast:
      return std::make_unique<Broadcast>(op, host, rank, size);
    case OpKind::kAllGather:
      return std::make_unique<AllGather>(op, host, rank, size);
    case OpKind::kAllReduce:
      if (PlanAllReduce(op.count * SizeOf(op.dtype), size) == AllReducePlan::kOneRound)
        return std::make_unique<OneRoundAllReduce>(op, host, rank, size, scratch);
      return std::make_unique<TwoRoundAllReduce>(op, host, rank, size, scratch);
    case OpKind::kReduce:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
    case OpKind::kSend:
    case OpKind::kRecv:
      break;
  }
  RESILIENT_CHECK(!"point-to-point is no collective");
}

}  // namespace resilient
