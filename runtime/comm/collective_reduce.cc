#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/comm/collective.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/reduce_stream.h"
#include "runtime/comm/schedule.h"

// The collectives that combine data.

namespace resilient {
namespace {

std::size_t RoundUp16(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

// Small all_reduce: everyone gets all inputs and reduces them all, in rank order.
class OneRoundAllReduce final : public Collective {
 public:
  OneRoundAllReduce(const Operation& op, CollectiveHost& host, int rank, int size)
      : Collective(host, rank, size), op_(op), bytes_(op.count * SizeOf(op.dtype)) {}

  std::size_t ScratchBytes() const override {
    return RoundUp16(bytes_) * static_cast<std::size_t>(size());
  }
  void Start(std::span<std::byte> scratch) override {
    for (int r = 0; r < size(); ++r)
      slots_.push_back(scratch.subspan(RoundUp16(bytes_) * static_cast<std::size_t>(r), bytes_));
    for (const std::span<std::byte> one : slots_) sinks_.emplace_back(one);
    // Sent from the copy: the result overwrites `data` while the kernel may still owe us a send.
    const std::span<std::byte> own = slots_[static_cast<std::size_t>(rank())];
    if (bytes_ > 0) std::memcpy(own.data(), op_.data, bytes_);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      Expect(peer, 1);
      Send(peer, own);
    }
    missing_ = size() - 1;
    if (missing_ == 0) Reduce();
  }

 private:
  std::size_t BytesFrom(int, std::size_t) const override { return bytes_; }
  PayloadSink* SinkFor(int peer, std::size_t) override {
    return &sinks_[static_cast<std::size_t>(peer)];
  }
  void OnPart(int, std::size_t) override {
    if (--missing_ == 0) Reduce();
  }
  void Reduce() {
    std::vector<const std::byte*> inputs;
    inputs.reserve(slots_.size());
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

// One run of elements that this rank gets from every other and reduces in rank order.
class StreamingReduction : public Collective {
 public:
  StreamingReduction(const Operation& op, CollectiveHost& host, int rank, int size)
      : Collective(host, rank, size), op_(op), element_(SizeOf(op.dtype)) {}

  std::size_t ScratchBytes() const override {
    return ReduceStream::WindowBytes(Result().size()) * static_cast<std::size_t>(size());
  }

 protected:
  // Where the elements go; empty where this rank reduces none.
  virtual std::span<std::byte> Result() const = 0;

  // Before the first message. `own` is this rank's input and may be Result().
  void Reduce(std::span<const std::byte> own, std::span<std::byte> scratch) {
    const std::span<std::byte> result = Result();
    const std::size_t count = result.size() / element_;
    ReduceStream::Plan plan{.ranks = std::vector<int>(static_cast<std::size_t>(size())),
                            .own = rank(),
                            .element_bytes = element_,
                            .out_element_bytes = element_};
    std::iota(plan.ranks.begin(), plan.ranks.end(), 0);
    plan.pieces.push_back({.own = own.data(), .out = result.data(), .count = count});
    plan.combine = [this](std::span<const std::byte* const> inputs, std::size_t elements,
                          std::byte* out) {
      ReduceInRankOrder(op_.dtype, op_.reduce, op_.factor, inputs, elements, out);
    };
    plan.on_piece = [this](std::size_t) { OnReduced(); };
    stream_.emplace(std::move(plan), host(), scratch);
    stream_->AddOwn(count);
  }
  PayloadSink* WindowOf(int peer) { return stream_->SinkOf(peer); }
  // What a rank gives is the first that comes from it.
  void OnPart(int peer, std::size_t index) override {
    if (index == 0) stream_->OnMessage(peer);
  }

  // The whole result is final, and nothing that it is made of has come damaged.
  virtual void OnReduced() {}

  const Operation& op() const { return op_; }
  std::size_t element() const { return element_; }
  std::span<std::byte> MemoryOf(const Part& part) const {
    return {static_cast<std::byte*>(part.data), part.count * element_};
  }
  std::span<std::byte> Data() const { return MemoryOf({.data = op_.data, .count = op_.count}); }

 private:
  const Operation& op_;
  const std::size_t element_;
  std::optional<ReduceStream> stream_;
};

// Large all_reduce: rank r takes part r from everyone, reduces it in rank order, sends it to all.
class TwoRoundAllReduce final : public StreamingReduction {
 public:
  using StreamingReduction::StreamingReduction;

  void Start(std::span<std::byte> scratch) override {
    for (int peer = 0; peer < size(); ++peer) {
      finals_.emplace_back(Part(peer));
      if (peer == rank()) continue;
      Expect(peer, 2);
      Send(peer, Part(peer));
    }
    Reduce(Part(rank()), scratch);
  }

 private:
  static constexpr std::size_t kScatter = 0;
  static constexpr std::size_t kGather = 1;

  std::span<std::byte> Part(int index) const {
    const Chunk chunk = ChunkOf(op().count, size(), index);
    return Data().subspan(chunk.begin * element(), chunk.count * element());
  }
  std::span<std::byte> Result() const override { return Part(rank()); }
  std::size_t BytesFrom(int peer, std::size_t phase) const override {
    return Part(phase == kScatter ? rank() : peer).size();
  }
  PayloadSink* SinkFor(int peer, std::size_t phase) override {
    if (phase == kScatter) return WindowOf(peer);
    return &finals_[static_cast<std::size_t>(peer)];
  }
  void OnReduced() override {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) Send(peer, Part(rank()));
    }
  }

  std::vector<FlatSink> finals_;
};

// Everyone sends everyone the part that it reduces.
class ReduceScatter final : public StreamingReduction {
 public:
  using StreamingReduction::StreamingReduction;

  void Start(std::span<std::byte> scratch) override {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      Expect(peer, 1);
      Send(peer, Input(peer));
    }
    Reduce(Input(rank()), scratch);
  }

 private:
  std::span<std::byte> Input(int peer) const {
    return MemoryOf(op().inputs[static_cast<std::size_t>(peer)]);
  }
  std::span<std::byte> Result() const override { return Data(); }
  std::size_t BytesFrom(int, std::size_t) const override { return Data().size(); }
  PayloadSink* SinkFor(int peer, std::size_t) override { return WindowOf(peer); }
};

// Everyone sends all to the root, which reduces it. The root sends notes: without them two ranks
// that both take themselves for the root would wait for ever.
class ReduceToRoot final : public StreamingReduction {
 public:
  using StreamingReduction::StreamingReduction;

  void Start(std::span<std::byte> scratch) override {
    if (rank() != op().root) return Send(op().root, Data());
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      Expect(peer, 1);
      host().SendNote(peer);
    }
    Reduce(Data(), scratch);
  }

 private:
  std::span<std::byte> Result() const override {
    return rank() == op().root ? Data() : std::span<std::byte>();
  }
  std::size_t BytesFrom(int, std::size_t) const override { return Data().size(); }
  PayloadSink* SinkFor(int peer, std::size_t) override { return WindowOf(peer); }
};

}  // namespace

std::unique_ptr<Collective> MakeReduction(const Operation& op, int rank, int size,
                                          CollectiveHost& host) {
  switch (op.kind) {
    case OpKind::kAllReduce:
      if (PlanAllReduce(op.count * SizeOf(op.dtype), size) == AllReducePlan::kOneRound)
        return std::make_unique<OneRoundAllReduce>(op, host, rank, size);
      return std::make_unique<TwoRoundAllReduce>(op, host, rank, size);
    case OpKind::kReduce:
      return std::make_unique<ReduceToRoot>(op, host, rank, size);
    case OpKind::kReduceScatter:
      return std::make_unique<ReduceScatter>(op, host, rank, size);
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
