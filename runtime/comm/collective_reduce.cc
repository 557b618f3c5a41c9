#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/comm/collective.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/schedule.h"

// The collectives that combine data.

namespace resilient {
namespace {

// What one peer may be ahead of the slowest one, in a reduction of what all ranks send. Beyond it
// that peer is read no further: memory stays bounded, and the reduction reads what is still in the
// cache.
constexpr std::size_t kWindowBytes = 256u << 10;
// Reducing less at a time costs more than it gains.
constexpr std::size_t kReduceStepBytes = 16u << 10;

std::size_t RoundUp16(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

// Small all_reduce: everyone gets all inputs and reduces them all, in rank order.
class OneRoundAllReduce final : public Collective {
 public:
  OneRoundAllReduce(const Operation& op, CollectiveHost& host, int rank, int size, Scratch& scratch)
      : Collective(host, rank, size), op_(op), bytes_(op.count * SizeOf(op.dtype)) {
    const std::size_t slot = RoundUp16(bytes_);
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
    if (op_.count > 0) {
      ReduceInRankOrder(op_.dtype, op_.reduce, op_.factor, inputs, op_.count,
                        static_cast<std::byte*>(op_.data));
    }
  }

  const Operation& op_;
  const std::size_t bytes_;
  std::vector<std::span<std::byte>> slots_;
  std::vector<FlatSink> sinks_;
  int missing_ = 0;
};

// One run of elements that this rank gets from every other and reduces in rank order while they
// come, through one bounded window a peer.
class StreamingReduction : public Collective {
 public:
  StreamingReduction(const Operation& op, CollectiveHost& host, int rank, int size,
                     Scratch& scratch)
      : Collective(host, rank, size), op_(op), scratch_(scratch), element_(SizeOf(op.dtype)) {}

 protected:
  // Before the first message. `own` is this rank's input and may be `result`.
  void ReduceInto(std::span<const std::byte> own, std::span<std::byte> result) {
    own_ = own;
    result_ = result;
    window_ = std::min(kWindowBytes, RoundUp16(result_.size()));
    const std::span<std::byte> all = scratch_.Get(window_ * static_cast<std::size_t>(size()));
    for (int r = 0; r < size(); ++r) {
      windows_.push_back(
          Window(*this, all.subspan(window_ * static_cast<std::size_t>(r), window_)));
    }
    if (size() == 1) Advance();  // No message will.
  }
  PayloadSink* WindowOf(int peer) { return &windows_[static_cast<std::size_t>(peer)]; }

  const Operation& op() const { return op_; }
  std::size_t element() const { return element_; }
  std::span<std::byte> MemoryOf(const Part& part) const {
    return {static_cast<std::byte*>(part.data), part.count * element_};
  }
  std::span<std::byte> Data() const { return MemoryOf({.data = op_.data, .count = op_.count}); }

 private:
  // A ring over the bytes [reduced_, reduced_ + window_) of what one peer sends.
  class Window final : public PayloadSink {
   public:
    Window(StreamingReduction& owner, std::span<std::byte> ring) : owner_(owner), ring_(ring) {}
    std::span<std::byte> Space() override {
      const std::size_t end = std::min(owner_.reduced_ + ring_.size(), owner_.result_.size());
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
    StreamingReduction& owner_;
    std::span<std::byte> ring_;
    std::size_t received_ = 0;
  };

  // Reduces what has come from everyone.
  void Advance() {
    std::size_t ready = result_.size();
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank())
        ready = std::min(ready, windows_[static_cast<std::size_t>(peer)].received());
    }
    ready -= ready % element_;
    if (ready == reduced_) return;
    if (ready - reduced_ < std::min(kReduceStepBytes, result_.size() - reduced_)) return;
    while (reduced_ < ready) ReduceUpTo(ready);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) host().SpaceFreed(peer);
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
                      result_.data() + reduced_);
    reduced_ += bytes;
  }

  const Operation& op_;
  Scratch& scratch_;
  const std::size_t element_;
  std::span<const std::byte> own_;
  std::span<std::byte> result_;
  std::size_t window_ = 0;
  std::size_t reduced_ = 0;  // Bytes of result_ that are final.
  std::vector<Window> windows_;
  std::vector<const std::byte*> inputs_;
};

// Large all_reduce: rank r takes part r from everyone, reduces it in rank order, sends it to all.
class TwoRoundAllReduce final : public StreamingReduction {
 public:
  using StreamingReduction::StreamingReduction;

  void Start() override {
    for (int peer = 0; peer < size(); ++peer) {
      finals_.emplace_back(Part(peer));
      if (peer == rank()) continue;
      Expect(peer, 2);
      Send(peer, kScatter, Part(peer));
    }
    ReduceInto(Part(rank()), Part(rank()));
  }

 private:
  static constexpr std::uint8_t kScatter = 0;
  static constexpr std::uint8_t kGather = 1;

  std::span<std::byte> Part(int index) const {
    const Chunk chunk = ChunkOf(op().count, size(), index);
    return Data().subspan(chunk.begin * element(), chunk.count * element());
  }
  std::size_t BytesFrom(int peer, std::uint8_t phase) const override {
    return Part(phase == kScatter ? rank() : peer).size();
  }
  PayloadSink* SinkFor(int peer, std::uint8_t phase) override {
    if (phase == kScatter) return WindowOf(peer);
    return &finals_[static_cast<std::size_t>(peer)];
  }
  // The reduction keeps up with what comes, but what has come is known to be whole only now.
  void OnPart(int, std::uint8_t phase) override {
    if (phase != kScatter || ++scattered_ < size() - 1) return;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) Send(peer, kGather, Part(rank()));
    }
  }

  std::vector<FlatSink> finals_;
  int scattered_ = 0;  // Inputs that are here.
};

// Everyone sends everyone the part that it reduces.
class ReduceScatter final : public StreamingReduction {
 public:
  using StreamingReduction::StreamingReduction;

  void Start() override {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      Expect(peer, 1);
      Send(peer, 0, Input(peer));
    }
    ReduceInto(Input(rank()), Data());
  }

 private:
  std::span<std::byte> Input(int peer) const {
    return MemoryOf(op().inputs[static_cast<std::size_t>(peer)]);
  }
  std::size_t BytesFrom(int, std::uint8_t) const override { return Data().size(); }
  PayloadSink* SinkFor(int peer, std::uint8_t) override { return WindowOf(peer); }
};

// Everyone sends all to the root, which reduces it. The root sends notes: without them two ranks
// that both take themselves for the root would wait for ever.
class Reduce final : public StreamingReduction {
 public:
  using StreamingReduction::StreamingReduction;

  void Start() override {
    if (rank() != op().root) return Send(op().root, 0, Data());
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      Expect(peer, 1);
      host().SendNote(peer);
    }
    ReduceInto(Data(), Data());
  }

 private:
  std::size_t BytesFrom(int, std::uint8_t) const override { return Data().size(); }
  PayloadSink* SinkFor(int peer, std::uint8_t) override { return WindowOf(peer); }
};

}  // namespace

std::unique_ptr<Collective> MakeReduction(const Operation& op, int rank, int size,
                                          CollectiveHost& host, Scratch& scratch) {
  switch (op.kind) {
    case OpKind::kAllReduce:
      if (PlanAllReduce(op.count * SizeOf(op.dtype), size) == AllReducePlan::kOneRound)
        return std::make_unique<OneRoundAllReduce>(op, host, rank, size, scratch);
      return std::make_unique<TwoRoundAllReduce>(op, host, rank, size, scratch);
    case OpKind::kReduce:
      return std::make_unique<Reduce>(op, host, rank, size, scratch);
    case OpKind::kReduceScatter:
      return std::make_unique<ReduceScatter>(op, host, rank, size, scratch);
    case OpKind::kBroadcast:
    case OpKind::kAllGather:
    case OpKind::kBarrier:
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
      break;
  }
  RESILIENT_CHECK(!"an operation that reduces nothing");
}

}  // namespace resilient
