// Goal: two ranks on one GPU are refused at the door, all of their world at once, with what to do
// about it; layouts that are legal are let in. Method: CoreMembership; ranks claim devices by hand.
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tests/unit/store/core_membership_fixture.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class CoreDevices : public CoreMembership {
 protected:
  static constexpr Duration kSeatWait = std::chrono::seconds(10);

  static DeviceClaim Claim(std::string uuid, int ordinal, int visible, int local_rank) {
    DeviceClaim claim;
    claim.uuid = std::move(uuid);
    claim.ordinal = ordinal;
    claim.visible = visible;
    claim.local_rank = local_rank;
    return claim;
  }
  static JoinOp JoinWith(int rank, int size, std::optional<DeviceClaim> device,
                         Duration seat_wait = {}) {
    JoinOp join{JoinOf(rank, size, seat_wait)};
    join.request.device = std::move(device);
    return join;
  }
  // Processes 0, 1, ... join as the ranks of a world.
  std::vector<ConnectionId> JoinAll(const std::vector<std::optional<DeviceClaim>>& devices) {
    const int size = static_cast<int>(devices.size());
    std::vector<ConnectionId> control;
    control.reserve(devices.size());
    for (int i = 0; i < size; ++i) control.push_back(OpenControl(i));
    for (int i = 0; i < size; ++i) Send(control[At(i)], JoinWith(i, size, devices[At(i)]));
    return control;
  }
  // Ranks 0 on GPU-a and 1 on GPU-b run, rank 1 is killed, and rank 0 joins again: who it is.
  ConnectionId LoseRankOneOfTwo() {
    const std::vector<ConnectionId> control{OpenControl(0), OpenControl(1)};
    Send(control[0], JoinWith(0, 2, Claim("GPU-a", 0, 2, 0), kSeatWait));
    Send(control[1], JoinWith(1, 2, Claim("GPU-b", 1, 2, 1), kSeatWait));
    BecomeReady(control);
    Kill(1);
    EXPECT_TRUE(Take<Fence>(control[0]));
    Send(control[0], JoinWith(0, 2, Claim("GPU-a", 0, 2, 0), kSeatWait));
    return control[0];
  }
  void ExpectRefused(const std::vector<ConnectionId>& control) {
    EXPECT_THAT(RefusalOfAll(control).message(), HasSubstr("GPU"));
  }
  // The refusal, which is the same on all.
  Status RefusalOfAll(const std::vector<ConnectionId>& control) {
    Status why;
    for (const ConnectionId connection : control) {
      const auto refused = Take<JoinRefusedEvent>(connection);
      EXPECT_TRUE(refused);
      EXPECT_FALSE(Take<View>(connection));
      if (!refused) continue;
      EXPECT_TRUE(why.ok() || why.message() == refused->why.message());
      why = refused->why;
    }
    EXPECT_EQ(why.code(), StatusCode::kDuplicateDevice);
    return why;
  }
};

TEST_F(CoreDevices, MoreProcessesThanGpus_RefusesAllAndSaysSo) {
  const auto control = JoinAll({Claim("GPU-a", 0, 1, 0), Claim("GPU-a", 0, 1, 1),
                                Claim("GPU-a", 0, 1, 2), Claim("GPU-a", 0, 1, 3)});
  const Status why = RefusalOfAll(control);
  EXPECT_EQ(
      why.message(),
      "ranks 0, 1, 2, 3 on host h0 all use GPU 0 (UUID GPU-a): 4 processes, 1 visible GPU; "
      "LOCAL_RANK 0, 1, 2, 3; CUDA_VISIBLE_DEVICES unset. Fix: start no more than 1 on this host "
      "(torchrun --nproc_per_node=1, resilient-run --nproc 1); "
      "RESILIENT_ALLOW_SHARED_GPU=1 lets ranks share one");
  EXPECT_EQ(why.detail().rank, 0);
  EXPECT_EQ(why.detail().host, "h0");
  EXPECT_EQ(why.detail().pid, 100);
}

TEST_F(CoreDevices, EnoughGpus_NamesTheRankThatDidNotChooseItsOwn) {
  const Status why = RefusalOfAll(JoinAll({Claim("GPU-a", 0, 2, 0), Claim("GPU-a", 0, 2, 1)}));
  EXPECT_THAT(why.message(), HasSubstr("ranks 0, 1 on host h0 both use GPU 0 (UUID GPU-a): 2 "
                                       "processes, 2 visible GPUs"));
  EXPECT_THAT(why.message(), HasSubstr("rank 1 has LOCAL_RANK=1 but its device is cuda:0: call "
                                       "torch.cuda.set_device(LOCAL_RANK)"));
  EXPECT_THAT(why.message(), Not(HasSubstr("nproc")));
}

TEST_F(CoreDevices, OneVisibleDeviceForAll_SpeaksOfTheVariable) {
  DeviceClaim claim = Claim("GPU-a", 0, 1, 0);
  claim.visible_devices = "3";
  const Status why = RefusalOfAll(JoinAll({claim, claim}));
  EXPECT_THAT(why.message(), HasSubstr("CUDA_VISIBLE_DEVICES 3"));
  EXPECT_THAT(why.message(), HasSubstr("or show each process a GPU of its own"));
}

TEST_F(CoreDevices, SameLocalRank_AsksForOneEach) {
  const Status why = RefusalOfAll(JoinAll({Claim("GPU-a", 0, 8, -1), Claim("GPU-a", 0, 8, -1)}));
  EXPECT_THAT(why.message(), HasSubstr("LOCAL_RANK unset, unset"));
  EXPECT_THAT(why.message(), HasSubstr("a LOCAL_RANK of its own"));
}

TEST_F(CoreDevices, SeveralSharedGpus_AreCountedAndThoseOfRank0Named) {
  const Status why = RefusalOfAll(JoinAll({Claim("GPU-b", 1, 2, 0), Claim("GPU-a", 0, 2, 1),
                                           Claim("GPU-a", 0, 2, 2), Claim("GPU-b", 1, 2, 3)}));
  EXPECT_THAT(why.message(), HasSubstr("ranks 0, 3 on host h0 both use GPU 1 (UUID GPU-b)"));
  EXPECT_THAT(why.message(), HasSubstr("4 processes, 2 visible GPUs"));
  EXPECT_THAT(why.message(), HasSubstr("1 more GPU is shared likewise"));
  EXPECT_THAT(why.message(), HasSubstr("start no more than 2"));
}

TEST_F(CoreDevices, PrefixAndCase_MakeNoOtherDevice) {
  ExpectRefused(JoinAll({Claim("GPU-ABC", 0, 2, 0), Claim("abc", 0, 2, 1)}));
}

TEST_F(CoreDevices, LegalLayouts_GetTheirView) {
  DeviceClaim there = Claim("GPU-a", 0, 1, 0);
  there.host = "other";
  const std::vector<std::vector<std::optional<DeviceClaim>>> layouts = {
      {Claim("GPU-a", 0, 2, 0), Claim("GPU-b", 1, 2, 1)},
      {Claim("GPU-a", 0, 1, 0), there},
      {Claim("MIG-a", 0, 1, 0), Claim("MIG-b", 0, 1, 1)},
      {Claim("GPU-a", 0, 1, 0), std::nullopt},
      {std::nullopt, std::nullopt}};
  for (const auto& layout : layouts) {
    Restart();
    const std::vector<ConnectionId> control = JoinAll(layout);
    BecomeReady(control);
    EXPECT_FALSE(Take<JoinRefusedEvent>(control[0]));
  }
}

TEST_F(CoreDevices, HostsByBootId_TellTheSameUuidApart) {
  const ConnectionId here = OpenControl(0);
  Hello hello = HelloOf(1, Role::kControl);
  hello.process.boot_id = "another boot";
  const ConnectionId there = Open(hello);
  Send(here, JoinWith(0, 2, Claim("GPU-a", 0, 1, 0)));
  Send(there, JoinWith(1, 2, Claim("GPU-a", 0, 1, 0)));
  EXPECT_TRUE(Take<View>(here));
}

TEST_F(CoreDevices, TwoWorldsOfTheSameProcesses_MayUseTheSameGpus) {
  const std::vector<std::optional<DeviceClaim>> devices = {Claim("GPU-a", 0, 2, 0),
                                                           Claim("GPU-b", 1, 2, 1)};
  BecomeReady(JoinAll(devices));
  std::vector<ConnectionId> second;
  for (int i = 0; i < 2; ++i) {
    second.push_back(Open(HelloOf(i, Role::kControl, "second" + std::to_string(i))));
    Send(second[At(i)], JoinWith(i, 2, devices[At(i)]));
  }
  BecomeReady(second);
}

TEST_F(CoreDevices, TwoRanksOfOneProcess_AreRefusedAsAnyOthers) {
  const ConnectionId one = Open(HelloOf(0, Role::kControl, "one"));
  const ConnectionId two = Open(HelloOf(0, Role::kControl, "two"));
  Send(one, JoinWith(0, 2, Claim("GPU-a", 0, 1, 0)));
  Send(two, JoinWith(1, 2, Claim("GPU-a", 0, 1, 0)));
  ExpectRefused({one, two});
}

TEST_F(CoreDevices, AfterTheRefusal_TheNextWorldCanForm) {
  const auto control = JoinAll({Claim("GPU-a", 0, 2, 0), Claim("GPU-a", 0, 2, 1)});
  ExpectRefused(control);
  Send(control[0], JoinWith(0, 2, Claim("GPU-a", 0, 2, 0)));
  Send(control[1], JoinWith(1, 2, Claim("GPU-b", 1, 2, 1)));
  BecomeReady(control);
}

TEST_F(CoreDevices, ReplacementOnItsPredecessorsGpu_TakesTheSeat) {
  const ConnectionId survivor = LoseRankOneOfTwo();
  const ConnectionId replacement = OpenControl(2);
  Send(replacement, JoinWith(1, 2, Claim("GPU-b", 1, 2, 1), kSeatWait));
  BecomeReady({survivor, replacement});
}

TEST_F(CoreDevices, ReplacementOnASurvivorsGpu_IsRefusedAlone) {
  const ConnectionId survivor = LoseRankOneOfTwo();
  const ConnectionId wrong = OpenControl(2);
  Send(wrong, JoinWith(1, 2, Claim("GPU-a", 0, 2, 1), kSeatWait));
  ExpectRefused({wrong});
  EXPECT_FALSE(Take<JoinRefusedEvent>(survivor));
  const ConnectionId right = OpenControl(3);
  Send(right, JoinWith(1, 2, Claim("GPU-b", 1, 2, 1), kSeatWait));
  BecomeReady({survivor, right});
}

TEST_F(CoreDevices, ClaimsOutliveTheServer) {
  const ConnectionId first = OpenControl(0);
  Send(first, JoinWith(0, 2, Claim("GPU-a", 0, 1, 0)));
  Recover();
  const ConnectionId back = OpenControl(0);
  const ConnectionId second = OpenControl(1);
  Send(second, JoinWith(1, 2, Claim("GPU-a", 0, 1, 1)));
  ExpectRefused({back, second});
}

TEST_F(CoreDevices, TextsBeyondTheLimit_AreRefused) {
  for (auto text : {&DeviceClaim::uuid, &DeviceClaim::host, &DeviceClaim::visible_devices}) {
    Restart();
    DeviceClaim claim = Claim("GPU-a", 0, 1, 0);
    claim.*text = std::string(kDeviceTextBytesMax, 'x');
    const ConnectionId fits = OpenControl(0);
    Send(fits, JoinWith(0, 2, claim));
    EXPECT_FALSE(Take<JoinRefusedEvent>(fits));
    claim.*text += "x";
    const ConnectionId too_long = OpenControl(1);
    Send(too_long, JoinWith(1, 2, claim));
    EXPECT_EQ(Take<JoinRefusedEvent>(too_long)->why.code(), StatusCode::kTooLarge);
  }
}

}  // namespace
}  // namespace resilient::store
