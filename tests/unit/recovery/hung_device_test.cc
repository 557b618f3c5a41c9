// Goal: a process is ended when its main thread waits for a device that hangs, and never one whose
// program has heard of it. Method: pure; times and places that the test gives.
#include "runtime/recovery/hung_device.h"

#include <chrono>

#include <gtest/gtest.h>

namespace resilient::recovery {
namespace {

using std::chrono::seconds;

class HungDeviceTest : public ::testing::Test {
 protected:
  static Instant At(int second) { return Instant(seconds(1000 + second)); }
  void See(const std::string& stack, int second, const std::string& top = "train.py:9 step") {
    Whereabouts seen;
    seen.main_thread = top;
    seen.stack = stack;
    device_.OnSeen(seen, At(second));
  }
  bool IsStuck() const { return device_.IsStuck(seconds(20)); }

  HungDevice device_;
};

TEST_F(HungDeviceTest, MainThreadThatStays_IsStuckAfterTheBudget) {
  See("synchronize", 0);
  device_.OnHangs(At(10));
  See("synchronize", 10);
  See("synchronize", 29);
  EXPECT_FALSE(IsStuck());
  See("synchronize", 30, "native code holds the GIL for 20 s, last seen at train.py:9 step");
  EXPECT_TRUE(IsStuck());
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
