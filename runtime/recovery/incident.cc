#include "runtime/recovery/incident.h"

#include <cmath>
#include <cstdio>
#include <utility>

#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/printable.h"

namespace resilient::recovery {
namespace {

constexpr int kSchema = 1;

const char* SourceName(IncidentSource source) {
  switch (source) {
    case IncidentSource::kFence:
      return "fence";
    case IncidentSource::kView:
      return "view";
    case IncidentSource::kSession:
      return "session";
  }
  return "";
}

long long Milliseconds(double from_s, double to_s) { return std::llround((to_s - from_s) * 1e3); }

// Bytes of other processes may be in it, and JSON is UTF-8.
std::string Quoted(const std::string& text) { return JsonString(Printable(text)); }

std::string Time(double unix_s) {
  if (unix_s == 0) return "null";
  char text[40];
  std::snprintf(text, sizeof text, "%.3f", unix_s);
  return text;
}

std::string Who(int rank, const std::string& host, std::int64_t pid) {
  return StrCat("{\"rank\": ", rank, ", \"host\": ", Quoted(host), ", \"pid\": ", pid, "}");
}

std::string Accused(const FailureDetail& detail) {
  return detail.rank < 0 ? "null" : Who(detail.rank, detail.host, detail.pid);
}

std::string Awaited(const FailureDetail& detail) {
  if (detail.group.empty()) return "null";
  return StrCat("{\"group\": ", Quoted(detail.group), ", \"seq\": ", detail.seq, "}");
}

std::string Phases(const Incident& incident, double ended_s) {
  std::string out = "{\"known\": 0";
  const std::pair<const char*, double> phases[] = {{"aborted", incident.aborted_unix_s},
                                                   {"joined", incident.joined_unix_s},
                                                   {"rebuilt", incident.rebuilt_unix_s},
                                                   {"running", incident.running_unix_s},
                                                   {"ended", ended_s}};
  for (const auto& [name, at_s] : phases) {
    out += StrCat(", \"", name, "\": ");
    // A phase that has not happened.
    out += at_s == 0 ? "null" : std::to_string(Milliseconds(incident.known_unix_s, at_s));
  }
  return out + "}";
}

}  // namespace

void IncidentLog::Begin(const View& view, std::uint64_t generation, IncidentSource source,
                        const Status& cause, double wall_s) {
  if (open_) End("fenced", 0, wall_s);
  latest_.emplace();
  latest_->generation = generation;
  latest_->cause = cause;
  latest_->known_unix_s = wall_s;
  life_ = view.life;
  round_ = view.round;
  source_ = source;
  open_ = true;
}

std::string IncidentLog::Mark(SessionState from, SessionState to, std::uint64_t generation,
                              double wall_s) {
  if (!open_ || from == to) return {};
  if (from == SessionState::kAborting &&
      (to == SessionState::kJoining || to == SessionState::kBuilding)) {
    latest_->aborted_unix_s = wall_s;
  }
  if (to == SessionState::kBuilding) latest_->joined_unix_s = wall_s;
  if (to == SessionState::kReady) latest_->rebuilt_unix_s = wall_s;
  if (to == SessionState::kRunning) {
    latest_->running_unix_s = wall_s;
    End("running", generation, wall_s);
  } else if (to == SessionState::kFailed) {
    End("failed", 0, wall_s);
  } else if (to == SessionState::kClosed) {
    End("closed", 0, wall_s);
  }
  if (!open_) return {};
  return StrCat("recovery from the end of generation ", latest_->generation, ": ",
                SessionStateName(to), " (generation ", generation, ") after +",
                Milliseconds(latest_->known_unix_s, wall_s), " ms");
}

std::vector<LogRecord> IncidentLog::TakeEnded() { return std::exchange(ended_, {}); }

void IncidentLog::End(const char* outcome, std::uint64_t next_generation, double wall_s) {
  open_ = false;
  const Incident& incident = *latest_;
  const FailureDetail& detail = incident.cause.detail();
  std::string object = StrCat(
      "{\"schema\": ", kSchema, ", \"outcome\": \"", outcome,
      "\", \"generation\": ", incident.generation,
      ", \"next_generation\": ", next_generation == 0 ? "null" : std::to_string(next_generation),
      ", \"life\": ", life_, ", \"round\": ", round_,
      ", \"reporter\": ", Who(reporter_.rank, reporter_.host, reporter_.pid),
      ", \"cause\": {\"code\": \"", CodeName(incident.cause.code()),
      "\", \"text\": ", Quoted(incident.cause.message()), "}, \"accused\": ", Accused(detail),
      ", \"evidence\": {\"by\": \"", SourceName(source_),
      "\", \"since\": ", Time(detail.since_unix_s), ", \"operation\": ", Awaited(detail),
      "}, \"known\": ", Time(incident.known_unix_s), ", \"phases_ms\": ", Phases(incident, wall_s),
      "}");
  LogRecord record{.event = "incident", .fields = {}, .text = {}, .object = std::move(object)};
  record.text = StrCat("generation ", incident.generation, " ended: ", incident.cause.message());
  ended_.push_back(std::move(record));
}

}  // namespace resilient::recovery
