#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <resilient/store/client.h>

#include "runtime/base/log.h"
#include "store/server/cli.h"
#include "store/server/command_support.h"
#include "store/server/status_table.h"

namespace resilient::store {
namespace {

struct StatusArguments : ClientArguments {
  bool json = false;
};

struct ReportArguments : ClientArguments {
  ExitNotice notice;
};

std::vector<std::string> SplitAddresses(const std::string& list) {
  std::vector<std::string> addresses;
  std::size_t begin = 0;
  while (begin <= list.size()) {
    const std::size_t comma = std::min(list.find(',', begin), list.size());
    if (comma > begin) addresses.push_back(list.substr(begin, comma - begin));
    begin = comma + 1;
  }
  return addresses;
}

}  // namespace

void AddCommonOptions(CLI::App& command, const CliContext& context, ClientArguments& arguments) {
  arguments.store = context.settings.store;
  arguments.job = context.settings.job;
  arguments.token_file = context.settings.token_file;
  arguments.tls = context.settings.tls;
  command.add_option("--store", arguments.store,
                     "Address of the store, HOST:PORT[,HOST:PORT] (default: RESILIENT_STORE)");
  command.add_option("--job", arguments.job, "Name of the job (default: RESILIENT_JOB)");
  command.add_option("--token-file", arguments.token_file,
                     "File with the token that the store asks for (default: RESILIENT_TOKEN_FILE)");
  AddTlsOptions(command, arguments.tls,
                "CA that has signed the store's certificate, PEM; connections are encrypted "
                "(default: RESILIENT_TLS_CA)");
  command.add_option("--timeout", arguments.timeout, "How long to try")
      ->check(IsDuration())
      ->capture_default_str();
}

Deadline DeadlineOf(const ClientArguments& arguments, const CliContext& context) {
  return Deadline::After(context.clock.Now(), *ParseDuration(arguments.timeout));
}

Result<ConnectOptions> OptionsOf(const ClientArguments& arguments) {
  ConnectOptions options;
  options.addresses = SplitAddresses(arguments.store);
  options.job = arguments.job;
  options.token_file = arguments.token_file;
  options.tls = arguments.tls;
  if (options.addresses.empty()) {
    return Status(StatusCode::kSetting,
                  "which store? give --store HOST:PORT or set RESILIENT_STORE");
  }
  return options;
}

int ComplainStatus(const Status& status) {
  return Complain(status.message(),
                  status.code() == StatusCode::kSetting ? kExitUsage : kExitFailed);
}

bool Print(const std::string& text) {
  return std::fwrite(text.data(), 1, text.size(), stdout) == text.size() &&
         std::fflush(stdout) == 0;
}

int WithClient(const ClientArguments& arguments, const CliContext& context,
               const InterruptCheck& interrupt, const UseClient& use) {
  Result<ConnectOptions> options = OptionsOf(arguments);
  if (!options.ok()) return ComplainStatus(options.status());
  if (options->job.empty()) {
    return Complain("which job's keys? give --job NAME or set RESILIENT_JOB", kExitUsage);
  }
  const Deadline deadline = DeadlineOf(arguments, context);
  Result<std::shared_ptr<Client>> client =
      Connect(std::move(options).value(), interrupt, context.clock, deadline);
  if (!client.ok()) return ComplainStatus(client.status());
  Client::Call call;
  call.deadline = deadline;
  const Status done = use(**client, call);
  (*client)->Close();
  return done.ok() ? kExitOk : ComplainStatus(done);
}

Result<nlohmann::json> WholeStatus(const ClientArguments& arguments, const CliContext& context) {
  Result<ConnectOptions> options = OptionsOf(arguments);
  if (!options.ok()) return options.status();
  const Deadline deadline = DeadlineOf(arguments, context);
  StatusQuery query;
  query.job = arguments.job;
  nlohmann::json status = nlohmann::json::object();
  while (true) {
    const Result<std::string> text = FetchStatus(*options, query, context.clock, deadline);
    if (!text.ok()) return text.status();
    nlohmann::json page = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
    if (!page.is_object() || !page["jobs"].is_array()) {
      return Status(StatusCode::kProtocol,
                    "the store's status is not JSON as it should be: is it another version?");
    }
    AddStatusPage(std::move(page), status);
    const auto next = status.find("next");
    if (next == status.end()) return status;
    query.from_job = next->value("job", "");
    query.from_round = next->value("round", std::uint64_t{0});
    query.from_rank = next->value("rank", std::uint64_t{0});
  }
}

namespace {

int RunStatus(const StatusArguments& arguments, const CliContext& context) {
  const Result<nlohmann::json> status = WholeStatus(arguments, context);
  if (!status.ok()) return ComplainStatus(status.status());
  Print(arguments.json ? status->dump(2) + "\n" : StatusTable(*status));
  return kExitOk;
}

int RunReport(const ReportArguments& arguments, const CliContext& context) {
  Result<ConnectOptions> options = OptionsOf(arguments);
  if (!options.ok()) return ComplainStatus(options.status());
  const Status sent = ReportExit(std::move(options).value(), arguments.notice, context.clock,
                                 DeadlineOf(arguments, context));
  return sent.ok() ? kExitOk : ComplainStatus(sent);
}

void AddStatus(CLI::App& app, CliContext& context) {
  auto arguments = std::make_shared<StatusArguments>();
  CLI::App* command = app.add_subcommand("status", "Show jobs, generations and members");
  AddCommonOptions(*command, context, *arguments);
  command->add_flag("--json", arguments->json, "Print JSON");
  command->footer(
      "Example: resilient-store status --store 10.0.0.1:29400 --job train\n"
      "Exit codes: 0 shown; 1 no answer of a store; 2 bad usage.");
  command->callback([arguments, &context] { context.exit_code = RunStatus(*arguments, context); });
}

void AddReport(CLI::App& app, CliContext& context) {
  auto arguments = std::make_shared<ReportArguments>();
  CLI::App* command =
      app.add_subcommand("report", "Tell how a process of this host ended (for launchers)");
  AddCommonOptions(*command, context, *arguments);
  ExitNotice& notice = arguments->notice;
  command->add_option("--rank", notice.rank, "Its rank")->required()->check(CLI::NonNegativeNumber);
  command->add_option("--pid", notice.pid, "Its process id")
      ->required()
      ->check(CLI::PositiveNumber);
  command->add_option("--start-time", notice.start_time,
                      "Field 22 of its /proc/PID/stat, against a reused pid");
  CLI::Option_group* how = command->add_option_group("how it ended");
  how->add_option("--exit-code", notice.exit_code, "Its exit code")->check(CLI::Range(0, 255));
  how->add_option("--signal", notice.signal, "The signal that killed it")->check(CLI::Range(1, 64));
  how->require_option(1);
  command->add_option("--text", notice.text, "What else is known, for people");
  command->footer(
      "Example: resilient-store report --rank 3 --pid 4711 --signal 9 --text 'out of memory'\n"
      "Exit codes: 0 told; 1 refused, or no answer of a store; 2 bad usage.");
  command->callback([arguments, &context] { context.exit_code = RunReport(*arguments, context); });
}

}  // namespace

void AddClientCommands(CLI::App& app, CliContext& context) {
  AddStatus(app, context);
  AddReport(app, context);
  AddKeyCommands(app, context);
  AddMemberCommands(app, context);
}

}  // namespace resilient::store
