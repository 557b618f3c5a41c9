// NCCL over the fake, for the suites of conformance.h.

#include "runtime/comm/nccl_launch.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/conformance.h"
#include "tests/unit/comm/nccl_world.h"

namespace resilient::testing {
namespace {

// Messages are in the order of their submission, and collectives among them.
Transport NcclTransport() {
  return {.name = "nccl",
          .make = nullptr,
          .environment = [] { return std::make_shared<NcclEnvironment>(); },
          .roots_run_ahead = false,
          .has_tags = false,
          .supports =
              [](const Operation& op, int ranks) {
                return CheckNcclSupports(op, ranks, {.premul_sum = true, .float8 = true}).ok();
              },
          .nan_wins = false};
}

}  // namespace

std::vector<ConformanceCase> ConformanceCases() {
  std::vector<ConformanceCase> cases;
  for (const int size : {1, 2, 3, 4}) {
    if (!kSanitized || size == 2 || size == 3)
      cases.push_back({.transport = NcclTransport(), .size = size});
  }
  return cases;
}

std::vector<Transport> ProgramTransports() { return {NcclTransport()}; }

}  // namespace resilient::testing
