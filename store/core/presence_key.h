#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace resilient::store {

// A rank of a world, as its process names itself before its init. Thread: value type.
struct PresenceName {
  int world_size = 0;
  int rank = 0;
};

// The leased key (Hello::leased_key) by which that process says that it lives, and back; nullopt:
// another key, or no rank of a world.
std::string PresenceKey(const PresenceName& name);
std::optional<PresenceName> ParsePresenceKey(std::string_view key);

}  // namespace resilient::store
