// Goal: an exchange of survivors ends for all of them with the same values once everyone has come
// who is still a member of that generation, whatever happens to it. Method: CoreFixture.
#include <gmock/gmock.h>

#include "tests/unit/store/core_membership_fixture.h"

namespace resilient::store {
namespace {

using ::testing::ElementsAre;

class CoreSurvivors : public CoreMembership {
 protected:
  static constexpr std::uint64_t kSeq = 1;

  void Begin(int size, Duration seat_wait = 60 * kSecond) {
    control_ = Run(size, seat_wait);
    for (int i = 0; i < size; ++i) requests_.push_back(OpenRequest(i));
    size_ = size;
  }
  // Rank `rank` gives its value for `generation`.
  void Vote(int rank, std::uint64_t generation = 1, std::uint64_t seq = kSeq) {
    ExchangeOp op{"agree/" + std::to_string(generation), rank, size_, "v" + std::to_string(rank)};
    op.survivors_of = generation;
    Send(requests_[At(rank)], std::move(op), seq, 1);
  }
  std::vector<std::string> Answer(int rank, std::uint64_t seq = kSeq) {
    const std::optional<Reply> reply = TakeReply(requests_[At(rank)], seq);
    if (!reply) return {"none"};
    if (!reply->status.ok()) return {std::string(CodeName(reply->status.code()))};
    return reply->shared_values ? reply->shared_values->values : reply->values;
  }

  int size_ = 0;
  std::vector<ConnectionId> control_;
  std::vector<ConnectionId> requests_;
};

TEST_F(CoreSurvivors, AllAreThere_AllGetAll) {
  Begin(3);
  Vote(0);
  Vote(2);
  EXPECT_THAT(Answer(0), ElementsAre("none"));
  Vote(1);
  for (const int rank : {0, 1, 2}) EXPECT_THAT(Answer(rank), ElementsAre("v0", "v1", "v2"));
}

TEST_F(CoreSurvivors, LossOfOneThatHasNotCome_EndsIt) {
  Begin(3);
  Vote(0);
  Vote(2);
  Kill(1);
  EXPECT_TRUE(Take<Fence>(control_[0]));
  for (const int rank : {0, 2}) EXPECT_THAT(Answer(rank), ElementsAre("v0", "", "v2"));
}

TEST_F(CoreSurvivors, FenceAlone_EndsNothing) {
  Begin(3);
  Vote(0);
  Kill(2);
  EXPECT_THAT(Answer(0), ElementsAre("none"));
  Vote(1);
  for (const int rank : {0, 1}) EXPECT_THAT(Answer(rank), ElementsAre("v0", "v1", ""));
}

TEST_F(CoreSurvivors, ValueOfOneThatIsLostBeforeTheEnd_DoesNotCount) {
  Begin(3);
  Vote(2);
  Vote(0);
  Kill(2);
  Vote(1);
  for (const int rank : {0, 1}) EXPECT_THAT(Answer(rank), ElementsAre("v0", "v1", ""));
}

TEST_F(CoreSurvivors, OneThatLeaves_IsNotWaitedFor) {
  Begin(3);
  Vote(0);
  Vote(1);
  Send(control_[2], LeaveOp{});
  for (const int rank : {0, 1}) EXPECT_THAT(Answer(rank), ElementsAre("v0", "v1", ""));
  EXPECT_FALSE(Take<Fence>(control_[0]));
}

TEST_F(CoreSurvivors, NewcomersToTheNextGeneration_HaveNoSay) {
  Begin(3);
  Kill(1);
  const ConnectionId newcomer = OpenControl(7);
  Send(newcomer, JoinOp{JoinOf(1, 3)});
  for (const int rank : {0, 2}) Send(control_[At(rank)], JoinOp{JoinOf(rank, 3)});
  EXPECT_EQ(BecomeReady({control_[0], newcomer, control_[2]}), 2U);
  Vote(0);
  EXPECT_THAT(Answer(0), ElementsAre("none"));
  Vote(2);
  for (const int rank : {0, 2}) EXPECT_THAT(Answer(rank), ElementsAre("v0", "", "v2"));
}

TEST_F(CoreSurvivors, OneThatHasGoneOn_IsNotWaitedFor) {
  Begin(2);
  Report report;
  report.kind = ReportKind::kCommFailed;
  report.generation = 1;
  report.status = Status(StatusCode::kCommFailed, "revoked");
  Send(control_[0], ReportOp{report});
  for (const int rank : {0, 1}) Send(control_[At(rank)], JoinOp{JoinOf(rank, 2)});
  EXPECT_EQ(BecomeReady(control_), 2U);
  Vote(0);
  Send(control_[1], ReadyOp{2});
  EXPECT_THAT(Answer(0), ElementsAre("none"));
  EXPECT_TRUE(Ask(control_[1], ReadyOp{2, true}).status.ok());
  EXPECT_THAT(Answer(0), ElementsAre("v0", ""));
  // In the generation that it has gone on to it is a member like the others.
  Vote(0, 2, 2);
  EXPECT_THAT(Answer(0, 2), ElementsAre("none"));
  Vote(1, 2, 2);
  for (const int rank : {0, 1}) EXPECT_THAT(Answer(rank, 2), ElementsAre("v0", "v1"));
}

TEST_F(CoreSurvivors, AfterTheWorldIsSmaller_TheNumbersAreThoseOfBefore) {
  Begin(4);
  Kill(0);
  for (const int rank : {1, 2, 3}) {
    JoinRequest join = JoinOf(rank, 4);
    join.min_world = 1;
    Send(control_[At(rank)], JoinOp{join});
  }
  ASSERT_TRUE(Take<View>(control_[1]));
  Vote(3);
  Vote(1);
  EXPECT_THAT(Answer(3), ElementsAre("none"));
  Vote(2);
  for (const int rank : {1, 2, 3}) EXPECT_THAT(Answer(rank), ElementsAre("", "v1", "v2", "v3"));
}

TEST_F(CoreSurvivors, AfterARestartOfTheServer_ItIsTheSame) {
  Begin(3);
  Vote(0);
  Kill(1);
  Recover();
  for (const int rank : {0, 2}) requests_[At(rank)] = OpenRequest(rank);
  Vote(0);
  EXPECT_THAT(Answer(0), ElementsAre("none"));
  Vote(2);
  for (const int rank : {0, 2}) EXPECT_THAT(Answer(rank), ElementsAre("v0", "", "v2"));
}

TEST_F(CoreSurvivors, LostCaller_IsToldSo) {
  Begin(2);
  Vote(0);
  Kill(0);
  EXPECT_THAT(Answer(0), ElementsAre("STALE_GENERATION"));
  Vote(1);
  EXPECT_THAT(Answer(1), ElementsAre("", "v1"));
}

TEST_F(CoreSurvivors, OutsideOfARound_IsRefused) {
  ExchangeOp op{"agree", 0, 2, "v"};
  op.survivors_of = 1;
  EXPECT_EQ(Ask(OpenRequest(0), std::move(op)).status.code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace resilient::store
