#include "runtime/comm/fabric.h"

#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/fork_guard.h"
#include "runtime/base/log.h"
#include "runtime/base/thread.h"
#include "runtime/comm/wire.h"

namespace resilient {
namespace {

// What a caller holds of a group on the fabric's thread. Owner: Session, through Group. Thread:
// thread-safe. Lifetime: may outlive the fabric; its operations then are refused.
class PortCommunicator final : public Communicator {
 public:
  explicit PortCommunicator(std::shared_ptr<GroupPort> port) : port_(std::move(port)) {}
  ~PortCommunicator() override {
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
  Result<std::vector<std::uint64_t>> SubmitBatch(std::vector<Submission> batch) override {
    return port_->SubmitBatch(std::move(batch));
  }
  Result<Ran> Run(Operation op, Completion done, const KeepWaiting& keep_waiting) override {
    return port_->Run(std::move(op), std::move(done), keep_waiting);
  }
  void Abort(const Status& cause) override { port_->Abort(cause); }
  bool IsQuiet() const override { return port_->IsQuiet(); }
  bool HoldsDevice() const override { return port_->HoldsDevice(); }
  ProgressAnswer AskProgress(const std::string& transport) override {
    return transport == port_->spec().name ? port_->AskProgress() : ProgressAnswer::kNotBegun;
  }
  void NoteAllEntered(const EnteredCall& call) override {
    if (call.group == port_->spec().name) port_->NoteAllEntered(call);
  }
  void Leave() override { port_->Leave(GroupLeft(port_->spec().name)); }

 private:
  std::shared_ptr<GroupPort> port_;
};

// Owner: Session. Thread: thread-safe, but for Close and the destructor, which one caller runs and
// never a completion.
class Fabric final : public CommunicatorFactory {
 public:
  Fabric(FabricParts parts, const Clock& clock)
      : endpoint_(std::move(parts.endpoint)),
        admission_(std::move(parts.admission)),
        observer_(std::move(parts.observer)),
        serves_device_(parts.serves_device),
        clock_(clock),
        requests_(std::move(parts.requests)),
        loop_(std::move(parts.loop)),
        thread_(std::move(parts.thread_name), [loop = loop_.get()] { loop->Run(); }) {}

  ~Fabric() override {
    if (InChild()) {
      thread_.AbandonInChild();
      LeakInChild(std::move(loop_));
      LeakInChild(std::move(requests_));
      return;
    }
    Close(Deadline::After(clock_.Now(), kCloseByDefault));
  }

  std::string endpoint() const override { return endpoint_; }

  std::shared_ptr<Communicator> Create(GroupSpec spec, std::shared_ptr<AbortCell> abort) override {
    RESILIENT_CHECK(spec.rank >= 0 && spec.rank < static_cast<int>(spec.members.size()));
    const bool fits = spec.name.size() <= kMaxGroupName;
    auto port = std::make_shared<GroupPort>(std::move(spec), abort, requests_->doorbell(),
                                            requests_->held(), clock_, admission_, observer_);
    auto communicator = std::make_shared<PortCommunicator>(port);
    if (InChild()) return communicator;  // Its operations are refused.
    port->SetHoldsDevice(serves_device_ && fits);
    if (!fits) {
      port->Close(Status(StatusCode::kInvalidArgument,
                         StrCat("the name of a group has at most ", kMaxGroupName, " characters")));
    } else if (!requests_->Create(port)) {
      port->SetHoldsDevice(false);
      port->Close(SessionClosed());
    } else if (abort != nullptr) {
      // Weak: the cell may outlive the group, and must not keep it.
      abort->Listen([weak = std::weak_ptr<GroupPort>(port)] {
        if (const auto alive = weak.lock()) alive->OnAbort();
      });
    }
    return communicator;
  }

  void Hold(Instant until) override { requests_->held()->Set(until); }

  void Knock(const GroupSpec& world, const std::vector<int>& ranks, Duration patience) override {
    if (InChild()) return;
    requests_->Knock({.world = world, .ranks = ranks, .patience = patience});
  }

  void Close(Deadline deadline) override {
    if (InChild() || !thread_.Joinable()) return;
    requests_->Stop(deadline);
    thread_.Join();
  }

 private:
  bool InChild() const { return requests_->doorbell()->InChild(); }

  const std::string endpoint_;
  const Admission admission_;
  const StepObserver observer_;
  const bool serves_device_;
  const Clock& clock_;
  std::unique_ptr<FabricRequests> requests_;
  std::unique_ptr<GroupLoop> loop_;
  Thread thread_;
};

}  // namespace

bool FabricRequests::Create(std::shared_ptr<GroupPort> port) {
  {
    std::lock_guard lock(mutex_);
    if (asked_.stop) return false;
    asked_.created.push_back(std::move(port));
  }
  doorbell_->Ring();
  return true;
}

void FabricRequests::Knock(KnockRound round) {
  {
    std::lock_guard lock(mutex_);
    if (asked_.stop) return;
    asked_.knock = std::move(round);
  }
  doorbell_->Ring();
}

void FabricRequests::Stop(Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    asked_.stop = true;
    asked_.stop_by = deadline;
  }
  doorbell_->Ring();
}

FabricRequests::Asked FabricRequests::Take() {
  std::lock_guard lock(mutex_);
  return {.created = std::exchange(asked_.created, {}),
          .knock = std::exchange(asked_.knock, std::nullopt),
          .stop = asked_.stop,
          .stop_by = asked_.stop_by};
}

std::unique_ptr<CommunicatorFactory> MakeFabric(FabricParts parts, const Clock& clock) {
  return std::make_unique<Fabric>(std::move(parts), clock);
}

Status SessionClosed() {
  return Status(StatusCode::kCancelled, "the session was closed on this rank");
}

Status GroupLeft(const std::string& group) {
  return Status(StatusCode::kCancelled, StrCat("this rank has left the group ", group));
}

}  // namespace resilient
