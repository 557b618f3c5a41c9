#include "runtime/base/exit_watch.h"

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"

namespace resilient {

ExitWatch::CallId ExitWatch::Begin(std::string what, Instant now) {
  calls_[++last_] = {std::move(what), now};
  return last_;
}

Instant ExitWatch::Due() const {
  if (!exit_ || calls_.empty()) return kNever;
  return Deadline::After(std::max(*exit_, calls_.begin()->second.since), budget_).when();
}

std::optional<std::string> ExitWatch::Blocked(Instant now) const {
  if (now < Due()) return std::nullopt;
  const Call& call = calls_.begin()->second;
  return StrCat(call.what, " has not returned for ",
                std::chrono::duration_cast<std::chrono::seconds>(now - call.since).count(), " s");
}

}  // namespace resilient
