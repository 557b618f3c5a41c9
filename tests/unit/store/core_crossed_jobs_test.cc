// Goal: ranks of one job that was given two names are told where the others are; ranks of jobs that
// have nothing to do with each other are told nothing. Method: the server core by hand, in virtual
// time.
#include <gmock/gmock.h>

#include "tests/unit/store/core_membership_fixture.h"

namespace resilient::store {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class CrossedJobs : public CoreMembership {
 protected:
  // A process joins `job` as that rank.
  ConnectionId Join(const std::string& job, int process, int rank, int size) {
    Hello hello = HelloOf(process, Role::kControl);
    hello.job = job;
    lines_.push_back(Open(hello));
    JoinRequest join = JoinOf(rank, size);
    join.join_timeout = 10 * kSecond;
    Send(lines_.back(), JoinOp{join});
    return lines_.back();
  }
  void Wait(int seconds) { Advance(seconds * kSecond, lines_); }
  // What a rank has been told since the last call.
  std::string Told(ConnectionId control) {
    const auto late = Take<LateEvent>(control);
    if (!late) return "";
    EXPECT_EQ(late->notice.generation, 0u);
    return late->notice.elsewhere;
  }
  std::string Refusal(ConnectionId control) {
    const auto refused = Take<JoinRefusedEvent>(control);
    return refused ? refused->why.message() : "not refused";
  }

 private:
  std::vector<ConnectionId> lines_;
};

TEST_F(CrossedJobs, BothSidesAreTold_Once_WithinFiveSecondsOfTheSecond) {
  const ConnectionId one = Join("a", 0, 0, 2);
  Wait(5);
  EXPECT_THAT(Told(one), IsEmpty());
  const ConnectionId other = Join("b", 1, 1, 2);
  Wait(4);
  EXPECT_THAT(Told(one), AllOf(HasSubstr("job 'b'"), HasSubstr("has rank 1 (host h1, pid 101)"),
                               HasSubstr("this job, 'a'"), HasSubstr("RESILIENT_JOB")));
  EXPECT_THAT(Told(other), AllOf(HasSubstr("job 'a'"), HasSubstr("has rank 0 (host h0, pid 100)")));
  Wait(3);
  EXPECT_THAT(Refusal(one), AllOf(HasSubstr("missing ranks 1"), HasSubstr("job 'b'")));
  EXPECT_THAT(Told(other), IsEmpty());
}

TEST_F(CrossedJobs, JobsThatHaveTheSameRank_AreTwo) {
  const ConnectionId one = Join("a", 0, 0, 3);
  const ConnectionId other = Join("b", 1, 0, 3);
  Join("b", 2, 1, 3);
  Wait(5);
  EXPECT_THAT(Told(one), IsEmpty());
  EXPECT_THAT(Told(other), IsEmpty());
}

TEST_F(CrossedJobs, JobsOfDifferentSizes_AreTwo) {
  const ConnectionId one = Join("a", 0, 0, 2);
  Join("b", 1, 1, 3);
  Wait(5);
  EXPECT_THAT(Told(one), IsEmpty());
}

TEST_F(CrossedJobs, WhenTheOtherHasAllItsRanks_ItWasAnotherJob) {
  const ConnectionId one = Join("a", 0, 0, 2);
  Join("b", 1, 1, 2);
  Wait(4);
  EXPECT_THAT(Told(one), Not(IsEmpty()));
  Join("b", 2, 0, 2);
  Wait(7);
  EXPECT_THAT(Refusal(one), AllOf(HasSubstr("missing ranks 1"), Not(HasSubstr("job 'b'"))));
}

}  // namespace
}  // namespace resilient::store
