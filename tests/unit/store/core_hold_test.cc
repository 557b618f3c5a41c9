// Goal: the silence of a held member is no sign of death while the hold lasts, and its death is
// one all the same. Method: CoreFixture; the clock moves in ticks.
#include <gmock/gmock.h>

#include "tests/unit/store/core_fixture.h"

namespace resilient::store {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

class Holds : public CoreFixture {
 protected:
  Reply Hold(HoldOp op) { return Ask(Admin(), std::move(op)); }
  Reply Release(ReleaseOp op) { return Ask(Admin(), std::move(op)); }
  ConnectionId Admin() {
    if (admin_ == 0) admin_ = Open(HelloOf(99, Role::kAdmin));
    return admin_;
  }

  ConnectionId admin_ = 0;
};

TEST_F(Holds, HeldMember_IsNotLostForSilence) {
  const std::vector<ConnectionId> control = Run(3, kWait);
  const Reply held = Hold({1, "", 20000, "a debugger"});
  ASSERT_TRUE(held.status.ok()) << held.status.ToString();
  EXPECT_EQ(held.number, 1);
  const auto told = Take<HeldEvent>(control[0]);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->rank, 1);
  EXPECT_EQ(told->host, "h1");
  EXPECT_TRUE(told->held);
  EXPECT_EQ(told->for_ms, 20000u);
  EXPECT_EQ(told->reason, "a debugger");
  EXPECT_THAT(core_->StatusJson(now_), HasSubstr("\"held\":true"));
  Advance(Millis(19900), {control[0], control[2]});
  EXPECT_FALSE(Take<Fence>(control[0]));
  // The cap, and then a full lease.
  Advance(Millis(5000), {control[0], control[2]});
  EXPECT_FALSE(Take<Fence>(control[0]));
  EXPECT_FALSE(Take<HeldEvent>(control[0])->held);
  EXPECT_THAT(core_->StatusJson(now_), Not(HasSubstr("\"held\":true")));
  Advance(Millis(400), {control[0], control[2]});
  EXPECT_TRUE(Take<Fence>(control[0]));
}

TEST_F(Holds, Release_GivesAFullLease) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  EXPECT_EQ(Hold({1, "", 0, ""}).number, 1);
  Advance(seconds(600), {control[0]});
  EXPECT_EQ(Release({}).number, 1);
  Advance(Millis(4900), {control[0]});
  EXPECT_FALSE(Take<Fence>(control[0]));
  Advance(Millis(300), {control[0]});
  EXPECT_TRUE(Take<Fence>(control[0]));
}

TEST_F(Holds, HeldMemberThatLostItsConnection_IsWaitedFor) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Hold({1, "", 60000, ""});
  Close(control[1]);
  Advance(seconds(30), {control[0]});
  EXPECT_FALSE(Take<Fence>(control[0]));
  const ConnectionId again = OpenControl(1);
  EXPECT_EQ(Release({1, ""}).number, 1);
  Advance(seconds(10), {control[0], again});
  EXPECT_FALSE(Take<Fence>(control[0]));
}

TEST_F(Holds, HeldMemberThatIsDead_IsLostAtOnce) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Hold({-1, "", 60000, ""});
  ExitReportOp report;
  report.process = HelloOf(1, Role::kControl).process;
  report.signal = 9;
  Ask(Admin(), report);
  const auto fence = Take<Fence>(control[0]);
  ASSERT_TRUE(fence);
  EXPECT_THAT(fence->cause.message(), HasSubstr("was killed by signal 9"));
  EXPECT_EQ(core_->LiveMembers(), 1u);
  EXPECT_EQ(Release({1, ""}).status.code(), StatusCode::kNotFound);
}

TEST_F(Holds, Everybody_IsToldHowLongAnyoneIsHeld) {
  const std::vector<ConnectionId> control = Run(3, kWait);
  Hold({1, "", 20000, ""});
  EXPECT_EQ(Take<HeldEvent>(control[0])->job_for_ms, 20000u);
  Hold({2, "", 5000, ""});
  EXPECT_EQ(Take<HeldEvent>(control[0])->job_for_ms, 20000u);
  Release({1, ""});
  EXPECT_EQ(Take<HeldEvent>(control[0])->job_for_ms, 5000u);
  Release({});
  EXPECT_EQ(Take<HeldEvent>(control[0])->job_for_ms, 0u);
}

TEST_F(Holds, HeldMemberThatIsLostOrLeaves_IsHeldNoMore) {
  const std::vector<ConnectionId> control = Run(4, kWait);
  Hold({1, "", 60000, ""});
  EXPECT_EQ(Take<HeldEvent>(control[0])->job_for_ms, 60000u);
  Send(control[1], LeaveOp{});
  EXPECT_EQ(Take<HeldEvent>(control[0])->job_for_ms, 0u);
  Hold({2, "", 60000, ""});
  EXPECT_EQ(Take<HeldEvent>(control[0])->job_for_ms, 60000u);
  ExitReportOp report;
  report.process = HelloOf(2, Role::kControl).process;
  report.signal = 9;
  Ask(Admin(), report);
  EXPECT_EQ(Take<HeldEvent>(control[0])->job_for_ms, 0u);
}

TEST_F(Holds, WhoWasNotThere_IsToldWhenItComes) {
  const std::vector<ConnectionId> control = Run(3, kWait);
  Hold({1, "", 60000, "gdb"});
  Close(control[0]);
  Advance(seconds(1), {control[2]});
  const ConnectionId again = Open(HelloOf(0, Role::kControl));
  const auto held = Take<HeldEvent>(again);
  ASSERT_TRUE(held);
  EXPECT_TRUE(held->held);
  EXPECT_EQ(held->rank, 1);
  EXPECT_EQ(held->reason, "gdb");
  EXPECT_EQ(held->job_for_ms, 59000u);

  const ConnectionId newcomer = Open(HelloOf(0, Role::kControl, "another world"));
  Send(newcomer, JoinOp{JoinOf(0, 1, kWait)});
  EXPECT_EQ(Take<HeldEvent>(newcomer)->job_for_ms, 59000u);
}

TEST_F(Holds, AHost_AndAllItsSessionsAreHeld) {
  const std::vector<ConnectionId> control = Run(3, kWait);
  // A second session of the process of rank 1, in another world.
  const ConnectionId second = Open(HelloOf(1, Role::kControl, "second"));
  Send(second, JoinOp{JoinOf(0, 1, kWait)});
  EXPECT_EQ(Hold({-1, "h1", 60000, ""}).number, 2);
  EXPECT_EQ(Take<HeldEvent>(control[0])->rank, -1);
  Advance(seconds(30), {control[0], control[2]});
  EXPECT_FALSE(Take<Fence>(control[0]));
  EXPECT_EQ(core_->LiveMembers(), 4u);
}

TEST_F(Holds, RefusesWhatIsNotThere) {
  Run(1, kWait);
  EXPECT_EQ(Hold({5, "", 1000, ""}).status.code(), StatusCode::kNotFound);
  EXPECT_EQ(Hold({-1, "nowhere", 1000, ""}).status.code(), StatusCode::kNotFound);
  EXPECT_EQ(Ask(OpenRequest(3), HoldOp{}).status.code(), StatusCode::kInvalidArgument);
  Hello other = HelloOf(98, Role::kAdmin);
  other.job = "another";
  EXPECT_EQ(Ask(Open(other), HoldOp{}).status.code(), StatusCode::kNotFound);
}

TEST_F(Holds, LongerThanAllowed_IsCut) {
  const std::vector<ConnectionId> control = Run(1, kWait);
  Hold({0, "", 1000ull * 3600 * 48, ""});
  EXPECT_EQ(Take<HeldEvent>(control[0])->for_ms, static_cast<std::uint64_t>(kHoldMax / Millis(1)));
}

TEST_F(Holds, AHold_SurvivesTheServer) {
  Run(2, kWait);
  Hold({1, "", 20000, "moved"});
  Recover();
  const ConnectionId zero = OpenControl(0);
  Advance(seconds(19), {zero});
  EXPECT_FALSE(Take<Fence>(zero));
  EXPECT_THAT(core_->StatusJson(now_), HasSubstr("\"held_because\":\"moved\""));
  Advance(seconds(8), {zero});
  EXPECT_TRUE(Take<Fence>(zero));
}

TEST_F(Holds, Drain_TellsTheClientsAndEndsAStoreThatKeeps) {
  const std::vector<ConnectionId> control = Run(2, kWait);
  Effects effects;
  core_->OnRequest(Admin(), Request{.seq = 50, .op = DrainOp{}}, now_, effects);
  EXPECT_TRUE(effects.drain);
  Collect(std::move(effects));
  EXPECT_THAT(Take<DrainingEvent>(control[1])->reason, HasSubstr("pid 199 on host h99"));
  CoreOptions forgetful = Options();
  forgetful.durable = false;
  Restart(forgetful);
  admin_ = 0;
  EXPECT_EQ(Ask(Admin(), DrainOp{}).status.code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Ask(Admin(), DrainOp{true}).status.ok());
}

}  // namespace
}  // namespace resilient::store
