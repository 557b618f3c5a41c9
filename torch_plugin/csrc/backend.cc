#include "torch_plugin/csrc/backend.h"

#include <numeric>
#include <utility>

#include <c10/util/StringUtil.h>
#include <resilient/settings.h>

#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/mem_allocator.h"

namespace resilient::plugin {

Result<c10::intrusive_ptr<ResilientBackend>> ResilientBackend::Create(
    std::shared_ptr<SessionContext> context, const std::string& name, int rank, int size,
    std::vector<int> ranks, std::chrono::milliseconds timeout, NcclOptions nccl, GroupParts parts) {
  const bool world = ranks.empty();
  if (world) {
    nccl = context->options().session.nccl;
    ranks.resize(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  if (rank < 0 || rank >= size || ranks.size() != static_cast<std::size_t>(size)) {
    return Status(StatusCode::kInvalidArgument,
                  c10::str("group '", name, "': rank ", rank, " of ", size, " with ", ranks.size(),
                           " members is not possible"));
  }
  auto options = c10::make_intrusive<BackendOptions>(timeout, nccl);
  options->group_name = name;
  options->global_ranks_in_group.assign(ranks.begin(), ranks.end());
  std::string made_at = context->host()->CallSite();
  auto group = context->session().CreateGroup(world ? kWorldGroup : name, ranks, nccl, made_at);
  if (!group.ok()) return group.status();
  if ((*group)->rank() != rank || (*group)->size() != size) {
    (*group)->Close();
    return Status(StatusCode::kInvalidArgument,
                  c10::str("group '", name, "': this process is rank ", (*group)->rank(), " of ",
                           (*group)->size(), ", not rank ", rank, " of ", size));
  }
  if (world) ranks.clear();  // They change when the world is resized.
  auto channels = std::make_shared<Channels>(context, *group, std::move(ranks), std::move(nccl),
                                             std::move(made_at));
  return c10::make_intrusive<ResilientBackend>(std::move(context), std::move(channels),
                                               std::move(options), std::move(parts));
}

ResilientBackend::ResilientBackend(std::shared_ptr<SessionContext> context,
                                   std::shared_ptr<Channels> channels,
                                   c10::intrusive_ptr<BackendOptions> options, GroupParts parts)
    : Backend(channels->main().group->rank(), channels->main().group->size()),
      context_(std::move(context)),
      channels_(std::move(channels)),
      group_(channels_->main().group),
      host_(context_->host()),
      options_(std::move(options)),
      parts_(std::move(parts)) {}

ResilientBackend::~ResilientBackend() { release_resources(); }

void ResilientBackend::release_resources() {
  std::optional<Batch> forgotten;
  {
    const std::lock_guard lock(mutex_);
    forgotten = TakeBatchLocked();
  }
  if (forgotten) Forget(*forgotten);
  if (!gave_way_.load()) channels_->Close();
}

std::shared_ptr<c10::Allocator> ResilientBackend::getMemAllocator() {
  return ValueOrThrow(*host_, NcclAllocator(context_->options().cuda));
}

void ResilientBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
}

void ResilientBackend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  parts_.extension->Add(timeout);
}

bool ResilientBackend::IsPresent() const {
  return getRank() == group_->rank() && getSize() == group_->size();
}

void ResilientBackend::FollowGroup() {
  const auto take = []([[maybe_unused]] auto& number, [[maybe_unused]] int present) {
    if constexpr (kCanFollow) number = present;
  };
  take(rank_, group_->rank());
  take(size_, group_->size());
  ListRanks();
}

void ResilientBackend::ListRanks() {
  options_->global_ranks_in_group.resize(static_cast<std::size_t>(getSize()));
  std::iota(options_->global_ranks_in_group.begin(), options_->global_ranks_in_group.end(), 0);
  SetLogTag(c10::str("rank ", getRank()));
}

ResilientBackend::WorldPtr ResilientBackend::GiveWay(const WorldMaker& make) {
  const std::lock_guard lock(mutex_);
  if (next_world_) return next_world_;
  const auto renewed = c10::make_intrusive<ResilientBackend>(context_, channels_, options_, parts_);
  renewed->log_ = log_;
  renewed->last_sequence_ = last_sequence_.load();
  renewed->last_on_device_ = last_on_device_.load();
  renewed->ListRanks();
  next_world_ = make(renewed);
  gave_way_ = true;
  return next_world_;
}

ResilientBackend::WorldPtr ResilientBackend::given_way_to() const {
  const std::lock_guard lock(mutex_);
  return next_world_;
}

void ResilientBackend::RequirePresent() const {
  if (!gave_way_.load(std::memory_order_relaxed)) return;
  host_->Throw(Status(
      StatusCode::kFailedPrecondition,
      c10::str("this process group was made before the world was resized: it was rank ", getRank(),
               " of ", getSize(), ", this process is rank ", group_->rank(), " of ", group_->size(),
               " now; use the world's present group, torch.distributed.group.WORLD (in C++: "
               "resilient::present_world), which is the default where no group is named")));
}

Plan ResilientBackend::Begin(c10d::OpType type, const char* title) const {
  RequirePresent();
  return Plan(*host_, type, title);
}

c10d::ErrorType ResilientBackend::getError() {
  const StatusCode code = context_->session().failure().code();
  if (code == StatusCode::kOk) {
    // The fence that follows an abort of our own may be on its way.
    const bool aborted = aborted_in_ == context_->session().acknowledged().generation;
    return aborted ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
  }
  if (code == StatusCode::kCommStalled) return c10d::ErrorType::TIMEOUT;
  const bool by_a_peer = code == StatusCode::kRankLost || code == StatusCode::kLeft ||
                         code == StatusCode::kMismatch || code == StatusCode::kGrowth;
  return by_a_peer ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR;
}

void ResilientBackend::abort() {
  Abort(c10::str("abort() was called on group '", group_->name(), "' by rank ",
                 context_->session().membership().rank));
}

void ResilientBackend::Abort(const std::string& why) {
  RequirePresent();
  aborted_in_ = context_->session().acknowledged().generation;
  group_->Abort(why);
}

#ifdef C10D_BACKEND_HAS_HOOKS
void ResilientBackend::registerAbortHook(std::int64_t id, c10d::AbortHook hook) {
  Check(*host_, context_->RunOnFailure(parts_.abort));
  parts_.abort->Add(id, std::move(hook));
}

void ResilientBackend::unregisterAbortHook(std::int64_t id) {
  context_->TakeHooksOfKnownFailures();
  parts_.abort->Remove(id);
}
#endif

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
void ResilientBackend::registerCompletionHook(std::int64_t id, c10d::CompletionHook hook) {
  parts_.completion->Add(id, OnCompletion(std::move(hook)));
}

void ResilientBackend::unregisterCompletionHook(std::int64_t id) { parts_.completion->Remove(id); }
#endif

void ResilientBackend::shutdown() {
  context_->LetHooksBegin();  // Torch lets go of the group's next.
  release_resources();
  context_->ledger()->Drain();
}

const at::Tensor& ResilientBackend::Only(Plan& plan, const Tensors& tensors) {
  if (tensors.size() != 1) plan.Refuse(c10::str("it takes one tensor, not ", tensors.size()));
  return tensors.front();
}

}  // namespace resilient::plugin
