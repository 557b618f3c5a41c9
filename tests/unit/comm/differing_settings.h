#pragma once

#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {

// In a world of three over TCP, whose options `set` sets, for rank 1 (`odd`) to another value:
// every rank is told so by `text`.
inline void ExpectDifferenceIsTold(const std::function<void(CpuFabricOptions&, bool odd)>& set,
                                   const std::string& text) {
  int made = 0;
  const auto make = [&](const Clock& clock, CommunicatorEvents& events) {
    CpuFabricOptions options;
    options.shm_limit = 0;
    set(options, made++ == 1);
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
    EXPECT_THAT(status.message(), ::testing::HasSubstr(text));
    EXPECT_EQ(status.detail().rank, 1);
  }
}

}  // namespace resilient::testing
