#include "runtime/comm/nccl_communicator.h"

#include <poll.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/base/fork_guard.h"
#include "runtime/base/log.h"
#include "runtime/base/thread.h"
#include "runtime/comm/group_port.h"
#include "runtime/comm/nccl_group.h"
#include "runtime/comm/nccl_launch.h"

namespace resilient {
namespace {

// What the destructor gives the flushes when Close was not called.
constexpr Duration kCloseByDefault = Millis(1000);

Status Closed() { return Status(StatusCode::kCancelled, "the session was closed on this rank"); }

// The body of the thread that makes all calls into NCCL. It polls: neither NCCL nor an event of
// CUDA rings anybody. Owner: NcclFabric. Thread: Create and RequestStop are thread-safe, the rest
// runs on the loop's thread.
class NcclLoop {
 public:
  NcclLoop(NcclFabricOptions options, NcclIdExchange& ids, const Clock& clock,
           CommunicatorEvents& events, std::shared_ptr<Doorbell> doorbell)
      : context_{.options = std::move(options),
                 .ids = ids,
                 .events = events,
                 .clock = clock,
                 .doorbell = std::move(doorbell),
                 .now = clock.Now()} {}

  // False once RequestStop was called.
  bool Create(std::shared_ptr<GroupPort> port) {
    {
      std::lock_guard lock(mutex_);
      if (stop_requested_) return false;
      created_.push_back(std::move(port));
    }
    context_.doorbell->Ring();
    return true;
  }

  // All groups leave; Run returns when NCCL has let go of them, at the latest at `deadline`.
  void RequestStop(Deadline deadline) {
    {
      std::lock_guard lock(mutex_);
      stop_requested_ = true;
      requested_deadline_ = deadline;
    }
    context_.doorbell->Ring();
  }

  void Run() {
    while (true) {
      context_.now = context_.clock.Now();
      TakeRequests();
      for (const auto& group : groups_) group->Step();
      for (const auto& group : groups_) group->RunCompletions();
      std::erase_if(groups_, [](const auto& group) { return group->done(); });
      if (stopping_ && (groups_.empty() || stop_by_.ExpiredAt(context_.now))) break;
      Wait();
    }
    groups_.clear();
  }

 private:
  void TakeRequests() {
    std::vector<std::shared_ptr<GroupPort>> created;
    {
      std::lock_guard lock(mutex_);
      created = std::exchange(created_, {});
      stopping_ = stop_requested_;
      stop_by_ = requested_deadline_;
    }
    for (auto& port : created) AddGroup(std::move(port));
    if (!stopping_) return;
    for (const auto& group : groups_) {
      group->Leave(Closed());
      if (stop_by_.ExpiredAt(context_.now)) group->End(Closed());
    }
  }

  void AddGroup(std::shared_ptr<GroupPort> port) {
    const GroupSpec& spec = port->spec();
    const bool twice = std::any_of(groups_.begin(), groups_.end(), [&](const auto& group) {
      const GroupSpec& other = group->spec();
      return other.name == spec.name && other.generation == spec.generation &&
             other.attempt == spec.attempt;
    });
    groups_.push_back(std::make_unique<NcclGroup>(std::move(port), context_));
    if (!twice) return groups_.back()->Start();
    // The key of its unique id is used up.
    groups_.back()->End(
        Status(StatusCode::kInvalidArgument,
               StrCat("group ", groups_.back()->spec().name, " exists already in generation ",
                      groups_.back()->spec().generation,
                      "; a group that failed is made again under another attempt")));
  }

  void Wait() {
    Instant next = stopping_ ? stop_by_.when() : kNever;
    for (const auto& group : groups_) next = std::min(next, group->NextTime());
    entries_.assign({{.fd = context_.doorbell->wake().fd(), .events = POLLIN}});
    PollUntil(entries_, context_.clock, Deadline::At(next));
    if (entries_.front().revents != 0) context_.doorbell->wake().Drain();
  }

  // Loop's thread.
  NcclContext context_;
  std::vector<std::unique_ptr<NcclGroup>> groups_;
  bool stopping_ = false;
  Deadline stop_by_ = Deadline::Never();
  std::vector<PollEntry> entries_;
  // Guarded by mutex_.
  std::mutex mutex_;
  std::vector<std::shared_ptr<GroupPort>> created_;
  bool stop_requested_ = false;
  Deadline requested_deadline_ = Deadline::Never();
};

// What a caller holds of a group on the loop's thread. Owner: Session, through Group. Thread:
// thread-safe. Lifetime: may outlive the fabric; its operations then are refused.
class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<GroupPort> port) : port_(std::move(port)) {}
  ~NcclCommunicator() override {
    if (port_->doorbell().InChild()) {
      LeakInChild(std::move(port_));
    } else {
      Leave();
    }
  }

  int rank() const override { return port_->spec().rank; }
  int size() const override { return port_->size(); }
  Result<std::uint64_t> Submit(Operation op, Completion done) override {
    RESILIENT_RETURN_IF_ERROR(ValidateOperation(op, rank(), size()));
    RESILIENT_RETURN_IF_ERROR(CheckNcclSupports(op));
    return port_->Submit(std::move(op), std::move(done));
  }
  Result<Ran> Run(Operation op, Completion done, const KeepWaiting& /*keep_waiting*/) override {
    Result<std::uint64_t> seq = Submit(std::move(op), std::move(done));
    if (!seq.ok()) return seq.status();
    return Ran{.seq = *seq, .outcome = std::nullopt};
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
class NcclFabric final : public CommunicatorFactory {
 public:
  NcclFabric(const NcclFabricOptions& options, NcclIdExchange& ids, const Clock& clock,
             CommunicatorEvents& events)
      : endpoint_(StrCat("nccl:", options.device)),
        clock_(clock),
        doorbell_(std::make_shared<Doorbell>()),
        loop_(std::make_unique<NcclLoop>(options, ids, clock, events, doorbell_)),
        thread_(options.name, [loop = loop_.get()] { loop->Run(); }) {}

  ~NcclFabric() override {
    if (doorbell_->InChild()) {
      thread_.AbandonInChild();
      LeakInChild(std::move(loop_));
      LeakInChild(std::move(doorbell_));
      return;
    }
    Close(Deadline::After(clock_.Now(), kCloseByDefault));
  }

  // Peers reach each other by the unique id; this is for the reader of a view.
  std::string endpoint() const override { return endpoint_; }

  std::shared_ptr<Communicator> Create(GroupSpec spec, std::shared_ptr<AbortCell> abort) override {
    RESILIENT_CHECK(spec.rank >= 0 && spec.rank < static_cast<int>(spec.members.size()));
    auto port = std::make_shared<GroupPort>(std::move(spec), abort, doorbell_, clock_);
    auto communicator = std::make_shared<NcclCommunicator>(port);
    if (doorbell_->InChild()) return communicator;  // Its operations are refused.
    if (!loop_->Create(port)) {
      port->Close(Closed());
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
  std::shared_ptr<Doorbell> doorbell_;
  std::unique_ptr<NcclLoop> loop_;
  Thread thread_;
};

}  // namespace

std::unique_ptr<CommunicatorFactory> MakeNcclFabric(const NcclFabricOptions& options,
                                                    NcclIdExchange& ids, const Clock& clock,
                                                    CommunicatorEvents& events) {
  return std::make_unique<NcclFabric>(options, ids, clock, events);
}

}  // namespace resilient
