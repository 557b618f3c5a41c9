#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <resilient/clock.h>
#include <resilient/ladder.h>
#include <resilient/session.h>
#include <resilient/status.h>
#include <resilient/store/client.h>
#include <resilient/termination.h>
#include <resilient/transports.h>

#include "torch_plugin/csrc/auto_heal.h"
#include "torch_plugin/csrc/finisher.h"
#include "torch_plugin/csrc/hooks.h"
#include "torch_plugin/csrc/host.h"
#include "torch_plugin/csrc/late_failure.h"
#include "torch_plugin/csrc/ledger.h"
#include "torch_plugin/csrc/places.h"
#include "torch_plugin/csrc/time_policy.h"

namespace resilient::plugin {

// What a world is opened with.
struct ContextOptions {
  store::ConnectOptions connect;  // Its session id is set by Open.
  SessionOptions session;         // Its interrupt is set by Open.
  std::string bind_address = "127.0.0.1";
  std::string socket_ifname;
  int socket_streams = CpuFabricOptions().streams;
  std::size_t shm_limit = CpuFabricOptions().shm_limit;
  bool checksums = false;
  bool encrypted_links = false;
  bool hierarchical_order = false;
  CudaFabricOptions cuda;
  bool auto_heal = false;
  // Job under which each reconfigure(uuid) has one of its own, of a process whose group's members
  // are the program's choice: this session is of that process alone then. Empty: an ordinary world.
  std::string reconfigure_scope;
  TimePolicy time;  // Its op_deadline is set by Open, to that of the session.
};

// One world in one process: the session, its line to the store's keys, and what its Works need.
//
// Owner: its backends, its stores and the user, by shared_ptr. Thread: thread-safe. Lifetime: Close
// ends it; the destructor closes, on any thread but the session's own.
class SessionContext : public std::enable_shared_from_this<SessionContext> {
 public:
  // Nothing is sent before Init.
  static Result<std::shared_ptr<SessionContext>> Open(ContextOptions options,
                                                      std::shared_ptr<Host> host);
  ~SessionContext();

  // Session::Init, with the connection for keys. Blocks.
  Status Init();

  // Session::Rebuild with the machine's part bounded by `budget`, nullopt: the session's; the wait
  // for seats comes on top of it. The others as of RebuildOptions. Blocks.
  Status Rebuild(std::optional<Duration> budget = std::nullopt, int min_world = 0,
                 std::optional<Duration> seat_wait = std::nullopt);

  // kFailedPrecondition before Init and after Close. A caller that holds it may go on using it
  // after Close.
  Result<std::shared_ptr<store::Client>> client() const;

  // Runs them, on a thread of their own, for each failure from now on. kResourceExhausted.
  Status RunOnFailure(const std::shared_ptr<AbortHooks>& hooks) {
    return abort_watch_.Follow(session_, hooks);
  }

  // Before one of them is taken out: a failure that is known already still finds it.
  void TakeHooksOfKnownFailures() const;
  // Before their owners are let go of: those of a failure that is known have begun. What they do
  // nobody waits for.
  void LetHooksBegin() const;

  Session& session() { return *session_; }
  AutoHeal& heal() { return *heal_; }
  const std::shared_ptr<Host>& host() const { return host_; }
  const Clock& clock() const { return clock_; }
  const Ladder& ladder() const { return ladder_; }
  const ContextOptions& options() const { return options_; }
  const TimePolicy& time() const { return options_.time; }
  std::uint64_t round() const { return session_->membership().round; }
  const std::shared_ptr<Ledger>& ledger() const { return ledger_; }
  const std::shared_ptr<LateFailure>& late_failure() const { return late_failure_; }
  const std::shared_ptr<Finisher>& finisher() const { return finisher_; }
  // Of the program, for its States. Thread: the one that uses these.
  Whereabouts& whereabouts() { return whereabouts_; }

  // Ends what is in flight, says goodbye, joins every thread of the session, releases every Work.
  // Idempotent; at most ~1 s, and as long as a callback of the user's runs. A hook of the user's
  // may go on behind it.
  void Close();

 private:
  SessionContext(ContextOptions options, std::shared_ptr<Host> host);
  Status ConnectForKeys(Deadline deadline);

  const std::shared_ptr<Host> host_;
  const SystemClock clock_;
  ContextOptions options_;  // Constant after Open.
  const Ladder ladder_;
  const std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  const std::shared_ptr<LateFailure> late_failure_ = std::make_shared<LateFailure>();
  const std::shared_ptr<Finisher> finisher_ = std::make_shared<Finisher>();
  Whereabouts whereabouts_;
  AbortWatch abort_watch_;
  std::shared_ptr<Session> session_;  // Constant after Open.
  std::optional<AutoHeal> heal_;      // Likewise.
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::shared_ptr<store::Client> connected_;  // Until Init has returned.
  std::shared_ptr<store::Client> client_;
  std::unique_ptr<Termination> termination_;  // While client_ exists; null: not ours to handle.
};

}  // namespace resilient::plugin
