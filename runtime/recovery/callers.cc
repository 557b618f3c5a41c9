#include "runtime/recovery/callers.h"

#include <unistd.h>

#include <utility>

namespace resilient::recovery {
namespace {

thread_local bool exempt = false;

}  // namespace

void Callers::ExemptThisThread() { exempt = true; }

void Callers::Block(BlockedIn in) {
  if (exempt) return;
  const std::lock_guard lock(mutex_);
  blocked_[gettid()].push_back(std::move(in));
}

void Callers::Unblock() {
  if (exempt) return;
  const std::lock_guard lock(mutex_);
  const auto found = blocked_.find(gettid());
  if (found == blocked_.end()) return;
  found->second.pop_back();
  if (found->second.empty()) blocked_.erase(found);
}

Callers::Snapshot Callers::Look() const {
  Snapshot snapshot;
  const std::lock_guard lock(mutex_);
  for (const auto& [thread, in] : blocked_) {
    snapshot.threads.push_back(thread);
    snapshot.blocked.push_back(in.back());
  }
  return snapshot;
}

}  // namespace resilient::recovery
