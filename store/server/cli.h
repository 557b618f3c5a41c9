#pragma once

#include <string>
#include <string_view>

#include <CLI/CLI.hpp>

#include <resilient/clock.h>
#include <resilient/settings.h>
#include <resilient/status.h>
#include <resilient/tls.h>

// The commands of resilient-store. Each Add... function adds one command to `app`; when that
// command was given, its exit code is in `exit_code` after parsing.
namespace resilient::store {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;  // Unreachable store, missing key, refused report.
inline constexpr int kExitUsage = 2;
inline constexpr int kExitPortTaken = 3;
inline constexpr int kExitStorage = 4;  // The data directory cannot be used or written.

// What all commands share. Owner: main. Lifetime: outlives the parse.
struct CliContext {
  Settings settings;
  bool log_given = false;  // RESILIENT_LOG is set.
  const Clock& clock;
  int exit_code = kExitOk;
};

void AddServeCommand(CLI::App& app, CliContext& context);
// All that talk to a server.
void AddClientCommands(CLI::App& app, CliContext& context);

// One line on stderr, "resilient-store: text"; returns `exit_code`.
int Complain(std::string_view text, int exit_code);
// A CLI11 check of the texts that ParseDuration takes.
CLI::Validator IsDuration();
// --tls-cert, --tls-key and --tls-ca; `ca_meaning`: what the last one does here.
void AddTlsOptions(CLI::App& command, TlsFiles& files, const std::string& ca_meaning);
// "debug" ... "off", with or without "json:" before it.
bool ApplyLogLevel(const std::string& level);

}  // namespace resilient::store
