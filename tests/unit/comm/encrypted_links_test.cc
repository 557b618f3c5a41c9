// Goal: ranks that encrypt their links agree on it, compute what others do, end as others do, and
// nothing that is changed on the way becomes a result. Method: fabrics of one process, with what
// damages a byte between two of them.
#include <gmock/gmock.h>

#include "runtime/comm/endpoint.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/damage.h"
#include "tests/unit/comm/differing_settings.h"

namespace resilient::testing {
namespace {

constexpr int kRanks = 3;
constexpr std::size_t kElements = 5'000;

TEST(EncryptedLinks, OneRankWithoutIt_IsAnErrorOnEveryRank) {
  ExpectDifferenceIsTold(
      [](CpuFabricOptions& options, bool odd) { options.encrypted = !odd; },
      "rank 1 (node1, pid 1001) runs with RESILIENT_LINK_TLS=0 where rank 0 (node0, pid 1000) runs "
      "with 1");
}

// Rank 0 is reached through a proxy that flips one byte of what comes to it.
TEST(EncryptedLinks, AByteThatIsChangedAnywhere_IsNeverPartOfAResult) {
  for (std::size_t at = 250; at < 20'000; at += 1'877) {
    World world(EncryptedTransports()[0], kRanks);
    Endpoint proxied = DecodeEndpoint(world.endpoint(0));
    DamagingProxy proxy(proxied.address, at);
    proxied.address = proxy.address();
    std::vector<std::shared_ptr<Communicator>> group;
    for (int rank = 0; rank < kRanks; ++rank) {
      GroupSpec spec = world.Spec("damaged", rank);
      if (rank == 1) spec.members[0].endpoint = EncodeEndpoint(proxied);
      group.push_back(world.Create(rank, spec));
    }
    std::vector<std::vector<float>> data(kRanks, std::vector<float>(kElements, 1.0f));
    std::vector<Pending> pending;
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      pending.push_back(Pending::Try(*group[index], AllReduceOp(data[index])));
    }
    // The link is at its end: the membership service, which is not here, would end the operation.
    EXPECT_TRUE(world.log(0).WaitFor([](EventLog& log) { return log.lost[1] > 0; })) << at;
    for (const auto& one : group) one->Abort(Status(StatusCode::kRankLost, "as a service would"));
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      if (!pending[index].Wait().ok()) continue;
      EXPECT_EQ(data[index], std::vector<float>(kElements, 1.0f * kRanks)) << at;
    }
    EXPECT_GE(proxy.flips(), 1) << at;
  }
}

}  // namespace
}  // namespace resilient::testing
