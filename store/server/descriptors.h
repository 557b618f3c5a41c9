#pragma once

#include <cstddef>

namespace resilient::store {

inline constexpr std::size_t kDescriptorReserve = 64;  // Not for connections and pidfds.
inline constexpr std::size_t kAdminReserve = 32;  // Connections for the command line, when full.

// Raises this process's limit of open files for `wanted` connections and the reserves, as far as it
// may. Returns how many connections there can be, `wanted` at most.
std::size_t MakeRoomForConnections(std::size_t wanted);

}  // namespace resilient::store
