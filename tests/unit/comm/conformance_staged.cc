// The way through memory of the host over the fake's CUDA, for the suites of conformance.h.

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
Transport InManyPieces() { return StagedTransport("stagedPieces", 40'004); }

}  // namespace

std::vector<ConformanceCase> ConformanceCases() {
  return {{.transport = InOnePiece(), .size = 1},
          {.transport = InOnePiece(), .size = 2},
          {.transport = InManyPieces(), .size = 3}};
}

std::vector<Transport> ProgramTransports() { return {InManyPieces()}; }

}  // namespace resilient::testing
