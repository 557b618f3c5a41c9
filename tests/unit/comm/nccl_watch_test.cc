// Goal: ranks know from what they tell each other who has not entered an operation of a device, and
// who is in another one; and before NCCL is connected, in what they differ.
// Method: pure; two or three ranks hear each other's words.

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/comm/nccl_identity.h"
#include "runtime/comm/nccl_meeting.h"
#include "runtime/comm/nccl_watch.h"

namespace resilient {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

GroupSpec SpecOf(int rank, int size) {
  GroupSpec spec;
  spec.name = "world/cuda";
  spec.generation = 3;
  spec.rank = rank;
  for (int r = 0; r < size; ++r) {
    spec.members.push_back(
        {.global_rank = r, .endpoint = "", .host = "node" + std::to_string(r), .pid = 100 + r});
  }
  return spec;
}

Operation Collective(std::size_t count, ReduceOp reduce = ReduceOp::kSum) {
  Operation op;
  op.kind = OpKind::kAllReduce;
  op.dtype = DataType::kFloat32;
  op.reduce = reduce;
  op.count = count;
  return op;
}

constexpr NcclWatch::Stage kBegun = NcclWatch::Stage::kBegun;
constexpr NcclWatch::Stage kSubmitted = NcclWatch::Stage::kSubmitted;

Operation Message(OpKind kind, int peer) {
  Operation op;
  op.kind = kind;
  op.peer = peer;
  op.count = 4;
  return op;
}

class NcclWatchTest : public ::testing::Test {
 protected:
  // What `from` tells `to`, over the wire.
  static Status Pass(const NcclWatch& from, int rank, NcclWatch& to, int to_rank,
                     const Operation* head = nullptr, std::uint64_t seq = 0,
                     const Operation* own_head = nullptr, std::uint64_t own_seq = 0) {
    const auto told = DecodeProgress(EncodeProgress(from.Tell(to_rank, head, seq, nullptr)));
    EXPECT_TRUE(told.has_value());
    return to.Hear(rank, *told, own_head, own_seq);
  }
  // The same of a replay that it is in.
  static void PassReplay(const NcclWatch& from, int rank, NcclWatch& to, int to_rank,
                         const ReplayPlace& place) {
    const auto told = DecodeProgress(EncodeProgress(from.Tell(to_rank, nullptr, 0, &place)));
    ASSERT_TRUE(told.has_value());
    EXPECT_TRUE(to.Hear(rank, *told, nullptr, 0).ok());
  }

  const GroupSpec specs_[3] = {SpecOf(0, 3), SpecOf(1, 3), SpecOf(2, 3)};
  NcclWatch zero_{specs_[0]};
  NcclWatch one_{specs_[1]};
  NcclWatch two_{specs_[2]};
};

TEST_F(NcclWatchTest, ReplayOfACollective_AsksAll) {
  const ReplayPlace place{.collective = 7, .messages = {}};
  EXPECT_THAT(zero_.NotInReplay(place), ElementsAre(1, 2)) << "nobody has been heard";
  PassReplay(one_, 1, zero_, 0, place);
  PassReplay(two_, 2, zero_, 0, {.collective = 8, .messages = {}});
  EXPECT_THAT(zero_.NotInReplay(place), ElementsAre(2));
  zero_.OnReplay();
  EXPECT_THAT(zero_.NotInReplay(place), ElementsAre(1, 2));
}

// A batch of one may be several operations of the other.
TEST_F(NcclWatchTest, ReplayOfMessages_AsksTheirPeersForTheSameOnes) {
  const ReplayPlace batch{.messages = {{1, {.sends = {3, 4}, .recvs = {}}}}};
  EXPECT_THAT(zero_.NotInReplay(batch), ElementsAre(1)) << "and not rank 2";
  PassReplay(one_, 1, zero_, 0, {.messages = {{0, {.sends = {3, 4}, .recvs = {1, 2}}}}});
  EXPECT_THAT(zero_.NotInReplay(batch), ElementsAre(1)) << "those before them";
  PassReplay(one_, 1, zero_, 0, {.messages = {{2, {.sends = {}, .recvs = {3, 4}}}}});
  EXPECT_THAT(zero_.NotInReplay(batch), ElementsAre(1)) << "those of another rank";
  PassReplay(one_, 1, zero_, 0, {.messages = {{0, {.sends = {}, .recvs = {4, 4}}}}});
  EXPECT_THAT(zero_.NotInReplay(batch), IsEmpty());
}

TEST_F(NcclWatchTest, Collective_WhoHasNotEntered_IsMissing) {
  const Operation op = Collective(4);
  const std::uint64_t number = zero_.OnEntered(op, 1);
  EXPECT_THAT(zero_.Missing(op, number, kBegun), ElementsAre(1, 2)) << "nobody has been heard";
  one_.OnEntered(op, 1);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  EXPECT_TRUE(Pass(two_, 2, zero_, 0).ok());
  EXPECT_THAT(zero_.Missing(op, number, kBegun), ElementsAre(2));
  two_.OnEntered(op, 1);
  EXPECT_TRUE(Pass(two_, 2, zero_, 0).ok());
  EXPECT_THAT(zero_.Missing(op, number, kBegun), IsEmpty());
}

// Its program has done its part: it is the device that is waited for.
TEST_F(NcclWatchTest, WhoHasSubmittedIt_IsNotMissing_ButItsDeviceHasNotBegun) {
  const Operation op = Collective(4);
  const std::uint64_t number = zero_.OnEntered(op, 1);
  one_.OnSubmitted(op, 1);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  EXPECT_THAT(zero_.Missing(op, number, kSubmitted), ElementsAre(2));
  EXPECT_THAT(zero_.Missing(op, number, kBegun), ElementsAre(1, 2));
  EXPECT_THAT(zero_.NotBegun(op, number), ElementsAre(1));
  const Operation recv = Message(OpKind::kRecv, 1);
  const std::uint64_t message = zero_.OnEntered(recv, 1);
  one_.OnSubmitted(Message(OpKind::kSend, 0), 1);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  EXPECT_THAT(zero_.Missing(recv, message, kSubmitted), IsEmpty());
  EXPECT_THAT(zero_.Missing(recv, message, kBegun), ElementsAre(1));
  EXPECT_THAT(zero_.NotBegun(recv, message), ElementsAre(1));
  one_.OnEntered(op, 1);
  one_.OnEntered(Message(OpKind::kSend, 0), 1);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  EXPECT_THAT(zero_.NotBegun(op, number), IsEmpty());
  EXPECT_THAT(zero_.NotBegun(recv, message), IsEmpty());
}

// Its own account: what it was given, and what of it its device has begun.
TEST_F(NcclWatchTest, Progress_TellsTheDeviceFromTheProgram) {
  one_.OnSubmitted(Collective(4), 1);
  one_.OnSubmitted(Message(OpKind::kSend, 0), 1);
  one_.OnSubmitted(Message(OpKind::kSend, 0), 2);
  one_.OnSubmitted(Message(OpKind::kRecv, 0), 1);
  one_.OnEntered(Message(OpKind::kSend, 0), 1);
  const GroupProgress progress = one_.Progress({});
  EXPECT_EQ(progress.entered, 1u);
  EXPECT_EQ(one_.begun(), 0u);
  ASSERT_EQ(progress.peers.size(), 1u);
  EXPECT_EQ(progress.peers[0].sent, 2u);
  EXPECT_EQ(progress.peers[0].sends_on_device, 1u);
  EXPECT_EQ(progress.peers[0].recvs_given, 1u);
  EXPECT_EQ(progress.peers[0].recvs_on_device, 0u);
}

TEST_F(NcclWatchTest, WhoHasDoneItsPart_MayLeave) {
  const Operation op = Collective(4);
  zero_.OnEntered(op, 1);
  one_.OnEntered(op, 1);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  EXPECT_TRUE(zero_.GoneBefore(1, op, 1)) << "it had begun, and has not said that it ended";
  one_.OnEnded(1);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  EXPECT_FALSE(zero_.GoneBefore(1, op, 1));
  EXPECT_TRUE(zero_.GoneBefore(2, op, 1)) << "nothing was heard of it";
  EXPECT_FALSE(zero_.GoneBefore(2, Message(OpKind::kRecv, 1), 1)) << "it is not needed";
  EXPECT_TRUE(zero_.GoneBefore(1, Message(OpKind::kRecv, 1), 1));
}

TEST_F(NcclWatchTest, Messages_AreCountedForEachPair) {
  const Operation recv = Message(OpKind::kRecv, 1);
  EXPECT_EQ(zero_.OnEntered(recv, 1), 1u);
  EXPECT_EQ(zero_.OnEntered(recv, 2), 2u);
  one_.OnEntered(Message(OpKind::kSend, 2), 1);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  EXPECT_THAT(zero_.Missing(recv, 1, kBegun), ElementsAre(1)) << "that one was for another rank";
  one_.OnEntered(Message(OpKind::kSend, 0), 2);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  EXPECT_THAT(zero_.Missing(recv, 1, kBegun), IsEmpty());
  EXPECT_THAT(zero_.Missing(recv, 2, kBegun), ElementsAre(1));
  const Operation send = Message(OpKind::kSend, 0);
  EXPECT_TRUE(Pass(zero_, 0, one_, 1).ok());
  EXPECT_THAT(one_.Missing(send, 1, kBegun), IsEmpty()) << "the receiver has entered two";
}

TEST_F(NcclWatchTest, TwoThatWaitInDifferentCollectives_NameBoth) {
  Operation mine = Collective(4);
  mine.call_site = "train.py:7";
  Operation theirs = Collective(4, ReduceOp::kMax);
  theirs.call_site = std::string(300, 'x');
  zero_.OnEntered(mine, 1);
  one_.OnEntered(theirs, 1);
  const Status status = Pass(one_, 1, zero_, 0, &theirs, 1, &mine, 1);
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_EQ(status.detail().rank, 1);
  EXPECT_THAT(
      status.message(),
      AllOf(HasSubstr("all_reduce(float32[4], sum)"), HasSubstr("train.py:7"),
            HasSubstr("all_reduce(float32[4], max)"), HasSubstr("rank 1 (node1, pid 101)")));
}

TEST_F(NcclWatchTest, CollectivesThatEndedApart_AreFoundByTheirSum) {
  for (std::uint64_t seq = 1; seq <= 3; ++seq) {
    zero_.OnEntered(Collective(seq), seq);
    one_.OnEntered(Collective(seq == 2 ? 7 : seq), seq);
    if (seq != 2) continue;
    one_.OnEnded(2);
    EXPECT_TRUE(one_.HasNews());
    one_.NoteTold();
    EXPECT_FALSE(one_.HasNews());
    EXPECT_EQ(Pass(one_, 1, zero_, 0).code(), StatusCode::kMismatch);
  }
  one_.OnEnded(3);
  const Status status = Pass(one_, 1, zero_, 0);
  EXPECT_EQ(status.code(), StatusCode::kMismatch) << "what is behind a difference differs too";
  EXPECT_THAT(status.message(), HasSubstr("at #3 or before it"));
}

TEST_F(NcclWatchTest, WhoIsAhead_IsComparedWhenThisRankGetsThere) {
  for (std::uint64_t seq = 1; seq <= 5; ++seq) one_.OnEntered(Collective(seq == 4 ? 9 : 1), seq);
  one_.OnEnded(5);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  for (std::uint64_t seq = 1; seq <= 4; ++seq) {
    zero_.OnEntered(Collective(1), seq);
    EXPECT_TRUE(zero_.Compare().ok());
  }
  zero_.OnEntered(Collective(1), 5);
  EXPECT_EQ(zero_.Compare().code(), StatusCode::kMismatch);
  EXPECT_TRUE(zero_.Compare().ok()) << "told once";
}

// The other one has gone on, and says what it was in where this one waits.
TEST_F(NcclWatchTest, WhoHasGoneOn_AnswersAboutTheCollectiveThatWaits) {
  const Operation waits = Collective(2);
  zero_.OnEntered(Collective(1), 1);
  zero_.OnEntered(waits, 2);
  for (std::uint64_t seq = 1; seq <= 3; ++seq) one_.OnEntered(Collective(1), seq);
  EXPECT_TRUE(Pass(zero_, 0, one_, 1, &waits, 2).ok());
  EXPECT_EQ(Pass(one_, 1, zero_, 0, nullptr, 0, &waits, 2).code(), StatusCode::kMismatch);
}

TEST_F(NcclWatchTest, SumsThatAreTooFarBack_AreNotCompared) {
  one_.OnEntered(Collective(5), 1);
  one_.OnEnded(1);
  for (std::uint64_t seq = 1; seq <= NcclWatch::kSumsMax + 1; ++seq)
    zero_.OnEntered(Collective(1), seq);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
}

TEST_F(NcclWatchTest, PartsOfEqualRanks_Count) {
  Operation gather;
  gather.kind = OpKind::kAllGather;
  gather.count = 2;
  gather.outputs = {{.data = nullptr, .count = 2}, {.data = nullptr, .count = 3}};
  Operation other = gather;
  other.count = 3;  // Its own part: no difference.
  zero_.OnEntered(gather, 1);
  one_.OnEntered(other, 1);
  one_.OnEnded(1);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  other.outputs.back().count = 4;
  two_.OnEntered(other, 1);
  two_.OnEnded(1);
  EXPECT_EQ(Pass(two_, 2, zero_, 0).code(), StatusCode::kMismatch);
}

TEST(NcclProgressTest, Rubbish_IsNotDecoded) {
  EXPECT_FALSE(DecodeProgress(""));
  EXPECT_FALSE(DecodeProgress(std::string(kProgressBytes, '\xff')));
  EXPECT_FALSE(DecodeProgress(std::string(kProgressBytes + 1, '\0')));
}

NcclIdentity IdentityOf(int rank) {
  NcclIdentity identity;
  identity.id.bytes[5] = 'x';
  identity.nccl_version = 23007;
  identity.boot_id = "boot";
  identity.settings = "NCCL_ALGO=Ring NCCL_PROTO=Simple";
  identity.options = "max_ctas=16";
  identity.device = {.uuid = "GPU-" + std::to_string(rank),
                     .host = "",
                     .ordinal = rank,
                     .visible = 3,
                     .visible_devices = "0,1,2",
                     .local_rank = rank};
  return identity;
}

TEST(NcclIdentityTest, Encoded_ComesBack) {
  const NcclIdentity identity = IdentityOf(2);
  const std::string text = EncodeIdentity(identity);
  EXPECT_LE(text.size(), kMeetingBytes);
  const auto back = DecodeIdentity(text);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->id.bytes, identity.id.bytes);
  EXPECT_EQ(back->nccl_version, identity.nccl_version);
  EXPECT_EQ(back->boot_id, identity.boot_id);
  EXPECT_EQ(back->settings, identity.settings);
  EXPECT_EQ(back->options, identity.options);
  EXPECT_EQ(back->device, identity.device);
  EXPECT_FALSE(DecodeIdentity(""));
  EXPECT_FALSE(DecodeIdentity(text.substr(0, text.size() - 1)));
}

TEST(NcclIdentityTest, LongTexts_FitAndStillDiffer) {
  NcclIdentity identity = IdentityOf(0);
  for (std::string* text :
       {&identity.boot_id, &identity.settings, &identity.options, &identity.device.uuid,
        &identity.device.host, &identity.device.visible_devices})
    *text = std::string(1000, 'x');
  const std::string text = EncodeIdentity(identity);
  EXPECT_LE(text.size(), kMeetingBytes);
  ASSERT_TRUE(DecodeIdentity(text));
  identity.settings.back() = 'y';
  EXPECT_NE(DecodeIdentity(EncodeIdentity(identity))->settings, DecodeIdentity(text)->settings);
}

TEST(NcclIdentityTest, Ranks_ThatFitTogether) {
  EXPECT_TRUE(CompareIdentities(SpecOf(0, 3), {IdentityOf(0), IdentityOf(1), IdentityOf(2)}).ok());
  NcclIdentity elsewhere = IdentityOf(0);
  elsewhere.boot_id = "another host";
  EXPECT_TRUE(CompareIdentities(SpecOf(0, 2), {IdentityOf(0), elsewhere}).ok());
  NcclIdentity unknown = IdentityOf(0);
  unknown.device.uuid.clear();
  EXPECT_TRUE(CompareIdentities(SpecOf(0, 2), {unknown, unknown}).ok()) << "no claim";
}

TEST(NcclIdentityTest, Ranks_ThatDiffer_AreToldInOneText) {
  NcclIdentity other = IdentityOf(1);
  other.nccl_version = 22809;
  for (const int rank : {0, 1}) {
    const Status status = CompareIdentities(SpecOf(rank, 3), {IdentityOf(0), other, IdentityOf(2)});
    EXPECT_EQ(status.code(), StatusCode::kSetting);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("different versions of NCCL"),
                                        HasSubstr("rank 1 (node1, pid 101) 2.28.9"),
                                        HasSubstr("rank 0 (node0, pid 100) and 1 more 2.30.7"),
                                        HasSubstr("RESILIENT_NCCL_LIBRARY")));
  }
  other = IdentityOf(1);
  other.settings.clear();
  EXPECT_THAT(CompareIdentities(SpecOf(0, 2), {IdentityOf(0), other}).message(),
              AllOf(HasSubstr("different settings of NCCL"), HasSubstr("pid 101) none"),
                    HasSubstr("NCCL_ALGO=Ring NCCL_PROTO=Simple")));
  other = IdentityOf(1);
  other.device.uuid = "gpu-0";
  const Status shared = CompareIdentities(SpecOf(0, 2), {IdentityOf(0), other});
  EXPECT_TRUE(shared.ok()) << "another prefix is another text: " << shared.ToString();
  other.device.uuid = "GPU-0";
  EXPECT_EQ(CompareIdentities(SpecOf(0, 2), {IdentityOf(0), other}).code(),
            StatusCode::kDuplicateDevice);
}

TEST(NcclIdentityTest, Settings_AreThoseThatMustBeEqual) {
  EXPECT_EQ(NcclSettings({{"NCCL_PROTO", "Simple"},
                          {"PATH", "/bin"},
                          {"NCCL_DEBUG", "INFO"},
                          {"NCCL_SOCKET_IFNAME", "eth0"},
                          {"NCCL_ALGO", "Ring\nTree"}}),
            "NCCL_ALGO=Ring Tree NCCL_PROTO=Simple");
  EXPECT_EQ(NcclSettings({}), "");
}

TEST_F(NcclWatchTest, PeerHasAllOfOurs_WhenItHasEndedAndBegunToReceive) {
  EXPECT_TRUE(zero_.HasAllOfOurs(1)) << "nothing was sent";
  zero_.OnEntered(Collective(4), 1);
  zero_.OnEnded(1);
  EXPECT_FALSE(zero_.HasAllOfOurs(1)) << "it has told nothing";
  one_.OnEntered(Collective(4), 1);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  EXPECT_FALSE(zero_.HasAllOfOurs(1)) << "it is in the midst of it";
  one_.OnEnded(1);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  EXPECT_TRUE(zero_.HasAllOfOurs(1));
  zero_.OnEntered(Message(OpKind::kSend, 1), 1);
  EXPECT_FALSE(zero_.HasAllOfOurs(1));
  one_.OnEntered(Message(OpKind::kRecv, 0), 1);
  EXPECT_TRUE(Pass(one_, 1, zero_, 0).ok());
  EXPECT_TRUE(zero_.HasAllOfOurs(1));
}

}  // namespace
}  // namespace resilient
