#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "runtime/base/log.h"
#include "runtime/net/socket.h"
#include "store/server/cli.h"
#include "store/server/server.h"

namespace resilient::store {
namespace {

constexpr Duration kLeaseTtlMin = std::chrono::seconds(1);

struct ServeArguments {
  std::string listen = "127.0.0.1:0";
  std::string lease_ttl;
  std::string linger = "0";
  std::string address_file;
  std::string log_level;
  bool print_address = false;
  bool parent_death = false;
};

// All or nothing: a reader never sees half an address.
Status WriteAddressFile(const std::string& path, const std::string& text) {
  const std::string temporary = StrCat(path, ".", getpid(), ".tmp");
  std::FILE* file = std::fopen(temporary.c_str(), "we");
  bool written = file != nullptr && std::fputs(text.c_str(), file) >= 0;
  if (file != nullptr && std::fclose(file) != 0) written = false;
  if (written && std::rename(temporary.c_str(), path.c_str()) == 0) return Status::Ok();
  const int error = errno;
  std::remove(temporary.c_str());
  return Status(StatusCode::kSetting,
                StrCat("cannot write the address file ", path, ": ", std::strerror(error)));
}

// The server options, or the exit code of a usage error that was told.
int ParseServe(const ServeArguments& arguments, const CliContext& context, ServerOptions* options) {
  const Result<HostPort> listen = ParseHostPort(arguments.listen);
  // "*:0" and ":0" may not parse, but deserve the better text.
  const std::string host =
      listen.ok() ? listen->host : arguments.listen.substr(0, arguments.listen.rfind(':'));
  if (IsWildcardHost(host)) {
    return Complain(StrCat("--listen ", arguments.listen,
                           " would offer the store to every host of every network, without a "
                           "password; name one address of this host, for example --listen "
                           "127.0.0.1:29400 or the address of the network between the ranks"),
                    kExitUsage);
  }
  if (!listen.ok()) {
    return Complain(StrCat("--listen: ", listen.status().message()), kExitUsage);
  }
  options->listen = *listen;
  options->lease_ttl = arguments.lease_ttl.empty() ? context.settings.lease_ttl
                                                   : *ParseDuration(arguments.lease_ttl);
  if (options->lease_ttl < kLeaseTtlMin) {
    return Complain(StrCat("--lease-ttl ", arguments.lease_ttl,
                           " is too short; the least is 1s, the default 5s"),
                    kExitUsage);
  }
  options->linger = *ParseDuration(arguments.linger);
  return kExitOk;
}

int TellAddress(const ServeArguments& arguments, const Server& server) {
  const std::string address = FormatHostPort(server.address());
  if (!arguments.address_file.empty()) {
    const Status written =
        WriteAddressFile(arguments.address_file, StrCat(address, "\n", server.server_id(), "\n"));
    if (!written.ok()) return Complain(written.message(), kExitFailed);
  }
  if (arguments.print_address) {
    std::printf("%s %s\n", address.c_str(), server.server_id().c_str());
    std::fflush(stdout);
  }
  return kExitOk;
}

int Serve(const ServeArguments& arguments, const CliContext& context, pid_t parent) {
  ServerOptions options;
  if (const int code = ParseServe(arguments, context, &options); code != kExitOk) return code;
  if (arguments.parent_death) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    // The parent may have died before the kernel was told.
    if (getppid() != parent) return Complain("the parent process has ended", kExitFailed);
  }
  SetLogTag("store");
  UvLoop loop;
  Server server(loop, context.clock, options);
  const Status started = server.Start();
  if (started.code() == StatusCode::kRefused) return Complain(started.message(), kExitPortTaken);
  if (started.code() == StatusCode::kSetting) return Complain(started.message(), kExitUsage);
  if (!started.ok()) return Complain(started.message(), kExitFailed);
  RESILIENT_LOG(kInfo, "listens on ", FormatHostPort(server.address()), ", server ",
                server.server_id());
  const int told = TellAddress(arguments, server);
  if (told != kExitOk) server.Shutdown("its address could not be told");
  loop.Run();
  return told;
}

}  // namespace

void AddServeCommand(CLI::App& app, CliContext& context) {
  auto arguments = std::make_shared<ServeArguments>();  // Lives as long as the callback.
  CLI::App* serve = app.add_subcommand("serve", "Run a store server");
  serve->add_option("--listen", arguments->listen, "HOST:PORT; port 0: chosen by the kernel")
      ->capture_default_str();
  serve
      ->add_option("--lease-ttl", arguments->lease_ttl,
                   "Silence after which a member is lost (default: RESILIENT_LEASE_TTL or 5s)")
      ->check(IsDuration());
  serve
      ->add_option("--linger", arguments->linger,
                   "End when nobody was here for so long, and at once when the last member has "
                   "left; 0: never")
      ->check(IsDuration())
      ->capture_default_str();
  serve->add_option("--address-file", arguments->address_file,
                    "Write \"host:port\\nserver-id\\n\" to this file once listening");
  serve->add_flag("--print-address", arguments->print_address,
                  "Print \"host:port server-id\" once listening");
  serve->add_flag("--parent-death", arguments->parent_death, "End when the parent process ends");
  serve
      ->add_option("--log-level", arguments->log_level,
                   "debug, info, warn, error or off, \"json:\" before it for JSON lines (default: "
                   "RESILIENT_LOG or info)")
      ->check([](const std::string& level) {
        return ApplyLogLevel(level) ? std::string() : StrCat("'", level, "' is not a log level");
      });
  const pid_t parent = getppid();
  serve->callback([arguments, &context, parent] {
    if (arguments->log_level.empty()) {
      ApplyLogLevel(context.log_given ? context.settings.log : "info");
    }
    context.exit_code = Serve(*arguments, context, parent);
  });
}

}  // namespace resilient::store
