#include "runtime/comm/staged_plan.h"

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"

namespace resilient {
namespace {

std::size_t LargestOf(const Operation& op) {
  std::size_t largest = op.count;
  for (const auto* parts : {&op.inputs, &op.outputs}) {
    for (const Part& part : *parts) largest = std::max(largest, part.count);
  }
  return largest;
}

}  // namespace

StagedPlan::StagedPlan(const Operation& op, int rank, int size, std::size_t piece_bytes)
    : op_(&op), rank_(rank), size_(static_cast<std::size_t>(size)), largest_(LargestOf(op)) {
  each_ = std::max<std::size_t>(piece_bytes / (Slots() * SizeOf(op.dtype)), 1);
}

bool StagedPlan::MustAsk() const {
  return op_->kind == OpKind::kGather || op_->kind == OpKind::kScatter ||
         op_->kind == OpKind::kAllToAll;
}

// The same on all ranks, so that each_ is.
std::size_t StagedPlan::Slots() const {
  switch (op_->kind) {
    case OpKind::kAllGather:
    case OpKind::kReduceScatter:
    case OpKind::kGather:
    case OpKind::kScatter:
      return size_;
    case OpKind::kAllToAll:
      return 2 * size_;
    case OpKind::kAllReduce:
    case OpKind::kBroadcast:
    case OpKind::kReduce:
    case OpKind::kBarrier:
    case OpKind::kSend:
    case OpKind::kRecv:
      return 1;
  }
  RESILIENT_CHECK(false);
}

std::size_t StagedPlan::SlotBytes() const { return std::min(each_, largest_) * SizeOf(op_->dtype); }

std::size_t StagedPlan::BufferBytes() const {
  const bool alone = (op_->kind == OpKind::kGather || op_->kind == OpKind::kScatter) && !IsRoot();
  return (alone ? 1 : Slots()) * SlotBytes();
}

// What a piece has of a part with `count` elements, in the buffer.
Part StagedPlan::Place(const Cut& cut, std::size_t slot, std::size_t count) const {
  const std::size_t rest = count - std::min(count, cut.first);
  return {.data = cut.buffer + slot * SlotBytes(), .count = std::min(rest, each_)};
}

void StagedPlan::CopyOut(Cut& cut, const Part& part, const Part& place) const {
  if (place.count == 0) return;
  const std::size_t element = SizeOf(op_->dtype);
  cut.piece.out.push_back({.device = static_cast<std::byte*>(part.data) + cut.first * element,
                           .host = static_cast<std::byte*>(place.data),
                           .bytes = place.count * element});
}

void StagedPlan::CopyIn(Cut& cut, const Part& part, const Part& place) const {
  if (place.count == 0) return;
  const std::size_t element = SizeOf(op_->dtype);
  cut.piece.in.push_back({.device = static_cast<std::byte*>(part.data) + cut.first * element,
                          .host = static_cast<std::byte*>(place.data),
                          .bytes = place.count * element});
}

// all_reduce, reduce, broadcast, send, recv.
void StagedPlan::CutWhole(Cut& cut) const {
  const Part whole{.data = op_->data, .count = op_->count};
  const Part place = Place(cut, 0, op_->count);
  const bool gives = op_->kind == OpKind::kAllReduce || op_->kind == OpKind::kReduce ||
                     op_->kind == OpKind::kSend || (op_->kind == OpKind::kBroadcast && IsRoot());
  const bool takes = op_->kind == OpKind::kAllReduce || op_->kind == OpKind::kRecv ||
                     (op_->kind == OpKind::kReduce && IsRoot()) ||
                     (op_->kind == OpKind::kBroadcast && !IsRoot());
  if (gives) CopyOut(cut, whole, place);
  if (takes) CopyIn(cut, whole, place);
  cut.piece.op.data = place.data;
  cut.piece.op.count = place.count;
}

// all_gather, gather: this rank's part is in its place among the outputs from the beginning.
void StagedPlan::CutGather(Cut& cut) const {
  const auto own = static_cast<std::size_t>(rank_);
  const Part whole{.data = op_->data, .count = op_->count};
  const Part place = Place(cut, op_->outputs.empty() ? 0 : own, op_->count);
  CopyOut(cut, whole, place);
  cut.piece.op.data = place.data;
  cut.piece.op.count = place.count;
  for (std::size_t from = 0; from < op_->outputs.size(); ++from) {
    const Part& output = op_->outputs[from];
    const Part& made = cut.piece.op.outputs.emplace_back(Place(cut, from, output.count));
    if (from != own || output.data != op_->data) CopyIn(cut, output, made);
  }
}

// reduce_scatter, scatter: this rank's part comes to the place of its own input.
void StagedPlan::CutScatter(Cut& cut) const {
  const auto own = static_cast<std::size_t>(rank_);
  for (std::size_t to = 0; to < op_->inputs.size(); ++to) {
    const Part& input = op_->inputs[to];
    CopyOut(cut, input, cut.piece.op.inputs.emplace_back(Place(cut, to, input.count)));
  }
  const Part whole{.data = op_->data, .count = op_->count};
  const Part place = Place(cut, op_->inputs.empty() ? 0 : own, op_->count);
  cut.piece.op.data = place.data;
  cut.piece.op.count = place.count;
  const bool there = !Reduces(op_->kind) && IsRoot() && op_->inputs[own].data == op_->data;
  if (!there) CopyIn(cut, whole, place);
}

void StagedPlan::CutAllToAll(Cut& cut) const {
  const auto own = static_cast<std::size_t>(rank_);
  for (std::size_t peer = 0; peer < size_; ++peer) {
    const Part& input = op_->inputs[peer];
    const Part& output = op_->outputs[peer];
    CopyOut(cut, input, cut.piece.op.inputs.emplace_back(Place(cut, peer, input.count)));
    const Part& made = cut.piece.op.outputs.emplace_back(Place(cut, size_ + peer, output.count));
    if (peer != own || input.data != output.data) CopyIn(cut, output, made);
  }
}

StagedPiece StagedPlan::Piece(std::size_t number, std::byte* buffer) const {
  Cut cut{.piece = {}, .first = number * each_, .buffer = buffer};
  Operation& op = cut.piece.op;
  op = OutlineOf(*op_);
  op.factor = op_->factor;
  op.device = kHost;
  op.count = 0;
  switch (op_->kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kBroadcast:
    case OpKind::kSend:
    case OpKind::kRecv:
      CutWhole(cut);
      break;
    case OpKind::kAllGather:
    case OpKind::kGather:
      CutGather(cut);
      break;
    case OpKind::kReduceScatter:
    case OpKind::kScatter:
      CutScatter(cut);
      break;
    case OpKind::kAllToAll:
      CutAllToAll(cut);
      break;
    case OpKind::kBarrier:
      break;
  }
  return std::move(cut.piece);
}

}  // namespace resilient
