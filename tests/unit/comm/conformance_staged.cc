// The way through memory of the host over the fake's CUDA, for the suites of conformance.h.

#include "tests/support/sanitizers.h"
#include "tests/unit/comm/conformance.h"
#include "tests/unit/comm/staged_world.h"

namespace resilient::testing {
namespace {

// Operations are in the order of their submission, messages and collectives alike.
Transport StagedTransport(const std::string& name, std::size_t piece_bytes) {
  return {.name = name,
          .make = nullptr,
          .environment = [piece_bytes] { return std::make_shared<StagedEnvironment>(piece_bytes); },
          .roots_run_ahead = false,
          .has_tags = false};
}

Transport InOnePiece() { return StagedTransport("staged", NcclFabricOptions().piece_bytes); }
// Of large operations; smaller pieces take long where they pass through the fake's threads.
Transport InManyPieces() { return StagedTransport("stagedPieces", 20'004); }

}  // namespace

std::vector<ConformanceCase> ConformanceCases() {
  std::vector<ConformanceCase> cases;
  for (const int size : {1, 2, 3}) {
    if (!kSanitized || size > 1) cases.push_back({.transport = InOnePiece(), .size = size});
  }
  cases.push_back({.transport = InManyPieces(), .size = 3});
  return cases;
}

std::vector<Transport> ProgramTransports() { return {InManyPieces()}; }

}  // namespace resilient::testing
