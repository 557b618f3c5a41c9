// The collectives on a board. All reduce in rank order, so the bits are those of every other
// transport.

#include <algorithm>
#include <cstring>

#include "runtime/base/check.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/schedule.h"
#include "runtime/comm/shm_collective.h"

namespace resilient {
namespace {

std::byte* Bytes(void* memory) { return static_cast<std::byte*>(memory); }

std::size_t BytesOf(const Part& part, std::size_t element) { return part.count * element; }

std::uint64_t Pieces(std::size_t bytes, std::size_t piece) { return (bytes + piece - 1) / piece; }

// Piece `round` of `bytes` bytes: its length; 0 past the end.
std::size_t PieceOf(std::size_t bytes, std::size_t piece, std::uint64_t round) {
  const std::size_t begin = round * piece;
  return begin >= bytes ? 0 : std::min(piece, bytes - begin);
}

void Copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

// Input and output of one rank's own part may be the same memory.
void CopyOwn(const Part& to, const Part& from, std::size_t element) {
  if (to.count > 0 && to.data != from.data) std::memmove(to.data, from.data, BytesOf(to, element));
}

class ShmBarrier final : public ShmCollective {
 public:
  using ShmCollective::ShmCollective;

 private:
  std::uint64_t RoundsFor(std::size_t) const override { return 1; }
  void Write(std::uint64_t) override {}
  void Read(std::uint64_t) override {}
};

class ShmBroadcast final : public ShmCollective {
 public:
  using ShmCollective::ShmCollective;

 private:
  std::uint64_t RoundsFor(std::size_t bytes) const override { return Pieces(bytes, capacity()); }
  void Write(std::uint64_t round) override {
    if (rank() == op().root) Put(step() + 1, 0, At(round), Length(round));
  }
  void Read(std::uint64_t round) override {
    const std::size_t bytes = Length(round);
    if (rank() != op().root) Copy(At(round), Get(op().root, step(), 0, bytes), bytes);
  }
  std::byte* At(std::uint64_t round) const { return Bytes(op().data) + round * capacity(); }
  std::size_t Length(std::uint64_t round) const {
    return PieceOf(op().count * element(), capacity(), round);
  }
};

// Everyone who has an input shows it to those who have outputs: all_gather, gather.
class ShmGather final : public ShmCollective {
 public:
  using ShmCollective::ShmCollective;

 private:
  std::uint64_t RoundsFor(std::size_t bytes) const override { return Pieces(bytes, capacity()); }
  void Write(std::uint64_t round) override {
    const std::size_t offset = round * capacity();
    const bool wanted = op().kind == OpKind::kAllGather || rank() != op().root;
    if (wanted) {
      Put(step() + 1, 0, Bytes(op().data) + offset,
          PieceOf(op().count * element(), capacity(), round));
    }
    if (round == 0 && !op().outputs.empty()) {
      CopyOwn(op().outputs[static_cast<std::size_t>(rank())],
              {.data = op().data, .count = op().count}, element());
    }
  }
  void Read(std::uint64_t round) override {
    if (op().outputs.empty()) return;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const Part& output = op().outputs[static_cast<std::size_t>(peer)];
      const std::size_t bytes = PieceOf(BytesOf(output, element()), capacity(), round);
      Copy(Bytes(output.data) + round * capacity(), Get(peer, step(), 0, bytes), bytes);
    }
  }
};

// Everyone who has inputs lays out a part for each rank: scatter, all_to_all.
class ShmExchange final : public ShmCollective {
 public:
  using ShmCollective::ShmCollective;

 private:
  std::uint64_t RoundsFor(std::size_t bytes) const override { return Pieces(bytes, region()); }
  void Write(std::uint64_t round) override {
    if (op().inputs.empty()) return;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const Part& input = op().inputs[static_cast<std::size_t>(peer)];
      Put(step() + 1, peer, Bytes(input.data) + round * region(),
          PieceOf(BytesOf(input, element()), region(), round));
    }
    const auto own = static_cast<std::size_t>(rank());
    if (round == 0) CopyOwn(Output(rank()), op().inputs[own], element());
  }
  void Read(std::uint64_t round) override {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank() || (op().kind == OpKind::kScatter && peer != op().root)) continue;
      const Part output = Output(peer);
      const std::size_t bytes = PieceOf(BytesOf(output, element()), region(), round);
      Copy(Bytes(output.data) + round * region(), Get(peer, step(), rank(), bytes), bytes);
    }
  }
  Part Output(int peer) const {
    if (op().kind == OpKind::kScatter) return {.data = op().data, .count = op().count};
    return op().outputs[static_cast<std::size_t>(peer)];
  }
};

// What the reducing collectives share: the inputs of one stretch, in rank order.
class ShmReducing : public ShmCollective {
 public:
  ShmReducing(const Operation& op, std::uint64_t seq, const GroupSpec& spec, ShmBoard& board)
      : ShmCollective(op, seq, spec, board), inputs_(static_cast<std::size_t>(board.size())) {}

 protected:
  // REQUIRES: the inputs are set.
  void Reduce(std::size_t bytes, std::byte* out) const {
    if (bytes == 0) return;
    ReduceInRankOrder(op().dtype, op().reduce, op().factor, inputs_, bytes / element(), out);
  }
  const std::byte*& InputOf(int rank) { return inputs_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<const std::byte*> inputs_;
};

class ShmReduce final : public ShmReducing {
 public:
  using ShmReducing::ShmReducing;

 private:
  std::uint64_t RoundsFor(std::size_t bytes) const override { return Pieces(bytes, capacity()); }
  void Write(std::uint64_t round) override {
    if (rank() != op().root) Put(step() + 1, 0, At(round), Length(round));
  }
  void Read(std::uint64_t round) override {
    if (rank() != op().root) return;
    for (int peer = 0; peer < size(); ++peer)
      InputOf(peer) = peer == rank() ? At(round) : Get(peer, step(), 0, Length(round));
    Reduce(Length(round), At(round));
  }
  std::byte* At(std::uint64_t round) const { return Bytes(op().data) + round * capacity(); }
  std::size_t Length(std::uint64_t round) const {
    return PieceOf(op().count * element(), capacity(), round);
  }
};

class ShmReduceScatter final : public ShmReducing {
 public:
  using ShmReducing::ShmReducing;

 private:
  std::uint64_t RoundsFor(std::size_t bytes) const override { return Pieces(bytes, region()); }
  void Write(std::uint64_t round) override {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const Part& input = op().inputs[static_cast<std::size_t>(peer)];
      Put(step() + 1, peer, Bytes(input.data) + round * region(),
          PieceOf(BytesOf(input, element()), region(), round));
    }
  }
  void Read(std::uint64_t round) override {
    const std::size_t offset = round * region();
    const std::size_t bytes = PieceOf(op().count * element(), region(), round);
    for (int peer = 0; peer < size(); ++peer) {
      InputOf(peer) = peer == rank()
                          ? Bytes(op().inputs[static_cast<std::size_t>(rank())].data) + offset
                          : Get(peer, step(), rank(), bytes);
    }
    Reduce(bytes, Bytes(op().data) + offset);
  }
};

// Small: everyone sees all inputs and reduces them all.
class ShmAllReduceOnce final : public ShmReducing {
 public:
  using ShmReducing::ShmReducing;

 private:
  std::uint64_t RoundsFor(std::size_t) const override { return 1; }
  void Write(std::uint64_t) override {
    Put(step() + 1, 0, Bytes(op().data), op().count * element());
  }
  void Read(std::uint64_t) override {
    const std::size_t bytes = op().count * element();
    std::byte* own = Bytes(op().data);
    for (int peer = 0; peer < size(); ++peer)
      InputOf(peer) = peer == rank() ? own : Get(peer, step(), 0, bytes);
    Reduce(bytes, own);
  }
};

// Large: stretch by stretch, rank r reduces part r and leaves the result where its own input would
// have been; in the next round, while the next stretch is on its way, everyone takes the results.
class ShmAllReduce final : public ShmReducing {
 public:
  using ShmReducing::ShmReducing;

 private:
  std::uint64_t RoundsFor(std::size_t bytes) const override { return Pieces(bytes, Stretch()) + 1; }
  void Write(std::uint64_t round) override {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const Chunk part = PartOf(round, peer);
      Put(step() + 1, peer, Bytes(op().data) + part.begin, part.count);
    }
  }
  void Read(std::uint64_t round) override {
    const Chunk own = PartOf(round, rank());
    std::byte* out = Bytes(op().data) + own.begin;
    for (int peer = 0; peer < size(); ++peer)
      InputOf(peer) = peer == rank() ? out : Get(peer, step(), rank(), own.count);
    Reduce(own.count, out);
    Put(step(), rank(), out, own.count);
    if (round == 0) return;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const Chunk part = PartOf(round - 1, peer);
      Copy(Bytes(op().data) + part.begin, Get(peer, step() - 1, peer, part.count), part.count);
    }
  }

  std::size_t Stretch() const { return region() * static_cast<std::size_t>(size()); }
  // In bytes of `data`.
  Chunk PartOf(std::uint64_t round, int peer) const {
    const std::size_t total = op().count * element();
    const std::size_t begin = std::min(total, round * Stretch());
    const std::size_t left = std::min(Stretch(), total - begin);
    const auto n = static_cast<std::size_t>(size());
    // Whole cache lines, so that no two ranks write to one.
    const std::size_t each = (left / n + 63 + (left % n != 0 ? 1 : 0)) / 64 * 64;
    const std::size_t from = std::min(left, each * static_cast<std::size_t>(peer));
    return {.begin = begin + from, .count = std::min(each, left - from)};
  }
};

}  // namespace

std::unique_ptr<ShmCollective> MakeShmCollective(const Operation& op, std::uint64_t seq,
                                                 const GroupSpec& spec, ShmBoard& board) {
  switch (op.kind) {
    case OpKind::kBarrier:
      return std::make_unique<ShmBarrier>(op, seq, spec, board);
    case OpKind::kBroadcast:
      return std::make_unique<ShmBroadcast>(op, seq, spec, board);
    case OpKind::kAllGather:
    case OpKind::kGather:
      return std::make_unique<ShmGather>(op, seq, spec, board);
    case OpKind::kScatter:
    case OpKind::kAllToAll:
      return std::make_unique<ShmExchange>(op, seq, spec, board);
    case OpKind::kReduce:
      return std::make_unique<ShmReduce>(op, seq, spec, board);
    case OpKind::kReduceScatter:
      return std::make_unique<ShmReduceScatter>(op, seq, spec, board);
    case OpKind::kAllReduce:
      break;
    case OpKind::kSend:
    case OpKind::kRecv:
      RESILIENT_CHECK(!"point-to-point is no collective");
  }
  RESILIENT_CHECK(op.kind == OpKind::kAllReduce);
  const std::size_t bytes = op.count * SizeOf(op.dtype);
  if (PlanAllReduce(bytes, board.size()) == AllReducePlan::kOneRound &&
      bytes <= board.slot_bytes() / 2)
    return std::make_unique<ShmAllReduceOnce>(op, seq, spec, board);
  return std::make_unique<ShmAllReduce>(op, seq, spec, board);
}

}  // namespace resilient
