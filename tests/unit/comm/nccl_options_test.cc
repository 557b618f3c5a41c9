// Goal: what a group asks of NCCL reaches it, in a layout that any version reads alike; ranks that
// ask for different things are told so before NCCL is asked.
// Method: pure; then ranks of one process over the fake NCCL, which reads configurations as NCCL
// does and says what it has read.

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/comm/nccl_options.h"
#include "tests/support/fake_nccl_config.h"
#include "tests/unit/comm/nccl_world.h"

namespace resilient::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

NcclOptions Everything() {
  return {.is_high_priority_stream = true,
          .cga_cluster_size = 2,
          .min_ctas = 4,
          .max_ctas = 16,
          .net_name = "Socket",
          .traffic_class = 106,
          .comm_name = "experts",
          .collnet_enable = 0,
          .cta_policy = 1,
          .nvls_ctas = 8,
          .nchannels_per_net_peer = 2,
          .nvlink_centric_sched = 1,
          .max_p2p_peers = 6};
}

TEST(NcclOptionsTest, WhatCannotBe_IsRefusedWithItsNameAndValue) {
  EXPECT_TRUE(CheckNcclOptions({}).ok());
  EXPECT_TRUE(CheckNcclOptions(Everything()).ok());
  const std::vector<std::pair<NcclOptions, std::string>> wrong = {
      {{.cga_cluster_size = 9}, "cga_cluster_size=9: it is 0 to 8"},
      {{.cga_cluster_size = -1}, "cga_cluster_size=-1"},
      {{.min_ctas = 0}, "min_ctas=0: it is 1 to 64"},
      {{.max_ctas = 65}, "max_ctas=65"},
      {{.min_ctas = 8, .max_ctas = 4}, "min_ctas=8: it is more than max_ctas, 4"},
      {{.traffic_class = -1}, "traffic_class=-1: it is 0 or more"},
      {{.collnet_enable = 2}, "collnet_enable=2"},
      {{.cta_policy = 2}, "cta_policy=2: 0 (default) and 1 (efficiency)"},
      {{.nvls_ctas = 0}, "nvls_ctas=0"},
      {{.nchannels_per_net_peer = 0}, "nchannels_per_net_peer=0"},
      {{.nvlink_centric_sched = 2}, "nvlink_centric_sched=2"},
      {{.max_p2p_peers = 0}, "max_p2p_peers=0"},
      {{.net_name = "two words"}, "net_name=two words"},
      {{.comm_name = "line\n"}, "comm_name=line\n"},
      {{.comm_name = std::string(65, 'x')}, "up to 64 characters"}};
  for (const auto& [options, text] : wrong) {
    const Status status = CheckNcclOptions(options);
    EXPECT_EQ(status.code(), StatusCode::kSetting) << text;
    EXPECT_THAT(status.message(), HasSubstr(text));
  }
}

TEST(NcclOptionsTest, Config_HasTheOldestLayoutThatDoes) {
  EXPECT_EQ(ReadConfig(ConfigOf({})), "");
  EXPECT_EQ(ConfigOf({}).version, 21801u);
  EXPECT_EQ(ConfigOf({.max_ctas = 4}).version, 21801u);
  EXPECT_EQ(ReadConfig(ConfigOf({.max_ctas = 4})), "max_ctas=4");
  EXPECT_EQ(ReadConfig(ConfigOf({.min_ctas = 4})), "min_ctas=4 max_ctas=64")
      << "NCCL takes no least without a most";
  EXPECT_EQ(ConfigOf({.traffic_class = 1}).version, 22600u);
  EXPECT_EQ(ReadConfig(ConfigOf({.traffic_class = 1})), "traffic_class=1");
  const NcclOptions named{.comm_name = "a"};
  EXPECT_EQ(ConfigOf(named).version, 22700u);
  EXPECT_EQ(ReadConfig(ConfigOf(named)), "comm_name=a");
  EXPECT_EQ(ConfigOf({.nvlink_centric_sched = 0}).version, 22800u);
  EXPECT_EQ(ReadConfig(ConfigOf({.nvlink_centric_sched = 0})), "nvlink_centric_sched=0");
  const NcclOptions everything = Everything();
  EXPECT_EQ(ConfigOf(everything).version, 23000u);
  EXPECT_EQ(ReadConfig(ConfigOf(everything)),
            "cga_cluster_size=2 min_ctas=4 max_ctas=16 traffic_class=106 collnet_enable=0 "
            "cta_policy=1 nvls_ctas=8 nchannels_per_net_peer=2 nvlink_centric_sched=1 "
            "max_p2p_peers=6 net_name=Socket comm_name=experts");
  EXPECT_EQ("is_high_priority_stream=1 " + ReadConfig(ConfigOf(everything)).value_or(""),
            ToString(everything));
}

TEST(NcclOptionsTest, LibraryThatLacksWhatIsAskedFor_IsNamedWithItsVersion) {
  GroupSpec spec;
  spec.name = "experts";
  CudaApi cuda = FakeNccl::cuda();
  EXPECT_TRUE(CheckLibrariesHave(spec, 22200, {}).ok());
  spec.nccl = {.is_high_priority_stream = true, .traffic_class = 1, .max_p2p_peers = 6};
  EXPECT_TRUE(CheckLibrariesHave(spec, 23000, cuda).ok());
  const Status old = CheckLibrariesHave(spec, 22809, cuda);
  EXPECT_EQ(old.code(), StatusCode::kSetting);
  EXPECT_THAT(old.message(), AllOf(HasSubstr("'experts'"), HasSubstr("max_p2p_peers=6"),
                                   HasSubstr("from 2.30.0 on"), HasSubstr("this is 2.28.9")));
  cuda.StreamCreateWithPriority = nullptr;
  EXPECT_THAT(CheckLibrariesHave(spec, 23000, cuda).message(),
              HasSubstr("is_high_priority_stream"));
}

class NcclOptionsWorldTest : public NcclTest {
 protected:
  // A group of all ranks that each make with what `of` gives for it.
  std::vector<std::shared_ptr<Communicator>> Make(const std::string& name,
                                                  const std::function<NcclOptions(int)>& of) {
    std::vector<std::shared_ptr<Communicator>> all;
    for (int rank = 0; rank < world().size(); ++rank) {
      GroupSpec spec = world().Spec(name, rank);
      spec.nccl = of(rank);
      all.push_back(world().Create(rank, std::move(spec)));
    }
    return all;
  }
  // Of an all_reduce of a one on each rank.
  static std::vector<Status> Sum(const std::vector<std::shared_ptr<Communicator>>& group) {
    std::vector<std::vector<float>> data(group.size(), {1});
    std::vector<Pending> pending;
    for (std::size_t i = 0; i < group.size(); ++i)
      pending.push_back(Pending::Try(*group[i], AllReduceOp(data[i])));
    std::vector<Status> outcomes;
    for (const Pending& one : pending) outcomes.push_back(one.Wait());
    return outcomes;
  }
};

TEST_F(NcclOptionsWorldTest, Options_ReachNccl_AndNoOtherGroup) {
  Start(2);
  ExpectAllOk(Sum(world().group));
  const auto experts = Make("experts", [](int) { return Everything(); });
  ExpectAllOk(Sum(experts));
  const std::string read = ReadConfig(ConfigOf(Everything())).value_or("");
  EXPECT_THAT(fake_.Counts().configs, ElementsAre("", "", read, read));
  EXPECT_THAT(fake_.Counts().priorities, ElementsAre(-5, -5)) << "the highest that there is";
}

TEST_F(NcclOptionsWorldTest, RanksThatDiffer_AllFailWithBothValues_BeforeNccl) {
  Start(3);
  ExpectAllOk(Sum(world().group));
  const auto experts = Make("experts", [](int rank) {
    return NcclOptions{.max_ctas = rank == 1 ? 32 : 16, .net_name = "Socket"};
  });
  for (const Status& status : Sum(experts)) {
    EXPECT_EQ(status.code(), StatusCode::kSetting) << status.ToString();
    EXPECT_THAT(status.message(),
                AllOf(HasSubstr("different options of NCCL"),
                      HasSubstr("rank 0 (node0, pid 1000) and 1 more max_ctas=16 net_name=Socket"),
                      HasSubstr("rank 1 (node1, pid 1001) max_ctas=32 net_name=Socket")));
  }
  const auto alone =
      Make("alone", [](int rank) { return NcclOptions{.is_high_priority_stream = rank == 2}; });
  for (const Status& status : Sum(alone)) {
    EXPECT_THAT(status.message(), AllOf(HasSubstr("is_high_priority_stream=1"), HasSubstr("none")));
  }
  EXPECT_EQ(fake_.Counts().configs.size(), 3u) << "those of the world";
  ExpectAllOk(Sum(world().group));
}

}  // namespace
}  // namespace resilient::testing
