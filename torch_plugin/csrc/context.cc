#include "torch_plugin/csrc/context.h"

#include <algorithm>
#include <utility>

#include <resilient/communicator.h>

namespace resilient::plugin {

SessionContext::SessionContext(ContextOptions options, std::shared_ptr<Host> host)
    : host_(std::move(host)), options_(std::move(options)) {}

SessionContext::~SessionContext() { Close(); }

Result<std::shared_ptr<SessionContext>> SessionContext::Open(ContextOptions options,
                                                             std::shared_ptr<Host> host) {
  const InterruptCheck interrupt = [host] { return host->Interrupted(); };
  options.connect.session = store::NewSessionId();
  options.session.interrupt = interrupt;
  options.session.observer = host->observer();
  std::shared_ptr<SessionContext> context(new SessionContext(std::move(options), std::move(host)));
  const Clock& clock = context->clock_;
  const FactoryMaker make_fabric = [&](CommunicatorEvents& events) {
    CpuFabricOptions fabric;
    fabric.bind_address = context->options_.bind_address;
    fabric.interfaces = context->options_.socket_ifname;
    fabric.streams = context->options_.socket_streams;
    fabric.shm_limit = context->options_.shm_limit;
    fabric.checksums = context->options_.checksums;
    fabric.hierarchical = context->options_.hierarchical_order;
    return MakeCpuFabric(std::move(fabric), clock, events);
  };
  auto session = OpenSession(context->options_.session,
                             store::MakeRendezvous(context->options_.connect, interrupt, clock),
                             make_fabric, clock);
  if (!session.ok()) return session.status();
  context->session_ = std::move(session).value();
  context->heal_.emplace(context->options_.auto_heal, context->budget() + context->seat_wait(),
                         *context->session_, clock);
  return context;
}

Status SessionContext::Init() {
  RESILIENT_RETURN_IF_ERROR(session_->Init());
  auto client = store::Connect(
      options_.connect, options_.session.interrupt, clock_,
      Deadline::After(clock_.Now(), std::max(budget(), Duration(std::chrono::seconds(1)))));
  if (!client.ok()) return client.status();
  const std::lock_guard lock(mutex_);
  client_ = std::move(client).value();
  termination_ = HandleTermination(session_, clock_);
  return Status::Ok();
}

Result<std::shared_ptr<store::Client>> SessionContext::client() const {
  const std::lock_guard lock(mutex_);
  if (client_) return client_;
  return Status(StatusCode::kFailedPrecondition,
                "the session is not open: its store exists from init until close");
}

void SessionContext::Close() {
  std::shared_ptr<store::Client> client;
  std::unique_ptr<Termination> termination;
  {
    const std::lock_guard lock(mutex_);
    termination = std::move(termination_);
    client = std::move(client_);
    client_ = nullptr;
  }
  if (session_ == nullptr) return;  // Open failed.
  const bool in_child = session_->InForkedChild();
  host_->WithoutLock([&] {
    termination.reset();
    session_->Close();
    if (client) client->Close();
    finisher_->Stop(in_child);
  });
  if (!in_child) ledger_->Close();
}

}  // namespace resilient::plugin
