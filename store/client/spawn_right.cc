#include "store/client/spawn_right.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "runtime/base/log.h"
#include "runtime/net/local_socket.h"
#include "runtime/net/unix_address.h"

namespace resilient::store {
namespace {

constexpr int kBacklog = 64;  // Of those who ask whose the name is; nobody accepts them.

// By whom the socket with the name was made to listen; nullopt: it does not listen, or as many have
// asked as it takes.
std::optional<uid_t> AskHolder(const UnixAddress& address) {
  const FileDescriptor asks(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!asks.valid()) return std::nullopt;
  if (connect(asks.get(), address.get(), address.size()) != 0) return std::nullopt;
  return UserOfPeer(asks.get());
}

std::optional<uid_t> HolderOf(const std::string& name, const UnixAddress& address,
                              const FindNameOwners& find_owners) {
  if (const auto user = AskHolder(address)) return user;
  // One that does not listen, or whose queue is full, may be so on purpose.
  const NameOwners owners = find_owners(SOCK_STREAM, name);
  const auto owner = owners.find(name);
  if (owner == owners.end()) return std::nullopt;
  return owner->second;
}

}  // namespace

std::string SpawnRightName(uid_t user, const HostPort& address) {
  // What is cut off is the end of a long host's name: then two hosts' stores share a right.
  std::string name = StrCat("resilient-spawn-", user, "-", address.port, "-", address.host);
  name.resize(std::min(name.size(), UnixAddress::kNameMax));
  return name;
}

SpawnRight::SpawnRight(const HostPort& address, const FindNameOwners& find_owners)
    : socket_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const std::string name = SpawnRightName(geteuid(), address);
  const auto right = UnixAddress::Abstract(name);
  held_ = socket_.valid() && bind(socket_.get(), right->get(), right->size()) == 0;
  if (held_) {
    (void)listen(socket_.get(), kBacklog);
    return;
  }
  if (!socket_.valid() || errno != EADDRINUSE) return;
  const auto holder = HolderOf(name, *right, find_owners);
  if (holder && *holder != geteuid()) other_user_ = holder;
}

}  // namespace resilient::store
