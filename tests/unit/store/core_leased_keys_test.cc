// Goal: a key that a session holds by its lease is there exactly as long as the session is heard.
// Method: the server core by hand, in virtual time; in each step the rows are compared and a second
// store is made of them (fixture).
#include "tests/unit/store/core_membership_fixture.h"

namespace resilient::store {
namespace {

class CoreLeasedKeys : public CoreMembership {
 protected:
  static Hello Present(int process, const std::string& key, std::string value = "here") {
    Hello hello = HelloOf(process, Role::kControl);
    hello.leased_key = key;
    hello.leased_value = std::move(value);
    return hello;
  }
  bool There(const std::string& key) {
    if (reader_ == 0) reader_ = OpenRequest(50);
    return Ask(reader_, CheckOp{{key}}).flag;
  }
  void Exit(int process) {
    std::optional<std::uint64_t> watch;
    for (const Effects::WatchProcess& one : watched_) {
      if (one.process.pid == 100 + process) watch = one.watch;
    }
    ASSERT_TRUE(watch) << "process " << process << " is not watched";
    Effects effects;
    core_->OnProcessExit(*watch, now_, effects);
    Collect(std::move(effects));
  }
  ConnectionId reader_ = 0;
};

TEST_F(CoreLeasedKeys, Key_IsThereWhileItsSessionBeats) {
  const ConnectionId agent = Open(Present(1, "agent/1", "host a"));
  EXPECT_TRUE(There("agent/1"));
  EXPECT_EQ(Ask(reader_, GetOp{"agent/1"}).value, "host a");
  EXPECT_EQ(core_->LiveMembers(), 1u);
  Advance(60 * kSecond, {agent});
  EXPECT_TRUE(There("agent/1"));
  Close(agent);  // The lease decides, not the connection.
  Advance(4 * kSecond);
  EXPECT_TRUE(There("agent/1"));
  Advance(2 * kSecond);
  EXPECT_FALSE(There("agent/1"));
  EXPECT_EQ(core_->LiveMembers(), 0u);
}

TEST_F(CoreLeasedKeys, WhoWasOnlySilent_HasItAgainOnceHeard) {
  const ConnectionId agent = Open(Present(1, "agent/1"));
  Advance(6 * kSecond);
  ASSERT_FALSE(There("agent/1"));
  EXPECT_TRUE(Closed(agent));  // So that it connects again.
  Send(agent, HeartbeatOp{1}, 0);
  EXPECT_FALSE(There("agent/1"));
  Open(Present(1, "agent/1"));
  EXPECT_TRUE(There("agent/1"));
  Advance(6 * kSecond);
  EXPECT_FALSE(There("agent/1"));
}

TEST_F(CoreLeasedKeys, EndOfTheProcess_TakesTheKeyAtOnceAndForGood) {
  const ConnectionId agent = Open(Present(1, "agent/1"));
  ASSERT_TRUE(There("agent/1"));
  Exit(1);
  EXPECT_FALSE(There("agent/1"));
  Send(agent, HeartbeatOp{1}, 0);  // Was under way.
  EXPECT_FALSE(There("agent/1"));
}

TEST_F(CoreLeasedKeys, Goodbye_TakesTheKeyAndMayBeTheLast) {
  const ConnectionId one = Open(Present(1, "agent/1"));
  const ConnectionId two = Open(Present(2, "agent/2"));
  Send(one, LeaveOp{});
  EXPECT_FALSE(There("agent/1"));
  EXPECT_TRUE(There("agent/2"));
  EXPECT_FALSE(last_member_left_);
  Send(one, HeartbeatOp{1}, 0);
  EXPECT_FALSE(There("agent/1"));
  Send(two, LeaveOp{});
  EXPECT_FALSE(There("agent/2"));
  EXPECT_TRUE(last_member_left_);
}

TEST_F(CoreLeasedKeys, RanksThatLeave_DoNotEndTheStoreOfWhoIsPresent) {
  Open(Present(9, "agent/9"));
  for (const ConnectionId rank : Run(2)) Send(rank, LeaveOp{});
  EXPECT_FALSE(last_member_left_);
  EXPECT_TRUE(There("agent/9"));
}

TEST_F(CoreLeasedKeys, TwoHoldersOfOneKey_ItStaysUntilBothAreGone) {
  Open(Present(1, "agent", "one"));
  Open(Present(2, "agent", "two"));
  Exit(1);
  EXPECT_TRUE(There("agent"));
  EXPECT_EQ(Ask(reader_, GetOp{"agent"}).value, "two");
  Exit(2);
  EXPECT_FALSE(There("agent"));
}

TEST_F(CoreLeasedKeys, WaitsAndWatches_SeeThemComeAndGo) {
  const ConnectionId reader = OpenRequest(50);
  ASSERT_TRUE(Ask(reader, SetOp{"other", "x"}).status.ok());
  Send(reader, WaitOp{{"agent/1"}}, 1000);
  Open(Present(1, "agent/1"));
  EXPECT_TRUE(TakeReply(reader, 1000));
  const Reply page = Ask(reader, WatchOp{"agent/", 0, false});
  Send(reader, WatchOp{"agent/", page.revision + 1, true}, 1001);
  EXPECT_FALSE(TakeReply(reader, 1001));
  Exit(1);
  const std::optional<Reply> told = TakeReply(reader, 1001);
  ASSERT_TRUE(told);
  ASSERT_EQ(told->events.size(), 1u);
  EXPECT_EQ(told->events[0].key, "agent/1");
  EXPECT_FALSE(told->events[0].value);
}

TEST_F(CoreLeasedKeys, NewLifeOfTheJob_KeepsThem) {
  Open(Present(9, "agent/9"));
  for (const ConnectionId rank : Run(2)) Send(rank, LeaveOp{});
  ASSERT_TRUE(There("agent/9"));
  ASSERT_TRUE(Ask(reader_, SetOp{"left over", "x"}).status.ok());
  const ConnectionId again = Open(HelloOf(3, Role::kControl));
  Send(again, JoinOp{JoinOf(0, 1)});
  ASSERT_TRUE(Take<View>(again));
  EXPECT_FALSE(There("left over"));
  EXPECT_TRUE(There("agent/9"));
}

TEST_F(CoreLeasedKeys, RestartedServer_GivesAFullLease) {
  Open(Present(1, "agent/1"));
  Open(Present(2, "agent/2"));
  Exit(2);
  Advance(4 * kSecond);
  Recover();
  reader_ = 0;
  EXPECT_EQ(watched_.size(), 1u);
  EXPECT_TRUE(There("agent/1"));
  EXPECT_FALSE(There("agent/2"));
  Advance(4 * kSecond);
  EXPECT_TRUE(There("agent/1"));
  Advance(2 * kSecond);
  EXPECT_FALSE(There("agent/1"));
}

TEST_F(CoreLeasedKeys, RequestLineThatCameFirst_HoldsNothing) {
  Hello hello = Present(1, "agent/1");
  hello.role = Role::kRequest;
  Open(hello);
  EXPECT_FALSE(There("agent/1"));
  reader_ = 0;
  Recover();
  Open(Present(1, "agent/1"));
  EXPECT_TRUE(There("agent/1"));
}

TEST_F(CoreLeasedKeys, DeletedByAnother_TheLeaseGoesOnOverARestart) {
  const ConnectionId agent = Open(Present(1, "agent/1"));
  ASSERT_TRUE(There("agent/1"));
  EXPECT_TRUE(Ask(reader_, DeleteOp{"agent/1"}).flag);
  Advance(kSecond, {agent});
  Recover();
  EXPECT_EQ(core_->LiveMembers(), 1u);
  reader_ = 0;
  EXPECT_FALSE(There("agent/1"));
}

TEST_F(CoreLeasedKeys, KeyBeyondTheLimit_IsNotThereAndTheSessionLivesOn) {
  const ConnectionId agent = Open(Present(1, std::string(kKeyBytesMax + 1, 'k')));
  EXPECT_EQ(core_->LiveMembers(), 0u);
  Send(agent, HeartbeatOp{7}, 0);
  EXPECT_TRUE(Take<HeartbeatAckEvent>(agent));
}

}  // namespace
}  // namespace resilient::store
