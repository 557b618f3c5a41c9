#pragma once

#include <vector>

#include "tests/unit/comm/comm_world.h"

// The suites of communicator_conformance_test.cc and random_programs_test.cc run on what the test
// that they are linked into defines here.
namespace resilient::testing {

struct ConformanceCase {
  Transport transport;
  int size = 1;
};

std::vector<ConformanceCase> ConformanceCases();
std::vector<Transport> ProgramTransports();

}  // namespace resilient::testing
