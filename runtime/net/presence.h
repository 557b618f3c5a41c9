#pragma once

#include <string>
#include <vector>

namespace resilient {

// Presence of a rank on its host before its init: a datagram socket, bound to a name in the
// abstract namespace for as long as the process lives (Linux, unix(7)). It costs no thread, port or
// file, and the kernel takes it away with the process. `prefix` is the same for all ranks of a job;
// the Python package binds it at `import torch`, see torch_resilient/_presence.py.
//
// Ranks 0 to world_size-1 but `self` whose name is bound on this host, at most kPresenceRanksMax
// tried. Never blocks: one system call a rank.
std::vector<int> PresentRanks(const std::string& prefix, int world_size, int self);

inline constexpr int kPresenceRanksMax = 1024;

}  // namespace resilient
