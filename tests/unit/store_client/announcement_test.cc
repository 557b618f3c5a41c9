// Goal: a rank's announcement holds its presence key, comes back when the store has lost it, gives
// up where waiting cannot help, says goodbye, and is nothing in a forked child. Method: the test
// plays the server step by step.
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <resilient/store/announcement.h>

#include "tests/unit/store_client/scripted_server.h"

namespace resilient::store {
namespace {

class AnnouncementTest : public ::testing::Test {
 protected:
  std::unique_ptr<Announcement> Begin() {
    ConnectOptions options;
    options.addresses = {server_.address()};
    options.job = "train";
    return Announce(options, {.rank = 3, .world_size = 4}, clock_);
  }
  // Its next line to the server, greeted.
  ScriptedConnection Greeted(const Welcome& welcome, Hello* hello = nullptr) {
    ScriptedConnection line = server_.Accept();
    const Hello told = line.Greet(welcome);
    if (hello != nullptr) *hello = told;
    return line;
  }
  void CloseOrderly(Announcement& announcement, ScriptedConnection& line) {
    EXPECT_TRUE(line.ReadOp<HeartbeatOp>());  // It knows that it is connected.
    auto closing = std::async(
        std::launch::async, [&] { announcement.Close(Deadline::After(clock_.Now(), kPatience)); });
    const std::optional<Request> leave = line.ReadOp<LeaveOp>();
    EXPECT_TRUE(leave);
    line.SendReply(ReplyTo(leave));
    EXPECT_TRUE(line.SeesEnd());
    closing.get();
  }
  static bool HasThread(const std::string& name) {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string line;
      std::getline(std::ifstream(task.path() / "comm"), line);
      if (line == name) return true;
    }
    return false;
  }
  // A thread that has been joined is listed for a moment yet.
  bool Ends(const std::string& thread) const {
    const Deadline deadline = Deadline::After(clock_.Now(), kPatience);
    std::vector<PollEntry> nothing;
    while (HasThread(thread) && !deadline.ExpiredAt(clock_.Now())) {
      PollUntil(nothing, clock_, Deadline::After(clock_.Now(), Millis(5)));
    }
    return !HasThread(thread);
  }

  SystemClock clock_;
  ScriptedServer server_;
};

TEST_F(AnnouncementTest, HoldsTheKeyOfItsRank_UntilItsGoodbye) {
  const auto announcement = Begin();
  Hello hello;
  ScriptedConnection line = Greeted(TestWelcome(), &hello);
  EXPECT_EQ(hello.job, "train");
  EXPECT_EQ(hello.role, Role::kControl);
  EXPECT_EQ(hello.leased_key, "resilient/presence/4/3");
  EXPECT_EQ(hello.leased_value, hello.process.host + " " + std::to_string(::getpid()));
  CloseOrderly(*announcement, line);
  EXPECT_TRUE(Ends("res-presence"));
  announcement->Close(Deadline::Never());
}

TEST_F(AnnouncementTest, NobodyAnswersYet_TriesOn) {
  const auto announcement = Begin();
  for (int i = 0; i < 3; ++i) static_cast<void>(server_.Accept());  // Closed at once.
  ScriptedConnection line = Greeted(TestWelcome());
  CloseOrderly(*announcement, line);
}

TEST_F(AnnouncementTest, NobodyAnswers_IsClosedAllTheSame) {
  const auto announcement = Begin();
  static_cast<void>(server_.Accept());
  server_.StopListening();
  announcement->Close(Deadline::After(clock_.Now(), kPatience));
  EXPECT_TRUE(Ends("res-presence"));
}

TEST_F(AnnouncementTest, AStoreThatHasLostIt_HearsOfItAnew) {
  const auto announcement = Begin();
  Hello first;
  { const ScriptedConnection lost = Greeted(TestWelcome(), &first); }
  Hello second;
  { const ScriptedConnection unknown = Greeted(TestWelcome(), &second); }
  EXPECT_EQ(second.session, first.session);
  Hello third;
  ScriptedConnection line = Greeted(TestWelcome(), &third);
  EXPECT_NE(third.session, first.session);
  EXPECT_EQ(third.leased_key, first.leased_key);
  CloseOrderly(*announcement, line);
}

TEST_F(AnnouncementTest, WhereWaitingCannotHelp_GivesUp) {
  const auto announcement = Begin();
  ScriptedConnection line = server_.Accept();
  const std::optional<Request> hello = line.Read();
  line.SendBytes(EncodePreamble());
  line.SendReply(ReplyTo(hello, Status(StatusCode::kAuth, "a token is needed")));
  EXPECT_TRUE(line.SeesEnd());
  EXPECT_TRUE(Ends("res-presence"));
}

TEST_F(AnnouncementTest, InAForkedChild_IsNothing) {
  auto announcement = Begin();
  ScriptedConnection line = Greeted(TestWelcome());
  const pid_t child = ::fork();
  if (child == 0) {
    announcement->Close(Deadline::Never());
    announcement.reset();
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  CloseOrderly(*announcement, line);
}

}  // namespace
}  // namespace resilient::store
