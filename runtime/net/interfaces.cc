#include "runtime/net/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>

#include "runtime/base/log.h"

namespace resilient {
namespace {

// nullopt: of another family, or of this link only.
std::optional<InterfaceAddress> Read(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & IFF_UP) == 0) return std::nullopt;
  const int family = entry.ifa_addr->sa_family;
  if (family != AF_INET && family != AF_INET6) return std::nullopt;
  const void* bytes = nullptr;
  if (family == AF_INET) {
    bytes = &reinterpret_cast<const sockaddr_in*>(entry.ifa_addr)->sin_addr;
  } else {
    const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr)->sin6_addr;
    if (IN6_IS_ADDR_LINKLOCAL(&address)) return std::nullopt;
    bytes = &address;
  }
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (inet_ntop(family, bytes, text.data(), text.size()) == nullptr) return std::nullopt;
  return InterfaceAddress{
      .interface = entry.ifa_name, .address = text.data(), .v6 = family == AF_INET6};
}

std::string Present(const std::vector<InterfaceAddress>& present) {
  std::string text;
  for (const InterfaceAddress& one : present) {
    text += StrCat(text.empty() ? "" : ", ", one.interface, " (", one.address, ")");
  }
  return text.empty() ? "none with an address" : text;
}

}  // namespace

Result<std::vector<InterfaceAddress>> ListInterfaceAddresses() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) {
    return Status(StatusCode::kUnreachable, StrCat("the network interfaces of this host cannot be "
                                                   "listed: ",
                                                   std::strerror(errno)));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(first, &freeifaddrs);
  std::vector<InterfaceAddress> all;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (std::optional<InterfaceAddress> one = Read(*entry)) all.push_back(std::move(*one));
  }
  return all;
}

Result<std::string> ChooseInterfaceAddress(std::string_view names,
                                           const std::vector<InterfaceAddress>& present) {
  for (std::string_view rest = names; !rest.empty();) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view name = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    for (const bool v6 : {false, true}) {
      const auto found = std::find_if(present.begin(), present.end(), [&](const auto& one) {
        return one.interface == name && one.v6 == v6;
      });
      if (found != present.end()) return found->address;
    }
  }
  return Status(StatusCode::kSetting,
                StrCat("RESILIENT_SOCKET_IFNAME=\"", names,
                       "\" names no interface of this host that is up and has an address: there "
                       "are ",
                       Present(present), ". Name one or several of these, separated by commas"));
}

}  // namespace resilient
