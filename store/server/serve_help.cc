#include "store/server/serve_help.h"

#include "runtime/base/log.h"
#include "store/server/limits.h"

namespace resilient::store {
namespace {

constexpr char kDescription[] =
    R"(Run a store server: keys, leases and membership of resilient jobs.

It serves until a signal ends it (or --linger), any number of jobs, each with keys and members of
its own. Without --data everything is in memory; with it, a server that is started again on the
same directory goes on where the last one ended, and its clients notice no more than a pause.)";

constexpr char kExamples[] = R"(EXAMPLES
  resilient-store serve
      For programs of this host; the log names the port.
  resilient-store serve --listen 10.0.0.1:29400 --data /var/lib/resilient
      A sidecar that may be killed and started again.
  resilient-store serve --listen 10.0.0.1:29500 --tcpstore --data /var/lib/resilient
      In place of torch's TCPStore, for programs with MASTER_ADDR=10.0.0.1 MASTER_PORT=29500.
  resilient-store serve --listen 10.0.0.1:29400 --tls-cert s.pem --tls-key s.key --tls-ca ca.pem
      Encrypted, for clients with a certificate of that CA.
  resilient-store serve --listen 10.0.0.1:29400 --metrics 10.0.0.1:29401 --log-level json:info
      Watched by Prometheus, read by a log collector.
)";

constexpr char kRest[] = R"(
TLS
  With --tls-cert and --tls-key: TLS 1.3 alone. The files are looked at every second and on SIGHUP;
  connections that were made stay, and files that cannot be used change nothing but the log.

HTTP
  With --metrics: /metrics in Prometheus' text format; /healthz: 200 while the server turns;
  /readyz: 200 while it is restored and listens, else 503 with the reason.

TCPSTORE
  With --tcpstore: torch.distributed.TCPStore(host, port, is_master=False) of torch 2.11 to 2.15
  works with this store as with torch's own server, and so do programs that keep gloo or NCCL. The
  keys are those of the job "tcpstore" (resilient-store keys --job tcpstore). That protocol has
  neither tokens nor encryption: whoever is let in reads and writes all of these keys. The stores
  that ranks and resilient-run start have --tcpstore=auto.

SIGNALS
  SIGHUP: tokens and certificates are read anew.
  SIGTERM, SIGINT: ends in good order: /readyz says 503, no connection is taken any more, what was
  asked is answered and written to the data directory, within 12 s. Clients go on at the server's
  next start or at their next address; nothing is lost with --data, nothing applied twice.

ENVIRONMENT
  RESILIENT_LEASE_TTL, RESILIENT_LOG   defaults of --lease-ttl and --log-level
  RESILIENT_TOKEN_FILE                 default of --token-file
  RESILIENT_TLS_CERT, RESILIENT_TLS_KEY, RESILIENT_TLS_CA
                                       defaults of --tls-cert, --tls-key and --tls-ca
  NOTIFY_SOCKET, WATCHDOG_USEC         set by systemd for Type=notify: the server tells when it is
                                       ready, ends, and that it turns

FILES
  DIR/store.db, DIR/store.db-wal       the data, an SQLite database; copy them while no server runs
  DIR/lock                             names the process that holds the directory

EXIT CODES
  0  ended by a signal or by --linger
  1  failed
  2  bad usage
  3  a port is taken
  4  the data directory cannot be used (held by another server, not writable, damaged) or could not
     be written (disk full, input/output error): nothing was acknowledged that is not kept)";

}  // namespace

std::string ServeDescription() { return kDescription; }

std::string ServeFooter() {
  return StrCat(kExamples,
                "\nLIMITS\n  Each with its default and range; beyond it a request or connection is "
                "refused.\n",
                DescribeLimits(), kRest);
}

}  // namespace resilient::store
