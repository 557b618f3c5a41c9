#include "runtime/net/presence.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "runtime/net/socket.h"

namespace resilient {

std::vector<int> PresentRanks(const std::string& prefix, int world_size, int self) {
  std::vector<int> present;
  const FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return present;
  for (int rank = 0; rank < std::min(world_size, kPresenceRanksMax); ++rank) {
    if (rank == self) continue;
    const std::string name = prefix + "/" + std::to_string(rank);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    // The first byte stays 0: the abstract namespace.
    if (name.size() + 1 > sizeof(address.sun_path)) break;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) {
      present.push_back(rank);
    }
  }
  return present;
}

}  // namespace resilient
