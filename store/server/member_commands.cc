#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "runtime/base/log.h"
#include "store/server/command_support.h"
#include "store/server/status_table.h"

// The commands about the members of a job, and about the store itself.
namespace resilient::store {
namespace {

using nlohmann::json;

constexpr char kHoldFooter[] =
    "While it is held a member may be silent (a debugger, a frozen container, a live migration)\n"
    "without being lost; it is lost all the same when its process is gone. At most one hour; "
    "then,\n"
    "or at the release, it has a full lease again. The other members log HELD and wait.\n"
    "Example: resilient-store hold --job train --rank 3 --for 30min --reason 'gdb'\n"
    "Exit codes: 0 held; 1 no such member, or no answer of a store; 2 bad usage.";

struct MembersArguments : ClientArguments {
  bool json = false;
};

struct HoldArguments : ClientArguments {
  MemberSelection which;
  bool all = false;
  std::string limit = "10min";
  std::string reason;
  bool json = false;
};

struct DrainArguments : ClientArguments {
  bool force = false;
  bool json = false;
};

int RunMembers(const MembersArguments& arguments, const CliContext& context) {
  const Result<json> status = WholeStatus(arguments, context);
  if (!status.ok()) return ComplainStatus(status.status());
  Print(arguments.json ? MembersJson(*status).dump(2) + "\n" : MembersTable(*status));
  return kExitOk;
}

// Where to, or the exit code of what is missing.
int CheckHold(const HoldArguments& arguments, ConnectOptions* options) {
  Result<ConnectOptions> where = OptionsOf(arguments);
  if (!where.ok()) return ComplainStatus(where.status());
  if (where->job.empty()) {
    return Complain("which job's members? give --job NAME or set RESILIENT_JOB", kExitUsage);
  }
  *options = std::move(*where);
  return kExitOk;
}

int Tell(const Result<std::int64_t>& count, const char* what, const HoldArguments& arguments,
         double for_s) {
  if (!count.ok()) return ComplainStatus(count.status());
  json told = {{what, *count}};
  if (for_s > 0) told["for_s"] = for_s;
  const std::string text = StrCat(what, " ", *count, *count == 1 ? " member" : " members",
                                  for_s > 0 ? StrCat(" for at most ", for_s, " s") : "", "\n");
  Print(arguments.json ? told.dump() + "\n" : text);
  return kExitOk;
}

int RunHold(const HoldArguments& arguments, const CliContext& context) {
  ConnectOptions options;
  if (const int code = CheckHold(arguments, &options); code != kExitOk) return code;
  const Duration limit = *ParseDuration(arguments.limit);
  const Duration most = std::chrono::hours(1);
  if (limit <= Duration::zero() || limit > most) {
    return Complain(StrCat("--for ", arguments.limit, ": a hold lasts an hour at most"),
                    kExitUsage);
  }
  return Tell(HoldMembers(options, arguments.which, limit, arguments.reason, context.clock,
                          DeadlineOf(arguments, context)),
              "held", arguments, std::chrono::duration<double>(limit).count());
}

int RunRelease(const HoldArguments& arguments, const CliContext& context) {
  ConnectOptions options;
  if (const int code = CheckHold(arguments, &options); code != kExitOk) return code;
  return Tell(
      ReleaseMembers(options, arguments.which, context.clock, DeadlineOf(arguments, context)),
      "released", arguments, 0);
}

int RunDrain(const DrainArguments& arguments, const CliContext& context) {
  Result<ConnectOptions> options = OptionsOf(arguments);
  if (!options.ok()) return ComplainStatus(options.status());
  const Status done =
      DrainStore(*options, arguments.force, context.clock, DeadlineOf(arguments, context));
  if (!done.ok()) return ComplainStatus(done);
  Print(arguments.json ? json{{"drained", arguments.store}}.dump() + "\n"
                       : StrCat("the store at ", arguments.store, " ends\n"));
  return kExitOk;
}

void AddMembers(CLI::App& app, CliContext& context) {
  auto arguments = std::make_shared<MembersArguments>();
  CLI::App* command = app.add_subcommand("members", "List the members of all jobs, or of --job");
  AddCommonOptions(*command, context, *arguments);
  command->add_flag("--json", arguments->json, "Print JSON: an array of members");
  command->footer(
      "Example: resilient-store members --job train\n"
      "Exit codes: 0 listed, be it none; 1 no answer of a store; 2 bad usage.");
  command->callback([arguments, &context] { context.exit_code = RunMembers(*arguments, context); });
}

// Which members: at least one of the three must be said, so that nobody holds all by oversight.
void AddSelection(CLI::App& command, HoldArguments& arguments) {
  CLI::Option_group* which = command.add_option_group("which members");
  CLI::Option* rank = which->add_option("--rank", arguments.which.rank, "The rank");
  rank->check(CLI::NonNegativeNumber);
  CLI::Option* host = which->add_option("--host", arguments.which.host, "The ranks of this host");
  which->add_flag("--all", arguments.all, "All ranks")->excludes(rank)->excludes(host);
  which->require_option(1, 2);
}

void AddHold(CLI::App& app, CliContext& context) {
  auto arguments = std::make_shared<HoldArguments>();
  CLI::App* command = app.add_subcommand("hold", "Let members of the job be silent for a while");
  AddCommonOptions(*command, context, *arguments);
  AddSelection(*command, *arguments);
  command->add_option("--for", arguments->limit, "How long at most; up to 1h")
      ->check(IsDuration())
      ->capture_default_str();
  command->add_option("--reason", arguments->reason, "Why, for the logs of the others");
  command->add_flag("--json", arguments->json, "Print JSON");
  command->footer(kHoldFooter);
  command->callback([arguments, &context] { context.exit_code = RunHold(*arguments, context); });
}

void AddRelease(CLI::App& app, CliContext& context) {
  auto arguments = std::make_shared<HoldArguments>();
  CLI::App* command = app.add_subcommand("release", "End the hold of members of the job");
  AddCommonOptions(*command, context, *arguments);
  AddSelection(*command, *arguments);
  command->add_flag("--json", arguments->json, "Print JSON");
  command->footer(
      "Example: resilient-store release --job train --rank 3\n"
      "Exit codes: 0 released, be it none; 1 no such member, or no answer of a store; 2 bad "
      "usage.");
  command->callback([arguments, &context] { context.exit_code = RunRelease(*arguments, context); });
}

void AddDrain(CLI::App& app, CliContext& context) {
  auto arguments = std::make_shared<DrainArguments>();
  CLI::App* command =
      app.add_subcommand("drain", "End the store as by SIGTERM; its clients are told");
  AddCommonOptions(*command, context, *arguments);
  command->add_flag("--force", arguments->force,
                    "Even when it keeps nothing beyond its memory, so that its jobs end with it");
  command->add_flag("--json", arguments->json, "Print JSON");
  command->footer(
      "What was acknowledged is kept; sessions go on when the store is started again with its\n"
      "--data.\n"
      "Example: resilient-store drain --store 10.0.0.1:29400\n"
      "Exit codes: 0 it ends; 1 refused, or no answer of a store; 2 bad usage.");
  command->callback([arguments, &context] { context.exit_code = RunDrain(*arguments, context); });
}

}  // namespace

void AddMemberCommands(CLI::App& app, CliContext& context) {
  AddMembers(app, context);
  AddHold(app, context);
  AddRelease(app, context);
  AddDrain(app, context);
}

}  // namespace resilient::store
