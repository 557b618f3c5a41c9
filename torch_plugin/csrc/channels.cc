#include "torch_plugin/csrc/channels.h"

#include <numeric>
#include <utility>

#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/context.h"

namespace resilient::plugin {

Channels::Channels(const std::shared_ptr<SessionContext>& context,
                   const std::shared_ptr<Group>& group, std::vector<int> ranks, NcclOptions nccl,
                   std::string made_at)
    : context_(context),
      main_{.group = group,
            .callbacks = std::make_shared<CallbackQueue>(context, group->name(), 0)},
      ranks_(std::move(ranks)),
      nccl_(std::move(nccl)),
      made_at_(std::move(made_at)) {}

Result<Channel> Channels::OfCollective() {
  const CallbackQueue::Running* const running = CallbackQueue::Running::Innermost();
  if (running == nullptr) return main_;
  const CallbackQueue& caller = running->queue();
  if (caller.depth() >= kDepthMax) {
    return Status(StatusCode::kFailedPrecondition,
                  c10::str("group '", main_.group->name(), "': a callback that is nested in ",
                           kDepthMax, " others has started a collective, and none can be so deep: ",
                           "start it on the program's own thread, after wait()"));
  }
  RESILIENT_RETURN_IF_ERROR(main_.group->Usable());
  const std::uint64_t epoch = main_.group->session().epoch();
  if (running->epoch() != epoch) {
    return Status(StatusCode::kFailedPrecondition,
                  c10::str("group '", main_.group->name(), "': the callback was added in ",
                           "generation ", running->epoch(), ", and the world has been rebuilt ",
                           "since: a collective that it starts now would meet those of generation ",
                           epoch, "; let it end when its future's value() raises"));
  }
  const std::lock_guard lock(mutex_);
  if (epoch != epoch_) CloseMadeLocked();
  epoch_ = epoch;
  if (const auto made = made_.find(caller.name()); made != made_.end()) return made->second;
  Result<Channel> channel = Make(caller, epoch);
  if (channel.ok()) made_.emplace(caller.name(), *channel);
  return channel;
}

// The name is the same on all ranks, and that of no group of another generation: one that was
// closed in a generation cannot be made again there.
Result<Channel> Channels::Make(const CallbackQueue& caller, std::uint64_t epoch) {
  const auto context = context_.lock();
  if (!context) return Status(StatusCode::kFailedPrecondition, "the session is closed");
  const std::string& own = main_.group->name();
  const std::string of = caller.name() == own ? "" : c10::str(" of ", caller.name());
  std::vector<int> ranks = ranks_;
  if (ranks.empty()) {
    ranks.resize(static_cast<std::size_t>(main_.group->size()));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  const std::string name = c10::str(own, "/callbacks", of, "#", epoch);
  auto group = context->session().CreateGroup(name, std::move(ranks), nccl_, made_at_);
  if (!group.ok()) return group.status();
  return Channel{.group = *std::move(group),
                 .callbacks = std::make_shared<CallbackQueue>(context, name, caller.depth() + 1)};
}

void Channels::CloseMadeLocked() {
  for (const auto& [name, channel] : made_) channel.group->Close();
  made_.clear();
}

void Channels::Close() {
  {
    const std::lock_guard lock(mutex_);
    CloseMadeLocked();
  }
  main_.group->Close();
}

}  // namespace resilient::plugin
