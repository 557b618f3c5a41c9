#pragma once

#include <functional>
#include <string>
#include <string_view>

#include <resilient/store/client.h>
#include <nlohmann/json_fwd.hpp>

#include "store/server/cli.h"

// What the commands that talk to a server share.
namespace resilient::store {

struct ClientArguments {
  std::string store;
  std::string job;
  std::string token_file;
  TlsFiles tls;
  std::string timeout = "5s";
};

// For options that every client command has. The defaults come from the environment.
void AddCommonOptions(CLI::App& command, const CliContext& context, ClientArguments& arguments);
Deadline DeadlineOf(const ClientArguments& arguments, const CliContext& context);
// Where to and as whom; kSetting when nobody said where.
Result<ConnectOptions> OptionsOf(const ClientArguments& arguments);
int ComplainStatus(const Status& status);
// All pages of the store's status, of --job alone where one is named.
Result<nlohmann::json> WholeStatus(const ClientArguments& arguments, const CliContext& context);
// To stdout; false when nobody reads any more.
bool Print(const std::string& text);

// Connects to the keys of a job and hands the client to `use`; the exit code.
using UseClient = std::function<Status(Client& client, const Client::Call& call)>;
int WithClient(const ClientArguments& arguments, const CliContext& context,
               const InterruptCheck& interrupt, const UseClient& use);

// get, set, keys, watch: key_commands.cc.
void AddKeyCommands(CLI::App& app, CliContext& context);
// members, hold, release, drain: member_commands.cc.
void AddMemberCommands(CLI::App& app, CliContext& context);

}  // namespace resilient::store
