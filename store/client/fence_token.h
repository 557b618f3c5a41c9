#pragma once

#include <cstdint>

namespace resilient::store {

// View::fence_token of a generation: the time at which the store began, which is kept where
// generations are kept, and then the generation. So a store that has lost its data and begins anew
// is above the one before, as far as the clocks of their hosts agree. More generations than fit
// carry over into the milliseconds, and cost as many of that distance. Pure.
constexpr std::uint64_t FenceTokenOf(std::uint64_t began_unix_ms, std::uint64_t generation) {
  constexpr int kGenerationBits = 20;
  return (began_unix_ms << kGenerationBits) + generation;
}

}  // namespace resilient::store
