#include "store/server/limits.h"

#include <array>
#include <cstdint>
#include <optional>

#include "runtime/base/log.h"
#include "runtime/base/numbers.h"
#include "runtime/net/frame.h"
#include "runtime/tls/stream.h"

namespace resilient::store {
namespace {

constexpr std::size_t kKibi = 1u << 10;
constexpr std::size_t kMebi = 1u << 20;
constexpr std::size_t kGibi = 1u << 30;
constexpr std::size_t kNameWidth = 22;  // In the table of --help.

struct Limit {
  std::string_view name;
  std::size_t least;
  std::size_t most;
  bool bytes;
  std::size_t& (*of)(ServerLimits&);
  std::string_view meaning;
};

// `most`: what the server was made for; more would be a promise that nobody has tested.
constexpr std::array kLimits = {
    Limit{"connections", 1, 131072, false,
          [](ServerLimits& limits) -> std::size_t& { return limits.connections; },
          "open connections; 32 more are kept for the command line"},
    Limit{"before-hello", 1, 65536, false,
          [](ServerLimits& limits) -> std::size_t& { return limits.before_hello; },
          "connections that have not said who they are; of others that come then each takes the "
          "place of "
          "one that is silent, or waits in the kernel's queue"},
    Limit{"hello-seconds", 1, 3600, false,
          [](ServerLimits& limits) -> std::size_t& { return limits.hello_seconds; },
          "until a connection must have said who it is"},
    Limit{"sessions", 1, 262144, false,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.sessions; },
          "clients known, connected or not"},
    Limit{"jobs", 1, 65536, false,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.jobs; }, "jobs known"},
    Limit{"worlds-per-job", 1, 65536, false,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.worlds_per_job; },
          "worlds of a job at one time"},
    Limit{"keys-per-job", 1, 4 * kMebi, false,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.keys_per_job; },
          "keys of a job; a queue counts as one"},
    Limit{"queue-items", 1, 4 * kMebi, false,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.queue_items; },
          "items of one queue"},
    Limit{"seats-per-job", 1, 4 * kMebi, false,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.seats_per_job; },
          "seats of the worlds of a job, empty ones too"},
    Limit{"seats", 1, 64 * kMebi, false,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.seats; },
          "the same of all jobs together"},
    Limit{"bytes-per-job", kKibi, 2 * kGibi, true,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.bytes_per_job; },
          "keys, values, items and waits of a job, with what keeping them takes"},
    Limit{"bytes", kKibi, 64 * kGibi, true,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.bytes; },
          "the same of all jobs together"},
    Limit{"result-bytes-per-job", kKibi, 2 * kGibi, true,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.result_bytes_per_job; },
          "answers kept for clients of a job that may ask again; above it the largest go"},
    Limit{"result-total-bytes", kKibi, 64 * kGibi, true,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.result_total_bytes; },
          "the same of all jobs together"},
    Limit{"change-total-bytes", kKibi, 64 * kGibi, true,
          [](ServerLimits& limits) -> std::size_t& { return limits.core.change_total_bytes; },
          "changes of keys kept for the watches of all jobs; above it the oldest go"},
    Limit{"output-bytes", kMebi, kGibi, true,
          [](ServerLimits& limits) -> std::size_t& { return limits.output_bytes; },
          "that a client leaves unread; above it is cut"},
    Limit{"output-total-bytes", kMebi, 64 * kGibi, true,
          [](ServerLimits& limits) -> std::size_t& { return limits.output_total_bytes; },
          "that all clients together leave unread; above it the worst is cut"},
    Limit{"input-total-bytes", 16 * kMebi, 64 * kGibi, true,
          [](ServerLimits& limits) -> std::size_t& { return limits.input_total_bytes; },
          "of requests of which a part has come; above it who has begun longest ago is cut"},
    Limit{"slow-seconds", 1, 3600, false,
          [](ServerLimits& limits) -> std::size_t& { return limits.slow_seconds; },
          "after which a client is cut that leaves 8 MiB unread and reads nothing"},
    Limit{"held-bytes", kMebi, 4 * kGibi, true,
          [](ServerLimits& limits) -> std::size_t& { return limits.held_bytes; },
          "under way to the disk; above it clients are left unread"},
};

// "12", and for bytes "12KiB"; nullopt when malformed or too large.
std::optional<std::size_t> ParseAmount(std::string_view text, bool bytes) {
  std::size_t unit = 1;
  if (bytes) {
    for (const auto& [suffix, size] :
         {std::pair<std::string_view, std::size_t>{"KiB", kKibi}, {"MiB", kMebi}, {"GiB", kGibi}}) {
      if (!text.ends_with(suffix)) continue;
      text.remove_suffix(suffix.size());
      unit = size;
    }
  }
  const auto number = ParseNumber<std::size_t>(text);
  if (!number || *number > SIZE_MAX / unit) return std::nullopt;
  return *number * unit;
}

std::string Amount(std::size_t value, bool bytes) {
  if (bytes && value % kGibi == 0) return StrCat(value / kGibi, "GiB");
  if (bytes && value % kMebi == 0) return StrCat(value / kMebi, "MiB");
  if (bytes && value % kKibi == 0) return StrCat(value / kKibi, "KiB");
  return StrCat(value);
}

}  // namespace

Status SetLimit(std::string_view text, ServerLimits& limits) {
  const std::size_t equals = text.find('=');
  const std::string_view name = text.substr(0, equals);
  std::string names;
  for (const Limit& limit : kLimits) {
    names += StrCat(names.empty() ? "" : ", ", limit.name);
    if (limit.name != name) continue;
    const auto value = equals == std::string_view::npos
                           ? std::nullopt
                           : ParseAmount(text.substr(equals + 1), limit.bytes);
    if (value && *value >= limit.least && *value <= limit.most) {
      limit.of(limits) = *value;
      return {};
    }
    return Status(StatusCode::kSetting,
                  StrCat("'", text, "': ", name, " is from ", Amount(limit.least, limit.bytes),
                         " to ", Amount(limit.most, limit.bytes), ", for example ", name, "=",
                         Amount(limit.of(limits), limit.bytes)));
  }
  return Status(StatusCode::kSetting,
                StrCat("'", text, "': there is no limit '", name, "'; the names are ", names));
}

std::string DescribeLimits() {
  std::string text;
  ServerLimits defaults;
  for (const Limit& limit : kLimits) {
    text += StrCat("  ", limit.name, std::string(kNameWidth - limit.name.size(), ' '),
                   Amount(limit.of(defaults), limit.bytes), " (", Amount(limit.least, limit.bytes),
                   " to ", Amount(limit.most, limit.bytes), "): ", limit.meaning, "\n");
  }
  return text;
}

std::vector<std::pair<std::string_view, double>> ListLimits(const ServerLimits& limits) {
  ServerLimits copy = limits;
  const std::pair<std::string_view, std::size_t> constants[] = {
      {"key-bytes", kKeyBytesMax},
      {"value-bytes", kValueBytesMax},
      {"keys-per-request", kKeysPerRequestMax},
      {"frame-bytes", kMaxFrameBody},
      {"frame-bytes-before-hello", kMaxFrameBodyBeforeHello},
      {"tls-handshake-bytes", kTlsHandshakeBytesMax},
      {"requests-in-flight", kInFlightPerSessionMax},
      {"result-bytes", kResultBytesPerLineMax},
      {"world-size", static_cast<std::size_t>(kWorldSizeMax)},
      {"endpoint-bytes", kEndpointBytesMax},
      {"text-bytes", kTextBytesMax},
  };
  std::vector<std::pair<std::string_view, double>> list;
  list.reserve(std::size(kLimits) + std::size(constants));
  for (const Limit& limit : kLimits) {
    list.emplace_back(limit.name, static_cast<double>(limit.of(copy)));
  }
  for (const auto& [name, value] : constants) list.emplace_back(name, static_cast<double>(value));
  return list;
}

}  // namespace resilient::store
