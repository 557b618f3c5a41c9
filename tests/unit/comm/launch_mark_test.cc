// Goal: who waits for a launch hears of it, awake or asleep, and of the end that comes in its
// place.
#include <resilient/launch_mark.h>

#include <string>
#include <thread>

#include <gtest/gtest.h>

namespace resilient {
namespace {

constexpr Duration kBound = std::chrono::seconds(30);

class Joined final : public LaunchMark::Joiner {
 public:
  Status Join(void* event, ExecutionStream stream) const override {
    return Status(StatusCode::kCommFailed, event == stream ? "the same" : "another");
  }
};

// Parameter: whether the communicator has said that the launch comes soon.
class LaunchMarkTest : public ::testing::TestWithParam<bool> {
 protected:
  LaunchMarkTest() {
    if (GetParam()) mark_.ExpectSoon();
  }

  const Joined joiner_;
  LaunchMark mark_;
};

TEST_P(LaunchMarkTest, NothingComes_TheWaitHasItsEnd) {
  EXPECT_FALSE(mark_.WaitFor(Duration::zero()));
  EXPECT_FALSE(mark_.WaitFor(Millis(1)));
  EXPECT_FALSE(mark_.ended());
}

TEST_P(LaunchMarkTest, LaunchedByAnother_IsHeardAndJoined) {
  int event = 0;
  std::thread launcher([&] { mark_.Launch(joiner_, &event); });
  EXPECT_TRUE(mark_.WaitFor(kBound));
  EXPECT_EQ(mark_.Join(&event).message(), "the same");
  EXPECT_FALSE(mark_.ended());
  launcher.join();
}

TEST_P(LaunchMarkTest, EndedByAnother_IsHeardAndNotJoined) {
  std::thread ender([this] { mark_.End(); });
  EXPECT_TRUE(mark_.WaitFor(kBound));
  EXPECT_TRUE(mark_.ended());
  EXPECT_TRUE(mark_.Join(nullptr).ok());
  ender.join();
}

// While the one who waits is awake, on its way to sleep, or asleep: each has come up by then.
TEST_P(LaunchMarkTest, ManyInTurn_NoneIsMissed) {
  for (int i = 0; i < 2000; ++i) {
    LaunchMark mark;
    if (GetParam()) mark.ExpectSoon();
    std::thread launcher([&] { mark.Launch(joiner_, nullptr); });
    EXPECT_TRUE(mark.WaitFor(kBound));
    launcher.join();
  }
}

INSTANTIATE_TEST_SUITE_P(Waiting, LaunchMarkTest, ::testing::Bool(),
                         [](const ::testing::TestParamInfo<bool>& soon) {
                           return std::string(soon.param ? "AwakeAtFirst" : "Asleep");
                         });

}  // namespace
}  // namespace resilient
