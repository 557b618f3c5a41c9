#pragma once

#include <string>
#include <vector>

namespace resilient {

// Presence of a rank on its host before its init: a datagram socket, bound to a name in the
// abstract namespace for as long as the process lives (Linux, unix(7)). It costs no thread, port or
// file, and the kernel takes it away with the process. The Python package binds the names, see
// torch_resilient/_presence.py:
//   JOB/R           by the process that its launcher calls rank R, from `import torch` on
//   JOB/R/init      while that process is in an init
//   JOB/R/INIT/Q    with it: that init is INIT, and the process is rank Q there; Q is "any" in the
//                   init that its launcher's variables lead to, as it may be any rank there
struct PresenceNames {
  std::string job;   // The same for all processes of a launch; empty: there are no names.
  std::string init;  // The same for all ranks of the init that the caller is in.
};

// Ranks 0 to world_size-1 but `self` whose processes are on this host and may still come to this
// init, at most kPresenceRanksMax tried. Never blocks: up to four system calls a rank.
std::vector<int> PresentRanks(const PresenceNames& names, int world_size, int self);

inline constexpr int kPresenceRanksMax = 1024;

}  // namespace resilient
