#include "runtime/comm/endpoint.h"

#include <resilient/settings.h>

#include "runtime/base/log.h"
#include "runtime/base/numbers.h"

namespace resilient {
namespace {

constexpr std::string_view kEncrypted = "tls";

// Takes the text up to the next space off `text`.
std::string_view NextWord(std::string_view* text) {
  const std::size_t end = std::min(text->find(' '), text->size());
  const std::string_view word = text->substr(0, end);
  text->remove_prefix(std::min(end + 1, text->size()));
  return word;
}

}  // namespace

std::string EncodeEndpoint(const Endpoint& endpoint) {
  std::string text = StrCat(endpoint.address, " ", OrderName(endpoint.hierarchical), " ",
                            endpoint.streams, " ", endpoint.encrypted ? kEncrypted : "plain");
  if (!endpoint.host_id.empty()) text += ' ' + endpoint.host_id;
  return text;
}

Endpoint DecodeEndpoint(std::string_view text) {
  Endpoint endpoint;
  endpoint.address = NextWord(&text);
  endpoint.hierarchical = NextWord(&text) == OrderName(true);
  const int streams = ParseNumber<int>(NextWord(&text)).value_or(0);
  if (streams >= 1 && streams <= kMaxSocketStreams) endpoint.streams = streams;
  endpoint.encrypted = NextWord(&text) == kEncrypted;
  endpoint.host_id = text;
  return endpoint;
}

std::string_view OrderName(bool hierarchical) { return hierarchical ? "hierarchical" : "rank"; }

}  // namespace resilient
