#include "torch_plugin/csrc/context.h"

#include <algorithm>
#include <utility>

#include <resilient/exit.h>
#include <resilient/transports.h>

namespace resilient::plugin {
namespace {

// Of what a thread does that nothing keeps: microseconds, where it is given a core.
constexpr Duration kAtOnce = std::chrono::seconds(1);

}  // namespace

SessionContext::SessionContext(ContextOptions options, std::shared_ptr<Host> host)
    : host_(std::move(host)),
      options_(std::move(options)),
      ladder_(LadderOf(options_.session.budget, options_.session.seat_wait)) {}

SessionContext::~SessionContext() { Close(); }

Result<std::shared_ptr<SessionContext>> SessionContext::Open(ContextOptions options,
                                                             std::shared_ptr<Host> host) {
  SetExitBudget(options.session.budget);
  const InterruptCheck interrupt = [host] { return host->Interrupted(); };
  options.connect.session = store::NewSessionId();
  options.session.interrupt = interrupt;
  options.session.observer = host->observer();
  options.time.op_deadline = options.session.op_deadline;
  options.cuda.connect_timeout = options.session.op_deadline / 2;  // It is tried twice.
  std::shared_ptr<SessionContext> context(new SessionContext(std::move(options), std::move(host)));
  const Clock& clock = context->clock_;
  const FactoryMaker make_fabric = [&](CommunicatorEvents& events) {
    CpuFabricOptions fabric;
    fabric.bind_address = context->options_.bind_address;
    fabric.interfaces = context->options_.socket_ifname;
    fabric.streams = context->options_.socket_streams;
    fabric.shm_limit = context->options_.shm_limit;
    fabric.checksums = context->options_.checksums;
    fabric.encrypted = context->options_.encrypted_links;
    fabric.hierarchical = context->options_.hierarchical_order;
    return MakeCudaFabric(std::move(fabric), context->options_.cuda, clock, events);
  };
  auto line = store::MakeRendezvous(
      context->options_.connect, interrupt, clock,
      [raw = context.get()](Deadline deadline) { return raw->ConnectForKeys(deadline); });
  auto session = OpenSession(context->options_.session, std::move(line), make_fabric, clock);
  if (!session.ok()) return session.status();
  context->session_ = std::move(session).value();
  context->heal_.emplace(context->options_.auto_heal, context->ladder_.rebuild, *context->session_,
                         clock);
  return context;
}

// While no seat is asked for: once all have theirs the host of the store may leave, with whom its
// address goes, and whoever came there too late would look for another world than they were in.
Status SessionContext::ConnectForKeys(Deadline deadline) {
  // The store has just answered: once more it may take as long as any answer.
  const Deadline answer = Deadline::After(clock_.Now(), ladder_.answer);
  auto client = store::Connect(options_.connect, options_.session.interrupt, clock_,
                               Deadline::At(std::max(deadline.when(), answer.when())));
  if (client.status().code() == StatusCode::kRefused && !options_.connect.expected_server.empty()) {
    return Status(StatusCode::kStoreLost,
                  "the store has stopped since this rank found it: " + client.status().message());
  }
  if (!client.ok()) return client.status();
  const std::lock_guard lock(mutex_);
  connected_ = std::move(client).value();
  return Status::Ok();
}

Status SessionContext::Init() {
  Status status = session_->Init();
  std::unique_lock lock(mutex_);
  std::shared_ptr<store::Client> client = std::exchange(connected_, nullptr);
  if (status.ok()) {
    client_ = std::move(client);
    termination_ = HandleTermination(session_, clock_);
    return status;
  }
  lock.unlock();
  if (client != nullptr) client->Close();
  return status;
}

Result<std::shared_ptr<store::Client>> SessionContext::client() const {
  const std::lock_guard lock(mutex_);
  if (client_) return client_;
  return Status(StatusCode::kFailedPrecondition,
                "the session is not open: its store exists from init until close");
}

Status SessionContext::Rebuild(std::optional<Duration> budget, int min_world,
                               std::optional<Duration> seat_wait) {
  // Others may wait for a seat longer than this rank wants to, and are waited for.
  const Duration longest = std::max(ladder_.seat_wait, seat_wait.value_or(Duration::zero()));
  const Duration limit = LadderOf(budget.value_or(ladder_.budget), longest).rebuild;
  return session_->Rebuild({.deadline = Deadline::After(clock_.Now(), limit),
                            .min_world = min_world,
                            .seat_wait = seat_wait});
}

void SessionContext::TakeHooksOfKnownFailures() const {
  if (host_->Ending() || session_->InForkedChild()) return;
  abort_watch_.Take(*session_);
}

void SessionContext::LetHooksBegin() const {
  if (host_->Ending() || session_->InForkedChild() || ExitHasBegun()) return;
  const Deadline deadline = Deadline::After(clock_.Now(), kAtOnce);
  host_->WithoutLock([&] { abort_watch_.LetBegin(*session_, deadline); });
}

void SessionContext::Close() {
  std::shared_ptr<store::Client> client;
  std::unique_ptr<Termination> termination;
  const bool in_child = session_ != nullptr && session_->InForkedChild();
  {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (!in_child) lock.lock();  // Another thread may have held it at the fork.
    termination = std::move(termination_);
    client = std::move(client_);
    client_ = nullptr;
  }
  if (session_ == nullptr) return;  // Open failed.
  host_->WithoutLock([&] {
    termination.reset();
    session_->Close();
    if (!in_child) abort_watch_.AwaitEnd(Deadline::After(clock_.Now(), kAtOnce));
    client.reset();  // It closes with the last store that a library has kept.
    finisher_->Stop(in_child);
  });
  if (!in_child) ledger_->Close();
  host_->RaiseLater();
}

}  // namespace resilient::plugin
