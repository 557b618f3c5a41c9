// Goal: ranks that are not in the same collective are all told so, for every kind of collective and
// everything that may differ, and nobody returns a wrong result. Method: one rank differs from the
// others in one thing, on fresh groups of one world.

#include <algorithm>
#include <span>

#include "runtime/base/random.h"
#include "runtime/comm/reduce.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/trial.h"

namespace resilient::testing {
namespace {

// What all ranks but one submit, and what that one does.
struct Difference {
  std::string what;
  Call usual;
  Call odd;
};

Call UsualCall(OpKind kind, int size, std::size_t count) {
  Call call{.kind = kind, .dtype = DataType::kInt32};
  if (Reduces(kind)) call.reduce = ReduceOp::kSum;
  if (HasRoot(kind)) call.root = 0;
  SetCounts(call, size, kind == OpKind::kBarrier ? 0 : count);
  return call;
}

class Mismatch : public ::testing::TestWithParam<Transport> {
 protected:
  // Each of `differences` with each rank of `world` as the odd one.
  void RunAll(World& world, const std::vector<Difference>& differences) {
    for (const Difference& difference : differences) {
      for (int odd = 0; odd < world.size(); ++odd) {
        SCOPED_TRACE(difference.what + ", rank " + std::to_string(odd) + " of " +
                     std::to_string(world.size()) + ": " + Describe(difference.usual));
        RunOne(world, difference, odd);
        if (HasFatalFailure()) return;
      }
    }
  }

 private:
  void RunOne(World& world, const Difference& difference, int odd) {
    const std::string name = "group" + std::to_string(++groups_);
    const auto group = world.CreateAll(name);
    // A rank that connects long after the others have failed finds nobody who tells it why.
    for (int rank = 0; rank < world.size(); ++rank) {
      ASSERT_TRUE(world.log(rank).WaitFor([&](EventLog& log) {
        return log.connected[{name, 1}] == 1;
      }));
    }
    Trial usual(difference.usual, random_);
    Trial other(difference.odd, random_);
    std::vector<Pending> pending;
    for (int rank = 0; rank < world.size(); ++rank) {
      Operation op = (rank == odd ? other : usual).At(rank);
      op.call_site = "train.py:" + std::to_string(30 + rank);
      // A rank that is told of the mismatch before it submits is refused with it.
      pending.push_back(Pending::Try(*group[static_cast<std::size_t>(rank)], std::move(op)));
    }
    for (int rank = 0; rank < world.size(); ++rank) {
      const Status status = pending[static_cast<std::size_t>(rank)].Wait();
      if (status.ok()) {
        // Over before the difference was seen: it needed nothing of those who differ.
        ASSERT_EQ((rank == odd ? other : usual).WhatIsWrong(rank), "");
        continue;
      }
      ASSERT_EQ(status.code(), StatusCode::kMismatch) << status.ToString();
      EXPECT_NE(status.message().find(" at train.py:" + std::to_string(30 + odd)),
                std::string::npos)
          << status.message();
      EXPECT_NE(status.message().find("group " + name + ", operation 1"), std::string::npos);
      EXPECT_EQ((rank == odd ? other : usual).WhatWasWritten(rank), "");
    }
    // Sooner or later all know, and nothing more runs.
    for (int rank = 0; rank < world.size(); ++rank) {
      EXPECT_TRUE(world.log(rank).WaitFor([&](EventLog& log) {
        return std::any_of(log.mismatches.begin(), log.mismatches.end(),
                           [&](const Status& one) { return one.detail().group == name; });
      }));
      EXPECT_EQ(group[static_cast<std::size_t>(rank)]->Submit(BarrierOp(), nullptr).status().code(),
                StatusCode::kMismatch);
    }
  }

  Random random_{11};
  int groups_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Transports, Mismatch, ::testing::ValuesIn(AllTransportsAndOrders()),
                         [](const auto& info) { return info.param.name; });

// Takes more than one round, over TCP and in shared memory.
constexpr std::size_t kLarge = 100'000;
constexpr int kAllSizes[] = {2, 3, 4};
constexpr std::span<const int> kSizes(kAllSizes, kThreadSanitized ? 1 : 3);

TEST_P(Mismatch, OfTheKind_EveryPair) {
  for (const int size : kSizes) {
    World world(GetParam(), size);
    std::vector<Difference> differences;
    for (const OpKind usual : kCollectives) {
      for (const OpKind odd : kCollectives) {
        if (usual == odd) continue;
        differences.push_back(
            {std::string(OpKindName(odd)), UsualCall(usual, size, 5), UsualCall(odd, size, 5)});
      }
    }
    RunAll(world, differences);
  }
}

TEST_P(Mismatch, OfTypeOperatorFactorOrRoot) {
  for (const int size : kSizes) {
    World world(GetParam(), size);
    std::vector<Difference> differences;
    for (const OpKind kind : kCollectives) {
      if (kind == OpKind::kBarrier) continue;
      for (const std::size_t count : {std::size_t{6}, kLarge}) {
        const Call usual = UsualCall(kind, size, count);
        Call odd = usual;
        odd.dtype = DataType::kFloat32;
        differences.push_back({"type", usual, odd});
        if (Reduces(kind)) {
          odd = usual;
          odd.reduce = ReduceOp::kMax;
          differences.push_back({"operator", usual, odd});
          if (CanReduce(DataType::kFloat32, ReduceOp::kPremulSum)) {
            Call half = usual;
            half.dtype = DataType::kFloat32;
            half.reduce = ReduceOp::kPremulSum;
            half.factor = 0.5;
            odd = half;
            odd.factor = 0.25;
            differences.push_back({"factor", half, odd});
          }
        }
        if (HasRoot(kind)) {
          odd = usual;
          odd.root = size - 1;
          differences.push_back({"root", usual, odd});
          differences.push_back({"root, the other way round", odd, usual});
        }
      }
    }
    RunAll(world, differences);
  }
}

TEST_P(Mismatch, OfTheOneCount) {
  for (const int size : kSizes) {
    World world(GetParam(), size);
    std::vector<Difference> differences;
    for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kBroadcast}) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{6}, kLarge})
        differences.push_back(
            {"count", UsualCall(kind, size, count), UsualCall(kind, size, count + 1)});
    }
    RunAll(world, differences);
  }
}

// The odd rank takes every part for one element longer than the others do.
TEST_P(Mismatch, OfTheCountOfAPart) {
  for (const int size : kSizes) {
    World world(GetParam(), size);
    std::vector<Difference> differences;
    for (const OpKind kind : {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter,
                              OpKind::kReduceScatter, OpKind::kAllToAll}) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{6}, kLarge})
        differences.push_back(
            {"count", UsualCall(kind, size, count), UsualCall(kind, size, count + 1)});
    }
    RunAll(world, differences);
  }
}

TEST_P(Mismatch, OfTheCountOfAPart_SaysBothCounts) {
  World world(GetParam(), 2);
  Random random(5);
  Call call = UsualCall(OpKind::kAllToAll, 2, 4);
  Trial here(call, random);
  call.counts[1][0] = 7;
  Trial there(call, random);
  const auto outcomes = world.RunAll([&](int rank) { return (rank == 0 ? here : there).At(rank); });
  const std::string text = outcomes[0].message();
  EXPECT_EQ(outcomes[0].code(), StatusCode::kMismatch);
  for (const char* part : {"rank 1 (node1, pid 1001) entered all_to_all(int32)",
                           "with 7 elements for rank 0 (node0, pid 1000)", "expects 4 elements",
                           "group world, operation 1"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  EXPECT_TRUE(world.log(1).WaitFor([](EventLog& log) { return log.mismatches.size() == 1; }));
}

TEST_P(Mismatch, BothTakeTheOtherOrThemselvesForTheRoot_IsFoundThoughNobodySends) {
  World world(GetParam(), 2);
  Random random(5);
  int groups = 0;
  for (const OpKind kind :
       {OpKind::kBroadcast, OpKind::kReduce, OpKind::kGather, OpKind::kScatter}) {
    for (const bool themselves : {false, true}) {
      const auto group = world.CreateAll("group" + std::to_string(++groups));
      Call call = UsualCall(kind, 2, 4);
      call.root = themselves ? 0 : 1;
      Trial first(call, random);
      call.root = 1 - call.root;
      Trial second(call, random);
      const Pending pending[] = {Pending::Try(*group[0], first.At(0)),
                                 Pending::Try(*group[1], second.At(1))};
      SCOPED_TRACE(Describe(call));
      for (int rank = 0; rank < 2; ++rank) {
        const Status status = pending[rank].Wait();
        EXPECT_TRUE(status.code() == StatusCode::kMismatch || status.ok()) << status.ToString();
        EXPECT_TRUE(world.log(rank).WaitFor([&](EventLog& log) {
          return log.mismatches.size() == static_cast<std::size_t>(groups);
        }));
      }
    }
  }
}

TEST_P(Mismatch, OfOneWhoRanAhead_IsFoundLater) {
  if (!GetParam().roots_run_ahead) GTEST_SKIP() << "here all wait for all";
  World world(GetParam(), 2);
  Random random(5);
  // Rank 1 only sends in these, rank 0 is somewhere else.
  for (const OpKind kind : {OpKind::kReduce, OpKind::kGather}) {
    const auto group = world.CreateAll(std::string(OpKindName(kind)));
    Trial ahead(UsualCall(kind, 2, 4), random);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(Pending::Of(*group[1], ahead.At(1)).Wait().ok());
    Trial barrier(UsualCall(OpKind::kBarrier, 2, 0), random);
    EXPECT_EQ(Pending::Of(*group[0], barrier.At(0)).Wait().code(), StatusCode::kMismatch);
    EXPECT_TRUE(world.log(1).WaitFor([&](EventLog& log) {
      return !log.mismatches.empty() && log.mismatches.back().detail().group == OpKindName(kind);
    }));
  }
}

}  // namespace
}  // namespace resilient::testing
