#include <malloc.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <resilient/settings.h>

#include "runtime/base/log.h"
#include "runtime/base/log_flush.h"
#include "runtime/net/socket.h"
#include "store/server/cli.h"
#include "store/server/crash_points.h"
#include "store/server/detach.h"
#include "store/server/engine.h"
#include "store/server/serve_help.h"
#include "store/server/server.h"

namespace resilient::store {
namespace {

constexpr Duration kLeaseTtlMin = std::chrono::seconds(1);
constexpr Duration kLeaseTtlMax = std::chrono::hours(1);
constexpr char kInMemory[] = "mem";
constexpr char kOnProcess[] = "process";
constexpr char kOnMachine[] = "machine";
constexpr char kTcpStoreOff[] = "off";
constexpr char kTcpStoreLoopback[] = "loopback";
constexpr char kTcpStoreAll[] = "all";
constexpr char kTcpStoreAuto[] = "auto";  // Loopback, where that lets nobody past a token.
constexpr char kTcpStoreUnsaid[] = "on";  // --tcpstore without a value.
constexpr char kUsersAny[] = "any";
constexpr char kUsersOwn[] = "own";
constexpr char kUsersAuto[] = "auto";  // Own, unless clients have to show a token or certificate.

struct ServeArguments {
  std::string listen = "127.0.0.1:0";
  std::string lease_ttl;
  std::string linger = "0";
  std::string address_file;
  std::string log_level;
  std::string data;
  std::string durability;
  std::string token_file;
  TlsFiles tls;
  std::string metrics;
  std::vector<std::string> limits;
  std::string tcpstore = kTcpStoreOff;
  std::string users = kUsersAny;
  std::uint64_t crash_at = 0;
  std::string own_log;
  std::string arrival;
  bool print_address = false;
  bool tcp_only = false;
  bool parent_death = false;
  bool detach = false;
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

// To whom torch's TCPStore protocol is spoken, or the exit code of a usage error that was told.
int ParseTcpStore(const ServeArguments& arguments, ServerOptions* options) {
  const bool open = arguments.token_file.empty() && arguments.tls.empty();
  std::string said = arguments.tcpstore;
  if (said == kTcpStoreAuto) said = open ? kTcpStoreLoopback : kTcpStoreOff;
  if (said == kTcpStoreUnsaid && !open) {
    return Complain(
        "--tcpstore on a store that asks for a token or speaks TLS: TCPStore's protocol knows "
        "neither, so its clients would come in without; say who may: --tcpstore=loopback (every "
        "program of this host) or --tcpstore=all (whoever reaches the address)",
        kExitUsage);
  }
  options->tcpstore = said == kTcpStoreOff        ? TcpStoreAccess::kOff
                      : said == kTcpStoreLoopback ? TcpStoreAccess::kLoopback
                                                  : TcpStoreAccess::kAll;
  return kExitOk;
}

// The server options, or the exit code of a usage error that was told.
int ParseServe(const ServeArguments& arguments, const CliContext& context, ServerOptions* options) {
  const Result<HostPort> listen = ParseHostPort(arguments.listen);
  // "*:0" and ":0" may not parse, but deserve the better text.
  const std::string host =
      listen.ok() ? listen->host : arguments.listen.substr(0, arguments.listen.rfind(':'));
  const Status together = CheckServerFiles(arguments.tls);
  if (!together.ok()) return Complain(together.message(), kExitUsage);
  if (IsWildcardHost(host) && arguments.token_file.empty() && arguments.tls.authority.empty()) {
    return Complain(StrCat("--listen ", arguments.listen,
                           " would offer the store to every host of every network, without a "
                           "password; name one address of this host, for example --listen "
                           "127.0.0.1:29400 or the address of the network between the ranks, or "
                           "ask for a token (--token-file) or for certificates of the clients "
                           "(--tls-ca)"),
                    kExitUsage);
  }
  if (!listen.ok()) {
    return Complain(StrCat("--listen: ", listen.status().message()), kExitUsage);
  }
  options->listen = *listen;
  options->tcp_only = arguments.tcp_only;
  options->token_file = arguments.token_file;
  const bool asks = !arguments.token_file.empty() || !arguments.tls.authority.empty();
  options->one_user = arguments.users == kUsersOwn || (arguments.users == kUsersAuto && !asks);
  options->tls = arguments.tls;
  options->lease_ttl = arguments.lease_ttl.empty() ? context.settings.lease_ttl
                                                   : *ParseDuration(arguments.lease_ttl);
  if (options->lease_ttl < kLeaseTtlMin) {
    return Complain(StrCat("--lease-ttl ", arguments.lease_ttl,
                           " is too short; the least is 1s, the default 5s"),
                    kExitUsage);
  }
  if (options->lease_ttl > kLeaseTtlMax) {
    return Complain(StrCat("--lease-ttl ", arguments.lease_ttl, " is too long; the most is 1h"),
                    kExitUsage);
  }
  options->linger = *ParseDuration(arguments.linger);
  if (!arguments.arrival.empty()) options->arrival = *ParseDuration(arguments.arrival);
  options->version = RESILIENT_VERSION;
  if (const int code = ParseTcpStore(arguments, options); code != kExitOk) return code;
  for (const std::string& limit : arguments.limits) {
    const Status set = SetLimit(limit, options->limits);
    if (!set.ok()) return Complain(StrCat("--limit ", set.message()), kExitUsage);
  }
  if (!arguments.metrics.empty()) {
    const Result<HostPort> metrics = ParseHostPort(arguments.metrics);
    if (!metrics.ok()) {
      return Complain(StrCat("--metrics: ", metrics.status().message()), kExitUsage);
    }
    options->metrics = *metrics;
  }
  return kExitOk;
}

// The engine of a durable store, null for one in memory; or the exit code of an error that was
// told.
int OpenEngine(const ServeArguments& arguments, CrashPoints& crash_points,
               std::unique_ptr<Engine>* engine) {
  const std::string& durability = arguments.durability;
  if (arguments.data.empty()) {
    if (durability.empty() || durability == kInMemory) return kExitOk;
    return Complain(StrCat("--durability ", durability, " needs --data DIR, where it is kept"),
                    kExitUsage);
  }
  if (durability == kInMemory) {
    return Complain(StrCat("--durability mem keeps nothing, but --data ", arguments.data,
                           " names where to keep it; leave one of them out"),
                    kExitUsage);
  }
  crash_points.Pass();
  Result<std::unique_ptr<Engine>> opened = OpenSqliteEngine(
      {arguments.data, durability == kOnMachine ? Durability::kMachine : Durability::kProcess,
       &crash_points});
  if (!opened.ok()) return Complain(opened.status().message(), kExitStorage);
  crash_points.Pass();
  *engine = std::move(*opened);
  return kExitOk;
}

[[noreturn]] void EndUnkept(const Status& why) {
  // At once: nothing may be acknowledged any more, and destructors could wait for the disk.
  const int code = Complain(StrCat(why.message(),
                                   " (the server ends; nothing was acknowledged that is "
                                   "not kept)"),
                            kExitStorage);
  (void)FlushLog();
  std::_Exit(code);
}

std::string_view TcpStoreNote(TcpStoreAccess access) {
  switch (access) {
    case TcpStoreAccess::kOff:
      return "";
    case TcpStoreAccess::kLoopback:
      return "; TCPStore clients of this host are served";
    case TcpStoreAccess::kAll:
      return "; TCPStore clients are served, whoever they are";
  }
  return "";
}

int TellAddress(const ServeArguments& arguments, const Server& server) {
  const std::string address = FormatHostPort(server.address());
  if (!arguments.address_file.empty()) {
    const Status written =
        WriteAddressFile(arguments.address_file, StrCat(address, "\n", server.server_id(), "\n"));
    if (!written.ok()) return Complain(written.message(), kExitFailed);
  }
  if (arguments.print_address) {
    // Before it serves anybody. tidy: allow(blocking-write)
    std::printf("%s %s\n", address.c_str(), server.server_id().c_str());
    std::fflush(stdout);  // tidy: allow(blocking-write)
  }
  return kExitOk;
}

// By default each buffer of a large value is given back to the system, and its pages are faulted in
// again for the next one, which costs more than to fill it.
void KeepFreedMemory() {
  constexpr int kLargest = 32 << 20;
  mallopt(M_MMAP_THRESHOLD, kLargest);
  mallopt(M_TRIM_THRESHOLD, 2 * kLargest);
}

// Runs until the server ends. `detachment`: null where it is the process that was started.
int RunServer(const ServeArguments& arguments, UvLoop& loop, Server& server,
              Detachment* detachment) {
  int told = TellAddress(arguments, server);
  if (told != kExitOk) {
    server.Shutdown("its address could not be told");
  } else if (detachment != nullptr && !detachment->TellReady()) {
    told = kExitFailed;
    server.Shutdown("who has started it is gone");
  }
  loop.Run();
  // Of one that fails somebody will want to read it.
  if (told == kExitOk && !arguments.own_log.empty()) unlink(arguments.own_log.c_str());
  return told;
}

int Serve(const ServeArguments& arguments, const CliContext& context, pid_t parent,
          Detachment* detachment) {
  ServerOptions options;
  if (const int code = ParseServe(arguments, context, &options); code != kExitOk) return code;
  if (arguments.parent_death) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    // The parent may have died before the kernel was told.
    if (getppid() != parent) return Complain("the parent process has ended", kExitFailed);
  }
  SetLogTag("store");
  KeepFreedMemory();
  CrashPoints crash_points(arguments.crash_at);
  std::unique_ptr<Engine> engine;
  if (const int code = OpenEngine(arguments, crash_points, &engine); code != kExitOk) return code;
  const bool durable = engine != nullptr;
  options.on_storage_failure = EndUnkept;
  options.crash_points = &crash_points;
  ServiceNotifier notifier(ProcessEnvironment(), getpid());
  options.notifier = &notifier;
  UvLoop loop;
  Server server(loop, context.clock, options, std::move(engine));
  const Status watchable = server.StartHttp();
  if (!watchable.ok()) {
    return Complain(StrCat("--metrics: ", watchable.message()),
                    watchable.code() == StatusCode::kRefused ? kExitPortTaken : kExitFailed);
  }
  if (durable) {
    const Status restored = server.Restore();
    if (!restored.ok()) return Complain(restored.message(), kExitStorage);
  }
  const Status started = server.Start();
  if (started.code() == StatusCode::kRefused) return Complain(started.message(), kExitPortTaken);
  if (started.code() == StatusCode::kSetting) return Complain(started.message(), kExitUsage);
  if (!started.ok()) return Complain(started.message(), kExitFailed);
  const std::string address = FormatHostPort(server.address());
  const bool everybody = options.token_file.empty() && options.tls.authority.empty();
  const std::string admission = !everybody ? ""
                                : options.one_user
                                    ? StrCat("; of this host the processes of user ", geteuid(),
                                             " are admitted, and whoever ",
                                             "reaches it from another host, no token is asked for")
                                    : "; whoever reaches it is admitted, no token is asked for";
  const std::string_view openness = options.tls.empty() ? "; connections are not encrypted" : "";
  RESILIENT_LOG_RECORD(
      kInfo, "listen",
      {{"address", address},
       {"server", server.server_id()},
       {"tokens", options.token_file},
       {"certificate", options.tls.certificate},
       {"client_ca", options.tls.authority},
       {"tcpstore", options.tcpstore == TcpStoreAccess::kOff ? std::string() : arguments.tcpstore}},
      StrCat("listens on ", address, ", server ", server.server_id(), admission, openness,
             TcpStoreNote(options.tcpstore)));
  return RunServer(arguments, loop, server, detachment);
}

// How it stands to who starts it.
void AddProcessOptions(CLI::App& serve, const std::shared_ptr<ServeArguments>& arguments) {
  serve.add_option("--address-file", arguments->address_file,
                   "Write \"host:port\\nserver-id\\n\" to this file once listening");
  serve.add_flag("--print-address", arguments->print_address,
                 "Print \"host:port server-id\" once listening");
  auto* with_parent =
      serve.add_flag("--parent-death", arguments->parent_death, "End when the parent process ends");
  serve
      .add_flag("--detach", arguments->detach,
                "Return once listening, or with the exit code of a server that could not; the "
                "server goes on as nobody's child, in a session of its own")
      ->excludes(with_parent);
  serve
      .add_option("--own-log", arguments->own_log,
                  "The file that stderr is: removed when the server ends in good order")
      ->group("For who starts one");
  serve
      .add_option("--arrival", arguments->arrival,
                  "With --linger: end sooner, when nobody was here for so long, until somebody has "
                  "been a member")
      ->check(IsDuration())
      ->group("For who starts one");
}

// What else it speaks.
void AddProtocolOptions(CLI::App& serve, ServeArguments& arguments) {
  serve
      .add_flag(StrCat("--tcpstore{", kTcpStoreUnsaid, "}"), arguments.tcpstore,
                "Serve clients of torch's TCPStore, too (TCPSTORE below): all, or only loopback, "
                "those of this host; auto: loopback, unless the store asks for a token or speaks "
                "TLS; off is the default. Without a value: all, and refused where auto is off")
      ->check(CLI::IsMember(
          {kTcpStoreOff, kTcpStoreLoopback, kTcpStoreAll, kTcpStoreAuto, kTcpStoreUnsaid}));
  serve.add_flag("--tcp-only", arguments.tcp_only,
                 "Make no unix socket beside the TCP address, by which clients of this host come "
                 "otherwise: for who watches or filters the connections");
  serve
      .add_option("--metrics", arguments.metrics,
                  "Serve metrics and probes over HTTP, for whoever reaches the address: they tell "
                  "numbers, no keys or names (default: off)")
      ->type_name("HOST:PORT");
}

}  // namespace

void AddServeCommand(CLI::App& app, CliContext& context) {
  auto arguments = std::make_shared<ServeArguments>();  // Lives as long as the callback.
  arguments->token_file = context.settings.token_file;
  arguments->tls = context.settings.tls;
  CLI::App* serve = app.add_subcommand("serve", "Run a store server");
  // Only for its own help: a list of commands has one line for each.
  serve->preparse_callback([serve](std::size_t) { serve->description(ServeDescription()); });
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
  serve->add_option("--data", arguments->data,
                    "Keep keys, sessions and members in this directory, which is made when it is "
                    "missing; a server started with it again goes on where the last one ended");
  serve
      ->add_option("--durability", arguments->durability,
                   "What an acknowledged change survives: mem: nothing; process (default with "
                   "--data): the end of the server, kill -9 included; machine: power loss too, "
                   "at one fsync for each group of changes")
      ->check(CLI::IsMember({kInMemory, kOnProcess, kOnMachine}));
  serve->add_option("--token-file", arguments->token_file,
                    "Admit only who proves to know a token of this file: one line with a token, or "
                    "lines \"JOB TOKEN\"; read again when it changes and on SIGHUP (default: "
                    "RESILIENT_TOKEN_FILE)");
  serve
      ->add_option("--users", arguments->users,
                   "Of this host admit any user (default), or own: the processes of the user of "
                   "this one, and root's; auto: own, unless clients have to show a token or a "
                   "certificate. It says nothing of other hosts")
      ->check(CLI::IsMember({kUsersAny, kUsersOwn, kUsersAuto}));
  AddTlsOptions(*serve, arguments->tls,
                "Ask every client for a certificate that this CA has signed (default: "
                "RESILIENT_TLS_CA)");
  AddProtocolOptions(*serve, *arguments);
  serve
      ->add_option("--limit", arguments->limits,
                   "What the server takes on (LIMITS below); may be repeated")
      ->type_name("NAME=VALUE")
      ->allow_extra_args(false);
  AddProcessOptions(*serve, arguments);
  serve
      ->add_option("--log-level", arguments->log_level,
                   "debug, info, warn, error or off, \"json:\" before it for JSON lines (default: "
                   "RESILIENT_LOG or info)")
      ->check([](const std::string& level) {
        return ApplyLogLevel(level) ? std::string() : StrCat("'", level, "' is not a log level");
      });
  serve
      ->add_option("--crash-at", arguments->crash_at,
                   "End as by kill -9 at the N-th step on the way to the disk")
      ->group("For tests");
  serve->footer(ServeFooter());
  const pid_t parent = getppid();
  serve->callback([arguments, &context, parent] {
    std::optional<Detachment> detachment;
    if (arguments->detach) detachment.emplace();  // Before any thread.
    if (arguments->log_level.empty()) {
      ApplyLogLevel(context.log_given ? context.settings.log : "info");
    }
    context.exit_code = Serve(*arguments, context, parent, detachment ? &*detachment : nullptr);
  });
}

}  // namespace resilient::store
