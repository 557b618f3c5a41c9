// Goal: a process is ended when a thread of its program waits for a device that hangs, and never
// one whose program has heard of it. Method: pure; times and places that the test gives.
#include "runtime/recovery/hung_device.h"

#include <chrono>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace resilient::recovery {
namespace {

using std::chrono::seconds;

class HungDeviceTest : public ::testing::Test {
 protected:
  static Instant At(int second) { return Instant(seconds(1000 + second)); }
  static ThreadStack Main(const std::string& stack) { return {7, "", "train.py:9 step", stack}; }
  static ThreadStack Trainer(const std::string& stack) {
    return {8, "trainer", "train.py:41 step", stack};
  }
  // The threads that submit operations.
  void See(const std::vector<ThreadStack>& threads, int second) {
    Whereabouts seen;
    seen.submitting = threads;
    device_.OnSeen(seen, At(second));
  }
  void See(const std::string& stack, int second) { See(std::vector{Main(stack)}, second); }
  bool IsStuck() const { return device_.StuckIn(seconds(20)) != nullptr; }

  HungDevice device_;
};

TEST_F(HungDeviceTest, MainThreadThatStays_IsStuckAfterTheBudget) {
  See("synchronize", 0);
  device_.OnHangs(At(10));
  See("synchronize", 10);
  See("synchronize", 29);
  EXPECT_FALSE(IsStuck());
  See("synchronize", 30);
  EXPECT_TRUE(IsStuck());
}

TEST_F(HungDeviceTest, ThreadThatTrainsBesideMain_IsTheOneThatCounts) {
  See({Trainer("synchronize")}, 0);
  device_.OnHangs(At(10));
  See({Trainer("synchronize")}, 30);
  const ThreadStack* stuck = device_.StuckIn(seconds(20));
  ASSERT_NE(stuck, nullptr);
  EXPECT_EQ(stuck->name, "trainer");
  EXPECT_EQ(stuck->top, "train.py:41 step");
  See({Trainer("except: save")}, 31);
  EXPECT_FALSE(IsStuck());
}

TEST_F(HungDeviceTest, OneOfTwoThatSubmitStays_IsStuckWhateverTheOtherDoes) {
  See({Trainer("barrier"), Main("synchronize")}, 0);
  device_.OnHangs(At(10));
  See({Trainer("except: log"), Main("synchronize")}, 11);
  See({Trainer("except: log"), Main("synchronize")}, 30);
  const ThreadStack* stuck = device_.StuckIn(seconds(20));
  ASSERT_NE(stuck, nullptr);
  EXPECT_EQ(stuck->name, "");
  See({Main("except: save")}, 31);
  EXPECT_FALSE(IsStuck());
}

// What cannot be read is where it was.
TEST_F(HungDeviceTest, WithoutAStack_TheLineTells) {
  See("", 0);
  device_.OnHangs(At(10));
  See("", 30);
  EXPECT_TRUE(IsStuck());
  See({{7, "", "train.py:10 step", ""}}, 31);
  EXPECT_FALSE(IsStuck());
}

TEST_F(HungDeviceTest, NothingIsKnown_NothingIsStuck) {
  See(std::vector<ThreadStack>(), 0);
  device_.OnHangs(At(10));
  See(std::vector<ThreadStack>(), 60);
  EXPECT_FALSE(IsStuck());
  See({{7, "", "", ""}}, 61);
  See({{7, "", "", ""}}, 62);
  EXPECT_FALSE(IsStuck());
}

TEST_F(HungDeviceTest, MainThreadThatHasMoved_HasHeardOfIt) {
  See("synchronize", 0);
  device_.OnHangs(At(10));
  See("except: save", 11);
  See("except: save", 60);
  EXPECT_FALSE(IsStuck());
  See("synchronize", 90);
  See("synchronize", 200);
  EXPECT_FALSE(IsStuck()) << "in a second wait it is by its own will";
}

TEST_F(HungDeviceTest, MainThreadThatWasNotSeenBefore_MayHaveHeardOfIt) {
  device_.OnHangs(At(10));
  See("save", 11);
  See("save", 60);
  EXPECT_FALSE(IsStuck());
}

TEST_F(HungDeviceTest, WithoutAHang_NothingIsStuck) {
  See("compute", 0);
  See("compute", 1000);
  EXPECT_FALSE(IsStuck());
}

}  // namespace
}  // namespace resilient::recovery
