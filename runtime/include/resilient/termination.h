#pragma once

#include <memory>

#include <resilient/clock.h>
#include <resilient/session.h>

namespace resilient {

inline constexpr Duration kTerminationWait = std::chrono::milliseconds(500);

// What a launcher that ends all ranks because of one would hide: while this object lives SIGTERM
// waits up to kTerminationWait for a fence, writes its first cause to the log, and then acts as it
// does by default. The wait happens on a thread of its own ("res-term"), so that it does not depend
// on what the program is doing; a forked helper without a world is ended at once, as ever.
//
// Owner: who owns the session, from init to close. Thread: caller-synchronised. Lifetime: the
// destructor gives SIGTERM its default action back and joins the thread; destroyed before `clock`.
class Termination {
 public:
  virtual ~Termination() = default;
};

// Null where SIGTERM does not have its default action: a handler of the user's, or that of another
// world in this process, is left alone.
std::unique_ptr<Termination> HandleTermination(std::shared_ptr<Session> session,
                                               const Clock& clock);

}  // namespace resilient
