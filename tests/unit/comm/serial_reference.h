#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <resilient/operation.h>

#include "runtime/base/random.h"

namespace resilient::testing {

using Bytes = std::vector<std::byte>;

inline constexpr OpKind kCollectives[] = {
    OpKind::kAllReduce, OpKind::kBroadcast,     OpKind::kAllGather,
    OpKind::kBarrier,   OpKind::kReduce,        OpKind::kGather,
    OpKind::kScatter,   OpKind::kReduceScatter, OpKind::kAllToAll};
inline constexpr DataType kTypes[] = {
    DataType::kFloat32,   DataType::kFloat64,   DataType::kBFloat16,   DataType::kInt64,
    DataType::kUInt8,     DataType::kBool,      DataType::kInt32,      DataType::kFloat16,
    DataType::kInt8,      DataType::kInt16,     DataType::kUInt16,     DataType::kUInt32,
    DataType::kUInt64,    DataType::kComplex64, DataType::kComplex128, DataType::kFloat8E4M3,
    DataType::kFloat8E5M2};
inline constexpr ReduceOp kReduceOps[] = {
    ReduceOp::kSum,    ReduceOp::kAvg,   ReduceOp::kMin,    ReduceOp::kMax,      ReduceOp::kProduct,
    ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor, ReduceOp::kPremulSum};

// One collective as all ranks of a group submit it, without its memory. Thread: value type.
struct Call {
  OpKind kind = OpKind::kBarrier;
  DataType dtype = DataType::kFloat32;
  ReduceOp reduce = ReduceOp::kNone;
  double factor = 1.0;
  int root = -1;
  bool in_place = false;   // Own parts of outputs are the memory of the input.
  bool one_block = false;  // Operation::one_block. REQUIRES: equal counts.
  // Elements that go from one rank to another: counts[from][to]. What has one count has it
  // everywhere; what a rank sends to all has one count in its row.
  std::vector<std::vector<std::size_t>> counts;

  // The ranks of each host, where the order of a reduction goes by hosts; none: rank order.
  std::vector<std::vector<std::size_t>> hosts = {};

  int size() const { return static_cast<int>(counts.size()); }
  std::size_t Count(int from, int to) const {
    return counts[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
  }
};

std::string Describe(const Call& call);

// Elements whose sum depends on the order of addition, and with which `reduce` over up to 8 inputs
// gives no NaN. What an average adds up does not overflow. Premultiplied with a power of two they
// are exact.
Bytes RandomElements(DataType type, ReduceOp reduce, std::size_t count, Random& random);

// Slow, and meant to be seen to be right: one element after the other, inputs in order. Floats of
// less than 32 bits are combined in float and rounded once, to nearest even. With `hosts` the
// inputs of each are combined first, and then what the hosts have. REQUIRES: the combination is one
// that a communicator accepts.
Bytes ReduceSerially(DataType type, ReduceOp reduce, double factor,
                     const std::vector<Bytes>& inputs,
                     const std::vector<std::vector<std::size_t>>& hosts = {});

// What each rank must have in its output memory after `call`: one for `data`, or one for each of
// the outputs; none where a rank has no output. sent[r][p] is what rank r gives for rank p.
std::vector<std::vector<Bytes>> ExpectedOutputs(const Call& call,
                                                const std::vector<std::vector<Bytes>>& sent);

}  // namespace resilient::testing
