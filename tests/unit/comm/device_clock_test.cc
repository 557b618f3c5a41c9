// Goal: of a device it is known since when it has begun and finished nothing though it could, and
// nothing else counts for it. Method: pure; times that the test gives.
#include "runtime/comm/device_clock.h"

#include <chrono>

#include <gtest/gtest.h>

namespace resilient {
namespace {

using std::chrono::duration_cast;
using std::chrono::seconds;

class DeviceClockTest : public ::testing::Test {
 protected:
  static Instant At(double second) {
    return Instant(seconds(1000) + duration_cast<Duration>(std::chrono::duration<double>(second)));
  }
  // Turns in which something is in the queue.
  void Queue(double from, double to) {
    for (double at = from; at <= to; at += 0.5) clock_.OnQueued(At(at));
  }
  double Still(double at) const { return ToSeconds(clock_.Tell("GPU 0", true, At(at)).still); }

  DeviceClock clock_;
};

TEST_F(DeviceClockTest, StandsStill_SinceSomethingIsInItsQueue) {
  clock_.OnMoved(At(1));
  Queue(10, 20);
  EXPECT_DOUBLE_EQ(Still(20), 10);
  EXPECT_EQ(clock_.Tell("GPU 0", false, At(20)).still, Duration::zero()) << "it has begun all";
}

TEST_F(DeviceClockTest, WhatItBeginsOrFinishes_StartsTheTimeAgain) {
  Queue(10, 20);
  clock_.OnMoved(At(20));
  Queue(20, 25);
  EXPECT_DOUBLE_EQ(Still(25), 5);
  Operation op;
  op.kind = OpKind::kAllReduce;
  op.dtype = DataType::kFloat32;
  op.reduce = ReduceOp::kSum;
  op.count = 4;
  clock_.OnEnded(op, 7, "w", At(26));
  Queue(25, 30);
  const DeviceProgress told = clock_.Tell("GPU 0", true, At(30));
  EXPECT_DOUBLE_EQ(ToSeconds(told.still), 4);
  EXPECT_EQ(told.last, "all_reduce(float32[4], sum) #7 of group 'w'");
  EXPECT_DOUBLE_EQ(ToSeconds(told.last_ago), 4);
  EXPECT_EQ(told.name, "GPU 0");
}

// Nobody has looked: what it did meanwhile is not known, or its queue was empty.
TEST_F(DeviceClockTest, TimeInWhichNobodyLooked_DoesNotCount) {
  Queue(10, 20);
  Queue(30, 33);
  EXPECT_DOUBLE_EQ(Still(33), 3);
}

TEST_F(DeviceClockTest, Runs_WhileAnyGroupHasAnOperationThere) {
  const int one = 0;
  const int other = 0;
  EXPECT_FALSE(clock_.Tell("GPU 0", true, At(0)).runs);
  clock_.NoteRuns(&one, true);
  clock_.NoteRuns(&other, true);
  clock_.NoteRuns(&one, false);
  EXPECT_TRUE(clock_.Tell("GPU 0", true, At(0)).runs);
  clock_.NoteRuns(&other, false);
  EXPECT_FALSE(clock_.Tell("GPU 0", true, At(0)).runs);
}

}  // namespace
}  // namespace resilient
