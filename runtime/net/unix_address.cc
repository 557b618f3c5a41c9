#include "runtime/net/unix_address.h"

#include <algorithm>
#include <cstddef>

namespace resilient {

UnixAddress::UnixAddress(std::size_t before, std::string_view name)
    : size_(static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + before + name.size())) {
  address_.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address_.sun_path + before);
}

std::optional<UnixAddress> UnixAddress::Abstract(std::string_view name) {
  if (name.size() > kNameMax) return std::nullopt;
  return UnixAddress(1, name);  // Behind a first byte of 0.
}

std::optional<UnixAddress> UnixAddress::Path(std::string_view path) {
  if (path.size() > kNameMax) return std::nullopt;
  return UnixAddress(0, path);
}

}  // namespace resilient
