#include "runtime/base/spin.h"

#include <sched.h>

namespace resilient {

bool HasCoresFor(std::size_t threads) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // Refused on machines with more cores than the set has bits.
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return threads <= CPU_SETSIZE;
  return threads <= static_cast<std::size_t>(CPU_COUNT(&cores));
}

}  // namespace resilient
