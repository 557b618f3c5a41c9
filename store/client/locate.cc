#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <resilient/settings.h>
#include <resilient/store/locate.h>
#include <resilient/store/server_process.h>

#include "runtime/base/log.h"
#include "runtime/net/resolver.h"
#include "runtime/net/socket.h"
#include "store/client/spawn_right.h"

namespace resilient::store {
namespace {

constexpr char kLoopback[] = "127.0.0.1";
constexpr char kProgram[] = "resilient-store";
constexpr Duration kProbeMax = std::chrono::seconds(2);  // For one answer of one that is there.
constexpr Duration kFirstTryPause = std::chrono::milliseconds(20);
constexpr Duration kLastTryPause = std::chrono::milliseconds(500);
constexpr Duration kLogAfter = std::chrono::seconds(10);

bool IsLoopback(const std::string& number) {
  return number.rfind("127.", 0) == 0 || number == "::1";
}

// Whether an interface of this host has one of the addresses.
bool AnyIsLocal(const Addresses& hosts) {
  return std::ranges::any_of(
      hosts, [](const std::string& host) { return ListenTcp({.host = host, .port = 0}, 1).ok(); });
}

Result<std::string> OwnAddressTowards(const Addresses& hosts) {
  Result<std::string> own = Status(StatusCode::kResolve, "no address");
  for (const std::string& host : hosts) {
    own = resilient::OwnAddressTowards(host);
    if (own.ok()) break;
  }
  return own;
}

// Where a server that is started for the address, which has these numbers, listens.
HostPort ListenAt(const LocateOptions& options, const HostPort& address, const Addresses& hosts) {
  HostPort listen = address;
  if (!options.bind.empty()) {
    listen.host = options.bind;
  } else if (!AnyIsLocal(hosts)) {  // The name of a service, which no host has.
    const Result<std::string> own = OwnAddressTowards(hosts);
    if (own.ok()) listen.host = *own;
  }
  return listen;
}

// Id of the server at the address; nullopt while nobody answers there. What waiting cannot mend is
// an error.
Result<std::optional<std::string>> Answer(const ConnectOptions& connect, const HostPort& address,
                                          const InterruptCheck& interrupt, const Clock& clock) {
  const Deadline deadline = Deadline::After(clock.Now(), kProbeMax);
  if (!ConnectTcp(address, clock, deadline, -1).ok()) return std::optional<std::string>();
  auto client = Connect(connect, interrupt, clock, Deadline::After(clock.Now(), kProbeMax));
  if (client.ok()) {
    std::optional<std::string> server_id = (*client)->server_id();
    (*client)->Close();
    return server_id;
  }
  const StatusCode code = client.status().code();
  const bool final = code == StatusCode::kProtocol || code == StatusCode::kAuth ||
                     code == StatusCode::kSetting || code == StatusCode::kInterrupted;
  if (final) return client.status();
  return std::optional<std::string>();
}

Status NotYet(std::string why) { return {StatusCode::kUnreachable, std::move(why)}; }

// Of a store that was started at `where`, which has these numbers. Without a token its users are
// those who reach the address: said once, by the rank that started it.
void WarnOfOpenStore(const LocateOptions& options, const std::string& where,
                     const Addresses& hosts) {
  if (!options.connect.token_file.empty() || !options.connect.tls.authority.empty()) return;
  const bool within =
      options.bind.empty() ? std::ranges::all_of(hosts, IsLoopback) : IsLoopback(options.bind);
  if (within) return;
  RESILIENT_LOG(kWarn, "the store at ", where,
                " asks for no token: whoever reaches it from another host can read and change what "
                "the ranks of this job keep there, and join it. Two lines close it, with the file "
                "on each host:\n  (umask 077; openssl rand -hex 32 > resilient.token)\n  export "
                "RESILIENT_TOKEN_FILE=$PWD/resilient.token");
}

// What the tries so far have left. Thread: value type.
struct Tries {
  Status reason = NotYet("nobody answers");  // Why the last one has not found or started a store.
  bool told_of_other_user = false;           // In the log.
};

// Once in all tries: nothing needs to be done, but whoever does so may do more.
void WarnOfOtherUser(uid_t user, const std::string& where, Tries* tries) {
  if (std::exchange(tries->told_of_other_user, true)) return;
  RESILIENT_LOG(kWarn, "user ", user,
                " of this host has taken the name by which processes of user ", geteuid(),
                " agree on who starts the store at ", where,
                "; starting it all the same: the port is had by one");
}

// One try; nullopt: not yet.
Result<std::optional<Located>> Try(const LocateOptions& options, const HostPort& address,
                                   const InterruptCheck& interrupt, const Clock& clock,
                                   Deadline deadline, Tries* tries) {
  // At each try: a pod's name may come with the pod.
  const Result<Addresses> hosts =
      ResolveWithin(Resolver::OfProcess(), address.host, interrupt, clock, deadline);
  if (!hosts.ok()) {
    if (hosts.status().code() != StatusCode::kResolve) return hosts.status();
    // Nobody would find a store there. What an earlier try was told says more than that this one's
    // time is up.
    const bool cut =
        tries->reason.code() == StatusCode::kResolve && deadline.ExpiredAt(clock.Now());
    if (!cut) tries->reason = hosts.status();
    return std::optional<Located>();
  }
  const HostPort listen = ListenAt(options, address, *hosts);
  auto answer = Answer(options.connect, address, interrupt, clock);
  if (!answer.ok()) return answer.status();
  if (*answer) return std::optional(Located{.server_id = **answer});
  const SpawnRight right(address);
  if (!right.may_start()) {
    tries->reason = NotYet("another process of this host holds the right to start it");
    return std::optional<Located>();
  }
  // Asked again under the lock: the previous holder may have started it meanwhile.
  answer = Answer(options.connect, address, interrupt, clock);
  if (!answer.ok()) return answer.status();
  if (*answer) return std::optional(Located{.server_id = **answer});
  const Result<std::string> program = StoreProgram();
  if (!program.ok()) return program.status();
  const std::string where = FormatHostPort(address);
  if (right.other_user()) WarnOfOtherUser(*right.other_user(), where, tries);
  const std::string listening = FormatHostPort(listen);
  auto started = StartServer(*program, listening, options.linger, clock);
  if (started.ok()) {
    RESILIENT_LOG(kInfo, "started the store at ", where, "; its log is ", started->log_path);
    WarnOfOpenStore(options, where, *hosts);
    return std::optional(Located{.server_id = std::move(started->server_id),
                                 .spawned = true,
                                 .log_path = std::move(started->log_path)});
  }
  if (started.status().code() != StatusCode::kRefused) {
    return Status(started.status().code(),
                  StrCat("no store could be started at ", where, " (listening on ", listening,
                         "): ", started.status().message()),
                  {.host = address.host});
  }
  tries->reason = NotYet(started.status().message());
  return std::optional<Located>();
}

// The folder of the library or program that this code is in.
std::filesystem::path OwnFolder() {
  Dl_info about{};
  if (dladdr(reinterpret_cast<const void*>(&StoreProgram), &about) == 0) return {};
  std::error_code error;
  return std::filesystem::canonical(about.dli_fname, error).parent_path();
}

}  // namespace

Result<std::string> StoreProgram() {
  std::vector<std::filesystem::path> folders;
  if (const std::filesystem::path own = OwnFolder(); !own.empty()) {
    folders = {own / "bin", own.parent_path() / "bin"};
  }
  for (const auto& [name, value] : ProcessEnvironment()) {
    if (name != "PATH") continue;
    std::string_view rest = value;
    while (!rest.empty()) {
      const std::size_t end = std::min(rest.find(':'), rest.size());
      if (end > 0) folders.emplace_back(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
  for (const std::filesystem::path& folder : folders) {
    std::string path = std::filesystem::absolute(folder / kProgram);
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  return Status(StatusCode::kSetting,
                StrCat("the program ", kProgram, " is missing: it is neither in bin/ beside the ",
                       "library nor in PATH; or start a store and set RESILIENT_STORE=host:port"));
}

Result<std::string> AddressTowards(const std::string& store_address,
                                   const InterruptCheck& interrupt, const Clock& clock,
                                   Deadline deadline) {
  const Result<HostPort> store = ParseHostPort(store_address);
  if (!store.ok()) return std::string(kLoopback);
  const Result<Addresses> hosts =
      ResolveWithin(Resolver::OfProcess(), store->host, interrupt, clock, deadline);
  if (!hosts.ok()) {
    const bool waited = deadline.ExpiredAt(clock.Now());
    if (hosts.status().code() != StatusCode::kResolve || waited) return hosts.status();
    return std::string(kLoopback);
  }
  const Result<std::string> own = OwnAddressTowards(*hosts);
  if (!own.ok() || IsLoopback(*own)) return std::string(kLoopback);
  return *own;
}

std::string AddressTowards(const std::string& store_address) {
  const SystemClock clock;
  const Result<std::string> own =
      AddressTowards(store_address, {}, clock, Deadline::After(clock.Now(), kLookupPatience));
  return own.ok() ? *own : std::string(kLoopback);
}

Result<Located> FindOrStart(const LocateOptions& options, const InterruptCheck& interrupt,
                            const Clock& clock, Deadline deadline) {
  if (options.connect.addresses.size() != 1) {
    return Status(StatusCode::kInvalidArgument, "a store is looked for at one address");
  }
  const Result<HostPort> address = ParseHostPort(options.connect.addresses.front());
  if (!address.ok()) return address.status();
  if (address->port == 0) {  // Each try would start another one.
    return Status(StatusCode::kSetting,
                  StrCat("port 0 of ", address->host,
                         " is another one for each rank: name one "
                         "that is free on that host, the same for all ranks (MASTER_PORT)"));
  }
  if (options.rank != 0) {
    const Result<Addresses> hosts =
        ResolveWithin(Resolver::OfProcess(), address->host, interrupt, clock, deadline);
    const bool unknown = hosts.status().code() == StatusCode::kResolve;
    if (!hosts.ok() && !unknown) return hosts.status();
    if (unknown || !AnyIsLocal(*hosts)) return Located{};
  }
  const std::string where = FormatHostPort(*address);
  Tries tries;
  Duration pause = kFirstTryPause;
  Instant log_at = clock.Now() + kLogAfter;
  std::vector<PollEntry> nothing;
  while (true) {
    auto located = Try(options, *address, interrupt, clock, deadline, &tries);
    if (!located.ok()) return located.status();
    if (*located) return **std::move(located);
    RESILIENT_RETURN_IF_ERROR(interrupt());
    const Instant now = clock.Now();
    if (deadline.ExpiredAt(now)) break;
    if (now > log_at) {
      RESILIENT_LOG(kWarn, "still no store at ", where, ": ", tries.reason.message());
      log_at = kNever;
    }
    PollUntil(nothing, clock, std::min(deadline, Deadline::After(now, pause)));
    pause = std::min(pause * 3 / 2, kLastTryPause);
  }
  return Status(tries.reason.code(),
                StrCat("no store of this package answers at ", where,
                       ", and none could be started there: ", tries.reason.message()),
                {.host = address->host});
}

}  // namespace resilient::store
