// Goal: operations of 64 MiB give what a serial program would give. Method: all that a rank gives
// repeats one block, whose length no window and no slot divides; so the result must repeat too, and
// its first block is compared with the serial reference.

#include <cstring>

#include "runtime/base/random.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/trial.h"

namespace resilient::testing {
namespace {

constexpr std::size_t kLargeBytes = 64u << 20;
constexpr std::size_t kBlock = 99'991;

// A trial of one block, blown up.
class RepeatedTrial {
 public:
  // `count`: elements of each part.
  RepeatedTrial(const Call& block, std::size_t count, Random& random)
      : trial_(block, random),
        element_(SizeOf(block.dtype)),
        count_(count),
        spread_(block.counts.size()) {}

  Operation At(int rank) {
    Operation op = trial_.At(rank);
    std::vector<Spread>& mine = spread_[static_cast<std::size_t>(rank)];
    const auto blow_up = [&](void** data, std::size_t* count) {
      if (*count == 0) return;
      Spread& spread = mine.emplace_back();
      spread.block = static_cast<std::byte*>(*data);
      spread.memory = std::make_unique_for_overwrite<std::byte[]>(count_ * element_);
      for (std::size_t at = 0; at < Bytes(); at += BlockBytes())
        std::memcpy(spread.memory.get() + at, spread.block, std::min(BlockBytes(), Bytes() - at));
      *data = spread.memory.get();
      *count = count_;
    };
    blow_up(&op.data, &op.count);
    for (Part& part : op.inputs) blow_up(&part.data, &part.count);
    for (Part& part : op.outputs) blow_up(&part.data, &part.count);
    return op;
  }
  // After it; once.
  std::string WhatIsWrong(int rank) {
    for (const Spread& spread : spread_[static_cast<std::size_t>(rank)]) {
      const std::byte* memory = spread.memory.get();
      if (std::memcmp(memory, memory + BlockBytes(), Bytes() - BlockBytes()) != 0)
        return "what came does not repeat what was sent";
      std::memcpy(spread.block, memory, BlockBytes());
    }
    return trial_.WhatIsWrong(rank);
  }

 private:
  struct Spread {
    std::byte* block = nullptr;  // Of the trial.
    std::unique_ptr<std::byte[]> memory;
  };
  std::size_t Bytes() const { return count_ * element_; }
  std::size_t BlockBytes() const { return kBlock * element_; }

  Trial trial_;
  const std::size_t element_;
  const std::size_t count_;
  std::vector<std::vector<Spread>> spread_;
};

class Large : public ::testing::TestWithParam<Transport> {
 protected:
  void SetUp() override {
    if (kSanitized) GTEST_SKIP() << "takes minutes where it is instrumented";
  }
  // In all 64 MiB that a rank gives or gets, whichever is more.
  void RunAndCheck(World& world, OpKind kind) {
    Call block{.kind = kind, .dtype = DataType::kFloat32};
    if (Reduces(kind)) block.reduce = ReduceOp::kAvg;
    if (HasRoot(kind)) block.root = 1;
    SetCounts(block, world.size(), kBlock);
    const bool one_part =
        kind == OpKind::kAllReduce || kind == OpKind::kBroadcast || kind == OpKind::kReduce;
    const std::size_t parts = one_part ? 1 : static_cast<std::size_t>(world.size());
    RepeatedTrial trial(block, kLargeBytes / sizeof(float) / parts, random_);
    ExpectAllOk(world.RunAll([&](int rank) { return trial.At(rank); }));
    for (int rank = 0; rank < world.size(); ++rank) {
      ASSERT_EQ(trial.WhatIsWrong(rank), "") << OpKindName(kind);
    }
  }

  Random random_{64};
};

INSTANTIATE_TEST_SUITE_P(Transports, Large, ::testing::ValuesIn(AllTransports()),
                         [](const auto& info) { return info.param.name; });

TEST_P(Large, EveryCollectiveOfTwoRanks) {
  World world(GetParam(), 2);
  for (const OpKind kind : kCollectives) {
    if (kind != OpKind::kBarrier) RunAndCheck(world, kind);
  }
}

TEST_P(Large, AllReduceOfFourRanks) {
  World world(GetParam(), 4);
  RunAndCheck(world, OpKind::kAllReduce);
}

TEST_P(Large, SendAndRecv) {
  World world(GetParam(), 2);
  std::vector<float> sent(kLargeBytes / sizeof(float)), got(sent.size());
  std::iota(sent.begin(), sent.end(), 0.0f);
  const Pending send = Pending::Of(world.at(0), SendOp(sent, 1, 0));
  EXPECT_TRUE(Pending::Of(world.at(1), RecvOp(got, 0, 0)).Wait().ok());
  EXPECT_TRUE(send.Wait().ok());
  EXPECT_TRUE(got == sent);
}

}  // namespace
}  // namespace resilient::testing
