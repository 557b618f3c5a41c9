#include "store/core/presence_key.h"

#include <charconv>

#include "store/core/messages.h"

namespace resilient::store {
namespace {

constexpr std::string_view kPrefix = "resilient/presence/";

// Takes a number from the front of `text`; false: there is none.
bool TakeNumber(std::string_view& text, int& number) {
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  text = {rest, static_cast<std::size_t>(end - rest)};
  return error == std::errc();
}

}  // namespace

std::string PresenceKey(const PresenceName& name) {
  return std::string(kPrefix) + std::to_string(name.world_size) + "/" + std::to_string(name.rank);
}

std::optional<PresenceName> ParsePresenceKey(std::string_view key) {
  if (!key.starts_with(kPrefix)) return std::nullopt;
  key.remove_prefix(kPrefix.size());
  PresenceName name;
  if (!TakeNumber(key, name.world_size) || !key.starts_with('/')) return std::nullopt;
  key.remove_prefix(1);
  if (!TakeNumber(key, name.rank) || !key.empty()) return std::nullopt;
  const bool is_rank =
      name.world_size <= kWorldSizeMax && name.rank >= 0 && name.rank < name.world_size;
  return is_rank ? std::optional(name) : std::nullopt;
}

}  // namespace resilient::store
