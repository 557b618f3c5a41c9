#include <resilient/settings.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <map>
#include <numeric>
#include <string_view>

#include "runtime/base/log.h"
#include "runtime/base/numbers.h"

namespace resilient {
namespace {

constexpr std::string_view kPrefix = "RESILIENT_";
constexpr std::string_view kDurationForms =
    "a duration: \"5\" or \"5s\" (seconds), \"500ms\", "
    "\"10min\", \"1h\"";

// What a value must look like; checked for every known name, whether this build uses it or not, so
// that a typing error is found at the start of a job and not in its first recovery.
enum class Form {
  kText,
  kDuration,
  kBytes,
  kSwitch,
  kStreams,
  kBackends,
  kHeal,
  kSharedGpu,
  kPolicy,
  kOrder,
  kLog,
  kStoreList,
  kOwner,
  kDevices,
  kCount,
  kSpares,
};

struct Known {
  std::string_view name;
  Form form;
  // For durations, in seconds.
  int floor_s = 0;
};

// Every variable of docs/semantics.md section 5.
constexpr std::array kKnown = {
    Known{"RESILIENT_STORE", Form::kStoreList},
    Known{"RESILIENT_JOB", Form::kText},
    Known{"RESILIENT_BIND", Form::kText},
    Known{"RESILIENT_LINGER", Form::kDuration},
    Known{"RESILIENT_TOKEN_FILE", Form::kText},
    Known{"RESILIENT_TLS_CERT", Form::kText},
    Known{"RESILIENT_TLS_KEY", Form::kText},
    Known{"RESILIENT_TLS_CA", Form::kText},
    Known{"RESILIENT_TAKE_OVER", Form::kBackends},
    Known{"RESILIENT_LEASE_TTL", Form::kDuration, 1},
    Known{"RESILIENT_BUDGET", Form::kDuration, 1},
    Known{"RESILIENT_SEAT_WAIT", Form::kDuration},
    Known{"RESILIENT_SPARES", Form::kSpares},
    Known{"RESILIENT_MIN_WORLD", Form::kCount},  // Read where a rebuild is asked for.
    Known{"RESILIENT_HEAL", Form::kHeal},
    Known{"RESILIENT_TIMEOUT_POLICY", Form::kPolicy},
    Known{"RESILIENT_OP_DEADLINE", Form::kDuration, 1},
    Known{"RESILIENT_STALL", Form::kDuration, 1},
    Known{"RESILIENT_DEVICE_STALL", Form::kDuration, 1},
    Known{"RESILIENT_WAIT_LOG", Form::kDuration, 1},
    Known{"RESILIENT_REPLAY", Form::kSwitch},
    Known{"RESILIENT_ALLOW_SHARED_GPU", Form::kSharedGpu},
    Known{"RESILIENT_SOCKET_IFNAME", Form::kText},
    Known{"RESILIENT_SOCKET_STREAMS", Form::kStreams},
    Known{"RESILIENT_SHM_LIMIT", Form::kBytes},
    Known{"RESILIENT_NCCL_LIBRARY", Form::kText},
    Known{"RESILIENT_CUDA_RUNTIME", Form::kText},
    Known{"RESILIENT_CHECKSUM", Form::kSwitch},
    Known{"RESILIENT_LINK_TLS", Form::kSwitch},
    Known{"RESILIENT_REDUCTION_ORDER", Form::kOrder},
    Known{"RESILIENT_LOG", Form::kLog},
    Known{"RESILIENT_OWNER", Form::kOwner},
    Known{"RESILIENT_SUPERVISED", Form::kSwitch},
    Known{"RESILIENT_REPLACES", Form::kSwitch},
    Known{"RESILIENT_FAKE_DEVICES", Form::kDevices},
    Known{"RESILIENT_ATTEMPT", Form::kCount},
    Known{"RESILIENT_LAUNCH", Form::kText},  // For resilient-run alone: whose child this is,
    Known{"RESILIENT_SEATED", Form::kText},  // and a file for the size of its world.
    Known{"RESILIENT_HOST_WATCH", Form::kSwitch},
};

const Known* FindKnown(std::string_view name) {
  for (const Known& known : kKnown) {
    if (known.name == name) return &known;
  }
  return nullptr;
}

// As int() of Python has it: YAML and files leave blanks and ends of lines around values.
std::string_view Trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\n\v\f\r";
  const std::size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

using Values = std::map<std::string_view, std::string_view>;

Status Bad(std::string_view name, std::string_view value, std::string_view accepted) {
  return {StatusCode::kSetting,
          StrCat(name, "=\"", value, "\" is not valid: accepted is ", accepted,
                 ". Correct it in the environment that starts the job")};
}

bool IsAddress(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const std::string_view host = text.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (!bracketed && host.find_first_of(":[] ") != std::string_view::npos) return false;
  const auto port = ParseNumber<std::uint16_t>(text.substr(colon + 1));
  return port.has_value() && *port > 0;
}

bool IsAddressList(std::string_view text) {
  while (true) {
    const std::size_t comma = text.find(',');
    if (!IsAddress(text.substr(0, comma))) return false;
    if (comma == std::string_view::npos) return true;
    text.remove_prefix(comma + 1);
  }
}

bool IsOwner(std::string_view text) {
  const std::size_t colon = text.find(':');
  if (colon == std::string_view::npos) return false;
  const auto pid = ParseNumber<std::int64_t>(text.substr(0, colon));
  return pid.has_value() && *pid > 0 &&
         ParseNumber<std::uint64_t>(text.substr(colon + 1)).has_value();
}

std::optional<int> ParseStreams(std::string_view text) {
  const auto streams = ParseNumber<int>(text);
  return streams && *streams >= 1 && *streams <= kMaxSocketStreams ? streams : std::nullopt;
}

std::optional<SharedGpu> ParseSharedGpu(std::string_view text) {
  if (text == "0") return SharedGpu::kRefused;
  if (text == "1") return SharedGpu::kThroughHost;
  if (text == "nccl") return SharedGpu::kThroughNccl;
  return std::nullopt;
}

std::optional<DeviceClaim> ParseDevice(std::string_view text) {
  std::array<std::string_view, 4> fields;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const std::size_t bar = text.find('|');
    if ((bar == std::string_view::npos) != (i + 1 == fields.size())) return std::nullopt;
    fields[i] = text.substr(0, bar);
    if (bar != std::string_view::npos) text.remove_prefix(bar + 1);
  }
  const auto ordinal = ParseNumber<int>(fields[2]);
  const auto visible = ParseNumber<int>(fields[3]);
  if (!ordinal || !visible) return std::nullopt;
  DeviceClaim claim;
  claim.host = fields[0];
  claim.uuid = fields[1];
  claim.ordinal = *ordinal;
  claim.visible = *visible;
  return claim;
}

std::optional<std::vector<DeviceClaim>> ParseDevices(std::string_view text) {
  std::vector<DeviceClaim> devices;
  while (true) {
    const std::size_t end = text.find(';');
    std::optional<DeviceClaim> device = ParseDevice(text.substr(0, end));
    if (!device) return std::nullopt;
    devices.push_back(*std::move(device));
    if (end == std::string_view::npos) return devices;
    text.remove_prefix(end + 1);
  }
}

bool IsLog(std::string_view text) {
  constexpr std::string_view kJson = "json:";
  if (text.starts_with(kJson)) text.remove_prefix(kJson.size());
  LogLevel level{};
  return ParseLogLevel(text, &level);
}

Status CheckDuration(const Known& known, std::string_view value) {
  const std::optional<Duration> parsed = ParseDuration(value);
  if (!parsed) return Bad(known.name, value, kDurationForms);
  if (*parsed < std::chrono::seconds(known.floor_s)) {
    return Bad(known.name, value, StrCat(kDurationForms, ", at least ", known.floor_s, " s"));
  }
  return {};
}

Status Check(const Known& known, std::string_view value) {
  const auto require = [&](bool holds, std::string_view accepted) {
    return holds ? Status() : Bad(known.name, value, accepted);
  };
  switch (known.form) {
    case Form::kText:
      return {};
    case Form::kDuration:
      return CheckDuration(known, value);
    case Form::kBytes:
      return require(ParseBytes(value).has_value(),
                     "a number of bytes: \"65536\", \"64KiB\", \"256MiB\", \"1GiB\"");
    case Form::kSwitch:
      return require(value == "0" || value == "1", "\"0\" or \"1\"");
    case Form::kBackends:
      return require(
          value == "nccl" || value == "gloo" || value == "nccl,gloo" || value == "gloo,nccl",
          "\"nccl\", \"gloo\" or \"nccl,gloo\"");
    case Form::kStreams:
      return require(ParseStreams(value).has_value(), StrCat("1 to ", kMaxSocketStreams));
    case Form::kHeal:
      return require(value == "explicit" || value == "auto", "\"explicit\" or \"auto\"");
    case Form::kSharedGpu:
      return require(ParseSharedGpu(value).has_value(), "\"0\", \"1\" or \"nccl\"");
    case Form::kPolicy:
      return require(value == "liveness" || value == "strict", "\"liveness\" or \"strict\"");
    case Form::kOrder:
      return require(value == "rank" || value == "hierarchical", "\"rank\" or \"hierarchical\"");
    case Form::kLog:
      return require(IsLog(value),
                     "debug, info, warn, error or off, with \"json:\" before it for structured "
                     "lines (\"json:info\")");
    case Form::kStoreList:
      return require(IsAddressList(value),
                     "\"host:port\", several separated by commas, an IPv6 address in brackets "
                     "(\"[::1]:29500\")");
    case Form::kOwner:
      return require(IsOwner(value),
                     "\"pid:start\" (internal: set by the library itself; unset it)");
    case Form::kDevices:
      return require(ParseDevices(value).has_value(),
                     "\"host|uuid|ordinal|visible\" for each rank, separated by \";\" (internal: "
                     "for tests; unset it)");
    case Form::kCount:
      return require(ParseNumber<std::uint64_t>(value).has_value(),
                     "a number (internal: set by launchers; unset it)");
    case Form::kSpares:
      return require(ParseNumber<std::uint16_t>(value).has_value(),
                     "how many of the WORLD_SIZE processes are spares, as in 1");
  }
  return {};
}

// Levenshtein's distance, one row at a time.
std::size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

std::string UnknownName(std::string_view name) {
  // A name from elsewhere may be of any length; its tail does not help to find the nearest.
  constexpr std::size_t kComparedMax = 64;
  const std::string_view compared = name.substr(0, kComparedMax);
  const auto nearest =
      std::min_element(kKnown.begin(), kKnown.end(), [&](const Known& left, const Known& right) {
        return EditDistance(compared, left.name) < EditDistance(compared, right.name);
      });
  return StrCat("the environment variable ", name, " is unknown and has no effect; did you mean ",
                nearest->name, "?");
}

bool IsWildcard(std::string_view address) {
  for (const std::string_view wildcard : {"0.0.0.0", "::", "[::]", "*"}) {
    if (address == wildcard) return true;
  }
  return address.starts_with("0.0.0.0:") || address.starts_with("[::]:") ||
         address.starts_with("*:");
}

Status CheckBind(const Values& values) {
  const auto bind = values.find("RESILIENT_BIND");
  if (bind == values.end() || !IsWildcard(bind->second)) return {};
  if (values.contains("RESILIENT_TOKEN_FILE")) return {};
  // Then a store of ours asks every client for a certificate.
  if (values.contains("RESILIENT_TLS_CA") && values.contains("RESILIENT_TLS_CERT")) return {};
  return {
      StatusCode::kSetting,
      StrCat("RESILIENT_BIND=\"", bind->second,
             "\" would open the store to every network of this host: bind to one address, or ask "
             "for a token (RESILIENT_TOKEN_FILE) or for certificates (RESILIENT_TLS_*)")};
}

void Assign(const Values& values, Settings* settings) {
  const auto text = [&](std::string_view name, std::string* field) {
    if (const auto found = values.find(name); found != values.end()) {
      *field = std::string(found->second);
    }
  };
  const auto duration = [&](std::string_view name, Duration* field) {
    if (const auto found = values.find(name); found != values.end()) {
      *field = ParseDuration(found->second).value_or(*field);
    }
  };
  const auto is = [&](std::string_view name, std::string_view value, bool* field) {
    if (const auto found = values.find(name); found != values.end()) {
      *field = found->second == value;
    }
  };
  text("RESILIENT_STORE", &settings->store);
  text("RESILIENT_JOB", &settings->job);
  text("RESILIENT_BIND", &settings->bind);
  text("RESILIENT_TOKEN_FILE", &settings->token_file);
  text("RESILIENT_TLS_CERT", &settings->tls.certificate);
  text("RESILIENT_TLS_KEY", &settings->tls.key);
  text("RESILIENT_TLS_CA", &settings->tls.authority);
  duration("RESILIENT_LINGER", &settings->linger);
  duration("RESILIENT_LEASE_TTL", &settings->lease_ttl);
  duration("RESILIENT_BUDGET", &settings->budget);
  duration("RESILIENT_SEAT_WAIT", &settings->seat_wait);
  if (const auto found = values.find("RESILIENT_SPARES"); found != values.end())
    settings->spares = ParseNumber<std::uint16_t>(found->second).value_or(0);
  is("RESILIENT_TIMEOUT_POLICY", "strict", &settings->strict_timeouts);
  duration("RESILIENT_OP_DEADLINE", &settings->op_deadline);
  duration("RESILIENT_STALL", &settings->stall);
  duration("RESILIENT_DEVICE_STALL", &settings->device_stall);
  duration("RESILIENT_WAIT_LOG", &settings->wait_log);
  if (const auto found = values.find("RESILIENT_SHM_LIMIT"); found != values.end())
    settings->shm_limit = ParseBytes(found->second).value_or(settings->shm_limit);
  is("RESILIENT_CHECKSUM", "1", &settings->checksums);
  is("RESILIENT_LINK_TLS", "1", &settings->encrypted_links);
  is("RESILIENT_REDUCTION_ORDER", "hierarchical", &settings->hierarchical_order);
  is("RESILIENT_HEAL", "auto", &settings->auto_heal);
  is("RESILIENT_REPLAY", "1", &settings->replay);
  text("RESILIENT_SOCKET_IFNAME", &settings->socket_ifname);
  if (const auto found = values.find("RESILIENT_SOCKET_STREAMS"); found != values.end())
    settings->socket_streams = ParseStreams(found->second).value_or(settings->socket_streams);
  text("RESILIENT_NCCL_LIBRARY", &settings->nccl_library);
  text("RESILIENT_CUDA_RUNTIME", &settings->cuda_runtime);
  text("RESILIENT_LOG", &settings->log);
  text("RESILIENT_OWNER", &settings->owner);
  if (const auto found = values.find("RESILIENT_ALLOW_SHARED_GPU"); found != values.end())
    settings->shared_gpu = ParseSharedGpu(found->second).value_or(settings->shared_gpu);
  if (const auto found = values.find("RESILIENT_FAKE_DEVICES"); found != values.end())
    settings->fake_devices = ParseDevices(found->second).value_or(settings->fake_devices);
  is("RESILIENT_SUPERVISED", "1", &settings->supervised);
  is("RESILIENT_REPLACES", "1", &settings->replaces);
  if (const auto found = values.find("RESILIENT_ATTEMPT"); found != values.end())
    settings->attempt = ParseNumber<std::uint64_t>(found->second).value_or(0);
  is("RESILIENT_HOST_WATCH", "1", &settings->host_watch);
}

}  // namespace

std::optional<Duration> ParseDuration(std::string_view text) {
  struct Unit {
    std::string_view suffix;
    std::int64_t nanos;
  };
  constexpr std::int64_t kSecond = 1'000'000'000;
  // "ms" and "min" before "s": the first suffix that fits decides.
  constexpr std::array kUnits = {Unit{"ms", kSecond / 1000}, Unit{"min", 60 * kSecond},
                                 Unit{"h", 3600 * kSecond}, Unit{"s", kSecond}};
  std::int64_t nanos = kSecond;
  for (const Unit& unit : kUnits) {
    if (text.ends_with(unit.suffix)) {
      nanos = unit.nanos;
      text.remove_suffix(unit.suffix.size());
      break;
    }
  }
  if (text.empty() || text.front() == '-') return std::nullopt;
  const auto number = ParseNumber<std::int64_t>(text);
  if (!number || *number > Duration::max().count() / nanos) return std::nullopt;
  return Duration(*number * nanos);
}

std::optional<std::size_t> ParseBytes(std::string_view text) {
  constexpr std::array<std::string_view, 4> kSuffixes = {"", "KiB", "MiB", "GiB"};
  unsigned power = 0;
  for (unsigned i = 1; i < kSuffixes.size(); ++i) {
    if (!text.ends_with(kSuffixes[i])) continue;
    power = i;
    text.remove_suffix(kSuffixes[i].size());
  }
  const auto number = ParseNumber<std::size_t>(text);
  if (!number || *number > (std::numeric_limits<std::size_t>::max() >> (10 * power))) return {};
  return *number << (10 * power);
}

Result<Settings> ParseSettings(
    const std::vector<std::pair<std::string, std::string>>& environment) {
  Settings settings;
  Values values;
  for (const auto& [name, whole] : environment) {
    if (!name.starts_with(kPrefix)) continue;
    const Known* known = FindKnown(name);
    if (known == nullptr) {
      settings.warnings.push_back(UnknownName(name));
      continue;
    }
    const std::string_view value = known->form == Form::kText ? whole : Trimmed(whole);
    if (value.empty()) continue;  // As scripts unset a variable: "RESILIENT_STORE= python ...".
    RESILIENT_RETURN_IF_ERROR(Check(*known, value));
    values[known->name] = value;
  }
  RESILIENT_RETURN_IF_ERROR(CheckBind(values));
  Assign(values, &settings);
  return settings;
}

std::vector<std::pair<std::string, std::string>> ProcessEnvironment() {
  std::vector<std::pair<std::string, std::string>> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    variables.emplace_back(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

}  // namespace resilient
