#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <resilient/clock.h>
#include <resilient/communicator.h>

#include "runtime/comm/device_clock.h"
#include "runtime/comm/fabric.h"
#include "runtime/comm/nccl_communicator.h"
#include "runtime/comm/nccl_events.h"
#include "runtime/comm/nccl_release.h"

namespace resilient {

// "rank 1 (device 0) of group 'world', generation 3": where a device failed, as texts say it.
std::string WhereOf(const GroupSpec& spec, int device);

// What all groups of one loop share. Owner: the loop. Thread: loop-confined.
struct NcclContext {
  const NcclFabricOptions options;
  CommunicatorFactory& control;
  const std::shared_ptr<ControlWaits> waits;
  const std::shared_ptr<NcclEvents> pool;
  const std::shared_ptr<NcclEvents> timed_pool;  // Of those that measure time.
  const LaunchMark::Joiner& joiner;
  CommunicatorEvents& events;
  const Clock& clock;
  const std::shared_ptr<Doorbell> doorbell;
  Instant now;  // Of this turn.
  DeviceClock device_clock;
  // Communicators of attempts that have failed, until they have ended.
  std::vector<std::shared_ptr<NcclRelease>> discarded;
};

// Operations that are over, whose completions run between turns. Owner: a DeviceGroup. Thread:
// loop-confined.
class FinishedOps {
 public:
  // `kept`, where it is not null, gets the completion when that has run, and `op` is not counted as
  // completed: its owner is to take the generation for one that is not quiet.
  void Add(SubmittedOp op, const Status& status, std::shared_ptr<Completion> kept = nullptr);
  // In their order. What they hold is gone before `port` counts them as completed.
  void Run(GroupPort& port);

 private:
  struct Finished {
    SubmittedOp op;
    Status status;
    std::shared_ptr<Completion> kept;
  };
  std::vector<Finished> finished_;
  std::vector<Finished> telling_;  // Those of finished_ before; kept for its memory.
};

// One communicator of a device, as its loop moves it. Owner: the loop. Thread: loop-confined.
class DeviceGroup {
 public:
  virtual ~DeviceGroup() = default;

  virtual const GroupSpec& spec() const = 0;
  virtual bool done() const = 0;

  // Calls the ranks together. Called once, before the first turn.
  virtual void Start() = 0;
  // One turn: moves everything that can move without waiting.
  virtual void Step() = 0;
  // Between turns, when no state is in the middle of a change.
  virtual void RunCompletions() = 0;
  // When the next turn must be, if nothing rings before.
  virtual Instant NextTime() const = 0;
  virtual void Leave(const Status& status) = 0;
  // For a reason that is this communicator's own, or the same on all its ranks.
  virtual void End(const Status& cause) = 0;

  // What is to be released, once; behind it SetRelease.
  virtual std::optional<NcclRelease::Work> TakeRelease() = 0;
  virtual void SetRelease(std::shared_ptr<NcclRelease> release) = 0;
};

using DeviceGroupMaker =
    std::function<std::unique_ptr<DeviceGroup>(std::shared_ptr<GroupPort> port, NcclContext&)>;

// The body of the thread that makes all calls of one transport on one device. It polls: neither
// NCCL nor an event of CUDA rings anybody. Owner: the fabric. Thread: the fabric's. It ends when
// the device has let go of all groups.
class NcclLoop final : public GroupLoop {
 public:
  // `requests` and what is given by reference outlive the loop.
  NcclLoop(const NcclFabricOptions& options, CommunicatorFactory& control,
           std::shared_ptr<ControlWaits> waits, std::shared_ptr<NcclEvents> pool,
           FabricRequests& requests, const Clock& clock, CommunicatorEvents& events,
           DeviceGroupMaker make);

  void Run() override;

 private:
  // Makes streams wait for events of the device. Owner: the loop. Thread: thread-safe.
  class Joiner final : public LaunchMark::Joiner {
   public:
    Joiner(const CudaApi& cuda, int device) : cuda_(cuda), device_(device) {}
    Status Join(void* event, ExecutionStream stream) const override;

   private:
    const CudaApi cuda_;
    const int device_;
  };

  void TakeRequests();
  void AddGroup(std::shared_ptr<GroupPort> port);
  void ReleaseEnded();
  void Wait();

  const Joiner joiner_;
  NcclContext context_;
  FabricRequests& requests_;
  const DeviceGroupMaker make_;
  std::vector<std::unique_ptr<DeviceGroup>> groups_;
  bool stopping_ = false;
  Deadline end_by_ = Deadline::Never();   // Groups that are still leaving.
  Deadline stop_by_ = Deadline::Never();  // What has not come back by then is left behind.
  std::vector<PollEntry> entries_;
};

// The transport of one device whose groups `make` makes; else as MakeNcclFabric. `check`: what it
// runs of what is valid, on the thread that submits.
std::unique_ptr<CommunicatorFactory> MakeDeviceFabric(const NcclFabricOptions& options,
                                                      CommunicatorFactory& control,
                                                      std::shared_ptr<ControlWaits> waits,
                                                      const Clock& clock,
                                                      CommunicatorEvents& events,
                                                      DeviceGroupMaker make, Admission check);

}  // namespace resilient
