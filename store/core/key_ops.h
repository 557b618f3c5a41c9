#pragma once

#include <vector>

#include <resilient/status.h>

#include "store/core/keyspace.h"
#include "store/core/messages.h"

// What each key operation of a request does to the keys of its job. Pure.
namespace resilient::store {

bool IsKeyOp(const Op& op);
// Whether a repeat must not take effect again, so that its result has to be remembered; of one
// that waits, when the wait ends. Reads and waits for keys are simply done again.
bool IsKeyMutation(const Op& op);

// What comes of an operation besides its status. Thread: value type on the stack of a step.
struct KeyOutcome {
  Reply reply{};
  bool waits = false;              // The answer comes later, as an EndedWait.
  std::vector<EndedWait> ended{};  // Waits that it has ended; its own may be among them.
  SessionId rival = 0;             // Whom an error is about besides the caller; 0: nobody.
};

// The status is that of the answer; of no meaning when `outcome.waits`, unless it is an error: then
// nothing waits. Values are moved out of the request. REQUIRES: IsKeyOp, the caller may use the
// scope.
Status ExecuteKeyOp(Keyspace& keys, SessionId session, Request& request, KeyOutcome& outcome);

}  // namespace resilient::store
