#include "torch_plugin/csrc/launch.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>
#include <string_view>

#include <c10/util/StringUtil.h>

namespace resilient::plugin {
namespace {

constexpr int kPortMax = 65535;

// The variables by name. Thread: immutable.
class Variables {
 public:
  using Entries = std::vector<std::pair<std::string, std::string>>;
  explicit Variables(const Entries& entries) : entries_(entries) {}

  // Empty when it is not set.
  std::string operator[](std::string_view name) const {
    const auto found = std::find_if(entries_.begin(), entries_.end(),
                                    [&](const auto& entry) { return entry.first == name; });
    return found == entries_.end() ? std::string() : found->second;
  }

 private:
  const Entries& entries_;
};

constexpr std::string_view kBlanks = " \t\n\v\f\r";

std::string_view Trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

// With blanks and ends of lines around it, as the package takes it.
std::optional<int> ToNumber(std::string_view whole) {
  const std::string text(Trimmed(whole));
  int number = 0;
  const char* end = text.data() + text.size();
  const auto [parsed, error] = std::from_chars(text.data(), end, number);
  if (text.empty() || error != std::errc() || parsed != end) return std::nullopt;
  return number;
}

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char one) { return static_cast<char>(std::tolower(one)); });
  return text;
}

Result<int> NumberOf(int given, const char* name, const Variables& variables) {
  if (given >= 0) return given;
  const std::string text = variables[name];
  if (text.empty()) {
    return Status(StatusCode::kSetting,
                  c10::str(name,
                           " is not set: start the program with a launcher (resilient-run --nproc "
                           "4 --no-python ./program), set ",
                           name, ", or give InitOptions to init_process_group"));
  }
  if (const std::optional<int> number = ToNumber(text)) return *number;
  return Status(StatusCode::kSetting, c10::str(name, "='", text, "' is not a number"));
}

std::vector<std::string> SplitAddresses(std::string_view text) {
  std::vector<std::string> addresses;
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    const std::string_view one = Trimmed(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
    if (!one.empty()) addresses.emplace_back(one);
  }
  return addresses;
}

// "host:port" of MASTER_ADDR and MASTER_PORT; empty when they name none.
std::string MasterAddress(const Variables& variables) {
  const std::string host = Lower(variables["MASTER_ADDR"]);
  const std::optional<int> port = ToNumber(variables["MASTER_PORT"]);
  const bool name = !host.empty() && host.find_first_of(kBlanks) == std::string::npos;
  if (!name || !port || *port < 0 || *port > kPortMax) return {};
  const bool v6 = host.find(':') != std::string::npos;
  return c10::str(v6 ? "[" : "", host, v6 ? "]" : "", ":", *port);
}

// The same on all ranks and at every attempt, also where hosts know the store by several names: one
// that is not `shared` with others is told by its place.
std::string JobName(const InitOptions& options, const Settings& settings,
                    const Variables& variables, const std::string& address, bool shared) {
  if (!options.job.empty()) return options.job;
  if (!settings.job.empty()) return settings.job;
  std::string run_id = variables["TORCHELASTIC_RUN_ID"];
  if (!run_id.empty() && run_id != "none") return run_id;  // torchrun's default id is no name.
  if (address.empty()) return "default";
  if (!shared) return c10::str("port-", address.substr(address.rfind(':') + 1));
  const std::string slurm = variables["SLURM_JOB_ID"];
  return slurm.empty() ? address : c10::str(slurm, "/", address);
}

// As the package's own rendezvous of torchrun says. Otherwise torchrun's count is used on a single
// node only: the nodes of one world differ in it.
std::uint64_t AttemptOf(const Settings& settings, const Variables& variables) {
  if (settings.attempt > 0) return settings.attempt;
  const std::string nodes = variables["GROUP_WORLD_SIZE"];
  const std::optional<int> count = ToNumber(variables["TORCHELASTIC_RESTART_COUNT"]);
  const bool counts = count && *count > 0 && (nodes.empty() || ToNumber(nodes) == 1);
  return counts ? static_cast<std::uint64_t>(*count) : 0;
}

Status FindStore(const InitOptions& options, const Settings& settings, const Variables& variables,
                 const std::string& master, Launch* launch) {
  launch->store = options.store.empty() ? SplitAddresses(settings.store) : options.store;
  launch->store_given = !launch->store.empty();
  if (launch->store_given) return Status::Ok();
  if (variables["TORCHELASTIC_USE_AGENT_STORE"] == "True") {
    return {StatusCode::kSetting,
            "under torchrun MASTER_PORT belongs to torchrun's own store, through which a C++ "
            "program finds none of ours: use resilient-run --no-python, or start resilient-store "
            "serve and set RESILIENT_STORE=host:port"};
  }
  if (master.empty()) {
    return {StatusCode::kSetting,
            c10::str("MASTER_ADDR='", variables["MASTER_ADDR"], "' and MASTER_PORT='",
                     variables["MASTER_PORT"],
                     "' name no address: start the program with a launcher (resilient-run "
                     "--no-python), or set them, or RESILIENT_STORE=host:port")};
  }
  launch->store = {master};
  return Status::Ok();
}

}  // namespace

Result<Launch> PlanLaunch(const InitOptions& options, const Settings& settings,
                          const std::vector<std::pair<std::string, std::string>>& environment) {
  const Variables variables(environment);
  const Result<int> rank = NumberOf(options.rank, "RANK", variables);
  if (!rank.ok()) return rank.status();
  const Result<int> size = NumberOf(options.world_size, "WORLD_SIZE", variables);
  if (!size.ok()) return size.status();
  if (*size < 1 || *rank < 0 || *rank >= *size) {
    return Status(StatusCode::kSetting,
                  c10::str("rank ", *rank, " of a world of ", *size,
                           ": WORLD_SIZE must be at least 1 and RANK 0 to WORLD_SIZE - 1"));
  }
  if (settings.spares >= *size) {
    return Status(StatusCode::kSetting,
                  c10::str("RESILIENT_SPARES is ", settings.spares, " and WORLD_SIZE ", *size,
                           ": WORLD_SIZE counts the spares too, and one rank must be left"));
  }
  Launch launch{.rank = *rank, .world_size = *size - settings.spares};
  launch.process = *rank;
  if (launch.rank >= launch.world_size) launch.rank = kSpareRank;
  const std::string master = MasterAddress(variables);
  RESILIENT_RETURN_IF_ERROR(FindStore(options, settings, variables, master, &launch));
  const std::string address = !master.empty() ? master : settings.store;
  launch.job = JobName(options, settings, variables, address, launch.store_given);
  launch.attempt = AttemptOf(settings, variables);
  return launch;
}

}  // namespace resilient::plugin
