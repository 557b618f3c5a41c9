#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <resilient/clock.h>

#include "store/core/counters.h"

namespace resilient::store {

// Counts of observations up to each bound. Owner: ServerMetrics. Thread: thread-safe, so that the
// writer thread observes while the loop's thread renders; a rendering may lack what is just being
// observed.
class Histogram {
 public:
  static constexpr std::size_t kBounds = 13;
  using Bounds = std::array<double, kBounds>;

  explicit Histogram(const Bounds& bounds) : bounds_(bounds) {}

  void Observe(double value);
  const Bounds& bounds() const { return bounds_; }
  // Observations between the bound before and this one; the last index: above all bounds.
  std::uint64_t count(std::size_t bucket) const { return counts_[bucket].load(kRelaxed); }
  double sum() const { return sum_.load(kRelaxed); }

 private:
  static constexpr auto kRelaxed = std::memory_order_relaxed;

  const Bounds bounds_;
  std::array<std::atomic<std::uint64_t>, kBounds + 1> counts_{};
  std::atomic<double> sum_ = 0;
};

// Observes for how long it lived, in seconds. Owner: a scope. Thread: as the histogram.
class ScopedObservation {
 public:
  ScopedObservation(const Clock& clock, Histogram& histogram)
      : clock_(clock), histogram_(histogram), begun_(clock.Now()) {}
  ~ScopedObservation() {
    histogram_.Observe(std::chrono::duration<double>(clock_.Now() - begun_).count());
  }
  ScopedObservation(const ScopedObservation&) = delete;
  ScopedObservation& operator=(const ScopedObservation&) = delete;

 private:
  const Clock& clock_;
  Histogram& histogram_;
  const Instant begun_;
};

// Why the server did not take a connection, or ended one.
enum class Refusal : std::uint8_t {
  kConnections,  // As many are open as may be.
  kSilent,       // No Hello in time.
  kProtocol,     // What it sent is not our protocol.
  kRequest,      // Not a request that can be read.
  kSlow,         // It does not read its answers, or does not end its requests.
  kAccess,       // It has not proved to know a token, or TLS was refused.
};
inline constexpr std::size_t kRefusals = 6;

// What the server shell counts; the core's part is CoreCounters. Owner: Server. Thread: the loop's,
// but for `commit_seconds` and `commit_changes`, which the writer thread observes.
struct ServerMetrics {
  std::uint64_t accepted = 0;
  std::uint64_t accepted_local = 0;
  std::array<std::uint64_t, kRefusals> refused{};  // By Refusal.
  std::uint64_t deferred = 0;  // Times that a client's requests waited for a later turn.
  Histogram request_seconds;   // From the request to its answer, where it was not a wait.
  Histogram step_seconds;      // Of what the loop does at a time: meanwhile all others wait.
  Histogram commit_seconds;
  Histogram commit_changes;  // Steps of the core in one commit.

  ServerMetrics();
  void Refused(Refusal why) { ++refused[static_cast<std::size_t>(why)]; }
};

// All that a page of metrics shows. Thread: value type; refers to what outlives the rendering.
struct MetricsPage {
  const ServerMetrics& server;
  const CoreCounters& core;
  CoreGauges gauges;
  std::string_view version;
  bool durable = false;
  bool ready = false;
  bool encrypted = false;
  std::size_t held_bytes = 0;
  std::size_t output_bytes = 0;
  std::size_t input_bytes = 0;
  std::size_t before_hello = 0;
  std::size_t watched_processes = 0;
  double start_unix_s = 0;
  std::vector<std::pair<std::string_view, double>> limits;
};

// The text format of Prometheus, version 0.0.4.
std::string RenderMetrics(const MetricsPage& page);
inline constexpr char kMetricsContentType[] = "text/plain; version=0.0.4; charset=utf-8";

}  // namespace resilient::store
