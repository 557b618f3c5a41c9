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
    EXPECT_EQ(status.code(), StatusCode::kSetting) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("RESILIENT_SOCKET_STREAMS is "));
    EXPECT_THAT(status.message(), HasSubstr("4 on rank 1 (node1)"));
    EXPECT_THAT(status.message(), HasSubstr("2 on rank "));
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
