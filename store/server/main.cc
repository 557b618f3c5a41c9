// resilient-store: the store server and the commands that talk to it.

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <string>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/log_flush.h"
#include "store/server/cli.h"

#ifndef RESILIENT_VERSION
#error "RESILIENT_VERSION comes from the build"
#endif

namespace resilient::store {

int Complain(std::string_view text, int exit_code) {
  WriteToStderr(StrCat("resilient-store: ", text, "\n"));
  return exit_code;
}

CLI::Validator IsDuration() {
  return CLI::Validator(
      [](std::string& text) {
        if (ParseDuration(text)) return std::string();
        return StrCat("'", text, "' is not a duration; write 5, 5s, 500ms, 10min or 1h");
      },
      "DURATION");
}

void AddTlsOptions(CLI::App& command, TlsFiles& files, const std::string& ca_meaning) {
  command.add_option("--tls-cert", files.certificate,
                     "Certificate to show, PEM, followed by those that lead to its CA (default: "
                     "RESILIENT_TLS_CERT)");
  command.add_option("--tls-key", files.key,
                     "Private key of that certificate, PEM (default: RESILIENT_TLS_KEY)");
  command.add_option("--tls-ca", files.authority, ca_meaning);
}

bool ApplyLogLevel(const std::string& level) { return ConfigureLog(level, "").ok(); }

namespace {

int Main(int argc, char** argv) {
  // A peer that goes away is an error of a write, not the end of the program.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // Likewise the limit of a file's size.
  const auto environment = ProcessEnvironment();
  const bool log_given =
      std::any_of(environment.begin(), environment.end(),
                  [](const auto& variable) { return variable.first == "RESILIENT_LOG"; });
  Result<Settings> settings = ParseSettings(environment);
  if (!settings.ok()) return Complain(settings.status().message(), kExitUsage);
  const SystemClock clock;
  CliContext context{std::move(settings).value(), log_given, clock};
  for (const std::string& warning : context.settings.warnings) Complain(warning, kExitOk);

  CLI::App app("The store of resilient jobs: keys, leases and membership.", "resilient-store");
  app.require_subcommand(1);
  app.set_version_flag("--version", StrCat("resilient-store ", RESILIENT_VERSION));
  app.add_subcommand("version", "Print the version")->callback([] {
    std::printf("resilient-store %s\n", RESILIENT_VERSION);
  });
  AddServeCommand(app, context);
  AddClientCommands(app, context);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // Help and version come this way too, with code 0.
    if (error.get_exit_code() == 0) return app.exit(error);
    const std::string first = argc > 1 ? argv[1] : "";
    const auto is_first = [&first](const CLI::App* command) {
      return command->get_name() == first;
    };
    if (!first.empty() && first[0] != '-' && app.get_subcommands(is_first).empty()) {
      return Complain(
          StrCat("there is no command '", first, "' (resilient-store --help lists them)"),
          kExitUsage);
    }
    return Complain(StrCat(error.what(), " (resilient-store --help tells more)"), kExitUsage);
  }
  return context.exit_code;
}

}  // namespace
}  // namespace resilient::store

int main(int argc, char** argv) { return resilient::store::Main(argc, argv); }
