#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <resilient/settings.h>
#include <resilient/status.h>
#include <resilient/torch.h>

namespace resilient::plugin {

// What a C++ program's world is started with. Thread: value type.
struct Launch {
  int rank = -1;                   // kSpareRank: of none yet.
  int world_size = 0;              // Without spares.
  int process = -1;                // RANK: among all that were started.
  std::vector<std::string> store;  // "host:port"
  bool store_given = false;        // Somebody else starts it; nothing is spawned.
  std::string job;
  std::uint64_t attempt = 0;  // How often the launcher has started all workers anew.
};

// From the options, the settings and the launcher's variables, in this order and by the rules of
// torch_resilient/_init.py. kSetting with what is missing and the fix. Pure.
Result<Launch> PlanLaunch(const InitOptions& options, const Settings& settings,
                          const std::vector<std::pair<std::string, std::string>>& environment);

}  // namespace resilient::plugin
