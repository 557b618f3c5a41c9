#include "store/core/presence_key.h"

#include "runtime/base/numbers.h"
#include "store/core/messages.h"

namespace resilient::store {
namespace {

constexpr std::string_view kPrefix = "resilient/presence/";

}  // namespace

std::string PresenceKey(const PresenceName& name) {
  return std::string(kPrefix) + std::to_string(name.world_size) + "/" + std::to_string(name.rank);
}

std::optional<PresenceName> ParsePresenceKey(std::string_view key) {
  if (!key.starts_with(kPrefix)) return std::nullopt;
  key.remove_prefix(kPrefix.size());
  const std::size_t slash = key.find('/');
  if (slash == std::string_view::npos) return std::nullopt;
  PresenceName name;
  if (!ReadNumbers(key.substr(0, slash), &name.world_size) ||
      !ReadNumbers(key.substr(slash + 1), &name.rank)) {
    return std::nullopt;
  }
  const bool is_rank =
      name.world_size <= kWorldSizeMax && name.rank >= 0 && name.rank < name.world_size;
  return is_rank ? std::optional(name) : std::nullopt;
}

}  // namespace resilient::store
