#pragma once

#include <memory>

#include <resilient/clock.h>
#include <resilient/store/client.h>

namespace resilient::store {

// Says to the store that this process lives and is a rank on its way to its init, so that it is
// waited for on every host: by a lease, from Announce until Close or the end of the process.
// It claims no seat. A thread "res-presence" connects in the background, again when the store has
// lost it, and tries on without a word, ever more rarely, while there is no store; it gives up
// where waiting cannot help (another protocol, a refused token). In a forked child it is nothing.
// Owner: who announces. Thread: thread-safe.
class Announcement {
 public:
  virtual ~Announcement() = default;  // Closes without a goodbye.
  // Says goodbye until `deadline`, and joins the threads; further calls do nothing.
  virtual void Close(Deadline deadline) = 0;
};

struct AnnouncedRank {
  int rank = 0;
  int world_size = 0;
};

// Returns at once. `options`: job and addresses are those of the later init.
std::unique_ptr<Announcement> Announce(ConnectOptions options, const AnnouncedRank& who,
                                       const Clock& clock);

}  // namespace resilient::store
