// Goal: of ranks that wait, the late one is named with where it is, a circle ends in DEADLOCK on
// all, a rank that stands still in STALLED; and nothing of it happens to ranks that go on, or whose
// network is silent.
// Method: CoreFixture; members tell what they wait for once a second of virtual time, and answer
// how far they have come: to what they wait in, and in other groups to what the test has noted.
#include <gmock/gmock.h>

#include <set>

#include "tests/unit/store/core_fixture.h"

namespace resilient::store {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class Waits : public CoreFixture {
 protected:
  static WaitingCall In(std::string group, std::uint64_t seq, std::vector<int> missing) {
    WaitingCall call;
    call.group = std::move(group);
    call.operation.seq = seq;
    call.operation.what = "all_reduce(float32[4], sum)";
    call.operation.call_site = "train.py:7 step";
    call.operation.age = seconds(1);
    call.operation.missing = std::move(missing);
    call.blocked = true;
    return call;
  }
  WaitingReport Blocked(WaitingCall call) const {
    WaitingReport report;
    report.generation = generation_;
    report.calls.push_back(std::move(call));
    report.blocked = true;
    report.stall = stall_;
    return report;
  }

  std::vector<ConnectionId> RunWorld(int n) {
    std::vector<ConnectionId> control;
    for (int i = 0; i < n; ++i) control.push_back(OpenControl(i));
    for (int i = 0; i < n; ++i) Send(control[At(i)], JoinOp{JoinOf(i, n, seconds(60))});
    generation_ = BecomeReady(control);
    return control;
  }

  // For so long, each second, the members tell what they wait for.
  void Wait(Duration duration, const std::vector<ConnectionId>& control,
            std::map<int, WaitingReport> told) {
    const Instant end = now_ + duration;
    while (now_ < end) {
      for (auto& [rank, report] : told) {
        Send(control[At(rank)], WaitingOp{report}, 0);
        for (WaitingCall& call : report.calls) call.operation.age += seconds(1);
      }
      const Instant next = now_ + std::min<Duration>(seconds(1), end - now_);
      while (now_ < next) {
        Answer(control);
        AnswerProgress(control, told);
        Advance(std::min<Duration>(Millis(100), next - now_), control);
      }
      Answer(control);
      AnswerProgress(control, told);
    }
  }
  // A rank that is asked how far it has come says so, beside what it waits for at present.
  void AnswerProgress(const std::vector<ConnectionId>& control,
                      const std::map<int, WaitingReport>& told) {
    for (std::size_t i = 0; i < control.size(); ++i) {
      const int rank = static_cast<int>(i);
      while (const auto ask = Take<AskProgressEvent>(control[i])) {
        ++asked_progress_[rank];
        if (silent_.contains(rank)) continue;
        WaitingReport answer;
        if (const auto own = told.find(rank); own != told.end()) answer = own->second;
        answer.generation = ask->generation;
        answer.tell = false;
        if (const auto made = made_.find(rank); made != made_.end()) answer.made = made->second;
        for (const std::string& group : ask->groups) {
          GroupProgress progress = ProgressOf(rank, group, answer);
          if (progress.device && device_moved_) progress.device->still = now_ - *device_moved_;
          answer.progress.push_back(std::move(progress));
        }
        Send(control[i], WaitingOp{answer}, 0);
      }
    }
  }
  GroupProgress ProgressOf(int rank, const std::string& group, const WaitingReport& own) const {
    if (const auto noted = progress_.find({rank, group}); noted != progress_.end())
      return noted->second;
    GroupProgress progress;
    progress.group = group;
    for (const WaitingCall& call : own.calls) {
      if (call.group == group && !call.operation.point_to_point)
        progress.entered = std::max(progress.entered, call.operation.seq);
    }
    return progress;
  }
  void NoteProgress(int rank, GroupProgress progress) {
    progress_[{rank, progress.group}] = std::move(progress);
  }
  static WaitingCall Message(std::string group, std::uint64_t seq, int peer, bool sends) {
    WaitingCall call = In(std::move(group), seq, {peer});
    call.operation.what = sends ? "send(float32[4])" : "recv(float32[4])";
    call.operation.point_to_point = true;
    call.operation.sends = sends;
    return call;
  }
  // Whoever is asked where it is says so.
  void Answer(const std::vector<ConnectionId>& control) {
    for (std::size_t i = 0; i < control.size(); ++i) {
      while (const auto where = Take<WhereEvent>(control[i])) {
        ++asked_[static_cast<int>(i)];
        if (mute_) continue;
        Whereabouts answer = whereabouts_;
        if (stands_still_) answer.no_progress = now_ - begun_;
        Send(control[i], WhereaboutsOp{where->ask, answer}, 0);
      }
    }
  }

  std::uint64_t generation_ = 0;
  Duration stall_ = std::chrono::hours(1);
  Whereabouts whereabouts_{.at = "prep.py:12 cache"};
  bool stands_still_ = false;
  bool mute_ = false;
  const Instant begun_ = now_;
  std::map<int, int> asked_;
  std::map<int, int> asked_progress_;
  std::optional<Instant> device_moved_;  // Of the devices in progress_.
  std::set<int> silent_;                 // Ranks that do not say how far they have come.
  std::map<std::pair<int, std::string>, GroupProgress> progress_;
  std::map<int, std::vector<GroupMade>> made_;  // What ranks say that they have made, when asked.
};

TEST_F(Waits, TwoGroupsInOppositeOrder_EndInDeadlockOnAll) {
  const auto control = RunWorld(3);
  Wait(Millis(2000), control, {{0, Blocked(In("a", 3, {1}))}, {1, Blocked(In("b", 5, {0}))}});
  for (const ConnectionId connection : control) {
    const auto fence = Take<Fence>(connection);
    ASSERT_TRUE(fence);
    EXPECT_EQ(fence->cause.code(), StatusCode::kDeadlock);
    EXPECT_THAT(fence->cause.message(),
                AllOf(HasSubstr("rank 0 (host h0, pid 100) in all_reduce(float32[4], sum) at "
                                "train.py:7 step (#3 of group 'a') waits for rank 1"),
                      HasSubstr("(#5 of group 'b') waits for rank 0"), HasSubstr("same order")));
  }
}

// Each believes that the other one is late, and both are in the same operation: the link between
// them is silent.
TEST_F(Waits, RanksInOneOperation_AreInNoCircle_AndHearThatAllHaveEntered) {
  const auto control = RunWorld(3);
  std::map<int, WaitingReport> told{{0, Blocked(In("world", 7, {1}))},
                                    {1, Blocked(In("world", 7, {0, 2}))},
                                    {2, Blocked(In("world", 7, {1}))}};
  for (auto& [rank, report] : told) report.calls[0].operation.needs_all = true;
  Wait(seconds(60), control, told);
  for (std::size_t i = 0; i < control.size(); ++i) {
    EXPECT_FALSE(Take<Fence>(control[i]));
    const auto entered = Take<AllEnteredEvent>(control[i]);
    ASSERT_TRUE(entered) << i;
    EXPECT_EQ(entered->generation, generation_);
    ASSERT_THAT(entered->calls, SizeIs(1));
    EXPECT_EQ(entered->calls[0].group, "world");
    EXPECT_EQ(entered->calls[0].seq, 7u);
    int again = 0;
    while (Take<AllEnteredEvent>(control[i])) ++again;
    EXPECT_LE(again, 60 / 5);
  }
}

// Rank 0 has ended the broadcast that rank 1 has heard nothing of yet.
TEST_F(Waits, ARankThatHasEndedTheOperation_IsInNoCircle) {
  const auto control = RunWorld(2);
  NoteProgress(0, {.group = "a", .entered = 3, .peers = {}});
  Wait(seconds(30), control, {{0, Blocked(In("b", 1, {1}))}, {1, Blocked(In("a", 3, {0}))}});
  EXPECT_FALSE(Take<Fence>(control[0]));
  EXPECT_TRUE(Take<AllEnteredEvent>(control[1]));
}

TEST_F(Waits, ARankThatDoesNotSayHowFarItIs_IsInNoCircle) {
  const auto control = RunWorld(2);
  silent_ = {1};
  const std::map<int, WaitingReport> told{{0, Blocked(In("a", 3, {1}))},
                                          {1, Blocked(In("b", 5, {0}))}};
  Wait(seconds(30), control, told);
  EXPECT_FALSE(Take<Fence>(control[0]));
  EXPECT_GT(asked_progress_[1], 10);
  silent_.clear();
  Wait(seconds(3), control, told);
  EXPECT_TRUE(Take<Fence>(control[0]));
}

// The account that was given first is out of date when the circle is to be confirmed.
TEST_F(Waits, AnAccountFromBeforeTheCircle_ProvesNothing) {
  const auto control = RunWorld(2);
  const std::map<int, WaitingReport> told{{0, Blocked(In("a", 3, {1}))},
                                          {1, Blocked(In("b", 5, {0}))}};
  Wait(Millis(500), control, told);  // Both have given one.
  ASSERT_EQ(asked_progress_[1], 1);
  silent_ = {0, 1};
  Wait(seconds(20), control, told);
  EXPECT_FALSE(Take<Fence>(control[0]));
}

// Rank 2 is what both others wait for, rank 0 by way of rank 1, with which it is in one operation.
TEST_F(Waits, ACircleByWayOfARankInTheSameOperation_IsFound) {
  const auto control = RunWorld(3);
  WaitingCall first = In("world", 7, {1});
  first.operation.needs_all = true;
  WaitingCall second = In("world", 7, {2});
  second.operation.needs_all = true;
  Wait(seconds(3), control,
       {{0, Blocked(first)}, {1, Blocked(second)}, {2, Blocked(In("pair", 1, {0}))}});
  const auto fence = Take<Fence>(control[0]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.code(), StatusCode::kDeadlock);
}

// Rank 0 waits for rank 3 by way of rank 2, with which it is in one operation. What it has not
// heard of itself is rank 1, which may come: no rank believes in a circle.
TEST_F(Waits, ACircleThatNoRankBelievesByItself_IsFound) {
  const auto control = RunWorld(4);
  WaitingCall first = In("world", 7, {1});
  first.operation.needs_all = true;
  WaitingCall second = In("world", 7, {3});
  second.operation.needs_all = true;
  Wait(seconds(3), control,
       {{0, Blocked(first)}, {2, Blocked(second)}, {3, Blocked(In("pair", 1, {0}))}});
  const auto fence = Take<Fence>(control[0]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.code(), StatusCode::kDeadlock);
  EXPECT_THAT(fence->cause.message(), HasSubstr("waits for rank 3"));
}

// A rank in the operation has entered it, whoever has not heard of it. Only rank 2 is late: ranks 0
// and 1 are in no circle that could be proved.
TEST_F(Waits, RanksInOneOperation_AreNotAskedForProofAgainstEachOther) {
  const auto control = RunWorld(3);
  std::map<int, WaitingReport> told{{0, Blocked(In("world", 7, {1, 2}))},
                                    {1, Blocked(In("world", 7, {0, 2}))}};
  for (auto& [rank, report] : told) report.calls[0].operation.needs_all = true;
  Wait(seconds(20), control, told);
  EXPECT_FALSE(Take<Fence>(control[0]));
  EXPECT_LE(asked_progress_[0], 20 / 10 + 1);
  EXPECT_LE(asked_progress_[1], 20 / 10 + 1);
}

// A broadcast ends on a rank that has heard of its root, whoever else is late.
TEST_F(Waits, NoCircleGoesByWayOfAnOperationThatCanEndAlone) {
  const auto control = RunWorld(3);
  Wait(seconds(20), control,
       {{0, Blocked(In("world", 7, {1}))},
        {1, Blocked(In("world", 7, {2}))},
        {2, Blocked(In("pair", 1, {0}))}});
  EXPECT_FALSE(Take<Fence>(control[0]));
}

TEST_F(Waits, TwoThatReceiveFromEachOther_AreACircle_UnlessAMessageIsOnItsWay) {
  const auto control = RunWorld(2);
  const std::map<int, WaitingReport> told{{0, Blocked(Message("world", 4, 1, false))},
                                          {1, Blocked(Message("world", 9, 0, false))}};
  // Of five messages that rank 1 has sent, rank 0 has seen four.
  NoteProgress(0, {.group = "world", .entered = 0, .peers = {{1, 2, 4, false}}});
  NoteProgress(1, {.group = "world", .entered = 0, .peers = {{0, 5, 2, false}}});
  Wait(seconds(20), control, told);
  EXPECT_FALSE(Take<Fence>(control[0]));
  const auto entered = Take<AllEnteredEvent>(control[0]);
  ASSERT_TRUE(entered);
  EXPECT_TRUE(entered->calls[0].point_to_point);
  NoteProgress(0, {.group = "world", .entered = 0, .peers = {{1, 2, 5, false}}});
  Wait(seconds(3), control, told);
  EXPECT_TRUE(Take<Fence>(control[0]));
}

TEST_F(Waits, TwoThatSendToEachOther_AreACircle_WhereBothHoldTheMessageBack) {
  const auto control = RunWorld(2);
  const std::map<int, WaitingReport> told{{0, Blocked(Message("world", 4, 1, true))},
                                          {1, Blocked(Message("world", 9, 0, true))}};
  NoteProgress(0, {.group = "world", .entered = 0, .peers = {{1, 1, 0, false}}});
  NoteProgress(1, {.group = "world", .entered = 0, .peers = {{0, 1, 1, true}}});
  Wait(seconds(20), control, told);
  EXPECT_FALSE(Take<Fence>(control[0]));
  NoteProgress(0, {.group = "world", .entered = 0, .peers = {{1, 1, 1, true}}});
  Wait(seconds(3), control, told);
  EXPECT_TRUE(Take<Fence>(control[0]));
}

TEST_F(Waits, AGroupThatAPeerHasNotMade_IsAwaited) {
  const auto control = RunWorld(2);
  NoteProgress(1, {.group = "a", .exists = false, .entered = 0, .peers = {}});
  Wait(seconds(3), control,
       {{0, Blocked(Message("a", 1, 1, true))}, {1, Blocked(In("b", 5, {0}))}});
  EXPECT_TRUE(Take<Fence>(control[0]));
}

TEST_F(Waits, ACircleThatIsToldOnce_IsNone) {
  const auto control = RunWorld(2);
  Send(control[0], WaitingOp{Blocked(In("a", 3, {1}))}, 0);
  Send(control[1], WaitingOp{Blocked(In("b", 5, {0}))}, 0);
  Advance(seconds(10), control);
  EXPECT_FALSE(Take<Fence>(control[0]));
}

// Whoever waits for it is told by its goodbye.
TEST_F(Waits, ARankThatHasLeft_IsInNoCircle) {
  const auto control = RunWorld(3);
  const WaitingReport first = Blocked(In("a", 3, {1}));
  const WaitingReport second = Blocked(In("b", 5, {0}));
  Wait(seconds(1), control, {{0, first}, {1, second}});
  Send(control[0], WaitingOp{first}, 0);
  Send(control[1], WaitingOp{second}, 0);
  Send(control[1], LeaveOp{});
  Advance(seconds(1), {control[0], control[2]});
  EXPECT_FALSE(Take<Fence>(control[0]));
}

// The same groups, but each time other operations: they go on.
TEST_F(Waits, ACircleThatChanges_IsNone) {
  const auto control = RunWorld(2);
  for (std::uint64_t seq = 1; seq < 10; ++seq) {
    Wait(seconds(1), control, {{0, Blocked(In("a", seq, {1}))}, {1, Blocked(In("b", seq, {0}))}});
  }
  EXPECT_FALSE(Take<Fence>(control[0]));
}

TEST_F(Waits, ARankOfWhichAThreadIsFree_IsInNoCircle) {
  const auto control = RunWorld(2);
  WaitingReport free = Blocked(In("b", 5, {0}));
  free.blocked = false;
  Wait(seconds(5), control, {{0, Blocked(In("a", 3, {1}))}, {1, free}});
  EXPECT_FALSE(Take<Fence>(control[0]));
  // Nor does it stand still: a thread of it waits itself.
  stall_ = seconds(4);
  stands_still_ = true;
  Wait(seconds(8), control, {{0, Blocked(In("a", 3, {1}))}, {1, free}});
  EXPECT_FALSE(Take<Fence>(control[0]));
}

// A thread that has run in between may have done what is waited for.
TEST_F(Waits, ACircleBesideAThreadThatRuns_IsNone) {
  const auto control = RunWorld(2);
  WaitingReport first = Blocked(In("a", 3, {1}));
  const WaitingReport second = Blocked(In("b", 5, {0}));
  for (std::uint64_t token = 1; token < 10; ++token) {
    first.threads = token;
    Wait(seconds(1), control, {{0, first}, {1, second}});
  }
  EXPECT_FALSE(Take<Fence>(control[0]));
  Wait(seconds(2), control, {{0, first}, {1, second}});
  EXPECT_TRUE(Take<Fence>(control[0]));
}

TEST_F(Waits, WhoAsks_IsToldWhereTheLateRankIs) {
  const auto control = RunWorld(3);
  WaitingReport report = Blocked(In("world", 7, {0, 2}));
  report.tell = true;
  Send(control[1], WaitingOp{report}, 0);
  Advance(Millis(300), control);
  EXPECT_FALSE(Take<LateEvent>(control[1]));  // Nobody has said where it is.
  Answer(control);
  Advance(Millis(300), control);
  const auto late = Take<LateEvent>(control[1]);
  ASSERT_TRUE(late);
  EXPECT_EQ(late->notice.generation, generation_);
  ASSERT_THAT(late->notice.ranks, SizeIs(2));
  EXPECT_EQ(late->notice.ranks[0].rank, 0);
  EXPECT_THAT(late->notice.ranks[0].text,
              AllOf(HasSubstr("rank 0 (host h0, pid 100): alive, last beat 0.0 s ago"),
                    HasSubstr("main thread in prep.py:12 cache")));
  EXPECT_FALSE(Take<LateEvent>(control[0]));
  EXPECT_EQ(asked_.count(1), 0u);
}

TEST_F(Waits, ARankThatDoesNotSayWhereItIs_IsNamedAllTheSame) {
  const auto control = RunWorld(2);
  mute_ = true;
  WaitingReport report = Blocked(In("world", 7, {0}));
  report.tell = true;
  Send(control[1], WaitingOp{report}, 0);
  report.tell = false;
  Wait(seconds(4), control, {{1, report}});
  const auto late = Take<LateEvent>(control[1]);
  ASSERT_TRUE(late);
  ASSERT_THAT(late->notice.ranks, SizeIs(1));
  EXPECT_THAT(late->notice.ranks[0].text, HasSubstr("did not answer"));
}

TEST_F(Waits, ARankThatWaitsItself_IsNotAskedButQuoted) {
  const auto control = RunWorld(3);
  WaitingReport report = Blocked(In("world", 7, {1}));
  report.tell = true;
  Wait(seconds(1), control, {{0, report}, {1, Blocked(In("pair", 2, {2}))}});
  const auto late = Take<LateEvent>(control[0]);
  ASSERT_TRUE(late);
  ASSERT_THAT(late->notice.ranks, SizeIs(1));
  EXPECT_THAT(late->notice.ranks[0].text,
              AllOf(HasSubstr("waits itself in all_reduce"), HasSubstr("#2 of group 'pair'"),
                    HasSubstr("for rank 2")));
  EXPECT_EQ(asked_.count(1), 0u);
}

// Of its threads one submitted first and has not come to wait, another one is in its call.
TEST_F(Waits, ARankOfWhichOneThreadWaits_IsQuotedByThat) {
  const auto control = RunWorld(3);
  WaitingReport report = Blocked(In("world", 7, {1}));
  report.tell = true;
  WaitingReport of_late = Blocked(In("pair", 2, {2}));
  WaitingCall in_flight = In("async", 4, {2});
  in_flight.operation.age = seconds(9);
  in_flight.blocked = false;
  of_late.calls.push_back(in_flight);
  of_late.blocked = false;
  Wait(seconds(1), control, {{0, report}, {1, of_late}});
  const auto late = Take<LateEvent>(control[0]);
  ASSERT_TRUE(late);
  ASSERT_THAT(late->notice.ranks, SizeIs(1));
  EXPECT_THAT(late->notice.ranks[0].text,
              AllOf(HasSubstr("waits itself in all_reduce"), HasSubstr("#2 of group 'pair'")));
}

TEST_F(Waits, ThreadOtherThanMain_IsNamed) {
  const auto control = RunWorld(2);
  stall_ = seconds(20);
  stands_still_ = true;
  whereabouts_.thread = "trainer";
  WaitingReport report = Blocked(In("world", 7, {0}));
  report.tell = true;
  Wait(seconds(2), control, {{1, report}});
  const auto late = Take<LateEvent>(control[1]);
  ASSERT_TRUE(late);
  ASSERT_THAT(late->notice.ranks, SizeIs(1));
  EXPECT_THAT(late->notice.ranks[0].text,
              AllOf(HasSubstr(", thread 'trainer' in prep.py:12 cache"), Not(HasSubstr("main"))));
  Wait(seconds(25), control, {{1, Blocked(In("world", 7, {0}))}});
  const auto fence = Take<Fence>(control[1]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.code(), StatusCode::kStalled);
  EXPECT_THAT(fence->cause.message(), HasSubstr("; thread 'trainer' in prep.py:12 cache"));
}

TEST_F(Waits, ManyLateRanks_AreCounted) {
  const int size = 20;
  const auto control = RunWorld(size);
  std::vector<int> missing;
  for (int rank = 1; rank < size; ++rank) missing.push_back(rank);
  WaitingReport report = Blocked(In("world", 7, missing));
  report.tell = true;
  Wait(seconds(2), control, {{0, report}});
  const auto late = Take<LateEvent>(control[0]);
  ASSERT_TRUE(late);
  EXPECT_THAT(late->notice.ranks, SizeIs(kLateRanksMax));
  EXPECT_EQ(late->notice.more, size - 1 - static_cast<int>(kLateRanksMax));
}

TEST_F(Waits, NoProgressWhileOthersWait_EndsInStalled) {
  const auto control = RunWorld(3);
  stall_ = seconds(20);
  stands_still_ = true;
  whereabouts_.stack = "train.py:1 main; prep.py:12 cache";
  Wait(seconds(19), control, {{1, Blocked(In("world", 7, {0}))}});
  EXPECT_FALSE(Take<Fence>(control[1]));
  Wait(seconds(6), control, {{1, Blocked(In("world", 7, {0}))}});
  for (const ConnectionId connection : control) {
    const auto fence = Take<Fence>(connection);
    ASSERT_TRUE(fence);
    EXPECT_EQ(fence->cause.code(), StatusCode::kStalled);
    EXPECT_EQ(fence->cause.detail().rank, 0);
    EXPECT_THAT(fence->cause.message(),
                AllOf(HasSubstr("rank 0 (host h0, pid 100) is alive and has made no progress"),
                      HasSubstr("rank 1 waited for it in all_reduce"),
                      HasSubstr("prep.py:12 cache"), HasSubstr("expect_slow")));
  }
}

// Its goodbye would end the operation, and is on a link that is silent, as what it may have sent.
TEST_F(Waits, WhoeverHasLeft_KeepsOthersWaitingByItsLinksAlone) {
  for (const int kind : {0, 1, 2}) {
    SCOPED_TRACE(kind);
    Restart();
    const auto control = RunWorld(3);
    const WaitingCall call = kind == 0 ? In("world", 7, {1}) : Message("world", 4, 1, kind == 2);
    const WaitingReport report = Blocked(call);
    Wait(seconds(5), control, {{0, report}});
    EXPECT_FALSE(Take<AllEnteredEvent>(control[0]));
    Send(control[1], LeaveOp{});
    WaitingReport tell = report;
    tell.tell = true;
    Wait(seconds(5), {control[0], control[2]}, {{0, tell}});
    EXPECT_FALSE(Take<Fence>(control[0]));
    EXPECT_TRUE(Take<AllEnteredEvent>(control[0]));
    const auto late = Take<LateEvent>(control[0]);
    ASSERT_TRUE(late);
    ASSERT_THAT(late->notice.ranks, SizeIs(1));
    EXPECT_THAT(late->notice.ranks[0].text, HasSubstr("has left"));
    EXPECT_TRUE(late->notice.ranks[0].of_network);
  }
}

// It sits in a later operation, or computes; what it has sent did not arrive.
TEST_F(Waits, NobodyIsStalled_WhoHasEnteredTheOperation) {
  const auto control = RunWorld(2);
  stall_ = seconds(5);
  stands_still_ = true;
  NoteProgress(0, {.group = "world", .entered = 7, .peers = {}});
  WaitingReport report = Blocked(In("world", 7, {0}));
  Wait(seconds(30), control, {{1, report}});
  EXPECT_FALSE(Take<Fence>(control[1]));
  EXPECT_TRUE(Take<AllEnteredEvent>(control[1]));
  report.tell = true;
  Send(control[1], WaitingOp{report}, 0);
  Wait(seconds(1), control, {{1, Blocked(In("world", 7, {0}))}});
  const auto late = Take<LateEvent>(control[1]);
  ASSERT_TRUE(late);
  ASSERT_THAT(late->notice.ranks, SizeIs(1));
  EXPECT_TRUE(late->notice.ranks[0].of_network);
}

TEST_F(Waits, NobodyIsStalled_WhoMakesProgressOrSaidSoOrIsHeldOrWaits) {
  const auto control = RunWorld(2);
  stall_ = seconds(5);
  Wait(seconds(30), control, {{1, Blocked(In("world", 7, {0}))}});
  EXPECT_GT(asked_[0], 3);  // It goes on.
  stands_still_ = true;
  whereabouts_.expected_slow = "checkpoint";
  whereabouts_.expected_slow_for = seconds(60);
  Wait(seconds(30), control, {{1, Blocked(In("world", 7, {0}))}});
  EXPECT_FALSE(Take<Fence>(control[1]));
  whereabouts_.expected_slow_for = {};
  const ConnectionId admin = Open(HelloOf(99, Role::kAdmin));
  EXPECT_EQ(Ask(admin, HoldOp{0, "", 0, "debugger"}).number, 1);
  Wait(seconds(30), control, {{1, Blocked(In("world", 7, {0}))}});
  EXPECT_FALSE(Take<Fence>(control[1]));
  Ask(admin, ReleaseOp{});
  Wait(seconds(30), control, {{1, Blocked(In("world", 7, {0}))}, {0, Blocked(In("other", 1, {}))}});
  EXPECT_FALSE(Take<Fence>(control[1]));
}

// Of rank 0: it has submitted operation 7 of the world, and its device has begun 6.
class DeviceWaits : public Waits {
 protected:
  static GroupProgress Queued() {
    return {.group = "world",
            .entered = 7,
            .peers = {},
            .device = DeviceProgress{.name = "GPU 0 (GPU-1)",
                                     .begun = 6,
                                     .last = "all_reduce(float32[4], sum) #6 of group 'world'"}};
  }
  // Of a rank whose device has begun operation 7, as that of `others` has not.
  WaitingReport Begun(std::vector<int> missing, std::vector<int> not_begun) const {
    WaitingReport report = Blocked(In("world", 7, std::move(missing)));
    report.calls.front().operation.not_begun = std::move(not_begun);
    report.device_stall = seconds(20);
    return report;
  }
};

TEST_F(DeviceWaits, WhoAsks_IsToldOfTheDeviceThatHasNotBegun) {
  const auto control = RunWorld(3);
  NoteProgress(0, Queued());
  device_moved_ = now_;
  WaitingReport report = Begun({}, {0});
  report.tell = true;
  Wait(seconds(1), control, {{1, report}});
  const auto late = Take<LateEvent>(control[1]);
  ASSERT_TRUE(late);
  ASSERT_THAT(late->notice.ranks, SizeIs(1));
  EXPECT_EQ(late->notice.ranks[0].rank, 0);
  EXPECT_FALSE(late->notice.ranks[0].of_network) << "it is no link that is silent";
  EXPECT_THAT(late->notice.ranks[0].text,
              AllOf(HasSubstr("rank 0 (host h0, pid 100): alive"),
                    HasSubstr("has submitted it, and its device has not begun it: GPU 0 (GPU-1) "
                              "has begun nothing for"),
                    HasSubstr("has finished all_reduce(float32[4], sum) #6 of group 'world' last"),
                    HasSubstr("main thread in prep.py:12 cache")));
}

TEST_F(DeviceWaits, ADeviceThatFinishesNothing_EndsInDeviceStalledOnAll) {
  const auto control = RunWorld(3);
  NoteProgress(0, Queued());
  device_moved_ = now_;
  Wait(seconds(19), control, {{1, Begun({}, {0})}, {2, Begun({}, {0})}});
  EXPECT_FALSE(Take<Fence>(control[1]));
  Wait(seconds(2), control, {{1, Begun({}, {0})}, {2, Begun({}, {0})}});
  for (const ConnectionId connection : control) {
    const auto fence = Take<Fence>(connection);
    ASSERT_TRUE(fence);
    EXPECT_EQ(fence->cause.code(), StatusCode::kDeviceStalled);
    EXPECT_EQ(fence->cause.detail().rank, 0);
    EXPECT_EQ(fence->cause.detail().group, "world");
    EXPECT_THAT(fence->cause.message(),
                AllOf(HasSubstr("GPU 0 (GPU-1) of rank 0 (host h0, pid 100) hangs"),
                      HasSubstr("(RESILIENT_DEVICE_STALL) while ranks 1, 2 waited for it in "
                                "all_reduce(float32[4], sum) #7 of group 'world'"),
                      HasSubstr("main thread in prep.py:12 cache"), HasSubstr("dmesg")));
  }
}

// Each that finishes something stands for whatever its device does between two of ours.
TEST_F(DeviceWaits, ADeviceThatFinishesSomething_NeverHangs) {
  const auto control = RunWorld(2);
  NoteProgress(0, Queued());
  for (int i = 0; i < 6; ++i) {
    device_moved_ = now_;
    Wait(seconds(15), control, {{1, Begun({}, {0})}});
  }
  EXPECT_FALSE(Take<Fence>(control[1]));
  EXPECT_GT(asked_progress_[0], 6);
}

TEST_F(DeviceWaits, NoDeviceHangs_ThatRunsOrIsAnnouncedOrHeldOrDoesNotSay) {
  const auto control = RunWorld(2);
  device_moved_ = now_;
  GroupProgress runs = Queued();
  runs.device->runs = true;  // What is behind that one may wait for another rank.
  NoteProgress(0, runs);
  Wait(seconds(40), control, {{1, Begun({}, {0})}});
  EXPECT_FALSE(Take<Fence>(control[1]));
  NoteProgress(0, Queued());
  silent_ = {0};
  Wait(seconds(40), control, {{1, Begun({}, {0})}});
  EXPECT_FALSE(Take<Fence>(control[1])) << "a belief of the waiter's proves nothing";
  whereabouts_.expected_slow = "warm-up";
  whereabouts_.expected_slow_for = seconds(60);
  Wait(seconds(2), control, {{1, Begun({}, {0})}});
  silent_ = {};
  Wait(seconds(40), control, {{1, Begun({}, {0})}});
  EXPECT_FALSE(Take<Fence>(control[1]));
  const ConnectionId admin = Open(HelloOf(99, Role::kAdmin));
  EXPECT_EQ(Ask(admin, HoldOp{0, "", 0, "debugger"}).number, 1);
  whereabouts_.expected_slow_for = {};
  Wait(seconds(40), control, {{1, Begun({}, {0})}});
  EXPECT_FALSE(Take<Fence>(control[1]));
}

// It is late as any other rank, whatever its device does meanwhile.
TEST_F(DeviceWaits, WhoHasNotSubmittedIt_HasNoDeviceThatHangs) {
  const auto control = RunWorld(2);
  GroupProgress late = Queued();
  late.entered = 6;
  device_moved_ = now_;
  NoteProgress(0, late);
  Wait(seconds(60), control, {{1, Begun({0}, {})}});
  EXPECT_FALSE(Take<Fence>(control[1]));
}

// The word between the ranks is lost, and what counts is the account.
TEST_F(DeviceWaits, AHungDeviceBehindASilentLink_IsFoundByTheAccount) {
  const auto control = RunWorld(2);
  NoteProgress(0, Queued());
  device_moved_ = now_;
  Wait(seconds(22), control, {{1, Begun({0}, {})}});
  const auto fence = Take<Fence>(control[1]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.code(), StatusCode::kDeviceStalled);
}

TEST_F(DeviceWaits, Messages_AreAwaitedByTheirNumber) {
  const auto control = RunWorld(2);
  device_moved_ = now_;
  GroupProgress progress = Queued();
  progress.peers = {{.rank = 1, .sent = 3, .sends_on_device = 2}};
  NoteProgress(0, progress);
  WaitingReport report = Blocked(Message("world", 5, 0, false));
  report.device_stall = seconds(20);
  report.calls.front().operation.missing = {};
  report.calls.front().operation.not_begun = {0};
  report.calls.front().operation.number = 2;
  Wait(seconds(40), control, {{1, report}});
  EXPECT_FALSE(Take<Fence>(control[1])) << "its device has begun that one";
  report.calls.front().operation.number = 3;
  Wait(seconds(3), control, {{1, report}});
  const auto fence = Take<Fence>(control[1]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.code(), StatusCode::kDeviceStalled);
}

TEST_F(Waits, WithoutWaiters_NobodyIsAsked) {
  const auto control = RunWorld(2);
  Advance(seconds(60), control);
  Answer(control);
  EXPECT_THAT(asked_, IsEmpty());
}

TEST_F(Waits, ReportsOfThePast_AndRanksThatDoNotExist_AreIgnored) {
  const auto control = RunWorld(2);
  WaitingReport old = Blocked(In("world", 7, {0}));
  old.generation = generation_ - 1;
  old.tell = true;
  Wait(seconds(3), control, {{1, old}});
  EXPECT_THAT(asked_, IsEmpty());
  WaitingReport wild = Blocked(In("world", 7, {-1, 2, 1 << 30}));
  wild.tell = true;
  Wait(seconds(3), control, {{1, wild}});
  const auto late = Take<LateEvent>(control[1]);
  ASSERT_TRUE(late);
  EXPECT_THAT(late->notice.ranks, IsEmpty());
}

TEST_F(Waits, WhoWaitsToJoin_IsToldWhoIsMissing) {
  const ConnectionId control = OpenControl(1);
  Send(control, JoinOp{JoinOf(1, 3)});
  WaitingReport report;
  report.tell = true;
  Send(control, WaitingOp{report}, 0);
  const auto late = Take<LateEvent>(control);
  ASSERT_TRUE(late);
  EXPECT_EQ(late->notice.generation, 0u);
  EXPECT_EQ(late->notice.ready, 1);
  EXPECT_EQ(late->notice.world_size, 3);
  ASSERT_THAT(late->notice.ranks, SizeIs(2));
  EXPECT_EQ(late->notice.ranks[0].text, "rank 0: nothing has been heard from it");
}

// The timeout of the init is for ranks that nobody has heard of.
TEST_F(Waits, RanksThatLiveOnAHost_AreNotMissing) {
  const ConnectionId control = OpenControl(1);
  JoinRequest join = JoinOf(1, 3);
  join.join_timeout = seconds(10);
  Send(control, JoinOp{join});
  WaitingReport report;
  report.present = {0, 2};
  for (int second = 0; second < 60; ++second) {
    Send(control, WaitingOp{report}, 0);
    Advance(seconds(1), {control});
  }
  EXPECT_FALSE(Take<JoinRefusedEvent>(control));
  report.tell = true;
  Send(control, WaitingOp{report}, 0);
  EXPECT_EQ(Take<LateEvent>(control)->notice.ranks[0].text,
            "rank 0: alive on host h1, not yet in its init");
  // Of rank 2 nothing is known any more. Whoever saw it may have been silent for nearly a lease.
  report.present = {0};
  for (int second = 0; second < 7; ++second) {
    if (second == 5) {
      EXPECT_FALSE(Take<JoinRefusedEvent>(control));
    }
    Send(control, WaitingOp{report}, 0);
    Advance(seconds(1), {control});
  }
  const auto refused = Take<JoinRefusedEvent>(control);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->why.code(), StatusCode::kJoinTimeout);
  EXPECT_THAT(refused->why.message(),
              AllOf(HasSubstr("1 of 3 joined; missing ranks 2"),
                    HasSubstr("rank 0 lives on host h1 and has not come to its init")));
}

// ---- Groups of different ranks ----

class WaitsInGroups : public Waits {
 protected:
  static GroupMade Made(std::string group, const std::vector<int>& ranks, std::string made_at,
                        bool used = true) {
    return {std::move(group), RanksOfGroup(ranks, std::move(made_at)), used};
  }
  // Beside what it is in, it has made these.
  static WaitingReport With(WaitingReport report, std::vector<GroupMade> made) {
    report.made = std::move(made);
    return report;
  }
};

// Ranks 0 and 1 are in group '1' both, and have no link to each other there: of neither list rank 0
// is the lower one of the two.
TEST_F(WaitsInGroups, TwoThatWaitInGroupsOfOneName_EndInMismatchOnAll) {
  const auto control = RunWorld(4);
  Wait(Millis(1300), control,
       {{0, With(Blocked(In("1", 3, {1})), {Made("1", {0, 1}, "a.py:1 pair")})},
        {1, With(Blocked(In("1", 7, {2})), {Made("1", {1, 2}, "b.py:2 other")})}});
  for (const ConnectionId connection : control) {
    const auto fence = Take<Fence>(connection);
    ASSERT_TRUE(fence);
    EXPECT_EQ(fence->cause.code(), StatusCode::kMismatch);
    EXPECT_EQ(fence->cause.detail().rank, 1);
    EXPECT_EQ(fence->cause.detail().group, "1");
    EXPECT_EQ(fence->cause.detail().pid, 101);
    EXPECT_THAT(fence->cause.message(),
                HasSubstr("rank 1 (host h1, pid 101) has made group '1' of ranks [1,2] at b.py:2 "
                          "other where rank 0 (host h0, pid 100) has made it of ranks [0,1] at "
                          "a.py:1 pair, in generation "));
  }
}

// It has used the group, and does something else by now, or has closed it.
TEST_F(WaitsInGroups, WhoHasUsedAnotherGroupOfThatName_IsFoundWhenItIsAsked) {
  const auto control = RunWorld(3);
  stall_ = Duration::zero();  // Whether or not standing still is judged.
  made_[1] = {Made("1", {1, 2}, "b.py:2")};
  Wait(seconds(4), control, {{0, With(Blocked(In("1", 3, {1})), {Made("1", {0, 1}, "a.py:1")})}});
  EXPECT_EQ(asked_progress_[1], 1);
  const auto fence = Take<Fence>(control[2]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.code(), StatusCode::kMismatch);
}

TEST_F(WaitsInGroups, SameRanksInAnotherOrder_AreAMismatch) {
  const auto control = RunWorld(2);
  Wait(seconds(2), control,
       {{0, With(Blocked(In("1", 1, {1})), {Made("1", {0, 1}, "")})},
        {1, With(Blocked(In("1", 1, {0})), {Made("1", {1, 0}, "")})}});
  const auto fence = Take<Fence>(control[0]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.code(), StatusCode::kMismatch);
  EXPECT_THAT(fence->cause.message(), AllOf(HasSubstr("[0,1]"), HasSubstr("[1,0]")));
}

// Groups of one name that have no rank in common need nothing of each other.
TEST_F(WaitsInGroups, RanksThatDoNotWaitForEachOther_AreNotCompared) {
  const auto control = RunWorld(4);
  Wait(seconds(20), control,
       {{0, With(Blocked(In("1", 3, {3})), {Made("1", {0, 3}, "")})},
        {1, With(Blocked(In("1", 7, {2})), {Made("1", {1, 2}, "")})}});
  EXPECT_FALSE(Take<Fence>(control[0]));
}

// Rank 3 waits for rank 1 elsewhere, and rank 1 waits for rank 2 alone: there is no circle. Of two
// ranks in one collective each waits for whom the other one misses.
TEST_F(WaitsInGroups, CollectivesOfTwoGroupsOfOneName_AreNotOne) {
  const auto control = RunWorld(4);
  std::map<int, WaitingReport> told{{0, With(Blocked(In("1", 1, {3})), {Made("1", {0, 3}, "")})},
                                    {1, With(Blocked(In("1", 1, {2})), {Made("1", {1, 2}, "")})},
                                    {3, Blocked(Message("world", 1, 1, false))}};
  for (const int rank : {0, 1}) told[rank].calls[0].operation.needs_all = true;
  Wait(seconds(20), control, told);
  EXPECT_FALSE(Take<Fence>(control[0]));
}

// It may still be closed, and another one get its name.
TEST_F(WaitsInGroups, AGroupThatIsNotUsed_IsNoProof) {
  const auto control = RunWorld(3);
  Wait(seconds(20), control,
       {{0, With(Blocked(In("1", 3, {1})), {Made("1", {0, 1}, "")})},
        {1, With(Blocked(In("2", 1, {2})), {Made("1", {1, 2}, "", false)})}});
  EXPECT_FALSE(Take<Fence>(control[0]));
}

// Nobody in the circle can close it any more: it is what keeps them.
TEST_F(WaitsInGroups, AGroupThatIsNotUsed_ExplainsACircle) {
  const auto control = RunWorld(3);
  Wait(seconds(3), control,
       {{0, With(Blocked(In("1", 1, {1})), {Made("1", {0, 1}, "a.py:1")})},
        {1, With(Blocked(In("2", 1, {0})),
                 {Made("2", {0, 1}, "b.py:2"), Made("1", {1, 2}, "b.py:3", false)})}});
  const auto fence = Take<Fence>(control[2]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.code(), StatusCode::kMismatch);
  EXPECT_THAT(fence->cause.message(), AllOf(HasSubstr("group '1'"), HasSubstr("[1,2] at b.py:3")));
}

TEST_F(WaitsInGroups, SameGroups_EndInADeadlockAsBefore) {
  const auto control = RunWorld(2);
  const std::vector<GroupMade> both{Made("1", {0, 1}, "a.py:1"), Made("2", {0, 1}, "a.py:2")};
  Wait(seconds(3), control,
       {{0, With(Blocked(In("1", 1, {1})), both)}, {1, With(Blocked(In("2", 1, {0})), both)}});
  const auto fence = Take<Fence>(control[0]);
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.code(), StatusCode::kDeadlock);
}

// What a member says of itself is cut, and is no more than it can wait in and be asked about.
TEST_F(WaitsInGroups, WhatIsToldBeyondTheLimits_IsLeftOut) {
  const auto control = RunWorld(2);
  std::vector<GroupMade> many;
  for (std::size_t i = 0; i < kMadeGroupsMax; ++i)
    many.push_back(Made("g" + std::to_string(i), {0, 1}, ""));
  many.push_back(Made("1", {1, 0}, ""));
  std::map<int, WaitingReport> told{{0, With(Blocked(In("1", 1, {1})), {Made("1", {0, 1}, "")})},
                                    {1, With(Blocked(In("1", 1, {0})), many)}};
  Wait(seconds(5), control, told);
  EXPECT_FALSE(Take<Fence>(control[0]));
  GroupMade& long_one = told.at(1).made.front();
  long_one = Made("1", {1, 0}, "");
  long_one.ranks.text = std::string(100'000, 'x');
  long_one.ranks.made_at = long_one.ranks.text;
  Wait(seconds(2), control, told);
  const auto fence = Take<Fence>(control[0]);
  ASSERT_TRUE(fence);
  EXPECT_LT(fence->cause.message().size(), 2000u);
}

}  // namespace
}  // namespace resilient::store
