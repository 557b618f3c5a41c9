#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <resilient/communicator.h>

#include "runtime/comm/group_port.h"
#include "runtime/comm/step_observer.h"

namespace resilient {

// CommunicatorFactory::Knock as a request. Thread: value type.
struct KnockRound {
  GroupSpec world;
  std::vector<int> ranks;  // Group ranks of `world`.
  Duration patience{};
};

// What a fabric asks of its thread. Owner: the fabric. Thread: thread-safe.
class FabricRequests {
 public:
  // False once Stop was called.
  bool Create(std::shared_ptr<GroupPort> port);
  void Knock(KnockRound round);
  void Stop(Deadline deadline);

  struct Asked {
    std::vector<std::shared_ptr<GroupPort>> created;  // Since the last call.
    std::optional<KnockRound> knock;                  // The latest, likewise.
    bool stop = false;                     // All groups leave; the thread ends when they have.
    Deadline stop_by = Deadline::Never();  // At the latest then.
  };
  Asked Take();

  const std::shared_ptr<Doorbell>& doorbell() const { return doorbell_; }
  const std::shared_ptr<HoldCell>& held() const { return held_; }

 private:
  const std::shared_ptr<Doorbell> doorbell_ = std::make_shared<Doorbell>();
  const std::shared_ptr<HoldCell> held_ = std::make_shared<HoldCell>();
  // Guarded by mutex_.
  std::mutex mutex_;
  Asked asked_;
};

// Moves all groups of a fabric, on its thread. Owner: the fabric. Thread: the fabric's.
class GroupLoop {
 public:
  virtual ~GroupLoop() = default;
  // Until FabricRequests says to stop.
  virtual void Run() = 0;
};

// What tells one transport from another. Thread: value type.
struct FabricParts {
  std::string endpoint;
  std::string thread_name;
  std::unique_ptr<FabricRequests> requests;
  std::unique_ptr<GroupLoop> loop;  // Reads `requests`.
  Admission admission;
  StepObserver observer;
  bool serves_device = false;  // GroupPort::SetHoldsDevice.
};

// A thread on which the loop moves its groups, and for each group what a caller holds of it: the
// part that all transports share. Close gives what is left a second when nobody has called it.
std::unique_ptr<CommunicatorFactory> MakeFabric(FabricParts parts, const Clock& clock);

// What the destructor gives the groups when Close was not called.
inline constexpr Duration kCloseByDefault = Millis(1000);

// What operations complete with: of a session that was closed, and of a group that this rank has
// left.
Status SessionClosed();
Status GroupLeft(const std::string& group);

}  // namespace resilient
