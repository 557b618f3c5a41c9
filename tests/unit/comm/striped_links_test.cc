// Goal: ranks agree on the number of sockets of a link, or are told both numbers.
// Method: fabrics of one process that are told different ones.
#include <gmock/gmock.h>

#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {
namespace {

using ::testing::HasSubstr;

TEST(StripedLinks, NumbersThatDiffer_AreAnErrorOnEveryRankThatNamesBoth) {
  int made = 0;
  const auto make = [&made](const Clock& clock, CommunicatorEvents& events) {
    CpuFabricOptions options;
    options.shm_limit = 0;
    options.streams = made++ == 1 ? 4 : 2;
    return MakeCpuFabric(std::move(options), clock, events);
  };
  World world({.name = "differ", .make = make}, 3);
  std::vector<std::vector<float>> data(3, std::vector<float>(3, 1.0f));
  std::vector<Pending> pending;
  for (int rank = 0; rank < 3; ++rank)
    pending.push_back(
        Pending::Try(world.at(rank), AllReduceOp(data[static_cast<std::size_t>(rank)])));
  for (const Pending& one : pending) {
    const Status status = one.Wait();
    EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.ToString();
    EXPECT_THAT(status.message(),
                HasSubstr("rank 1 (node1, pid 1001) runs with RESILIENT_SOCKET_STREAMS=4 where "
                          "rank 0 (node0, pid 1000) runs with 2"));
    EXPECT_EQ(status.detail().rank, 1);
  }
}

TEST(StripedLinks, ANumberThatCannotBe_IsRefused) {
  SystemClock clock;
  EventLog events;
  for (const int streams : {0, 9}) {
    CpuFabricOptions options;
    options.streams = streams;
    const auto fabric = MakeCpuFabric(std::move(options), clock, events);
    ASSERT_FALSE(fabric.ok());
    EXPECT_EQ(fabric.status().code(), StatusCode::kSetting);
    EXPECT_THAT(fabric.status().message(), HasSubstr("1 to 8"));
  }
}

}  // namespace
}  // namespace resilient::testing
