// Goal: a rank that holds its presence key is alive, not missing, for as long as it holds it, and
// what became of it is told. Method: the server core by hand, in virtual time; in each step the
// rows are compared and a second store is made of them (fixture).
#include <gmock/gmock.h>
#include <resilient/ladder.h>

#include "store/core/presence_key.h"
#include "tests/unit/store/core_membership_fixture.h"

namespace resilient::store {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

class CorePresence : public CoreMembership {
 protected:
  // The line of `process`, which is that rank and has not called init.
  ConnectionId Announce(int process, const PresenceName& name) {
    Hello hello = HelloOf(process, Role::kControl, "presence" + std::to_string(process));
    hello.leased_key = PresenceKey(name);
    hello.leased_value = "here";
    return Open(hello);
  }
  ConnectionId JoinAs(int rank, int size, Duration timeout = 10 * kSecond) {
    const ConnectionId control = OpenControl(rank);
    JoinRequest join = JoinOf(rank, size);
    join.join_timeout = timeout;
    Send(control, JoinOp{join});
    return control;
  }
  // What a rank that waits in its init is told about the others.
  std::vector<LateRank> Late(ConnectionId control) {
    WaitingReport report;
    report.tell = true;
    Send(control, WaitingOp{report}, 0);
    const auto late = Take<LateEvent>(control);
    return late ? late->notice.ranks : std::vector<LateRank>();
  }
  void Exit(int process) {
    for (const Effects::WatchProcess& one : std::vector(watched_)) {
      if (one.process.pid != 100 + process) continue;
      Effects effects;
      core_->OnProcessExit(one.watch, now_, effects);
      Collect(std::move(effects));
    }
  }
  std::string Refusal(ConnectionId control) {
    const auto refused = Take<JoinRefusedEvent>(control);
    if (!refused) return "not refused";
    EXPECT_EQ(refused->why.code(), StatusCode::kJoinTimeout);
    return refused->why.message();
  }
};

TEST(PresenceKeyTest, NamesRanksOfWorldsAndNothingElse) {
  EXPECT_EQ(PresenceKey({4, 3}), "resilient/presence/4/3");
  const auto name = ParsePresenceKey("resilient/presence/4/3");
  ASSERT_TRUE(name);
  EXPECT_EQ(name->world_size, 4);
  EXPECT_EQ(name->rank, 3);
  for (const char* key :
       {"agent/1", "resilient/presence/4/4", "resilient/presence/4/-1", "resilient/presence/-4/-5",
        "resilient/presence/4", "resilient/presence/4/", "resilient/presence//3",
        "resilient/presence/4/3/", "resilient/presence/4/3x", "resilient/presence/x/3",
        "resilient/presence/131073/3", "resilient/presence/99999999999/3", "4/3"}) {
    EXPECT_FALSE(ParsePresenceKey(key)) << key;
  }
}

TEST_F(CorePresence, ARankThatHoldsItsKey_IsWaitedForBeyondTheTimeoutAndNamed) {
  const ConnectionId late = Announce(5, {2, 0});
  const ConnectionId control = JoinAs(1, 2);
  Advance(60 * kSecond, {control, late});
  EXPECT_EQ(Refusal(control), "not refused");
  const std::vector<LateRank> told = Late(control);
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(told[0].text, "rank 0: alive on host h5 (pid 105), not yet in its init");
  Send(OpenControl(0), JoinOp{JoinOf(0, 2)});
  EXPECT_TRUE(Take<View>(control));
}

TEST_F(CorePresence, AKeyThatComesAfterTheFirstJoin_CountsToo) {
  const ConnectionId control = JoinAs(1, 2);
  Advance(9 * kSecond, {control});
  const ConnectionId late = Announce(5, {2, 0});
  Advance(60 * kSecond, {control, late});
  EXPECT_EQ(Refusal(control), "not refused");
}

TEST_F(CorePresence, ARankThatIsKilledBeforeItsInit_IsMissingAtOnceOrAtTheTimeout) {
  Announce(5, {2, 0});
  const ConnectionId control = JoinAs(1, 2);
  Advance(2 * kSecond, {control});
  Kill(5);
  EXPECT_EQ(Refusal(control), "not refused");
  Advance(7 * kSecond, {control});
  EXPECT_EQ(Refusal(control), "not refused");
  Advance(2 * kSecond, {control});
  EXPECT_THAT(Refusal(control),
              AllOf(HasSubstr("1 of 2 joined; missing ranks 0"),
                    HasSubstr("rank 0 (host h5, pid 105) was killed by signal 9 (SIGKILL) before "
                              "its init"),
                    Not(HasSubstr("nothing was ever heard"))));
  const ConnectionId again = Announce(6, {2, 0});
  const ConnectionId second = JoinAs(1, 2);
  Forget();  // The refusal of before, told again.
  Advance(30 * kSecond, {second, again});
  EXPECT_EQ(Refusal(second), "not refused");
  Exit(6);
  EXPECT_THAT(Refusal(second), HasSubstr("rank 0 (host h6, pid 106) has ended before its init"));
}

TEST_F(CorePresence, ARankThatIsSilent_IsMissingAfterOneLeaseAndBackOnceHeard) {
  const ConnectionId silent = Announce(5, {2, 0});
  const ConnectionId control = JoinAs(1, 2, 30 * kSecond);
  Close(silent);
  Advance(6 * kSecond, {control});
  EXPECT_THAT(Late(control)[0].text, HasSubstr("sent no heartbeat for 5."));
  const ConnectionId back = Announce(5, {2, 0});
  EXPECT_THAT(Late(control)[0].text, HasSubstr("alive on host h5"));
  Advance(60 * kSecond, {control, back});
  EXPECT_EQ(Refusal(control), "not refused");
}

TEST_F(CorePresence, WhoEndedBeforeTheFirstJoin_IsNamedWithHow) {
  Announce(5, {2, 0});
  Kill(5, 0, 7);
  const ConnectionId control = JoinAs(1, 2);
  Advance(11 * kSecond, {control});
  EXPECT_THAT(Refusal(control),
              HasSubstr("rank 0 (host h5, pid 105) exited with code 7 before its init"));
}

TEST_F(CorePresence, OneRankPresentAndOneNot_TheTimeoutCounts) {
  const ConnectionId late = Announce(5, {3, 0});
  const ConnectionId control = JoinAs(1, 3);
  Advance(11 * kSecond, {control, late});
  EXPECT_THAT(Refusal(control),
              AllOf(HasSubstr("1 of 3 joined; missing ranks 2; nothing was ever heard from them"),
                    HasSubstr("rank 0 lives on host h5 (pid 105) and has not come to its init")));
}

TEST_F(CorePresence, OfManyPresentRanks_TheFirstAreNamed) {
  std::vector<ConnectionId> beating;
  beating.reserve(100);
  for (int rank = 2; rank < 100; ++rank) beating.push_back(Announce(100 + rank, {100, rank}));
  const ConnectionId control = JoinAs(1, 100);
  beating.push_back(control);
  Advance(11 * kSecond, beating);
  const std::string why = Refusal(control);
  EXPECT_THAT(why, AllOf(HasSubstr("1 of 100 joined; missing ranks 0;"),
                         HasSubstr("rank 65 lives on host h165 (pid 265)"),
                         Not(HasSubstr("rank 66 lives")), HasSubstr("; so do 34 more")));
}

TEST_F(CorePresence, ARankOfAnotherSizeOrJob_IsNobodyHere) {
  const ConnectionId other = Announce(5, {3, 0});
  Hello hello = HelloOf(6, Role::kControl, "elsewhere");
  hello.job = "another";
  hello.leased_key = PresenceKey({2, 0});
  const ConnectionId elsewhere = Open(hello);
  const ConnectionId control = JoinAs(1, 2);
  Advance(11 * kSecond, {control, other, elsewhere});
  EXPECT_THAT(Refusal(control), HasSubstr("nothing was ever heard from them"));
}

TEST_F(CorePresence, OfTwoProcessesOfOneRank_TheLastKeepsItPresent) {
  const ConnectionId one = Announce(5, {2, 0});
  const ConnectionId two = Announce(6, {2, 0});
  const ConnectionId control = JoinAs(1, 2);
  EXPECT_THAT(Late(control)[0].text, HasSubstr("alive on host h6 (pid 106)"));
  Exit(6);
  EXPECT_THAT(Late(control)[0].text, HasSubstr("alive on host h5 (pid 105)"));
  Advance(20 * kSecond, {control, one, two});
  EXPECT_EQ(Refusal(control), "not refused");
}

// Its own lease takes over, and its goodbye is not its end.
TEST_F(CorePresence, WhoHasJoined_LetsItsKeyGoWithoutATrace) {
  const ConnectionId announced = Announce(5, {2, 0});
  Send(OpenControl(0), JoinOp{JoinOf(0, 2)});
  Send(announced, LeaveOp{});
  const ConnectionId control = JoinAs(1, 2);
  EXPECT_TRUE(Take<View>(control));
  EXPECT_FALSE(last_member_left_);
}

TEST_F(CorePresence, WhoJoinedAndWasLost_IsNamedAsLost) {
  Hello hello = HelloOf(0, Role::kControl, "presence0");
  hello.leased_key = PresenceKey({3, 0});
  Open(hello);
  JoinAs(0, 3);
  const ConnectionId control = JoinAs(1, 3);
  Exit(0);
  Advance(11 * kSecond, {control});
  EXPECT_THAT(Refusal(control), AllOf(HasSubstr("rank 0 (host h0, pid 100) is gone"),
                                      Not(HasSubstr("before its init"))));
}

TEST_F(CorePresence, NobodyInItsInit_NothingIsSaid) {
  const ConnectionId one = Announce(5, {2, 0});
  const ConnectionId two = Announce(6, {2, 1});
  Advance(60 * kSecond, {one, two});
  EXPECT_FALSE(Take<LateEvent>(one));
  EXPECT_EQ(core_->Gauges().worlds, 0u);
  EXPECT_EQ(core_->LiveMembers(), 2u);
}

TEST_F(CorePresence, ARestartedServer_WaitsForThemAsBefore) {
  const ConnectionId late = Announce(5, {2, 0});
  const ConnectionId control = JoinAs(1, 2);
  Advance(20 * kSecond, {control, late});
  Recover();
  const ConnectionId back = Announce(5, {2, 0});
  const ConnectionId again = OpenControl(1);
  Advance(60 * kSecond, {again, back});
  EXPECT_EQ(Refusal(again), "not refused");
  EXPECT_EQ(Late(again)[0].text, "rank 0: alive on host h5 (pid 105), not yet in its init");
  Exit(5);
  EXPECT_THAT(Refusal(again), HasSubstr("missing ranks 0"));
}

// ---- Seen on their host alone ----

class CoreSeenOnHost : public CorePresence {
 protected:
  // Rank 1 says each second what it sees.
  void Tell(ConnectionId control, const WaitingReport& report, Duration duration) {
    for (Duration told{}; told < duration; told += kSecond) {
      Send(control, WaitingOp{report}, 0);
      Advance(kSecond, {control});
    }
  }

  const WaitingReport verified_{.present = {0}};
  const WaitingReport unverified_{.unverified = {0}};
};

TEST_F(CoreSeenOnHost, OneThatIsVerified_IsWaitedForWithoutLimit) {
  const ConnectionId control = JoinAs(1, 2);
  Tell(control, verified_, 60 * kSecond);
  EXPECT_EQ(Refusal(control), "not refused");
}

TEST_F(CoreSeenOnHost, OneThatIsNot_IsWaitedForTwiceTheTimeout) {
  const ConnectionId control = JoinAs(1, 2);
  Tell(control, unverified_, 19 * kSecond);
  EXPECT_EQ(Refusal(control), "not refused");
  EXPECT_EQ(Late(control)[0].text, "rank 0: alive on host h1, not yet in its init");
  Tell(control, unverified_, 2 * kSecond);
  EXPECT_THAT(
      Refusal(control),
      AllOf(HasSubstr("1 of 2 joined; missing ranks 0; a process on host h1 has the name of "
                      "rank 0 and was waited for no longer than twice the timeout"),
            Not(HasSubstr("nothing was ever heard"))));
}

TEST_F(CoreSeenOnHost, OneThatIsNotAndIsSeenNoMore_IsMissingAtOnce) {
  const ConnectionId control = JoinAs(1, 2);
  Tell(control, unverified_, 12 * kSecond);
  Tell(control, {}, 7 * kSecond);
  EXPECT_THAT(Refusal(control), HasSubstr("nothing was ever heard from them"));
}

TEST_F(CoreSeenOnHost, OneThatIsVerifiedLater_IsWaitedForWithoutLimit) {
  const ConnectionId control = JoinAs(1, 2);
  Tell(control, unverified_, 19 * kSecond);
  Tell(control, verified_, 60 * kSecond);
  EXPECT_EQ(Refusal(control), "not refused");
  Tell(control, unverified_, 7 * kSecond);
  EXPECT_THAT(Refusal(control), HasSubstr("missing ranks 0"));
}

TEST_F(CoreSeenOnHost, OneThatHoldsItsKeyToo_IsWaitedForWithoutLimit) {
  const ConnectionId control = JoinAs(1, 2);
  Tell(control, unverified_, kSecond);
  const ConnectionId late = Announce(5, {2, 0});
  Advance(60 * kSecond, {control, late});
  EXPECT_EQ(Refusal(control), "not refused");
}

TEST_F(CoreSeenOnHost, RanksThatDoNotExist_AreNobody) {
  const ConnectionId control = JoinAs(1, 2);
  Tell(control, {.present = {-1, 2}, .unverified = {-7, 2, 1 << 30}}, 11 * kSecond);
  EXPECT_THAT(Refusal(control), HasSubstr("nothing was ever heard from them"));
}

// Of four ranks, whose seats may be empty for `wait`, rank 1 is lost; the process that is to take
// its place has been started, and comes late.
class CoreLastCall : public CorePresence {
 protected:
  static constexpr Duration kWait = 10 * kSecond;

  void Lose(Duration wait, int min_world) {
    all_ = Run(4, wait);
    Kill(1);
    for (const int rank : {0, 2, 3}) {
      JoinRequest again = JoinOf(rank, 4, wait);
      again.generation = 1;
      again.min_world = min_world;
      Send(all_[At(rank)], JoinOp{again});
    }
    left_ = {all_[0], all_[2], all_[3]};
  }
  void Pass(Duration duration) { Advance(duration, left_); }
  void PassWith(ConnectionId joiner, Duration duration) {
    std::vector<ConnectionId> beating = left_;
    beating.push_back(joiner);
    Advance(duration, beating);
  }
  std::size_t ViewAt(ConnectionId control) {
    const std::optional<View> view = Take<View>(control);
    return view ? view->members.size() : 0;
  }

  std::vector<ConnectionId> all_;
  std::vector<ConnectionId> left_;
};

TEST_F(CoreLastCall, AJoinerOnItsWayWhenTheSeatsTimeIsOver_StillComes) {
  Lose(kWait, 2);
  Pass(kWait - kSecond);
  const ConnectionId joiner = Announce(7, {4, 1});
  PassWith(joiner, kWait / 2);
  EXPECT_EQ(ViewAt(left_[0]), 0U);
  Send(OpenControl(7), JoinOp{JoinOf(1, 4, kWait)});
  EXPECT_EQ(ViewAt(left_[0]), 4U);
}

TEST_F(CoreLastCall, AJoinerThatLivesAndDoesNotCome_HoldsTheOthersNoLonger) {
  Lose(kWait, 2);
  const ConnectionId joiner = Announce(7, {4, 1});
  PassWith(joiner, 2 * kWait - kSecond);
  EXPECT_EQ(ViewAt(left_[0]), 0U);
  PassWith(joiner, 2 * kSecond);
  EXPECT_EQ(ViewAt(left_[0]), 3U);
}

TEST_F(CoreLastCall, ALongWait_IsMadeLongerByNoMoreThanTheMost) {
  constexpr Duration kLong = 10 * kLastCallMax;
  Lose(kLong, 2);
  const ConnectionId joiner = Announce(7, {4, 1});
  PassWith(joiner, kLong + kLastCallMax - kSecond);
  EXPECT_EQ(ViewAt(left_[0]), 0U);
  PassWith(joiner, 2 * kSecond);
  EXPECT_EQ(ViewAt(left_[0]), 3U);
}

TEST_F(CoreLastCall, AJoinerThatEndsOnItsWay_IsWaitedForNoMore) {
  Lose(kWait, 2);
  const ConnectionId joiner = Announce(7, {4, 1});
  PassWith(joiner, kWait + kSecond);
  EXPECT_EQ(ViewAt(left_[0]), 0U);
  Exit(7);
  EXPECT_EQ(ViewAt(left_[0]), 3U);
}

TEST_F(CoreLastCall, WhereNobodyMayBeWaitedFor_ThereIsNone) {
  const ConnectionId joiner = Announce(7, {4, 1});
  Lose(Duration::zero(), 2);
  EXPECT_EQ(ViewAt(left_[0]), 3U);
  EXPECT_FALSE(Closed(joiner));
}

TEST_F(CoreLastCall, OfAWorldThatGoesOnWithAllOrNone_ComesBeforeItsRefusal) {
  Lose(kWait, 0);
  const ConnectionId joiner = Announce(7, {4, 1});
  PassWith(joiner, kWait + kSecond);
  EXPECT_FALSE(Take<JoinRefusedEvent>(left_[0]));
  Exit(7);
  EXPECT_TRUE(Take<JoinRefusedEvent>(left_[0]));
}

}  // namespace
}  // namespace resilient::store
