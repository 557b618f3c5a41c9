#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <resilient/operation.h>

namespace resilient {

// One copy between memory of the device and a buffer of the host. Thread: value type.
struct StagedCopy {
  void* device = nullptr;
  std::byte* host = nullptr;
  std::size_t bytes = 0;
};

// One piece of an operation. Thread: value type.
struct StagedPiece {
  std::vector<StagedCopy> out;  // From the device, before `op`.
  Operation op;                 // Over the buffer; without bounds and call site.
  std::vector<StagedCopy> in;   // To the device, behind it.
};

// How an operation on a device is cut into operations on a buffer of the host. Of each of its parts
// (one a rank, where there are some) a piece has as many elements as all of its parts have room for
// in a buffer; the last piece has fewer, even if that is none. So ranks whose counts differ meet in
// a piece where they do: what has fewer elements than the others ends there.
//
// How many pieces there are all ranks must know alike. Where a rank does not know the parts of the
// others (gather, scatter, all_to_all), they tell each other the largest first.
//
// Owner: the operation. Thread: value type. Pure. REQUIRES: ValidateOperation.
class StagedPlan {
 public:
  StagedPlan() = default;
  // `op` outlives it and does not change.
  StagedPlan(const Operation& op, int rank, int size, std::size_t piece_bytes);

  // The ranks have to tell each other their Largest before there are pieces.
  bool MustAsk() const;
  // Elements of the largest part that this rank knows of.
  std::size_t largest() const { return largest_; }
  // Of all ranks. REQUIRES: MustAsk.
  void SetLargest(std::size_t elements) { largest_ = elements; }

  std::size_t pieces() const { return op_->kind == OpKind::kBarrier ? 1 : largest_ / each_ + 1; }
  // Of the buffer that a piece needs. At most the bytes of a piece, but where a group has more
  // parts than fit by one element each.
  std::size_t BufferBytes() const;
  StagedPiece Piece(std::size_t number, std::byte* buffer) const;

 private:
  // Of one piece, while it is made.
  struct Cut {
    StagedPiece piece;
    std::size_t first = 0;  // Element.
    std::byte* buffer = nullptr;
  };
  bool IsRoot() const { return op_->root == rank_; }
  std::size_t Slots() const;
  std::size_t SlotBytes() const;
  Part Place(const Cut& cut, std::size_t slot, std::size_t count) const;
  void CopyOut(Cut& cut, const Part& part, const Part& place) const;
  void CopyIn(Cut& cut, const Part& part, const Part& place) const;
  void CutWhole(Cut& cut) const;
  void CutGather(Cut& cut) const;
  void CutScatter(Cut& cut) const;
  void CutAllToAll(Cut& cut) const;

  const Operation* op_ = nullptr;
  int rank_ = 0;
  std::size_t size_ = 0;
  std::size_t each_ = 1;     // Elements of a part in one piece.
  std::size_t largest_ = 0;  // Elements.
};

}  // namespace resilient
