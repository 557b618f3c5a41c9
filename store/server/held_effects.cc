#include "store/server/held_effects.h"

#include <utility>
#include <variant>

namespace resilient::store {
namespace {

constexpr std::size_t kMessageBytes = 256;  // Of a message without its contents, roughly.

std::size_t BytesOf(const Effects::Outgoing& outgoing) {
  std::size_t bytes = kMessageBytes;
  if (const Reply* reply = std::get_if<Reply>(&outgoing.message)) {
    bytes += reply->value.size() + reply->status_json.size();
    for (const KeyEvent& event : reply->events) {
      bytes += sizeof(event) + event.key.size() + (event.value ? event.value->size() : 0);
    }
    for (const std::string& value : reply->values) bytes += value.size() + sizeof(std::string);
  }
  return bytes;
}

}  // namespace

std::size_t BytesOf(const std::vector<Write>& writes) {
  std::size_t bytes = 0;
  for (const Write& write : writes) {
    bytes += sizeof(write) + write.row.size() + (write.value ? write.value->size() : 0);
  }
  return bytes;
}

bool IsEmpty(const Effects& effects) {
  return effects.write.empty() && effects.send.empty() && effects.close.empty() &&
         effects.watch.empty() && effects.unwatch.empty() && effects.log.empty() &&
         !effects.drain && !effects.listens && !effects.last_member_left;
}

void HeldEffects::Push(std::uint64_t ticket, std::size_t write_bytes, Effects effects,
                       std::optional<Instant> begun) {
  std::size_t bytes = sizeof(Step) + write_bytes;
  for (const Effects::Outgoing& outgoing : effects.send) bytes += BytesOf(outgoing);
  bytes_ += bytes;
  steps_.push_back({ticket, bytes, std::move(effects), begun});
}

std::optional<HeldEffects::Step> HeldEffects::Pop(std::uint64_t kept) {
  if (steps_.empty() || steps_.front().ticket > kept) return std::nullopt;
  Step step = std::move(steps_.front());
  bytes_ -= step.bytes;
  steps_.pop_front();
  return step;
}

}  // namespace resilient::store
