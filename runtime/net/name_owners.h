#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace resilient {

// Names in the abstract namespace, and the users whose sockets have them. A name that is missing
// may be somebody's: it was bound meanwhile, or the kernel does not tell.
using NameOwners = std::map<std::string, uid_t, std::less<>>;

// Of the bound sockets of `type` (SOCK_DGRAM, SOCK_STREAM) whose names begin with `prefix`, by one
// question to the kernel (sock_diag(7), Linux 5.3). Unlike SO_PEERCRED it is answered of a socket
// that does not listen. Never blocks. Thread: thread-safe.
NameOwners OwnersOfNames(int type, std::string_view prefix);

// That function, or what a test has in its place.
using FindNameOwners = std::function<NameOwners(int type, std::string_view prefix)>;

}  // namespace resilient
