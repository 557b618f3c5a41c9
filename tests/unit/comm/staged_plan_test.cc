// Goal: the pieces of an operation are all of it, each element once, and ranks that do not agree on
// its size differ in a piece before any of them is through.
// Method: plans of random and of border sizes, played over vectors; pure.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/comm/staged_plan.h"

namespace resilient::testing {
namespace {

constexpr std::size_t kPieceBytes = 64;
constexpr std::size_t kEach = kPieceBytes / sizeof(float);

Operation Whole(OpKind kind, std::vector<float>& data) {
  Operation op;
  op.kind = kind;
  op.dtype = DataType::kFloat32;
  op.data = data.data();
  op.count = data.size();
  op.root = 0;
  op.peer = 1;
  op.reduce = Reduces(kind) ? ReduceOp::kSum : ReduceOp::kNone;
  return op;
}

std::vector<float> Numbered(std::size_t count, float first) {
  std::vector<float> numbers(count);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

void Copy(const StagedCopy& one, bool out) {
  std::memcpy(out ? one.host : one.device, out ? one.device : one.host, one.bytes);
}

TEST(StagedPlan, AllReduce_PiecesAreAllOfIt) {
  for (const std::size_t count : {0, 1, 15, 16, 17, 32, 33, 1000}) {
    std::vector<float> data = Numbered(count, 1);
    const Operation op = Whole(OpKind::kAllReduce, data);
    const StagedPlan plan(op, 0, 2, kPieceBytes);
    EXPECT_EQ(plan.pieces(), count / kEach + 1);
    EXPECT_FALSE(plan.MustAsk());
    ASSERT_LE(plan.BufferBytes(), kPieceBytes);
    std::vector<std::byte> buffer(plan.BufferBytes());
    for (std::size_t i = 0; i < plan.pieces(); ++i) {
      const StagedPiece piece = plan.Piece(i, buffer.data());
      EXPECT_EQ(piece.op.count, std::min(kEach, count - i * kEach));
      for (const StagedCopy& one : piece.out) Copy(one, true);
      auto* values = static_cast<float*>(piece.op.data);
      for (std::size_t j = 0; j < piece.op.count; ++j) values[j] *= 2;
      for (const StagedCopy& one : piece.in) Copy(one, false);
    }
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(data[i], 2 * static_cast<float>(i + 1));
  }
}

// What is only read is not written, and what is only written is not read.
TEST(StagedPlan, CopiesGoWhereTheOperationReadsAndWrites) {
  std::vector<float> data(3);
  const auto copies = [&](OpKind kind, int rank) {
    const Operation op = Whole(kind, data);
    std::vector<std::byte> buffer(kPieceBytes);
    const StagedPiece piece = StagedPlan(op, rank, 2, kPieceBytes).Piece(0, buffer.data());
    return std::pair(piece.out.size(), piece.in.size());
  };
  EXPECT_EQ(copies(OpKind::kAllReduce, 1), std::pair(1ul, 1ul));
  EXPECT_EQ(copies(OpKind::kReduce, 0), std::pair(1ul, 1ul));
  EXPECT_EQ(copies(OpKind::kReduce, 1), std::pair(1ul, 0ul));
  EXPECT_EQ(copies(OpKind::kBroadcast, 0), std::pair(1ul, 0ul));
  EXPECT_EQ(copies(OpKind::kBroadcast, 1), std::pair(0ul, 1ul));
  EXPECT_EQ(copies(OpKind::kSend, 0), std::pair(1ul, 0ul));
  EXPECT_EQ(copies(OpKind::kRecv, 0), std::pair(0ul, 1ul));
}

// The counts of `op` in its pieces, as peers see them.
std::vector<std::size_t> CountsOf(const Operation& op) {
  const StagedPlan plan(op, 0, 2, kPieceBytes);
  std::vector<std::size_t> counts;
  std::vector<std::byte> buffer(plan.BufferBytes());
  for (std::size_t i = 0; i < plan.pieces(); ++i)
    counts.push_back(plan.Piece(i, buffer.data()).op.count);
  return counts;
}

TEST(StagedPlan, SizesThatDiffer_DifferInAPieceThatBothHave) {
  std::vector<std::vector<std::size_t>> all;
  for (std::size_t count = 0; count < 4 * kEach; ++count) {
    std::vector<float> data(count);
    all.push_back(CountsOf(Whole(OpKind::kSend, data)));
  }
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = 0; b < all.size(); ++b) {
      if (a == b) continue;
      const std::size_t both = std::min(all[a].size(), all[b].size());
      EXPECT_FALSE(std::equal(all[a].begin(), all[a].begin() + static_cast<std::ptrdiff_t>(both),
                              all[b].begin()))
          << a << " and " << b;
    }
  }
}

TEST(StagedPlan, AllGather_PartsOfEveryLength_FindTheirPlaces) {
  const std::vector<std::size_t> counts = {40, 0, 7};
  std::vector<std::vector<float>> outputs;
  for (const std::size_t count : counts) outputs.emplace_back(count);
  std::vector<float> data = Numbered(counts[0], 1);
  Operation op = Whole(OpKind::kAllGather, data);
  for (auto& output : outputs) op.outputs.push_back({output.data(), output.size()});
  const StagedPlan plan(op, 0, 3, kPieceBytes);
  const std::size_t each = kEach / 3;
  EXPECT_EQ(plan.pieces(), 40 / each + 1);
  std::vector<std::byte> buffer(plan.BufferBytes());
  for (std::size_t i = 0; i < plan.pieces(); ++i) {
    const StagedPiece piece = plan.Piece(i, buffer.data());
    for (const StagedCopy& one : piece.out) Copy(one, true);
    EXPECT_EQ(piece.op.data, piece.op.outputs[0].data) << "in its place from the beginning";
    EXPECT_EQ(piece.op.count, piece.op.outputs[0].count);
    for (std::size_t j = 0; j < piece.op.outputs[2].count; ++j)
      static_cast<float*>(piece.op.outputs[2].data)[j] = static_cast<float>(100 + i * each + j);
    for (const StagedCopy& one : piece.in) Copy(one, false);
  }
  EXPECT_EQ(outputs[0], Numbered(40, 1));
  EXPECT_EQ(outputs[2], Numbered(7, 100));
}

TEST(StagedPlan, OwnPartThatIsInItsPlace_IsNotCopiedBack) {
  std::vector<float> data(8);
  Operation op = Whole(OpKind::kAllGather, data);
  op.data = data.data();
  op.count = 4;
  op.outputs = {{data.data(), 4}, {data.data() + 4, 4}};
  std::vector<std::byte> buffer(kPieceBytes);
  const StagedPiece piece = StagedPlan(op, 0, 2, kPieceBytes).Piece(0, buffer.data());
  ASSERT_EQ(piece.in.size(), 1u);
  EXPECT_EQ(piece.in.front().device, data.data() + 4);
}

TEST(StagedPlan, PartsThatOthersDoNotKnow_AreAskedFor) {
  std::vector<float> data(4);
  std::vector<float> other(4);
  Operation op = Whole(OpKind::kGather, data);
  StagedPlan plan(op, 1, 2, kPieceBytes);  // Not the root.
  EXPECT_TRUE(plan.MustAsk());
  EXPECT_EQ(plan.largest(), 4u);
  plan.SetLargest(100);
  EXPECT_EQ(plan.pieces(), 100 / (kEach / 2) + 1);
  std::vector<std::byte> buffer(plan.BufferBytes());
  EXPECT_EQ(plan.Piece(0, buffer.data()).op.count, 4u);
  EXPECT_EQ(plan.Piece(5, buffer.data()).op.count, 0u) << "the others have more";
  EXPECT_TRUE(plan.Piece(5, buffer.data()).out.empty());
}

TEST(StagedPlan, MoreRanksThanFitInAPiece_HaveOneElementEach) {
  std::vector<float> data(1);
  std::vector<float> places(100);
  Operation op = Whole(OpKind::kAllGather, data);
  for (float& place : places) op.outputs.push_back({&place, 1});
  const StagedPlan plan(op, 0, 100, kPieceBytes);
  EXPECT_EQ(plan.BufferBytes(), 100 * sizeof(float));
  EXPECT_EQ(plan.pieces(), 2u);
}

}  // namespace
}  // namespace resilient::testing
