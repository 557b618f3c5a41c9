#include "runtime/comm/cuda_fabric.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <resilient/settings.h>

#include "runtime/base/exit_watch.h"
#include "runtime/base/fork_guard.h"
#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "runtime/comm/fabric.h"
#include "runtime/comm/nccl_communicator.h"
#include "runtime/comm/staged_communicator.h"

namespace resilient {
namespace {

bool IsControl(const std::string& group) { return group.ends_with(kControlSuffix); }

// The group that `group` belongs to: itself, or the one whose control group it is.
std::string ServedBy(std::string group) {
  if (IsControl(group)) group.resize(group.size() - std::string_view(kControlSuffix).size());
  return group;
}

// Between the CPU transport and the session, which does not know of the control groups: what these
// wait for is told by the communicators that stand on them. Owner: the fabric. Thread: thread-safe.
class HostEvents final : public CommunicatorEvents {
 public:
  HostEvents(CommunicatorEvents& session, std::shared_ptr<ControlWaits> waits,
             std::shared_ptr<StagedCalls> calls, const Clock& clock)
      : session_(session), waits_(std::move(waits)), calls_(std::move(calls)), clock_(clock) {}

  void OnConnected(const std::string& group, std::uint64_t generation) override {
    if (!IsControl(group)) session_.OnConnected(group, generation);
  }
  void OnLinkLost(const std::string& group, std::uint64_t generation, int global_rank,
                  const Status& why) override {
    session_.OnLinkLost(ServedBy(group), generation, global_rank, why);
  }
  void OnUnreached(const std::string& group, std::uint64_t generation, int global_rank,
                   const Status& why) override {
    session_.OnUnreached(group, generation, global_rank, why);
  }
  void OnMismatch(const std::string& group, std::uint64_t generation,
                  const Status& mismatch) override {
    session_.OnMismatch(group, generation, mismatch);
  }
  void OnStalled(const std::string& group, std::uint64_t generation, const Status& why) override {
    session_.OnStalled(group, generation, why);
  }
  void OnWaiting(const std::string& group, std::uint64_t generation,
                 std::vector<WaitingOperation> waiting) override {
    if (!IsControl(group)) {
      calls_->Translate(group, generation, &waiting);
      return session_.OnWaiting(group, generation, std::move(waiting));
    }
    for (WaitingOperation& one : waiting) {
      // A meeting. Messages are waited for all the time.
      if (!one.point_to_point)
        waits_->Note(group, generation, std::move(one.missing), clock_.Now());
    }
  }
  void OnProgress(std::uint64_t generation, GroupProgress progress) override {
    session_.OnProgress(generation, std::move(progress));
  }
  void OnKnocked(std::uint64_t generation, int global_rank, const Status& found) override {
    session_.OnKnocked(generation, global_rank, found);
  }

 private:
  CommunicatorEvents& session_;
  const std::shared_ptr<ControlWaits> waits_;
  const std::shared_ptr<StagedCalls> calls_;
  const Clock& clock_;
};

// The transports of the devices, each made when an operation needs it. Owner: shared by the fabric
// and its communicators. Thread: thread-safe.
class DeviceTransports {
 public:
  DeviceTransports(CudaFabricOptions options, CudaSources sources, const Clock& clock)
      : options_(std::move(options)), sources_(std::move(sources)), clock_(clock) {}

  // `control` and `events` outlive it, once it is closed.
  void Open(CommunicatorFactory& control, CommunicatorEvents& events,
            std::shared_ptr<ControlWaits> waits, std::shared_ptr<StagedCalls> calls) {
    control_ = &control;
    events_ = &events;
    waits_ = std::move(waits);
    calls_ = std::move(calls);
  }

  // kSetting where there is no NCCL or no CUDA.
  Result<std::shared_ptr<Communicator>> Create(int device, GroupSpec spec,
                                               std::shared_ptr<AbortCell> abort) {
    const std::lock_guard lock(mutex_);
    if (closed_) return SessionClosed();
    auto& transport = transports_[device];
    if (transport == nullptr) {
      Result<std::unique_ptr<CommunicatorFactory>> made = MakeLocked(device);
      if (!made.ok()) return made.status();
      transport = std::move(made).value();
    }
    return transport->Create(std::move(spec), std::move(abort));
  }
  void Hold(Instant until) {
    const std::lock_guard lock(mutex_);
    held_ = until;
    for (auto& [device, transport] : transports_) {
      if (transport != nullptr) transport->Hold(until);
    }
  }
  void Close(Deadline deadline) {
    std::map<int, std::unique_ptr<CommunicatorFactory>> transports;
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      transports.swap(transports_);
    }
    for (auto& [device, transport] : transports) {
      if (transport == nullptr) continue;
      const DriverCall call(StrCat("the end of the communicators on device ", device));
      transport->Close(deadline);
    }
  }

 private:
  // REQUIRES: mutex_.
  Result<std::unique_ptr<CommunicatorFactory>> MakeLocked(int device) {
    if (!library_) library_ = Load();
    if (!library_->ok()) return library_->status();
    NcclFabricOptions options;
    options.nccl = (*library_)->nccl;
    options.cuda = (*library_)->cuda;
    options.device = device;
    options.identity.boot_id = ThisProcess().boot_id;
    if (options_.shared_gpu == SharedGpu::kRefused)
      options.identity.device = sources_.claim(device);
    options.connect_timeout = options_.connect_timeout;
    options.flush_timeout = options_.flush_timeout;
    options.verdict_wait = options_.verdict_wait;
    options.name = options_.name;
    auto made = Make(std::move(options));
    made->Hold(held_);
    return made;
  }
  Result<NcclLibrary> Load() const {
    if (options_.shared_gpu != SharedGpu::kThroughHost) return sources_.load();
    const Result<CudaApi> cuda = sources_.load_cuda();
    if (!cuda.ok()) return cuda.status();
    return NcclLibrary{.nccl = {}, .cuda = *cuda};
  }
  std::unique_ptr<CommunicatorFactory> Make(NcclFabricOptions options) const {
    if (options_.shared_gpu == SharedGpu::kThroughHost) {
      options.identity.way = kStagedWay;
      options.name = "res-staged";
      return MakeStagedFabric(options, *control_, waits_, calls_, clock_, *events_);
    }
    options.identity.nccl_version = (*library_)->nccl_version;
    options.identity.settings = NcclSettings(ProcessEnvironment());
    return MakeNcclFabric(options, *control_, waits_, clock_, *events_);
  }

  const CudaFabricOptions options_;
  const CudaSources sources_;
  const Clock& clock_;
  CommunicatorFactory* control_ = nullptr;
  CommunicatorEvents* events_ = nullptr;
  std::shared_ptr<ControlWaits> waits_;
  std::shared_ptr<StagedCalls> calls_;
  std::mutex mutex_;
  // Guarded by mutex_.
  bool closed_ = false;
  Instant held_ = Instant::min();
  std::optional<Result<NcclLibrary>> library_;  // Of the one attempt to load it.
  std::map<int, std::unique_ptr<CommunicatorFactory>> transports_;
};

// One group over all memory: what is on a device goes to a communicator of that device, made when
// it is needed first. Ranks that use several devices begin to use them in the same order. Owner:
// Session, through Group. Thread: thread-safe.
class CudaCommunicator final : public Communicator {
 public:
  CudaCommunicator(std::shared_ptr<Communicator> host, GroupSpec spec,
                   std::shared_ptr<AbortCell> abort, std::shared_ptr<DeviceTransports> transports)
      : host_(std::move(host)),
        spec_(std::move(spec)),
        abort_(std::move(abort)),
        transports_(std::move(transports)) {}

  // Begins to connect. What comes of it the first operation there is told.
  void Connect(int device) { (void)On(device); }

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }

  Result<std::uint64_t> Submit(Operation op, Completion done) override {
    if (op.device == kHost) return host_->Submit(std::move(op), std::move(done));
    const auto device = On(op.device);
    if (!device.ok()) return device.status();
    return (*device)->Submit(std::move(op), std::move(done));
  }
  Result<std::vector<std::uint64_t>> SubmitBatch(std::vector<Submission> batch) override {
    if (batch.empty() || batch.front().op.device == kHost)
      return host_->SubmitBatch(std::move(batch));
    const auto device = On(batch.front().op.device);
    if (!device.ok()) return device.status();
    return (*device)->SubmitBatch(std::move(batch));
  }
  Result<Ran> Run(Operation op, Completion done, const KeepWaiting& keep_waiting) override {
    if (op.device == kHost) return host_->Run(std::move(op), std::move(done), keep_waiting);
    const auto device = On(op.device);
    if (!device.ok()) return device.status();
    return (*device)->Run(std::move(op), std::move(done), keep_waiting);
  }

  void Abort(const Status& cause) override {
    host_->Abort(cause);
    if (mark_.InChild()) return;
    const std::lock_guard lock(mutex_);
    if (over_.ok()) over_ = cause;
    for (const auto& [number, device] : devices_) device->Abort(cause);
  }
  bool IsQuiet() const override {
    if (!host_->IsQuiet()) return false;
    if (mark_.InChild()) return true;
    const std::lock_guard lock(mutex_);
    return std::all_of(devices_.begin(), devices_.end(),
                       [](const auto& device) { return device.second->IsQuiet(); });
  }
  bool HoldsDevice() const override {
    if (mark_.InChild()) return false;
    const std::lock_guard lock(mutex_);
    return std::any_of(devices_.begin(), devices_.end(),
                       [](const auto& device) { return device.second->HoldsDevice(); });
  }
  ProgressAnswer AskProgress(const std::string& transport) override {
    if (transport == spec_.name) return host_->AskProgress(transport);
    if (mark_.InChild()) return ProgressAnswer::kOver;
    const std::lock_guard lock(mutex_);
    for (const auto& [number, device] : devices_) {
      const ProgressAnswer answer = device->AskProgress(transport);
      if (answer != ProgressAnswer::kNotBegun) return answer;
    }
    return ProgressAnswer::kNotBegun;
  }
  void NoteAllEntered(const EnteredCall& call) override {
    host_->NoteAllEntered(call);
    if (mark_.InChild()) return;
    const std::lock_guard lock(mutex_);
    for (const auto& [number, device] : devices_) device->NoteAllEntered(call);
  }
  void Leave() override {
    host_->Leave();
    if (mark_.InChild()) return;
    const std::lock_guard lock(mutex_);
    if (over_.ok()) over_ = GroupLeft(spec_.name);
    for (const auto& [number, device] : devices_) device->Leave();
  }

 private:
  Result<std::shared_ptr<Communicator>> On(int device) {
    if (mark_.InChild()) return ForkedFromRank();
    const std::lock_guard lock(mutex_);
    if (const auto found = devices_.find(device); found != devices_.end()) return found->second;
    if (!over_.ok()) return over_;
    GroupSpec spec = spec_;
    spec.name = CommunicatorName(spec_.name, device);
    if (!devices_.empty()) spec.name += StrCat("-", devices_.size() + 1);
    auto made = transports_->Create(device, std::move(spec), abort_);
    if (made.ok()) devices_[device] = *made;
    return made;
  }

  const std::shared_ptr<Communicator> host_;
  const GroupSpec spec_;
  const std::shared_ptr<AbortCell> abort_;
  const std::shared_ptr<DeviceTransports> transports_;
  const ProcessMark mark_;
  mutable std::mutex mutex_;
  Status over_;                                           // Guarded by mutex_. Aborted or left.
  std::map<int, std::shared_ptr<Communicator>> devices_;  // Guarded by mutex_.
};

// Owner: Session. Thread: as Fabric.
class CudaFabric final : public CommunicatorFactory {
 public:
  CudaFabric(CommunicatorEvents& session, std::shared_ptr<DeviceTransports> transports,
             int eager_device, const Clock& clock)
      : eager_device_(eager_device),
        waits_(std::make_shared<ControlWaits>()),
        calls_(std::make_shared<StagedCalls>()),
        host_events_(session, waits_, calls_, clock),
        session_(session),
        clock_(clock),
        transports_(std::move(transports)) {}

  Status Open(CpuFabricOptions options) {
    auto host = MakeCpuFabric(std::move(options), clock_, host_events_);
    if (!host.ok()) return host.status();
    host_ = std::move(host).value();
    transports_->Open(*host_, session_, waits_, calls_);
    return Status::Ok();
  }

  std::string endpoint() const override { return host_->endpoint(); }
  std::shared_ptr<Communicator> Create(GroupSpec spec, std::shared_ptr<AbortCell> abort) override {
    auto host = host_->Create(spec, abort);
    auto made = std::make_shared<CudaCommunicator>(std::move(host), std::move(spec),
                                                   std::move(abort), transports_);
    if (eager_device_ != kHost && !mark_.InChild()) made->Connect(eager_device_);
    return made;
  }
  void Hold(Instant until) override {
    host_->Hold(until);
    transports_->Hold(until);
  }
  void Knock(const GroupSpec& world, const std::vector<int>& ranks, Duration patience) override {
    host_->Knock(world, ranks, patience);
  }
  // First what stands on the control groups.
  void Close(Deadline deadline) override {
    if (mark_.InChild()) return;
    transports_->Close(deadline);
    host_->Close(deadline);
  }
  ~CudaFabric() override {
    if (mark_.InChild()) {
      LeakInChild(std::move(transports_));
    } else {
      transports_->Close(Deadline::After(clock_.Now(), kCloseByDefault));
    }
  }

 private:
  const ProcessMark mark_;
  const int eager_device_;
  const std::shared_ptr<ControlWaits> waits_;
  const std::shared_ptr<StagedCalls> calls_;
  HostEvents host_events_;
  CommunicatorEvents& session_;
  const Clock& clock_;
  std::shared_ptr<DeviceTransports> transports_;
  std::unique_ptr<CommunicatorFactory> host_;
};

}  // namespace

Result<std::unique_ptr<CommunicatorFactory>> MakeCudaFabric(CpuFabricOptions cpu,
                                                            CudaFabricOptions cuda,
                                                            CudaSources sources, const Clock& clock,
                                                            CommunicatorEvents& events) {
  const int eager_device = cuda.eager_device;
  auto transports = std::make_shared<DeviceTransports>(std::move(cuda), std::move(sources), clock);
  auto fabric = std::make_unique<CudaFabric>(events, std::move(transports), eager_device, clock);
  RESILIENT_RETURN_IF_ERROR(fabric->Open(std::move(cpu)));
  return std::unique_ptr<CommunicatorFactory>(std::move(fabric));
}

Result<std::unique_ptr<CommunicatorFactory>> MakeCudaFabric(CpuFabricOptions cpu,
                                                            CudaFabricOptions cuda,
                                                            const Clock& clock,
                                                            CommunicatorEvents& events) {
  const NcclLibraryPaths paths{.nccl = cuda.nccl_library, .cuda_runtime = cuda.cuda_runtime};
  auto claim = cuda.claim;
  if (claim == nullptr)
    claim = [](int device) { return ClaimOf(device, ListGpus(), ProcessEnvironment()); };
  return MakeCudaFabric(std::move(cpu), std::move(cuda),
                        {.load = [paths] { return LoadNcclLibrary(paths); },
                         .load_cuda = [paths] { return LoadCudaRuntime(paths); },
                         .claim = claim},
                        clock, events);
}

}  // namespace resilient
