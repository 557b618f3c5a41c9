#pragma once

#include <string>
#include <vector>

#include "runtime/net/name_owners.h"

namespace resilient {

// Presence of a rank on its host before its init: a datagram socket, bound to a name in the
// abstract namespace for as long as the process lives (Linux, unix(7)). It costs no thread, port or
// file, and the kernel takes it away with the process. The Python package binds the names, see
// torch_resilient/_presence.py:
//   JOB/R           by the process that its launcher calls rank R, from `import torch` on
//   JOB/R/init      while that process is in an init
//   JOB/R/INIT/Q    with it: that init is INIT, and the process is rank Q there; Q is "any" in the
//                   init that its launcher's variables lead to, as it may be any rank there
// JOB has the user's number in it, so that users who run alike jobs keep apart. Whoever knows a
// name can bind it all the same: what another user has bound says nothing.
struct PresenceNames {
  std::string job;   // The same for all processes of a launch; empty: there are no names.
  std::string init;  // The same for all ranks of the init that the caller is in.
};

// Ranks whose processes are on this host and may still come to the caller's init. Ascending.
struct RanksOnHost {
  std::vector<int> present;  // Of the caller's user.
  // By their names alone: whose these are the kernel does not tell. Each is in one of the two.
  std::vector<int> unverified;
};

// Of ranks 0 to world_size-1 but `self`, at most kPresenceRanksMax tried. Never blocks: up to four
// system calls a rank, and one question to `find_owners` if any name is bound.
RanksOnHost PresentRanks(const PresenceNames& names, int world_size, int self,
                         const FindNameOwners& find_owners = OwnersOfNames);

inline constexpr int kPresenceRanksMax = 1024;

}  // namespace resilient
