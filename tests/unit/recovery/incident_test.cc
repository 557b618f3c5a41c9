// Goal: each fence leaves one line, however it ends, with cause, who and the time of each phase.
// Method: an IncidentLog under the hands of the test; wall times are given.
#include "runtime/recovery/incident.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace resilient::recovery {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kKnown = 1700000000.25;

class IncidentLogTest : public ::testing::Test {
 protected:
  IncidentLogTest() {
    view_.life = 2;
    view_.round = 5;
    view_.generation = 7;
  }
  static Status Lost() {
    FailureDetail detail;
    detail.rank = 2;
    detail.host = "b";
    detail.pid = 70;
    detail.generation = 7;
    detail.group = "world";
    detail.seq = 9;
    detail.since_unix_s = 1700000000;
    return Status(StatusCode::kRankLost, "rank 2 (host b, pid 70) was killed", detail);
  }
  void Begin(const Status& cause, std::uint64_t generation = 7) {
    log_.Begin(view_, generation, IncidentSource::kFence, cause, kKnown);
  }
  // The object of the only line that has ended since the last call.
  std::string Ended() {
    const std::vector<LogRecord> ended = log_.TakeEnded();
    EXPECT_EQ(ended.size(), 1u);
    if (ended.size() != 1) return {};
    EXPECT_EQ(ended[0].event, "incident");
    EXPECT_EQ(ToText(ended[0]), "incident " + ended[0].object);
    return ended[0].object;
  }

  View view_;
  IncidentLog log_{{1, "a", 60}};
};

TEST_F(IncidentLogTest, Recovery_LeavesOneLineWithAllPhases) {
  Begin(Lost());
  log_.Mark(SessionState::kRunning, SessionState::kAborting, 7, kKnown);
  log_.Mark(SessionState::kAborting, SessionState::kJoining, 7, kKnown + 0.003);
  log_.Mark(SessionState::kJoining, SessionState::kBuilding, 8, kKnown + 1);
  log_.Mark(SessionState::kBuilding, SessionState::kReady, 8, kKnown + 1.25);
  EXPECT_THAT(log_.TakeEnded(), IsEmpty()) << "not over yet";
  log_.Mark(SessionState::kReady, SessionState::kRunning, 8, kKnown + 1.5);
  EXPECT_EQ(Ended(),
            R"({"schema": 1, "outcome": "running", "generation": 7, "next_generation": 8, )"
            R"("life": 2, "round": 5, "reporter": {"rank": 1, "host": "a", "pid": 60}, )"
            R"("cause": {"code": "RANK_LOST", "text": "rank 2 (host b, pid 70) was killed"}, )"
            R"("accused": {"rank": 2, "host": "b", "pid": 70}, )"
            R"("evidence": {"by": "fence", "since": 1700000000.000, )"
            R"("operation": {"group": "world", "seq": 9}}, "known": 1700000000.250, )"
            R"("phases_ms": {"known": 0, "aborted": 3, "joined": 1000, "rebuilt": 1250, )"
            R"("running": 1500, "ended": 1500}})");
  EXPECT_FALSE(log_.open());
  log_.Mark(SessionState::kRunning, SessionState::kClosed, 8, kKnown + 2);
  EXPECT_THAT(log_.TakeEnded(), IsEmpty()) << "once";
}

TEST_F(IncidentLogTest, OtherEnds_SayWhatHasNotHappened) {
  const std::pair<SessionState, const char*> ends[] = {{SessionState::kFailed, "failed"},
                                                       {SessionState::kClosed, "closed"}};
  for (const auto& [state, outcome] : ends) {
    Begin(Lost());
    log_.Mark(SessionState::kRunning, SessionState::kAborting, 7, kKnown);
    log_.Mark(SessionState::kAborting, state, 7, kKnown + 0.5);
    const std::string line = Ended();
    EXPECT_THAT(line, HasSubstr(std::string(R"("outcome": ")") + outcome + "\""));
    EXPECT_THAT(line, HasSubstr(R"("next_generation": null)"));
    EXPECT_THAT(line, HasSubstr(R"("phases_ms": {"known": 0, "aborted": null, "joined": null, )"
                                R"("rebuilt": null, "running": null, "ended": 500})"));
    log_.Mark(state, SessionState::kClosed, 7, kKnown + 1);
    EXPECT_THAT(log_.TakeEnded(), IsEmpty()) << "once";
  }
}

TEST_F(IncidentLogTest, NextFence_EndsTheIncidentBeforeIt) {
  Begin(Lost());
  log_.Mark(SessionState::kRunning, SessionState::kAborting, 7, kKnown);
  log_.Begin(view_, 8, IncidentSource::kView, Lost(), kKnown + 0.1);
  const std::string first = Ended();
  EXPECT_THAT(first, HasSubstr(R"("outcome": "fenced", "generation": 7)"));
  EXPECT_THAT(first, HasSubstr(R"("ended": 100})"));
  EXPECT_TRUE(log_.open());
  log_.Mark(SessionState::kAborting, SessionState::kClosed, 8, kKnown + 1.1);
  const std::string second = Ended();
  EXPECT_THAT(second, HasSubstr(R"("outcome": "closed", "generation": 8)"));
  EXPECT_THAT(second, HasSubstr(R"("by": "view")"));
}

TEST_F(IncidentLogTest, UnknownFacts_AreNull) {
  Begin(Status(StatusCode::kCommFailed, "a link is broken"));
  log_.Mark(SessionState::kRunning, SessionState::kClosed, 7, kKnown);
  const std::string line = Ended();
  EXPECT_THAT(line, HasSubstr(R"("accused": null)"));
  EXPECT_THAT(line, HasSubstr(R"("since": null, "operation": null)"));
}

// The texts of launchers and of other hosts are in it.
TEST_F(IncidentLogTest, AnyText_LeavesTheLineOneValidObject) {
  Begin(Status(StatusCode::kRankLost, "said \"no\"\n\xff\\"));
  log_.Mark(SessionState::kRunning, SessionState::kClosed, 7, kKnown);
  EXPECT_THAT(Ended(), HasSubstr(R"("text": "said \"no\"\\x0a\\xff\\\\")"));
}

TEST_F(IncidentLogTest, NoIncident_NoLine) {
  EXPECT_EQ(log_.Mark(SessionState::kInit, SessionState::kJoining, 0, kKnown), "");
  EXPECT_EQ(log_.Mark(SessionState::kRunning, SessionState::kClosed, 1, kKnown), "");
  EXPECT_THAT(log_.TakeEnded(), IsEmpty());
}

}  // namespace
}  // namespace resilient::recovery
