#pragma once

#include <cstdint>

namespace resilient::store::sim {

// What the command line asks of the simulators. Thread: set by main before the tests.
struct Seeds {
  std::uint64_t first = 1;
  std::uint64_t count = 2000;
  bool trace = false;
};

Seeds& TheSeeds();

}  // namespace resilient::store::sim
