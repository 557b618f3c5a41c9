// Goal: ranks agree on the number of sockets of a link, or are told both numbers.
// Method: fabrics of one process that are told different ones.
#include <gmock/gmock.h>

#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/differing_settings.h"

namespace resilient::testing {
namespace {

using ::testing::HasSubstr;

TEST(StripedLinks, NumbersThatDiffer_AreAnErrorOnEveryRankThatNamesBoth) {
  ExpectDifferenceIsTold(
      [](CpuFabricOptions& options, bool odd) { options.streams = odd ? 4 : 2; },
      "rank 1 (node1, pid 1001) runs with RESILIENT_SOCKET_STREAMS=4 where rank 0 (node0, pid "
      "1000) runs with 2");
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
