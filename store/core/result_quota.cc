#include "store/core/result_quota.h"

#include <bit>

#include "runtime/base/check.h"

namespace resilient::store {
namespace {

constexpr std::size_t kSharedCopies = 2;  // Shared values are kept as they are and as encoded.

}  // namespace

std::size_t ResultQuota::OwnBytes(const Reply& reply) {
  std::size_t bytes = kOverhead + reply.value.size() + reply.status.message().size();
  for (const std::string& value : reply.values) bytes += sizeof(std::string) + value.size();
  for (const KeyEvent& event : reply.events) {
    bytes += sizeof(KeyEvent) + event.key.size() + (event.value ? event.value->size() : 0);
  }
  return bytes;
}

int ResultQuota::SizeClass(std::size_t bytes) {
  return static_cast<int>(std::bit_width(bytes / kSmallLineBytes));
}

void ResultQuota::Take(const Reply& reply) {
  quota_ += OwnBytes(reply);
  if (reply.shared_values && ++holders_[reply.shared_values.get()] == 1) {
    quota_ += kSharedCopies * SharedBytes(reply);
  }
}

void ResultQuota::GiveBack(const Reply& reply) {
  quota_ -= OwnBytes(reply);
  if (!reply.shared_values) return;
  const auto holders = holders_.find(reply.shared_values.get());
  RESILIENT_CHECK(holders != holders_.end());
  if (--holders->second > 0) return;
  holders_.erase(holders);
  quota_ -= kSharedCopies * SharedBytes(reply);
}

void ResultQuota::Move(LineId line, Standing from, Standing to) {
  if (SizeClass(from.bytes) == SizeClass(to.bytes) && from.idle_since == to.idle_since) return;
  Erase(line, from);
  Insert(line, to);
}

void ResultQuota::Insert(LineId line, const Standing& at) {
  const int size = SizeClass(at.bytes);
  if (size == 0) return;
  if (at.idle_since) {
    idle_.emplace(*at.idle_since, line);
  } else {
    connected_.emplace(size, line);
  }
}

void ResultQuota::Erase(LineId line, const Standing& at) {
  if (at.idle_since) {
    idle_.erase({*at.idle_since, line});
  } else {
    connected_.erase({SizeClass(at.bytes), line});
  }
}

std::optional<LineId> ResultQuota::First() const {
  if (!idle_.empty()) return idle_.begin()->second;
  if (!connected_.empty()) return connected_.rbegin()->second;
  return std::nullopt;
}

}  // namespace resilient::store
