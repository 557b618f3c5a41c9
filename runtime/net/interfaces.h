#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <resilient/status.h>

namespace resilient {

// One address of a network interface that is up. Thread: value type.
struct InterfaceAddress {
  std::string interface;  // "eth0"
  std::string address;    // Numeric; never one that means nothing without its interface (fe80::).
  bool v6 = false;
};

// Of this host, in the kernel's order.
Result<std::vector<InterfaceAddress>> ListInterfaceAddresses();

// An address of the first interface in `names` ("eth1,eth0") that is in `present`: its first one,
// IPv4 before IPv6. kSetting, with the interfaces that there are, when none is. Pure.
Result<std::string> ChooseInterfaceAddress(std::string_view names,
                                           const std::vector<InterfaceAddress>& present);

}  // namespace resilient
