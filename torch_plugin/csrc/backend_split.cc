#include <algorithm>
#include <utility>

#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/backend.h"
#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {

Result<c10::intrusive_ptr<ResilientBackend>> ResilientBackend::MakeSplit(
    const std::vector<int>& ranks, const Options& options) {
  RESILIENT_RETURN_IF_ERROR(context_->session().failure());
  RESILIENT_RETURN_IF_ERROR(group_->Usable());
  std::vector<int> global;
  global.reserve(ranks.size());
  for (const int rank : ranks) {
    if (rank < 0 || rank >= getSize()) {
      return Status(StatusCode::kInvalidArgument,
                    c10::str("rank ", rank, " is none of the ", getSize(), " ranks of this group"));
    }
    global.push_back(
        static_cast<int>(options_->global_ranks_in_group[static_cast<std::size_t>(rank)]));
  }
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) return c10::intrusive_ptr<ResilientBackend>();
  const auto* ours = dynamic_cast<const BackendOptions*>(&options);
  if (ours == nullptr && options.backend != "resilient") {
    TORCH_WARN("split of group '", group_->name(), "': options of backend '", options.backend,
               "' are none of this one's, so the new group has those of its parent; "
               "torch_resilient.NcclOptions are");
  }
  auto child = Create(context_, options.group_name, static_cast<int>(own - ranks.begin()),
                      static_cast<int>(ranks.size()), std::move(global), options.timeout,
                      ours == nullptr ? options_->nccl : ours->nccl);
  if (child.ok()) (*child)->options_->group_desc = options.group_desc;
  return child;
}

c10::intrusive_ptr<c10d::Backend> ResilientBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
  HealIfDue();
  RequirePresent();
  {
    // Torch before 2.15 calls once for each device, and keeps one backend for all of them.
    const std::lock_guard lock(mutex_);
    if (last_split_ && store && last_split_->store.lock() == store) {
      if (auto child = last_split_->child.lock()) return child;
    }
  }
  Result<c10::intrusive_ptr<ResilientBackend>> child =
      Status(StatusCode::kInvalidArgument, "it has no options and no ranks");
  if (options && !ranks.empty()) child = MakeSplit(ranks, *options);
  if (!child.ok()) {
    const Status& why = child.status();
    Raise(Status(why.code(),
                 c10::str("split of group '", group_->name(), "': ", why.message(),
                          why.code() == StatusCode::kInvalidArgument
                              ? "; each split has ranks of its parent, and a group_name of its own"
                              : ""),
                 why.detail()));
  }
  if (store && *child) {
    const std::lock_guard lock(mutex_);
    last_split_.emplace(Split{c10::weak_intrusive_ptr<c10d::Store>(store),
                              c10::weak_intrusive_ptr<c10d::Backend>(*child)});
  }
  return *std::move(child);
}

c10::intrusive_ptr<c10d::Backend> ResilientBackend::merge(
    const c10::intrusive_ptr<c10d::Store>& /*store*/,
    const c10::intrusive_ptr<Options>& /*options*/, const int& /*rank*/, const int& /*size*/) {
  Raise(Status(StatusCode::kSetting,
               c10::str("group '", group_->name(), "' cannot be merged with another: its members ",
                        "are those of its world. What is to merge later begins with ",
                        "init_process_group(..., enable_reconfigure=True), and ",
                        "dist._reconfigure(uuid, handles) with the handles of all merges it")));
}

}  // namespace resilient::plugin
