#pragma once

#include <resilient/clock.h>
#include <resilient/session.h>
#include <resilient/status.h>

#include "runtime/base/log_record.h"

namespace resilient::recovery {

// A rank that fell silent is known to be lost so long after the end of its lease, at the latest:
// the store's tick, a round trip, and a control thread that has to be run.
inline constexpr Duration kKnownAfterLease = std::chrono::seconds(1);

// Whether a session can keep what it promises with these settings and the lease that the store
// grants; `lease` zero: not known. kSetting names the two that contradict each other, their values,
// and what to do. Pure.
//
// Refused is what cannot work, and nothing else. Not, for instance: an operation deadline or a
// stall below the lease (a rank that is silent is left to its lease all the same), or a stall below
// the interval of the waiting line (that line is not written then).
Status CheckDeadlines(const SessionOptions& options, Duration lease);

// All of a session's deadlines in one line, for the log at its start. Pure.
LogRecord DeadlinesRecord(const SessionOptions& options, Duration lease);

}  // namespace resilient::recovery
