#include "runtime/recovery/deadlines.h"

#include <string>

#include <resilient/ladder.h>

#include "runtime/base/log.h"

namespace resilient::recovery {
namespace {

std::string Seconds(Duration duration) { return StrCat(ToSeconds(duration), "s"); }

// Of programs in C++: what comes from the environment was checked there.
Status CheckRanges(const SessionOptions& options) {
  if (options.budget <= Duration::zero()) {
    return Status(StatusCode::kSetting, StrCat("the budget is ", ToSeconds(options.budget),
                                               " s: it must be more than 0"));
  }
  if (options.seat_wait < Duration::zero()) {
    return Status(StatusCode::kSetting,
                  StrCat("the wait for seats is ", ToSeconds(options.seat_wait),
                         " s: it must not be negative"));
  }
  return Status::Ok();
}

}  // namespace

Status CheckDeadlines(const SessionOptions& options, Duration lease) {
  RESILIENT_RETURN_IF_ERROR(CheckRanges(options));
  // A rank or host that falls silent while the others rebuild is waited for until its lease ends,
  // and that is their own time: they would give up before the store could say what has happened.
  const Duration known = SumOf(lease, kKnownAfterLease);
  if (lease == Duration::zero() || options.budget >= known) return Status::Ok();
  return Status(
      StatusCode::kSetting,
      StrCat("RESILIENT_BUDGET is ", ToSeconds(options.budget),
             " s and the store's leases (RESILIENT_LEASE_TTL or --lease-ttl where it was started) "
             "are of ",
             ToSeconds(lease), " s: when a second rank falls silent during a recovery this rank ",
             "would give up before the store can know of that loss, which takes ", ToSeconds(known),
             " s. Set RESILIENT_BUDGET to ", ToSeconds(known),
             " s or more on every rank, or start the store with shorter leases"));
}

LogRecord DeadlinesRecord(const SessionOptions& options, Duration lease) {
  const Ladder ladder = LadderOf(options.budget, options.seat_wait);
  LogRecord record;
  record.event = "deadlines";
  record.fields = {
      {"budget", Seconds(ladder.budget)},       {"abort", Seconds(ladder.budget)},
      {"seat_wait", Seconds(ladder.seat_wait)}, {"last_call", Seconds(ladder.last_call)},
      {"build", Seconds(ladder.build)},         {"ready", Seconds(ladder.budget)},
      {"rebuild", Seconds(ladder.rebuild)},     {"answer", Seconds(ladder.answer)},
  };
  if (lease > Duration::zero()) {
    record.fields.emplace_back("lease", Seconds(lease));
    record.fields.emplace_back("beat", Seconds(lease / kHeartbeatsPerLease));
    record.fields.emplace_back("known", Seconds(SumOf(lease, kKnownAfterLease)));
  }
  record.fields.emplace_back("op_deadline", Seconds(options.op_deadline));
  record.fields.emplace_back("stall", Seconds(options.stall));
  record.fields.emplace_back("device_stall", Seconds(options.device_stall));
  record.fields.emplace_back("wait_log", Seconds(options.wait_log));
  record.text = "abort, build and ready share the budget of one failure";
  return record;
}

}  // namespace resilient::recovery
