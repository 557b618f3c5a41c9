#include "torch_plugin/csrc/reconfigurable.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

#include <algorithm>
#include <array>
#include <charconv>
#include <tuple>
#include <utility>
#include <variant>

#include <c10/util/StringUtil.h>
#include <resilient/settings.h>

#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/work.h"

namespace resilient::plugin {
namespace {

constexpr char kHandlePrefix[] = "resilient";
constexpr std::size_t kHandleShown = 200;  // Characters of one that is none, in the error.
constexpr std::size_t kPeersShown = 16;    // In an error that lists them.

std::string HandleOf(SessionContext& anchor, int rank) {
  // The anchor is a world of one: this process.
  const Membership membership = anchor.session().membership();
  const Member& self = membership.members.front();
  return c10::str(kHandlePrefix, ":", rank, ":", self.incarnation, ":", self.pid, ":", self.host);
}

c10::intrusive_ptr<c10d::Backend::Options> OptionsOf(const std::string& name, int size,
                                                     std::chrono::milliseconds timeout) {
  auto options = c10::make_intrusive<c10d::Backend::Options>("resilient", timeout);
  options->group_name = name;
  options->enable_reconfigure = true;
  for (int rank = 0; rank < size; ++rank) {
    options->global_ranks_in_group.push_back(static_cast<std::uint64_t>(rank));
  }
  return options;
}

Status MembersChosen() {
  return Status(
      StatusCode::kSetting,
      "a group with enable_reconfigure=True is neither split nor merged: its members "
      "change by dist._reconfigure(uuid, handles) only, with fewer of the handles or with "
      "those of others too");
}

Status Refusal(std::int64_t uuid, const std::string& why) {
  return Status(StatusCode::kSetting, c10::str("reconfigure(uuid=", uuid, "): ", why));
}

Status AlreadyUsed(std::int64_t uuid, const std::string& by) {
  return Refusal(uuid, c10::str("this uuid was already used", by,
                                "; every reconfigure takes a fresh one, the same on all members"));
}

}  // namespace

ReconfigurableBackend::ReconfigurableBackend(std::shared_ptr<SessionContext> anchor,
                                             const std::string& name, int rank, int size,
                                             std::chrono::milliseconds timeout)
    : Backend(rank, size),
      anchor_(std::move(anchor)),
      host_(anchor_->host()),
      options_(OptionsOf(name, size, timeout)),
      handle_(HandleOf(*anchor_, rank)) {}

ReconfigurableBackend::~ReconfigurableBackend() { ReconfigurableBackend::shutdown(); }

c10d::ReconfigureHandle ReconfigurableBackend::get_reconfigure_handle() const { return handle_; }

Result<ReconfigurableBackend::Peer> ReconfigurableBackend::ParseHandle(const std::string& handle) {
  std::array<std::string, 4> head;  // Prefix, rank, incarnation, pid; a host may have colons.
  std::size_t begin = 0;
  bool complete = true;
  for (std::string& part : head) {
    const std::size_t end = handle.find(':', begin);
    complete = complete && end != std::string::npos;
    if (!complete) break;
    part = handle.substr(begin, end - begin);
    begin = end + 1;
  }
  Peer peer;
  if (complete) {
    const std::string& number = head[1];
    const auto parsed =
        std::from_chars(number.data(), number.data() + number.size(), peer.init_rank);
    complete = head[0] == kHandlePrefix && parsed.ec == std::errc() && !head[2].empty();
  }
  if (!complete) {
    return Status(StatusCode::kSetting,
                  c10::str("'", handle.substr(0, kHandleShown),
                           "' is no handle of this backend: each member passes on what its "
                           "dist._get_reconfigure_handle() returns"));
  }
  peer.incarnation = head[2];
  peer.pid = head[3];
  peer.host = handle.substr(begin);
  return peer;
}

std::string ReconfigurableBackend::Describe(const std::vector<Peer>& peers) {
  std::string text;
  for (std::size_t i = 0; i < std::min(peers.size(), kPeersShown); ++i) {
    text += c10::str(i == 0 ? "" : ", ", "rank ", i, " is host ", peers[i].host, ", pid ",
                     peers[i].pid);
  }
  return peers.size() > kPeersShown ? text + ", ..." : text;
}

Result<std::vector<ReconfigurableBackend::Peer>> ReconfigurableBackend::PeersOf(
    const c10d::ReconfigureOptions& options) const {
  const auto* ordered = std::get_if<std::vector<c10d::ReconfigureHandle>>(&options.handles);
  std::vector<c10d::ReconfigureHandle> handles;
  if (ordered != nullptr) {
    handles = *ordered;
  } else {
    const auto& any_order = std::get<std::unordered_set<c10d::ReconfigureHandle>>(options.handles);
    handles.assign(any_order.begin(), any_order.end());
  }
  std::vector<Peer> peers;
  std::unordered_set<std::string> seen;
  for (const c10d::ReconfigureHandle& handle : handles) {
    auto peer = ParseHandle(handle);
    if (!peer.ok()) return Refusal(options.uuid, peer.status().message());
    if (!seen.insert(peer->incarnation).second) {
      return Refusal(options.uuid, c10::str("host ", peer->host, ", pid ", peer->pid,
                                            " is among the handles twice"));
    }
    peers.push_back(std::move(peer).value());
  }
  if (ordered == nullptr) {
    std::sort(peers.begin(), peers.end(), [](const Peer& left, const Peer& right) {
      return std::tie(left.init_rank, left.incarnation) <
             std::tie(right.init_rank, right.incarnation);
    });
  }
  return peers;
}

Result<int> ReconfigurableBackend::OwnRank(const std::vector<Peer>& peers) const {
  const auto self = ParseHandle(handle_);
  if (!self.ok()) return self.status();
  const auto found = std::find_if(peers.begin(), peers.end(), [&](const Peer& peer) {
    return peer.incarnation == self->incarnation;
  });
  if (found != peers.end()) return static_cast<int>(found - peers.begin());
  return Status(StatusCode::kSetting,
                c10::str("the handle of this process, '", handle_, "', is not among the ",
                         peers.size(), " handles; a process that is to be left out makes no call"));
}

Result<std::optional<ReconfigurableBackend::Members>> ReconfigurableBackend::Begin(
    std::int64_t uuid) {
  const std::lock_guard lock(mutex_);
  if (closed_) {
    return Status(StatusCode::kFailedPrecondition, "reconfigure: this group was destroyed");
  }
  if (reconfiguring_) {
    return Status(StatusCode::kFailedPrecondition,
                  "reconfigure: another thread is reconfiguring this group");
  }
  if (!used_.insert(uuid).second) return AlreadyUsed(uuid, " by this process");
  reconfiguring_ = true;
  return std::exchange(members_, std::nullopt);
}

Status ReconfigurableBackend::CheckMembers(std::int64_t uuid, const std::vector<Peer>& peers,
                                           const Membership& membership) const {
  // Each life of its job begins with round 1: there was a set of members that is not gone yet.
  if (membership.round != 1) return AlreadyUsed(uuid, " by members that are still there");
  for (std::size_t i = 0; i < std::min(peers.size(), membership.members.size()); ++i) {
    const Member& member = membership.members[i];
    if (member.incarnation == peers[i].incarnation) continue;
    return AlreadyUsed(
        uuid, c10::str(" by others: rank ", i, " is host ", member.host, ", pid ", member.pid,
                       " there, and host ", peers[i].host, ", pid ", peers[i].pid, " here"));
  }
  return Status::Ok();
}

Result<ReconfigurableBackend::Members> ReconfigurableBackend::Join(
    std::int64_t uuid, const std::vector<Peer>& peers, int rank,
    std::chrono::milliseconds timeout) {
  ContextOptions pattern = anchor_->options();
  pattern.connect.job = c10::str(pattern.reconfigure_scope, "/", uuid);
  pattern.session.rank = rank;
  pattern.session.world_size = static_cast<int>(peers.size());
  pattern.session.init_timeout = Saturated(timeout);
  pattern.time.world_timeout = options_->timeout;
  auto context = SessionContext::Open(std::move(pattern), host_);
  if (!context.ok()) return context.status();
  bool closed = false;
  {
    const std::lock_guard lock(mutex_);
    closed = closed_;
    if (!closed) joining_ = *context;
  }
  Status joined = closed ? Status(StatusCode::kFailedPrecondition, "this group was destroyed")
                         : (*context)->Init();
  if (joined.ok()) joined = CheckMembers(uuid, peers, (*context)->session().membership());
  if (joined.ok()) {
    auto backend =
        ResilientBackend::Create(*context, options_->group_name, rank,
                                 static_cast<int>(peers.size()), {}, options_->timeout, {}, parts_);
    joined = backend.ok() ? (*context)->RunOnFailure(parts_.abort) : backend.status();
    if (joined.ok()) return Members{*std::move(context), *std::move(backend)};
  }
  (*context)->Close();
  if (joined.code() == StatusCode::kDuplicateRank || joined.code() == StatusCode::kWorldSize) {
    return AlreadyUsed(uuid, c10::str(" by others (", joined.message(), ")"));
  }
  if (joined.code() != StatusCode::kJoinTimeout) return joined;
  return Status(joined.code(),
                c10::str("reconfigure(uuid=", uuid, ") timed out after ", timeout.count(),
                         " ms: ", joined.message(), "; ", Describe(peers),
                         ". Reconfigure those that live, with a fresh uuid"),
                joined.detail());
}

void ReconfigurableBackend::End(Members& members) {
  members.backend->shutdown();
  members.context->Close();
}

Status ReconfigurableBackend::Reconfigure(const c10d::ReconfigureOptions& options) {
  const auto peers = PeersOf(options);
  if (!peers.ok()) return peers.status();
  const auto rank = OwnRank(*peers);
  if (!rank.ok()) return Refusal(options.uuid, rank.status().message());
  const std::chrono::milliseconds timeout = options.timeout.value_or(options_->timeout);
  if (timeout <= std::chrono::milliseconds::zero()) {
    return Refusal(options.uuid, c10::str("timeout of ", timeout.count(), " ms: it must be longer ",
                                          "than zero"));
  }
  auto before = Begin(options.uuid);
  if (!before.ok()) return before.status();
  // First: who still waits for this process there is told that it has left.
  if (before->has_value()) End(**before);
  auto joined = Join(options.uuid, *peers, *rank, timeout);
  std::optional<Members> useless;
  {
    const std::lock_guard lock(mutex_);
    reconfiguring_ = false;
    joining_ = nullptr;
    if (!joined.ok()) return joined.status();
    if (closed_) {
      useless = std::move(joined).value();
    } else {
      members_ = std::move(joined).value();
      rank_ = *rank;
      size_ = static_cast<int>(peers->size());
    }
  }
  if (!useless) {
    SetLogTag(c10::str("rank ", *rank));
    return Status::Ok();
  }
  End(*useless);
  return Status(StatusCode::kFailedPrecondition, "reconfigure: this group was destroyed");
}

c10::intrusive_ptr<c10d::Work> ReconfigurableBackend::reconfigure(
    const c10d::ReconfigureOptions& options) {
  Status status;
  host_->WithoutLock([&] { status = Reconfigure(options); });
  Check(*host_, status);
  const std::shared_ptr<SessionContext> joined = context();
  const auto progress = std::make_shared<Progress>(*joined, 1, parts_.completion);
  WorkSpec spec;
  spec.title = nullptr;  // Nothing for the profiler.
  spec.group = options_->group_name;
  auto work = c10::make_intrusive<WorkImpl>(joined, getRank(), std::move(spec), progress);
  progress->EnlistRunning(work);
  progress->Complete(Status::Ok());
  return work;
}

std::shared_ptr<SessionContext> ReconfigurableBackend::context() const {
  const std::lock_guard lock(mutex_);
  return members_ ? members_->context : anchor_;
}

c10::intrusive_ptr<ResilientBackend> ReconfigurableBackend::Current() const {
  {
    const std::lock_guard lock(mutex_);
    if (members_) return members_->backend;
  }
  host_->Throw(
      Status(StatusCode::kFailedPrecondition,
             c10::str("group '", options_->group_name, "' has no members: it was made with ",
                      "enable_reconfigure=True, and no reconfigure has succeeded since, or it was ",
                      "destroyed. Exchange the handles of dist._get_reconfigure_handle() and call ",
                      "dist._reconfigure(uuid, handles), with a fresh uuid, on every member")));
}

void ReconfigurableBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  const std::lock_guard lock(mutex_);
  if (members_) members_->backend->setTimeout(timeout);
}

void ReconfigurableBackend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  parts_.extension->Add(timeout);
}

std::uint64_t ReconfigurableBackend::getSequenceNumberForGroup() {
  const std::lock_guard lock(mutex_);
  return members_ ? members_->backend->getSequenceNumberForGroup() : 0;
}

c10d::ErrorType ReconfigurableBackend::getError() {
  std::optional<Members> members;
  {
    const std::lock_guard lock(mutex_);
    members = members_;
  }
  return members ? members->backend->getError() : c10d::ErrorType::SUCCESS;
}

void ReconfigurableBackend::abort() {
  std::shared_ptr<SessionContext> joining;
  std::optional<Members> members;
  {
    const std::lock_guard lock(mutex_);
    joining = joining_;
    members = members_;
  }
  if (joining) joining->Close();
  if (members) members->backend->abort();
}

void ReconfigurableBackend::shutdown() {
  std::shared_ptr<SessionContext> joining;
  std::optional<Members> members;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    joining = joining_;
    members = std::exchange(members_, std::nullopt);
  }
  if (joining) joining->Close();
  if (members) End(*members);
}

#ifdef C10D_BACKEND_HAS_HOOKS
void ReconfigurableBackend::registerAbortHook(std::int64_t id, c10d::AbortHook hook) {
  parts_.abort->Add(id, std::move(hook));
}

void ReconfigurableBackend::unregisterAbortHook(std::int64_t id) {
  context()->TakeHooksOfKnownFailures();
  parts_.abort->Remove(id);
}
#endif

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
void ReconfigurableBackend::registerCompletionHook(std::int64_t id, c10d::CompletionHook hook) {
  parts_.completion->Add(id, OnCompletion(std::move(hook)));
}

void ReconfigurableBackend::unregisterCompletionHook(std::int64_t id) {
  parts_.completion->Remove(id);
}
#endif

c10::intrusive_ptr<c10d::Backend> ReconfigurableBackend::split(
    const c10::intrusive_ptr<c10d::Store>& /*store*/, const std::vector<int>& /*ranks*/,
    const c10::intrusive_ptr<Options>& /*options*/) {
  host_->Throw(MembersChosen());
}

c10::intrusive_ptr<c10d::Backend> ReconfigurableBackend::merge(
    const c10::intrusive_ptr<c10d::Store>& /*store*/,
    const c10::intrusive_ptr<Options>& /*options*/, const int& /*rank*/, const int& /*size*/) {
  host_->Throw(MembersChosen());
}

void ReconfigurableBackend::startCoalescing() { Current()->startCoalescing(); }

ReconfigurableBackend::WorkPtr ReconfigurableBackend::endCoalescing() {
  return Current()->endCoalescing();
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& options) {
  return Current()->broadcast(tensors, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  return Current()->allreduce(tensors, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  return Current()->allreduce_sparse(tensors, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return Current()->allreduce_coalesced(tensors, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::reduce(Tensors& tensors,
                                                             const c10d::ReduceOptions& options) {
  return Current()->reduce(tensors, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return Current()->allgather(outputs, inputs, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return Current()->_allgather_base(output, input, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return Current()->allgather_coalesced(outputs, inputs, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return Current()->allgather_into_tensor_coalesced(outputs, inputs, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::gather(std::vector<Tensors>& outputs,
                                                             Tensors& inputs,
                                                             const c10d::GatherOptions& options) {
  return Current()->gather(outputs, inputs, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::gather_into_tensor(
    at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options) {
  return Current()->gather_into_tensor(output, input, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::scatter(Tensors& outputs,
                                                              std::vector<Tensors>& inputs,
                                                              const c10d::ScatterOptions& options) {
  return Current()->scatter(outputs, inputs, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  return Current()->reduce_scatter(outputs, inputs, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return Current()->_reduce_scatter_base(output, input, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return Current()->reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return Current()->alltoall(outputs, inputs, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
    std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return Current()->alltoall_base(output, input, output_splits, input_splits, options);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::send(Tensors& tensors, int destination,
                                                           int tag) {
  return Current()->send(tensors, destination, tag);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::recv(Tensors& tensors, int source, int tag) {
  return Current()->recv(tensors, source, tag);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::recvAnysource(Tensors& tensors, int tag) {
  return Current()->recvAnysource(tensors, tag);
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::barrier(const c10d::BarrierOptions& options) {
  return Current()->barrier(options);
}

void ReconfigurableBackend::monitoredBarrier(const c10d::BarrierOptions& options,
                                             bool wait_all_ranks) {
  Current()->monitoredBarrier(options, wait_all_ranks);
}

}  // namespace resilient::plugin

#endif
