#include "runtime/net/presence.h"

#include <algorithm>

#include "runtime/net/socket.h"
#include "runtime/net/unix_address.h"

namespace resilient {

std::vector<int> PresentRanks(const std::string& prefix, int world_size, int self) {
  std::vector<int> present;
  const FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return present;
  for (int rank = 0; rank < std::min(world_size, kPresenceRanksMax); ++rank) {
    if (rank == self) continue;
    const auto address = UnixAddress::Abstract(prefix + "/" + std::to_string(rank));
    if (!address) break;
    if (::connect(socket.get(), address->get(), address->size()) == 0) present.push_back(rank);
  }
  return present;
}

}  // namespace resilient
