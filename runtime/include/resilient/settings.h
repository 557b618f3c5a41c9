#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/device.h>
#include <resilient/status.h>
#include <resilient/tls.h>

namespace resilient {

inline constexpr int kMaxSocketStreams = 8;

// Every RESILIENT_* variable, parsed once by main or the plugin and passed on. Meanings and
// defaults: docs/semantics.md section 5. Thread: value type.
struct Settings {
  std::string store;       // RESILIENT_STORE: "host:port[,host:port]"; empty: auto-spawn.
  std::string job;         // RESILIENT_JOB
  std::string bind;        // RESILIENT_BIND
  std::string token_file;  // RESILIENT_TOKEN_FILE: what the store asks for, and clients present
  TlsFiles tls;            // RESILIENT_TLS_CERT, RESILIENT_TLS_KEY, RESILIENT_TLS_CA
  Duration linger = std::chrono::seconds(60);    // RESILIENT_LINGER
  Duration lease_ttl = std::chrono::seconds(5);  // RESILIENT_LEASE_TTL, floor 1 s; beat = TTL/5
  Duration budget = std::chrono::seconds(20);    // RESILIENT_BUDGET
  Duration seat_wait = Duration::zero();         // RESILIENT_SEAT_WAIT
  // RESILIENT_SPARES: the last so many of WORLD_SIZE processes wait for a seat to become free.
  int spares = 0;
  bool strict_timeouts = false;                      // RESILIENT_TIMEOUT_POLICY=strict
  Duration op_deadline = std::chrono::seconds(120);  // RESILIENT_OP_DEADLINE, floor 1 s
  Duration stall = std::chrono::hours(1);            // RESILIENT_STALL, floor 1 s
  Duration device_stall = std::chrono::minutes(10);  // RESILIENT_DEVICE_STALL, floor 1 s
  Duration wait_log = std::chrono::seconds(30);      // RESILIENT_WAIT_LOG, floor 1 s
  std::size_t shm_limit = std::size_t{256} << 20;    // RESILIENT_SHM_LIMIT, bytes; 0: none
  bool checksums = false;                            // RESILIENT_CHECKSUM
  bool encrypted_links = false;                      // RESILIENT_LINK_TLS
  bool hierarchical_order = false;                   // RESILIENT_REDUCTION_ORDER=hierarchical
  bool auto_heal = false;                            // RESILIENT_HEAL=auto
  bool replay = false;                               // RESILIENT_REPLAY
  std::string socket_ifname;  // RESILIENT_SOCKET_IFNAME: "eth0,eth1"; empty: the way to the store
  int socket_streams = 1;     // RESILIENT_SOCKET_STREAMS: connections of a link to another host
  std::string nccl_library;   // RESILIENT_NCCL_LIBRARY: a path; empty: as CudaFabricOptions has it
  std::string cuda_runtime;   // RESILIENT_CUDA_RUNTIME: likewise
  std::string log = "warn";   // RESILIENT_LOG: level, "json:" prefix for structured lines
  std::string owner;          // RESILIENT_OWNER: internal, "pid:start" of the rank process
  bool supervised = false;    // RESILIENT_SUPERVISED: internal, how this process ends is reported
  // RESILIENT_REPLACES: internal, this process replaces one; where its seat is taken it is a spare.
  bool replaces = false;
  // RESILIENT_ALLOW_SHARED_GPU: where it is allowed ranks claim no GPU for themselves.
  SharedGpu shared_gpu = SharedGpu::kRefused;
  // RESILIENT_FAKE_DEVICES: internal, the claims of ranks 0, 1, ... instead of what NVML and CUDA
  // say, "host|uuid|ordinal|visible;..."; with an empty uuid a rank's device is not known.
  std::vector<DeviceClaim> fake_devices;
  std::uint64_t attempt = 0;  // RESILIENT_ATTEMPT: internal, how often all workers were started
  bool host_watch = true;     // RESILIENT_HOST_WATCH: internal, for tests and measurements
  std::vector<std::string> warnings;  // Names that are unknown.
};

// Reads NAME -> value pairs (all of the environment). kSetting for a value that does not parse or
// is out of range: the text names variable, value, and what is accepted ("5", "5s", "500ms",
// "10min", "1h"). Unknown RESILIENT_* names
// become warnings.
Result<Settings> ParseSettings(const std::vector<std::pair<std::string, std::string>>& environment);

// The environment of this process. The only getenv of the library.
std::vector<std::pair<std::string, std::string>> ProcessEnvironment();

// Sets level and tag ("rank 2") of the lines that the library writes to stderr; process-wide, as
// stderr is. `level` as in Settings::log; kSetting when it is unknown.
Status ConfigureLog(const std::string& level, const std::string& tag);

// The tag alone.
void SetLogTag(std::string tag);

// "5", "5s", "500ms", "10min", "1h" -> duration; nullopt when malformed or negative.
std::optional<Duration> ParseDuration(std::string_view text);

// "0", "65536", "64KiB", "256MiB", "1GiB" -> bytes; nullopt when malformed or too large.
std::optional<std::size_t> ParseBytes(std::string_view text);

}  // namespace resilient
