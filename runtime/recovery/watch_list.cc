#include "runtime/recovery/watch_list.h"

#include <optional>

#include "runtime/base/log.h"

namespace resilient::recovery {

std::string EncodeSessionEndpoint(const SessionEndpoint& endpoint) {
  if (endpoint.token.empty() || endpoint.host_id.empty()) return endpoint.communicator;
  return StrCat(endpoint.communicator, "\n", endpoint.token, "\n", endpoint.host_id);
}

SessionEndpoint DecodeSessionEndpoint(std::string_view text) {
  SessionEndpoint endpoint;
  const std::size_t first = text.find('\n');
  endpoint.communicator = text.substr(0, first);
  if (first == std::string_view::npos) return endpoint;
  text.remove_prefix(first + 1);
  const std::size_t second = text.find('\n');
  if (second == std::string_view::npos) return endpoint;
  endpoint.token = text.substr(0, second);
  endpoint.host_id = text.substr(second + 1);
  return endpoint;
}

std::string ShortHostId(std::string_view host_id) {
  if (host_id.empty()) return {};
  // FNV-1a.
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char byte : host_id) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  }
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(hash >> shift) & 0xf];
  return text;
}

std::vector<Neighbour> NeighboursOf(const View& view, int rank, const SessionEndpoint& own) {
  std::vector<Neighbour> neighbours;
  const std::optional<RobustToken::Offer> ours = RobustToken::DecodeOffer(own.token);
  if (!ours || own.host_id.empty()) return neighbours;
  const std::size_t size = view.members.size();
  for (std::size_t step = 1; step < size && neighbours.size() < kNeighboursMax; ++step) {
    const Member& member = view.members[(static_cast<std::size_t>(rank) + step) % size];
    const SessionEndpoint endpoint = DecodeSessionEndpoint(member.endpoint);
    if (endpoint.host_id != own.host_id) continue;
    const std::optional<RobustToken::Offer> token = RobustToken::DecodeOffer(endpoint.token);
    // A rank of this very process ends with it.
    if (!token || token->pid == ours->pid) continue;
    neighbours.push_back({member.rank, member.host, member.incarnation, *token});
  }
  return neighbours;
}

TokenVerdict Judge(std::uint32_t word, bool ending, Duration dead_for) {
  if (TokenWatch::HolderDied(word)) {
    if (ending) return TokenVerdict::kDied;
    return dead_for < kEndShownWithin ? TokenVerdict::kLookAgain : TokenVerdict::kForget;
  }
  return TokenWatch::Held(word) ? TokenVerdict::kWatch : TokenVerdict::kForget;
}

}  // namespace resilient::recovery
