#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/comm/collective.h"

// The collectives that move data as it is.

namespace resilient {
namespace {

using Memory = std::span<std::byte>;

// At most one message each way between this rank and every other. What a kind of operation adds is
// which: nullopt is none, while an empty one is a message without payload.
class Exchange : public Collective {
 public:
  Exchange(const Operation& op, CollectiveHost& host, int rank, int size)
      : Collective(host, rank, size), op_(op) {}

  void Start(std::span<std::byte>) final {
    CopyOwnPart();
    for (int peer = 0; peer < size(); ++peer) {
      const std::optional<Memory> to = To(peer);
      const std::optional<Memory> from = From(peer);
      sinks_.emplace_back(from.value_or(Memory()));
      if (peer == rank()) continue;
      if (from) Expect(peer, 1);
      if (to) Send(peer, *to);
      // Without a note a peer that sends to us would never hear of this rank: two that each take
      // the other for the root would wait for ever, and one that runs ahead would miss a mismatch.
      if (from && !to) host().SendNote(peer);
    }
  }

 protected:
  // `peer` may be this rank: where both exist, its part is copied.
  virtual std::optional<Memory> To(int peer) const = 0;
  virtual std::optional<Memory> From(int peer) const = 0;

  const Operation& op() const { return op_; }
  Memory Data() const { return MemoryOf({.data = op_.data, .count = op_.count}); }
  Memory MemoryOf(const Part& part) const {
    return {static_cast<std::byte*>(part.data), part.count * SizeOf(op_.dtype)};
  }
  Memory PartOf(const std::vector<Part>& parts, int peer) const {
    return MemoryOf(parts[static_cast<std::size_t>(peer)]);
  }

 private:
  void CopyOwnPart() const {
    const std::optional<Memory> to = To(rank());
    const std::optional<Memory> from = From(rank());
    if (!to || !from || to->empty() || to->data() == from->data()) return;
    RESILIENT_CHECK(to->size() == from->size());
    std::memcpy(from->data(), to->data(), to->size());
  }

  std::size_t BytesFrom(int peer, std::size_t) const override {
    return From(peer).value_or(Memory()).size();
  }
  PayloadSink* SinkFor(int peer, std::size_t) override {
    return &sinks_[static_cast<std::size_t>(peer)];
  }

  const Operation& op_;
  std::vector<FlatSink> sinks_;
};

// All ranks tell all that they are here.
class Barrier final : public Exchange {
 public:
  using Exchange::Exchange;

 private:
  std::optional<Memory> To(int) const override { return Memory(); }
  std::optional<Memory> From(int) const override { return Memory(); }
};

// The root sends to all.
class Broadcast final : public Exchange {
 public:
  using Exchange::Exchange;

 private:
  std::optional<Memory> To(int) const override {
    return rank() == op().root ? std::optional(Data()) : std::nullopt;
  }
  std::optional<Memory> From(int peer) const override {
    return peer == op().root ? std::optional(Data()) : std::nullopt;
  }
};

// Everyone sends its input to all.
class AllGather final : public Exchange {
 public:
  using Exchange::Exchange;

 private:
  std::optional<Memory> To(int) const override { return Data(); }
  std::optional<Memory> From(int peer) const override { return PartOf(op().outputs, peer); }
};

// Everyone sends its input to the root.
class Gather final : public Exchange {
 public:
  using Exchange::Exchange;

 private:
  std::optional<Memory> To(int peer) const override {
    return peer == op().root ? std::optional(Data()) : std::nullopt;
  }
  std::optional<Memory> From(int peer) const override {
    return rank() == op().root ? std::optional(PartOf(op().outputs, peer)) : std::nullopt;
  }
};

// The root sends everyone a part of its own.
class Scatter final : public Exchange {
 public:
  using Exchange::Exchange;

 private:
  std::optional<Memory> To(int peer) const override {
    return rank() == op().root ? std::optional(PartOf(op().inputs, peer)) : std::nullopt;
  }
  std::optional<Memory> From(int peer) const override {
    return peer == op().root ? std::optional(Data()) : std::nullopt;
  }
};

// Everyone sends everyone a part of its own.
class AllToAll final : public Exchange {
 public:
  using Exchange::Exchange;

 private:
  std::optional<Memory> To(int peer) const override { return PartOf(op().inputs, peer); }
  std::optional<Memory> From(int peer) const override { return PartOf(op().outputs, peer); }
};

}  // namespace

std::unique_ptr<Collective> MakeExchange(const Operation& op, int rank, int size,
                                         CollectiveHost& host) {
  switch (op.kind) {
    case OpKind::kBarrier:
      return std::make_unique<Barrier>(op, host, rank, size);
    case OpKind::kBroadcast:
      return std::make_unique<Broadcast>(op, host, rank, size);
    case OpKind::kAllGather:
      return std::make_unique<AllGather>(op, host, rank, size);
    case OpKind::kGather:
      return std::make_unique<Gather>(op, host, rank, size);
    case OpKind::kScatter:
      return std::make_unique<Scatter>(op, host, rank, size);
    case OpKind::kAllToAll:
      return std::make_unique<AllToAll>(op, host, rank, size);
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter:
    case OpKind::kSend:
    case OpKind::kRecv:
      break;
  }
  RESILIENT_CHECK(!"an operation that moves no data as it is");
}

}  // namespace resilient
