#include "store/server/metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <memory>

#include <resilient/status.h>

#include "runtime/base/log.h"

namespace resilient::store {
namespace {

constexpr Histogram::Bounds kSecondsBounds = {10e-6, 25e-6, 100e-6, 250e-6, 1e-3, 2.5e-3, 10e-3,
                                              25e-3, 0.1,   0.25,   1,      2.5,  10};
constexpr Histogram::Bounds kChangesBounds = {1,   2,   4,   8,    16,   32,   64,
                                              128, 256, 512, 1024, 4096, 16384};
constexpr std::array<std::string_view, kRefusals> kRefusalNames = {
    "connections", "silent", "protocol", "request", "slow", "access"};
constexpr std::string_view kPrefix = "resilient_store_";

std::string Lower(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

// Shortest text that reads back as the same number.
std::string Number(double value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  return error == std::errc() ? std::string(text, end) : "NaN";
}

// Writes families one after another. Label values here are names of ours: nothing to escape.
// Owner: RenderMetrics. Thread: confined to it.
class Page {
 public:
  // Begins a family; its samples follow. `name` is whole.
  void Family(std::string name, std::string_view type, std::string_view help) {
    name_ = std::move(name);
    out_ += StrCat("# HELP ", name_, " ", help, "\n# TYPE ", name_, " ", type, "\n");
  }
  void Sample(double value, std::string_view labels = {}, std::string_view suffix = {}) {
    out_ += StrCat(name_, suffix);
    if (!labels.empty()) out_ += StrCat("{", labels, "}");
    out_ += StrCat(" ", Number(value), "\n");
  }
  void Gauge(std::string_view name, std::string_view help, double value) {
    Family(StrCat(kPrefix, name), "gauge", help);
    Sample(value);
  }
  void Counter(std::string_view name, std::string_view help, std::uint64_t value) {
    Family(StrCat(kPrefix, name), "counter", help);
    Sample(static_cast<double>(value));
  }
  void Distribution(std::string_view name, std::string_view help, const Histogram& histogram) {
    Family(StrCat(kPrefix, name), "histogram", help);
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < Histogram::kBounds; ++i) {
      total += histogram.count(i);
      Sample(static_cast<double>(total), StrCat("le=\"", Number(histogram.bounds()[i]), "\""),
             "_bucket");
    }
    total += histogram.count(Histogram::kBounds);
    Sample(static_cast<double>(total), "le=\"+Inf\"", "_bucket");
    Sample(histogram.sum(), {}, "_sum");
    Sample(static_cast<double>(total), {}, "_count");
  }

  std::string Take() && { return std::move(out_); }

 private:
  std::string name_;
  std::string out_;
};

std::string OutcomeName(std::size_t outcome) {
  if (outcome == Outcomes::kWaits) return "waits";
  if (outcome == Outcomes::kRepeated) return "repeated";
  return Lower(CodeName(static_cast<StatusCode>(outcome)));
}

void AddOutcomes(Page& page, const Outcomes& outcomes, const std::string& label,
                 const std::string& more_labels = {}) {
  for (std::size_t i = 0; i < Outcomes::kSize; ++i) {
    if (outcomes[i] == 0) continue;
    page.Sample(static_cast<double>(outcomes[i]),
                StrCat(more_labels, label, "=\"", OutcomeName(i), "\""));
  }
}

void AddStore(Page& page, const MetricsPage& from) {
  page.Family(StrCat(kPrefix, "build_info"), "gauge", "The version that runs, as a label.");
  page.Sample(1, StrCat("version=\"", from.version, "\",durable=\"",
                        from.durable ? "true" : "false", "\""));
  const CoreGauges& gauges = from.gauges;
  page.Gauge("ready", "1 while /readyz says so.", from.ready ? 1 : 0);
  page.Gauge("insecure", "1 when connections are not encrypted.", from.encrypted ? 0 : 1);
  page.Gauge("epoch", "Starts of the durable store; 0 for one in memory.",
             static_cast<double>(gauges.epoch));
  page.Gauge("connections", "Open connections.", static_cast<double>(gauges.connections));
  page.Gauge("connections_before_hello", "Connections that have not said who they are.",
             static_cast<double>(from.before_hello));
  page.Gauge("sessions", "Sessions known, connected or not.", static_cast<double>(gauges.sessions));
  page.Gauge("jobs", "Jobs known.", static_cast<double>(gauges.jobs));
  page.Gauge("worlds", "Worlds that exist now, over all jobs.", static_cast<double>(gauges.worlds));
  page.Gauge("live_members", "Members that hold a lease.",
             static_cast<double>(gauges.live_members));
  page.Gauge("keys", "Keys over all jobs; a queue counts as one.",
             static_cast<double>(gauges.keys));
  page.Gauge("seats", "Seats of these worlds, empty ones too.", static_cast<double>(gauges.seats));
  page.Gauge("result_bytes", "Answers kept for clients that may ask again.",
             static_cast<double>(gauges.result_bytes));
  page.Gauge("change_bytes", "Changes of keys kept for watches.",
             static_cast<double>(gauges.change_bytes));
  page.Gauge("bytes", "Bytes of keys, values, items and waits over all jobs.",
             static_cast<double>(gauges.bytes));
  page.Gauge("waits", "Requests that wait for others.", static_cast<double>(gauges.waits));
  page.Gauge("watched_processes", "Processes of this host whose end is watched.",
             static_cast<double>(from.watched_processes));
  page.Gauge("held_bytes", "Changes under way to the disk and the answers that wait for them.",
             static_cast<double>(from.held_bytes));
  page.Gauge("input_bytes", "Parts of requests that are not whole yet.",
             static_cast<double>(from.input_bytes));
  page.Gauge("output_bytes", "Answers that wait for their receivers to read.",
             static_cast<double>(from.output_bytes));
}

void AddCounters(Page& page, const MetricsPage& from) {
  const CoreCounters& core = from.core;
  page.Counter("connections_accepted_total", "Connections accepted.", from.server.accepted);
  page.Counter("local_connections_accepted_total", "Of these, over the unix socket of this host.",
               from.server.accepted_local);
  page.Family(StrCat(kPrefix, "connections_refused_total"), "counter",
              "Connections not taken, or ended, by reason.");
  for (std::size_t i = 0; i < kRefusals; ++i) {
    page.Sample(static_cast<double>(from.server.refused[i]),
                StrCat("reason=\"", kRefusalNames[i], "\""));
  }
  page.Counter("sessions_opened_total", "Sessions that said Hello first.", core.sessions_opened);
  page.Counter("sessions_resumed_total", "Hellos of a session that was known.",
               core.sessions_resumed);
  page.Counter("leases_expired_total", "Members lost by silence.", core.leases_expired);
  page.Family(StrCat(kPrefix, "fences_total"), "counter",
              "Generations ended, by the code of the first cause.");
  AddOutcomes(page, core.fences, "cause");
  page.Family(StrCat(kPrefix, "requests_total"), "counter",
              "Requests by operation and by how they were answered at first.");
  for (std::size_t op = 0; op < kOpKinds; ++op) {
    AddOutcomes(page, core.requests[op], "outcome", StrCat("operation=\"", kOpNames[op], "\","));
  }
  page.Family(StrCat(kPrefix, "waits_ended_total"), "counter",
              "Requests that waited, by how they were answered.");
  AddOutcomes(page, core.waits_ended, "outcome");
  page.Distribution("request_duration_seconds",
                    "From reading a request to writing its answer; waits are not among them.",
                    from.server.request_seconds);
  page.Distribution("loop_step_seconds",
                    "What the loop does at a time: requests of one connection, the end of one, "
                    "what is due in a turn. All others wait meanwhile.",
                    from.server.step_seconds);
  page.Counter("deferred_total",
               "Times that requests of a client waited for a later turn of the loop.",
               from.server.deferred);
  if (!from.durable) return;
  page.Distribution("commit_duration_seconds", "Of one write to the data directory.",
                    from.server.commit_seconds);
  page.Distribution("commit_changes", "Steps that one write made durable together.",
                    from.server.commit_changes);
}

void AddLimits(Page& page, const MetricsPage& from) {
  page.Family(StrCat(kPrefix, "limit"), "gauge", "What the server takes on, by name.");
  for (const auto& [name, value] : from.limits) {
    page.Sample(value, StrCat("limit=\"", name, "\""));
  }
}

std::size_t OpenDescriptors() {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir("/proc/self/fd"), &closedir);
  if (directory == nullptr) return 0;
  std::size_t count = 0;
  while (const dirent* entry = readdir(directory.get())) count += entry->d_name[0] != '.' ? 1 : 0;
  return count - 1;  // Its own.
}

// The names that every process exports.
void AddProcess(Page& page, double start_unix_s) {
  page.Family("process_start_time_seconds", "gauge", "Wall clock when the server was made.");
  page.Sample(start_unix_s);
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) == 0) {
    const auto seconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
    };
    page.Family("process_cpu_seconds_total", "counter", "User and system CPU time.");
    page.Sample(seconds(usage.ru_utime) + seconds(usage.ru_stime));
  }
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen("/proc/self/statm", "re"),
                                                             &std::fclose);
  unsigned long size = 0;
  unsigned long resident = 0;
  if (file != nullptr && std::fscanf(file.get(), "%lu %lu", &size, &resident) == 2) {
    const double page_bytes = static_cast<double>(sysconf(_SC_PAGESIZE));
    page.Family("process_virtual_memory_bytes", "gauge", "Virtual memory size.");
    page.Sample(static_cast<double>(size) * page_bytes);
    page.Family("process_resident_memory_bytes", "gauge", "Resident memory size.");
    page.Sample(static_cast<double>(resident) * page_bytes);
  }
  page.Family("process_open_fds", "gauge", "Open file descriptors.");
  page.Sample(static_cast<double>(OpenDescriptors()));
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    page.Family("process_max_fds", "gauge", "Most open file descriptors.");
    page.Sample(static_cast<double>(limit.rlim_cur));
  }
}

}  // namespace

void Histogram::Observe(double value) {
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  counts_[static_cast<std::size_t>(bucket)].fetch_add(1, kRelaxed);
  sum_.fetch_add(value, kRelaxed);
}

ServerMetrics::ServerMetrics()
    : request_seconds(kSecondsBounds),
      step_seconds(kSecondsBounds),
      commit_seconds(kSecondsBounds),
      commit_changes(kChangesBounds) {}

std::string RenderMetrics(const MetricsPage& page) {
  Page text;
  AddStore(text, page);
  AddCounters(text, page);
  AddLimits(text, page);
  AddProcess(text, page.start_unix_s);
  return std::move(text).Take();
}

}  // namespace resilient::store
