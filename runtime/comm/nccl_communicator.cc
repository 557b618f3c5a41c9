#include "runtime/comm/nccl_communicator.h"

#include <poll.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/base/log.h"
#include "runtime/comm/fabric.h"
#include "runtime/comm/nccl_group.h"
#include "runtime/comm/nccl_launch.h"

namespace resilient {
namespace {

// The body of the thread that makes all calls into NCCL. It polls: neither NCCL nor an event of
// CUDA rings anybody. Owner: the fabric. Thread: the fabric's. It ends when NCCL has let go of all
// groups.
class NcclLoop final : public GroupLoop {
 public:
  // `requests` outlives the loop.
  NcclLoop(const NcclFabricOptions& options, NcclIdExchange& ids, FabricRequests& requests,
           const Clock& clock, CommunicatorEvents& events)
      : context_{.options = options,
                 .ids = ids,
                 .events = events,
                 .clock = clock,
                 .doorbell = requests.doorbell(),
                 .now = clock.Now()},
        requests_(requests) {}

  void Run() override {
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
    FabricRequests::Asked asked = requests_.Take();
    stopping_ = asked.stop;
    stop_by_ = asked.stop_by;
    for (auto& port : asked.created) AddGroup(std::move(port));
    if (!stopping_) return;
    for (const auto& group : groups_) {
      group->Leave(SessionClosed());
      if (stop_by_.ExpiredAt(context_.now)) group->End(SessionClosed());
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

  NcclContext context_;
  FabricRequests& requests_;
  std::vector<std::unique_ptr<NcclGroup>> groups_;
  bool stopping_ = false;
  Deadline stop_by_ = Deadline::Never();
  std::vector<PollEntry> entries_;
};

}  // namespace

std::unique_ptr<CommunicatorFactory> MakeNcclFabric(const NcclFabricOptions& options,
                                                    NcclIdExchange& ids, const Clock& clock,
                                                    CommunicatorEvents& events) {
  auto requests = std::make_unique<FabricRequests>();
  auto loop = std::make_unique<NcclLoop>(options, ids, *requests, clock, events);
  return MakeFabric(
      // Peers reach each other by the unique id; the endpoint is for the reader of a view.
      {.endpoint = StrCat("nccl:", options.device),
       .thread_name = options.name,
       .requests = std::move(requests),
       .loop = std::move(loop),
       .check = [abilities = AbilitiesOf(options.nccl, options.cuda, options.device)](
                    const Operation& op) { return CheckNcclSupports(op, abilities); },
       .observer = nullptr},
      clock);
}

}  // namespace resilient
