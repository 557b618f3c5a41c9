#include <memory>
#include <string>
#include <utility>

#include <resilient/communicator.h>

#include "runtime/base/check.h"
#include "runtime/base/fork_guard.h"
#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "runtime/base/thread.h"
#include "runtime/comm/endpoint.h"
#include "runtime/comm/fabric_loop.h"
#include "runtime/comm/group_port.h"
#include "runtime/comm/step_observer.h"
#include "runtime/comm/wire.h"
#include "runtime/net/interfaces.h"

namespace resilient {
namespace {

constexpr int kListenBacklog = 1024;
// What the destructor gives the goodbyes when Close was not called.
constexpr Duration kCloseByDefault = Millis(1000);

// What a caller holds of a group on the comm thread. Owner: Session, through Group. Thread:
// thread-safe. Lifetime: may outlive the fabric; its operations then are refused.
class CpuCommunicator final : public Communicator {
 public:
  explicit CpuCommunicator(std::shared_ptr<GroupPort> port) : port_(std::move(port)) {}
  ~CpuCommunicator() override {
    if (port_->doorbell().InChild()) {
      LeakInChild(std::move(port_));
    } else {
      Leave();
    }
  }

  int rank() const override { return port_->spec().rank; }
  int size() const override { return port_->size(); }
  Result<std::uint64_t> Submit(Operation op, Completion done) override {
    return port_->Submit(std::move(op), std::move(done));
  }
  Result<Ran> Run(Operation op, Completion done, const KeepWaiting& keep_waiting) override {
    return port_->Run(std::move(op), std::move(done), keep_waiting);
  }
  void Abort(const Status& cause) override { port_->Abort(cause); }
  bool IsQuiet() const override { return port_->IsQuiet(); }
  void Leave() override {
    port_->Leave(Status(StatusCode::kCancelled,
                        StrCat("this rank has left the group ", port_->spec().name)));
  }

 private:
  std::shared_ptr<GroupPort> port_;
};

// Owner: Session. Thread: thread-safe, but for Close and the destructor, which one caller runs and
// never a completion.
class CpuFabric final : public CommunicatorFactory {
 public:
  CpuFabric(FileDescriptor listener, std::string endpoint, std::string thread_name,
            std::size_t shm_limit, const Clock& clock, CommunicatorEvents& events,
            StepObserver observer)
      : endpoint_(std::move(endpoint)),
        clock_(clock),
        observer_(std::move(observer)),
        doorbell_(std::make_shared<Doorbell>()),
        loop_(std::make_unique<FabricLoop>(std::move(listener), doorbell_, clock, events,
                                           RandomSeed(), shm_limit)),
        thread_(std::move(thread_name), [loop = loop_.get()] { loop->Run(); }) {}

  ~CpuFabric() override {
    if (doorbell_->InChild()) {
      thread_.AbandonInChild();
      LeakInChild(std::move(loop_));
      LeakInChild(std::move(doorbell_));
      return;
    }
    Close(Deadline::After(clock_.Now(), kCloseByDefault));
  }

  std::string endpoint() const override { return endpoint_; }

  std::shared_ptr<Communicator> Create(GroupSpec spec, std::shared_ptr<AbortCell> abort) override {
    RESILIENT_CHECK(spec.rank >= 0 && spec.rank < static_cast<int>(spec.members.size()));
    const bool fits = spec.name.size() <= kMaxGroupName && spec.secret.size() <= kMaxSecret;
    auto port = std::make_shared<GroupPort>(std::move(spec), abort, doorbell_, clock_, observer_);
    auto communicator = std::make_shared<CpuCommunicator>(port);
    if (doorbell_->InChild()) return communicator;  // Its operations are refused.
    if (!fits) {
      port->Close(Status(StatusCode::kInvalidArgument,
                         StrCat("the name of a group has at most ", kMaxGroupName,
                                " characters, its secret ", kMaxSecret)));
    } else if (!loop_->Create(port)) {
      port->Close(Status(StatusCode::kCancelled, "the session was closed on this rank"));
    } else if (abort != nullptr) {
      // Weak: the cell may outlive the group, and must not keep it.
      abort->Listen([weak = std::weak_ptr<GroupPort>(port)] {
        if (const auto alive = weak.lock()) alive->OnAbort();
      });
    }
    return communicator;
  }

  void Close(Deadline deadline) override {
    if (doorbell_->InChild() || !thread_.Joinable()) return;
    loop_->RequestStop(deadline);
    thread_.Join();
  }

 private:
  const std::string endpoint_;
  const Clock& clock_;
  const StepObserver observer_;
  std::shared_ptr<Doorbell> doorbell_;
  std::unique_ptr<FabricLoop> loop_;
  Thread thread_;
};

}  // namespace

Result<std::unique_ptr<CommunicatorFactory>> MakeCpuFabric(CpuFabricOptions options,
                                                           const Clock& clock,
                                                           CommunicatorEvents& events) {
  return MakeObservedCpuFabric(std::move(options), clock, events, nullptr);
}

Result<std::unique_ptr<CommunicatorFactory>> MakeObservedCpuFabric(CpuFabricOptions options,
                                                                   const Clock& clock,
                                                                   CommunicatorEvents& events,
                                                                   StepObserver observer) {
  if (!options.interfaces.empty()) {
    const Result<std::vector<InterfaceAddress>> present = ListInterfaceAddresses();
    if (!present.ok()) return present.status();
    Result<std::string> chosen = ChooseInterfaceAddress(options.interfaces, *present);
    if (!chosen.ok()) return chosen.status();
    options.bind_address = std::move(*chosen);
  }
  Result<FileDescriptor> listener =
      ListenTcp({.host = options.bind_address, .port = 0}, kListenBacklog);
  if (!listener) {
    return Status(
        StatusCode::kUnreachable,
        StrCat("cannot listen on ", options.bind_address, ": ", listener.status().message(),
               "; RESILIENT_SOCKET_IFNAME names the interface to use"));
  }
  const Result<HostPort> address = LocalAddress(*listener);
  if (!address) return address.status();
  return std::unique_ptr<CommunicatorFactory>(std::make_unique<CpuFabric>(
      std::move(*listener),
      EncodeEndpoint({.address = FormatHostPort(*address),
                      .host_id = options.shm_limit > 0 ? ShmHostId() : std::string()}),
      std::move(options.name), options.shm_limit, clock, events, std::move(observer)));
}

}  // namespace resilient
