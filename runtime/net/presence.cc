#include "runtime/net/presence.h"

#include <algorithm>

#include "runtime/base/log.h"
#include "runtime/net/socket.h"
#include "runtime/net/unix_address.h"

namespace resilient {

namespace {

bool IsBound(const FileDescriptor& socket, const std::string& name) {
  const auto address = UnixAddress::Abstract(name);
  return address && ::connect(socket.get(), address->get(), address->size()) == 0;
}

}  // namespace

std::vector<int> PresentRanks(const PresenceNames& names, int world_size, int self) {
  std::vector<int> present;
  const FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return present;
  for (int rank = 0; rank < std::min(world_size, kPresenceRanksMax); ++rank) {
    if (rank == self) continue;
    const std::string name = StrCat(names.job, "/", rank);
    if (!IsBound(socket, name)) continue;
    const std::string in_this = StrCat(name, "/", names.init, "/");
    const bool in_another = IsBound(socket, name + "/init") &&
                            !IsBound(socket, StrCat(in_this, rank)) &&
                            !IsBound(socket, in_this + "any");
    if (!in_another) present.push_back(rank);
  }
  return present;
}

}  // namespace resilient
