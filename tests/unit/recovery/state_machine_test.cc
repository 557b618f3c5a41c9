// Goal: every edge of the recovery state machine, and that nothing else is an edge.
// Method: a history in a small language brings the machine into a state, one more word is the event
// under test, and what comes out is compared as text. Words: I init, V<g> view, B<g> built,
// X<g> build failed, R<g> running, F<g> fence (RANK_LOST), C<g> fence (COMM_FAILED), M<g> fence
// (MISMATCH), Q<g> quiet, J join refused, J<n> one that was
// sent n joins before, S store lost, Z stale, D device lost, A acknowledge, W withdraw,
// T<seconds> time passes, K close.
#include "runtime/recovery/state_machine.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace resilient::recovery {
namespace {

constexpr Duration kBudget = std::chrono::seconds(20);

// A machine with a clock that the word T moves.
class Player {
 public:
  // Plays all words; returns the outcome of the last: "STATE action action".
  std::string Play(const std::string& words) {
    std::istringstream in(words);
    std::string word;
    std::string outcome;
    while (in >> word) outcome = PlayOne(word);
    return outcome;
  }

  StateMachine machine{LadderOf(kBudget)};

 private:
  std::string PlayOne(const std::string& word) {
    const std::uint64_t number = word.size() > 1 ? std::stoull(word.substr(1)) : 0;
    const std::vector<Action> actions = machine.Step(EventOf(word[0], number), now_);
    std::string text(SessionStateName(machine.state()));
    for (const Action& action : actions) {
      text += " " + Show(action);
      if (action.kind == ActionKind::kSendJoin) last_join_ = action.join;
    }
    return text;
  }

  Event EventOf(char letter, std::uint64_t number) {
    const auto because = [&](StatusCode code) {
      return Status(code, std::string("cause ") + letter + std::to_string(number));
    };
    switch (letter) {
      case 'I':
        return {EventKind::kInit, 0, {}, {}};
      case 'V': {
        View view;
        view.generation = number;
        return {EventKind::kView, number, {}, view};
      }
      case 'B':
        return {EventKind::kBuilt, number, {}, {}};
      case 'X':
        return {EventKind::kBuildFailed, number, because(StatusCode::kCommFailed), {}};
      case 'R':
        return {EventKind::kRunning, number, {}, {}};
      case 'F':
        return {EventKind::kFence, number, because(StatusCode::kRankLost), {}};
      case 'C':
        return {EventKind::kFence, number, because(StatusCode::kCommFailed), {}};
      case 'M':
        return {EventKind::kFence, number, because(StatusCode::kMismatch), {}};
      case 'Q':
        return {EventKind::kQuiet, number, {}, {}};
      case 'J': {
        Event refused{EventKind::kJoinRefused, 0, because(StatusCode::kJoinTimeout), {}};
        refused.join = last_join_ - number;
        return refused;
      }
      case 'S':
        return {EventKind::kSessionLost, 0, because(StatusCode::kStoreLost), {}};
      case 'Z':
        return {EventKind::kSessionLost, 0, because(StatusCode::kStaleGeneration), {}};
      case 'D':
        return {EventKind::kSessionLost, 0, because(StatusCode::kDeviceLost), {}};
      case 'A':
        return {EventKind::kAcknowledge, 0, {}, {}};
      case 'a': {
        Event acknowledge{EventKind::kAcknowledge, 0, {}, {}};
        acknowledge.wish_changed = true;
        return acknowledge;
      }
      case 'W':
        return {EventKind::kWithdraw, 0, {}, {}};
      case 'T':
        now_ += std::chrono::seconds(number);
        return {EventKind::kTick, 0, {}, {}};
      case 'K':
        return {EventKind::kClose, 0, {}, {}};
    }
    ADD_FAILURE() << "unknown word " << letter;
    return {};
  }

  static std::string Show(const Action& action) {
    const std::string number = std::to_string(action.generation);
    switch (action.kind) {
      case ActionKind::kSendJoin:
        return "join:" + number;
      case ActionKind::kBuildWorld:
        EXPECT_EQ(action.view.generation, action.generation);
        return "build:" + number;
      case ActionKind::kAbortCommunicators:
        return "abort:" + number + "(" + action.cause.message() + ")";
      case ActionKind::kSendReady:
        return "ready:" + number;
      case ActionKind::kReportBuildFailed:
        return "report:" + number;
      case ActionKind::kOpenGate:
        return "open:" + number;
      case ActionKind::kFail:
        return "fail(" + action.cause.message() + ")";
    }
    return "?";
  }

  Instant now_{};
  std::uint64_t last_join_ = 0;
};

// Histories that end in each state; generation 5 where there is one. READY twice, for it differs by
// what it still waits for.
const std::map<std::string, std::string> kHistories = {
    {"INIT", ""},
    {"JOINING", "I V4 B4 R4 F4 Q4"},
    {"BUILDING", "I V4 B4 R4 F4 Q4 V5"},
    {"READY", "I V4 B4 R4 F4 Q4 V5 B5"},
    {"READY, world runs", "I V4 B4 R4 F4 Q4 V5 B5 R5"},
    {"RUNNING", "I V5 B5 R5"},
    {"ABORTING", "I V5 B5 R5 F5"},
    {"FENCED", "I V5 B5 R5 F5 Q5 J"},
    {"FAILED", "I V5 B5 R5 S"},
    {"CLOSED", "I V5 B5 R5 K"},
};

struct Edge {
  const char* history;
  const char* event;
  const char* outcome;
};

const Edge kEdges[] = {
    {"INIT", "I", "JOINING join:0"},
    {"INIT", "S", "FAILED fail(cause S0)"},
    {"INIT", "Z", "FAILED fail(cause Z0)"},
    {"INIT", "D", "FAILED fail(cause D0)"},
    {"INIT", "K", "CLOSED"},

    {"JOINING", "V5", "BUILDING build:5"},
    {"JOINING", "V6", "BUILDING build:6"},
    {"JOINING", "F5", "JOINING join:5"},
    {"JOINING", "F6", "JOINING join:6"},
    {"JOINING", "C6", "JOINING join:6"},
    {"JOINING", "M6", "JOINING join:6"},
    {"JOINING", "J", "FENCED"},
    {"JOINING", "A", "JOINING"},
    {"JOINING", "W", "JOINING"},
    {"JOINING", "S", "FAILED fail(cause F4)"},
    {"JOINING", "Z", "FAILED fail(cause Z0)"},
    {"JOINING", "D", "FAILED fail(cause D0)"},
    {"JOINING", "K", "CLOSED"},

    {"BUILDING", "B5", "READY ready:5"},
    {"BUILDING", "X5", "BUILDING report:5"},
    {"BUILDING", "V6", "ABORTING abort:5(cause F4)"},
    {"BUILDING", "F5", "ABORTING abort:5(cause F4)"},
    {"BUILDING", "F6", "ABORTING abort:5(cause F4)"},
    {"BUILDING", "C6", "ABORTING abort:5(cause F4)"},
    {"BUILDING", "M6", "ABORTING abort:5(cause F4)"},
    {"BUILDING", "T8", "BUILDING report:5"},
    {"BUILDING", "T19", "BUILDING report:5"},
    {"BUILDING", "T20", "FAILED abort:5(cause F4) fail(cause F4)"},
    {"BUILDING", "S", "FAILED abort:5(cause F4) fail(cause F4)"},
    {"BUILDING", "Z", "FAILED abort:5(cause Z0) fail(cause Z0)"},
    {"BUILDING", "D", "FAILED abort:5(cause D0) fail(cause D0)"},
    {"BUILDING", "K", "CLOSED"},

    {"READY", "R5", "READY"},
    {"READY", "A", "READY"},
    {"READY", "V6", "ABORTING abort:5(cause F4)"},
    {"READY", "F5", "ABORTING abort:5(cause F4)"},
    {"READY", "F6", "ABORTING abort:5(cause F4)"},
    {"READY", "C6", "ABORTING abort:5(cause F4)"},
    {"READY", "M6", "ABORTING abort:5(cause F4)"},
    {"READY", "T20", "FAILED abort:5(cause F4) fail(cause F4)"},
    {"READY", "S", "FAILED abort:5(cause F4) fail(cause F4)"},
    {"READY", "Z", "FAILED abort:5(cause Z0) fail(cause Z0)"},
    {"READY", "D", "FAILED abort:5(cause D0) fail(cause D0)"},
    {"READY", "K", "CLOSED"},

    {"READY, world runs", "A", "RUNNING open:5"},
    {"READY, world runs", "V6", "ABORTING abort:5(cause F4)"},
    {"READY, world runs", "F5", "ABORTING abort:5(cause F4)"},
    {"READY, world runs", "F6", "ABORTING abort:5(cause F4)"},
    {"READY, world runs", "C6", "ABORTING abort:5(cause F4)"},
    {"READY, world runs", "M6", "ABORTING abort:5(cause F4)"},
    {"READY, world runs", "S", "FAILED abort:5(cause F4) fail(cause F4)"},
    {"READY, world runs", "Z", "FAILED abort:5(cause Z0) fail(cause Z0)"},
    {"READY, world runs", "D", "FAILED abort:5(cause D0) fail(cause D0)"},
    {"READY, world runs", "K", "CLOSED"},

    {"RUNNING", "V6",
     "ABORTING abort:5(generation 5 ended without word to this rank: the membership service is at "
     "generation 6; the group is being rebuilt, call rebuild())"},
    {"RUNNING", "F5", "ABORTING abort:5(cause F5)"},
    {"RUNNING", "F6", "ABORTING abort:5(cause F6)"},
    {"RUNNING", "C6", "ABORTING abort:5(cause C6)"},
    {"RUNNING", "M6", "ABORTING abort:5(cause M6)"},
    {"RUNNING", "S", "FAILED abort:5(cause S0) fail(cause S0)"},
    {"RUNNING", "Z", "FAILED abort:5(cause Z0) fail(cause Z0)"},
    {"RUNNING", "D", "FAILED abort:5(cause D0) fail(cause D0)"},
    {"RUNNING", "K", "CLOSED"},

    {"ABORTING", "Q5", "JOINING join:5"},
    {"ABORTING", "T20", "FAILED fail(cause F5)"},
    {"ABORTING", "S", "FAILED fail(cause F5)"},
    {"ABORTING", "Z", "FAILED fail(cause Z0)"},
    {"ABORTING", "D", "FAILED fail(cause D0)"},
    {"ABORTING", "K", "CLOSED"},

    {"FENCED", "A", "JOINING join:5"},
    {"FENCED", "S", "FAILED fail(cause F5)"},
    {"FENCED", "Z", "FAILED fail(cause Z0)"},
    {"FENCED", "D", "FAILED fail(cause D0)"},
    {"FENCED", "K", "CLOSED"},

    {"FAILED", "K", "CLOSED"},
};

std::string StateOf(const std::string& history) { return history.substr(0, history.find(',')); }

TEST(StateMachine, RefusalOfAnEarlierJoin_DoesNotCount) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 Q1 a J1"), "JOINING");
  EXPECT_EQ(player.Play("J"), "FENCED");
}

TEST(StateMachine, OtherWish_SendsTheJoinThatIsUnderWayAgain) {
  for (const auto& [name, history] : kHistories) {
    Player one;
    Player other;
    one.Play(history);
    other.Play(history);
    const std::string acknowledged = one.Play("A");
    EXPECT_EQ(other.Play("a"), acknowledged + (name == "JOINING" ? " join:4" : "")) << name;
  }
}

TEST(StateMachineTable, EveryEdge_LeadsWhereItShould) {
  for (const Edge& edge : kEdges) {
    Player player;
    player.Play(kHistories.at(edge.history));
    ASSERT_EQ(SessionStateName(player.machine.state()), StateOf(edge.history));
    EXPECT_EQ(player.Play(edge.event), edge.outcome) << edge.history << " --" << edge.event;
  }
}

TEST(StateMachineTable, EveryOtherPair_ChangesNothing) {
  const std::vector<std::string> events = {
      "I",  "V3", "V5", "V6", "B4", "B5", "B6", "X4", "X5", "R4", "R5", "R6", "F3",  "F5",  "F6",
      "C6", "M6", "Q3", "Q5", "J",  "S",  "Z",  "D",  "A",  "W",  "T7", "T8", "T19", "T20", "K"};
  std::set<std::string> edges;
  for (const Edge& edge : kEdges) edges.insert(std::string(edge.history) + "/" + edge.event);
  int checked = 0;
  for (const auto& [name, history] : kHistories) {
    for (const std::string& event : events) {
      if (edges.count(name + "/" + event) != 0) continue;
      Player player;
      player.Play(history);
      EXPECT_EQ(player.Play(event), StateOf(name)) << name << " --" << event;
      ++checked;
    }
  }
  EXPECT_EQ(kHistories.size(), static_cast<std::size_t>(kSessionStates + 1));
  EXPECT_GT(checked, 150);
}

TEST(StateMachineInit, FirstWorld_OpensByItself) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1"), "RUNNING open:1");
  EXPECT_TRUE(player.machine.failure().ok());
}

TEST(StateMachineInit, FenceBeforeTheFirstRun_HealsWithoutAcknowledgement) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 F1"), "ABORTING abort:1(cause F1)");
  EXPECT_TRUE(player.machine.failure().ok()) << "nothing has run that could be poisoned";
  EXPECT_EQ(player.machine.first_cause().message(), "cause F1") << "for Init, should it time out";
  EXPECT_EQ(player.Play("Q1 V2 B2 R2"), "RUNNING open:2");
  EXPECT_TRUE(player.machine.first_cause().ok());
}

TEST(StateMachineInit, FirstInit_HasNoBudgetOfItsOwn) {
  Player player;
  EXPECT_EQ(player.Play("I V1 T1000"), "BUILDING");
  EXPECT_EQ(player.Play("B1 T1000"), "READY");
}

TEST(StateMachineInit, Refusal_IsTheCause) {
  Player player;
  EXPECT_EQ(player.Play("I V1 F1 Q1 J"), "FENCED");
  EXPECT_EQ(player.machine.failure().code(), StatusCode::kJoinTimeout);
}

TEST(StateMachineFence, FirstCause_StaysUntilTheGateOpens) {
  Player player;
  player.Play("I V1 B1 R1 F1 Q1 V2 B2 R2");
  EXPECT_EQ(player.machine.failure().message(), "cause F1");
  player.Play("C2 Q2 V3 B3");
  EXPECT_EQ(player.machine.failure().message(), "cause F1") << "a second fence hides nothing";
  EXPECT_EQ(player.Play("A R3"), "RUNNING open:3");
  EXPECT_TRUE(player.machine.failure().ok());
  player.Play("M3");
  EXPECT_EQ(player.machine.failure().message(), "cause M3") << "the next incident is a new one";
}

TEST(StateMachineFence, MismatchHealsLikeAnyOther) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 M1 Q1 V2 B2 A R2"), "RUNNING open:2");
}

// The rank that has found it gives up and leaves, and by that the next try of this one is refused.
TEST(StateMachineInit, FirstInit_FailsWithTheMismatchAndNotWithWhatCameOfIt) {
  Player player;
  EXPECT_EQ(player.Play("I V1 M1 Q1 J"), "FENCED");
  EXPECT_EQ(player.machine.first_cause().code(), StatusCode::kMismatch);
  Player refused;
  EXPECT_EQ(refused.Play("I V1 C1 Q1 J"), "FENCED");
  EXPECT_EQ(refused.machine.first_cause().code(), StatusCode::kJoinTimeout);
}

TEST(StateMachineFence, RaisedTarget_RefusesOlderViews) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 F3"), "ABORTING");
  EXPECT_EQ(player.Play("Q1"), "JOINING join:3");
  EXPECT_EQ(player.Play("V2"), "JOINING");
  EXPECT_EQ(player.Play("V3"), "JOINING");
  EXPECT_EQ(player.Play("V4"), "BUILDING build:4");
}

TEST(StateMachineFence, LateQuietOfAnOlderGeneration_IsIgnored) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 Q1 V2 F2 Q1"), "ABORTING");
  EXPECT_EQ(player.Play("Q2"), "JOINING join:2");
}

TEST(StateMachineAcknowledge, AtAnyPointOfTheRecovery_OpensAtItsEnd) {
  for (const char* words :
       {"I V1 B1 R1 F1 A Q1 V2 B2 R2", "I V1 B1 R1 F1 Q1 A V2 B2 R2", "I V1 B1 R1 F1 Q1 V2 A B2 R2",
        "I V1 B1 R1 F1 Q1 V2 B2 A R2", "I V1 B1 R1 F1 Q1 V2 B2 R2 A"}) {
    Player player;
    EXPECT_EQ(player.Play(words), "RUNNING open:2") << words;
  }
}

TEST(StateMachineAcknowledge, Withdrawn_KeepsTheGateShut) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 A Q1 V2 B2 W R2"), "READY");
  EXPECT_EQ(player.machine.failure().message(), "cause F1");
  EXPECT_EQ(player.Play("A"), "RUNNING open:2");
}

TEST(StateMachineAcknowledge, DuringTheFirstInit_WithdrawnMeansNothing) {
  Player player;
  EXPECT_EQ(player.Play("I V1 W B1 R1"), "RUNNING open:1");
}

TEST(StateMachineAcknowledge, SurvivesASecondFenceWhileItsCallerWaits) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 Q1 A V2 F2 Q2 V3 B3 R3"), "RUNNING open:3");
}

TEST(StateMachineAcknowledge, OfOneFence_DoesNotCoverTheNext) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 Q1 V2 B2 R2 A F2 Q2 V3 B3 R3"), "READY");
}

TEST(StateMachineFenced, EachAcknowledgement_JoinsOnce) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 Q1 J A"), "JOINING join:1");
  EXPECT_EQ(player.Play("J"), "FENCED");
  EXPECT_EQ(player.machine.failure().message(), "cause F1");
  EXPECT_EQ(player.Play("A V2 B2 R2"), "RUNNING open:2");
}

TEST(StateMachineView, ThatOvertookQuiet_IsBuiltWithoutAnotherJoin) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 V2"),
            "ABORTING abort:1(generation 1 ended without word to this rank: the membership service "
            "is at generation 2; the group is being rebuilt, call rebuild())");
  EXPECT_EQ(player.Play("Q1"), "BUILDING build:2");
}

TEST(StateMachineView, ThatOvertookQuietAndEnded_IsNotBuilt) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 V2 F2 Q1"), "JOINING join:2");
  EXPECT_EQ(player.Play("V3"), "BUILDING build:3");
}

TEST(StateMachineView, NewerOnesWhileAborting_LastCounts) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 V2 V3 Q1"), "BUILDING build:3");
}

TEST(StateMachineBudget, WaitingForSeats_IsNotMachineTime) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 T10 Q1 T1000 V2 T7"), "BUILDING");
  EXPECT_EQ(player.Play("T2"), "BUILDING report:2");
  EXPECT_EQ(player.Play("T1"), "FAILED abort:2(cause F1) fail(cause F1)");
  EXPECT_EQ(player.Play("A"), "FAILED");
}

TEST(StateMachineBuild, ThatTakesTooLong_IsReportedOnceATry) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 Q1 V2 T7"), "BUILDING");
  EXPECT_EQ(player.Play("T1"), "BUILDING report:2");
  EXPECT_EQ(player.Play("T3"), "BUILDING") << "the service has been told";
  EXPECT_EQ(player.Play("C2 Q2 V3 T7"), "BUILDING") << "another try has a share of its own";
  EXPECT_EQ(player.Play("T1"), "BUILDING report:3");
  EXPECT_EQ(player.Play("T1"), "FAILED abort:3(cause F1) fail(cause F1)");
}

TEST(StateMachineBuild, ThatComesUpLate_IsBuilt) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 Q1 A V2 T10 B2"), "READY ready:2");
  EXPECT_EQ(player.Play("R2"), "RUNNING open:2");
}

TEST(StateMachineBudget, WaitingForTheAcknowledgement_IsNotMachineTime) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 Q1 V2 B2 R2 T1000"), "READY");
  EXPECT_EQ(player.machine.budget_end(), kNever);
}

TEST(StateMachineBudget, AnotherLoss_HasItsOwn) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 Q1 V2 T19 F2 T19"), "ABORTING");
  EXPECT_EQ(player.Play("T1"), "FAILED fail(cause F1)");
}

TEST(StateMachineBudget, AnotherTry_SharesIt) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 F1 Q1 V2 T15 C2 T4"), "ABORTING");
  EXPECT_EQ(player.Play("T1"), "FAILED fail(cause F1)");
}

TEST(StateMachineBudget, EachIncident_StartsAnew) {
  Player player;
  EXPECT_EQ(player.Play("I V1 B1 R1 C1 T19 Q1 V2 B2 A R2 T100 C2 T19"), "ABORTING");
}

TEST(StateMachineNames, AreThoseOfTheDesign) {
  const std::vector<std::string> names = {"INIT",     "JOINING", "BUILDING", "READY", "RUNNING",
                                          "ABORTING", "FENCED",  "FAILED",   "CLOSED"};
  for (int i = 0; i < kSessionStates; ++i) {
    EXPECT_EQ(SessionStateName(static_cast<SessionState>(i)), names[static_cast<std::size_t>(i)]);
  }
}

}  // namespace
}  // namespace resilient::recovery
