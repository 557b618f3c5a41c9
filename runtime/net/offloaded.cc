#include "runtime/net/offloaded.h"

#include <algorithm>
#include <vector>

#include <resilient/abort.h>

namespace resilient {

Status AwaitReadable(int fd, const std::function<Status()>& interrupt, const Clock& clock,
                     Deadline deadline) {
  std::vector<PollEntry> entries{{.fd = fd, .events = POLLIN}};
  while (true) {
    const Instant now = clock.Now();
    const Deadline slice =
        interrupt ? std::min(deadline, Deadline::After(now, Millis(kInterruptPollMs))) : deadline;
    if (PollUntil(entries, clock, slice) > 0 || deadline.ExpiredAt(clock.Now())) return {};
    if (interrupt) RESILIENT_RETURN_IF_ERROR(interrupt());
  }
}

}  // namespace resilient
