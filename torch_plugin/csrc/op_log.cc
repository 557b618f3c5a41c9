#include "torch_plugin/csrc/op_log.h"

#include <numeric>

namespace resilient::plugin {
namespace {

// Elements that this rank gives or takes, whichever the operation has in one piece.
std::size_t CountOf(const Operation& operation) {
  if (operation.kind != OpKind::kAllToAll) return operation.count;
  return std::accumulate(operation.inputs.begin(), operation.inputs.end(), std::size_t{0},
                         [](std::size_t sum, const Part& part) { return sum + part.count; });
}

}  // namespace

std::string_view LoggedStateName(LoggedState state) {
  switch (state) {
    case LoggedState::kRunning:
      return "running";
    case LoggedState::kCompleted:
      return "completed";
    case LoggedState::kFailed:
      return "failed";
  }
  return "unknown";
}

std::uint64_t OpLog::Start(const char* name, const Operation& operation) {
  const double now = clock_.WallSeconds();
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = ++last_id_;
  if (ring_.size() < kLoggedOperations) ring_.emplace_back();
  LoggedOperation& entry = ring_[(id - 1) % kLoggedOperations];
  entry.id = id;
  entry.seq = 0;
  entry.name = name;
  entry.dtype = operation.dtype;
  entry.count = CountOf(operation);
  entry.state = LoggedState::kRunning;
  entry.call_site = operation.call_site;  // Into the memory of the one before: no allocation.
  entry.started_unix_s = now;
  entry.ended_unix_s = 0;
  entry.failure.clear();
  return id;
}

void OpLog::SetSequence(std::uint64_t id, std::uint64_t seq) {
  const std::lock_guard lock(mutex_);
  if (LoggedOperation* entry = Find(id)) entry->seq = seq;
}

void OpLog::End(std::uint64_t id, const Status& status) {
  const double now = clock_.WallSeconds();
  const std::lock_guard lock(mutex_);
  LoggedOperation* entry = Find(id);
  if (entry == nullptr) return;
  entry->state = status.ok() ? LoggedState::kCompleted : LoggedState::kFailed;
  entry->ended_unix_s = now;
  if (!status.ok()) entry->failure = status.ToString();
}

LoggedOperation* OpLog::Find(std::uint64_t id) {
  LoggedOperation& entry = ring_[(id - 1) % kLoggedOperations];
  return entry.id == id ? &entry : nullptr;
}

std::vector<LoggedOperation> OpLog::Snapshot() const {
  const std::lock_guard lock(mutex_);
  std::vector<LoggedOperation> entries;
  entries.reserve(ring_.size());
  const std::uint64_t first = last_id_ - ring_.size() + 1;
  for (std::uint64_t id = first; id <= last_id_; ++id) {
    entries.push_back(ring_[(id - 1) % kLoggedOperations]);
  }
  return entries;
}

}  // namespace resilient::plugin
