#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "runtime/net/name_owners.h"
#include "runtime/net/socket.h"

namespace resilient::store {

// The right to start the store of an address on this host, which one process of a user has at a
// time: a listening socket's name in the abstract namespace, which the kernel frees when its holder
// dies. It only keeps ranks from starting servers that find the port taken. So another user who has
// the name, which anybody can bind, keeps nobody from starting one: the port decides. Owner: one
// try of FindOrStart. Thread: caller-synchronised. Lifetime: the right is held until destruction.
class SpawnRight {
 public:
  // Never blocks.
  explicit SpawnRight(const HostPort& address, const FindNameOwners& find_owners = OwnersOfNames);

  // False: another process of this user has the right, or one of which nobody could tell whose it
  // is.
  bool may_start() const { return held_ || other_user_.has_value(); }
  // The other user who has the name.
  std::optional<uid_t> other_user() const { return other_user_; }

 private:
  FileDescriptor socket_;
  bool held_ = false;
  std::optional<uid_t> other_user_;
};

// What its name is.
std::string SpawnRightName(uid_t user, const HostPort& address);

}  // namespace resilient::store
