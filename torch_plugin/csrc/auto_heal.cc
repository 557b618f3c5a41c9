#include "torch_plugin/csrc/auto_heal.h"

#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {

void AutoHeal::NoteRaised(const Status& status) {
  // A timeout of one call fences nobody.
  if (!on_ || status.code() == StatusCode::kTimeout || !RetriedByElastic(status.code())) return;
  const std::uint64_t told = status.detail().generation;
  raised_at_.store(told != kNothing ? told : session_.membership().generation,
                   std::memory_order_relaxed);
}

Status AutoHeal::Rebuild() {
  const Membership now = session_.membership();
  const bool rebuilt = now.state == SessionState::kRunning &&
                       now.generation > raised_at_.load(std::memory_order_relaxed);
  if (!rebuilt) {
    const Instant began = clock_.Now();
    const Status cause = session_.AwaitFailure(Deadline::After(began, kFenceGrace));
    if (!cause.ok() && !RetriedByElastic(cause.code())) return Status::Ok();
    RESILIENT_RETURN_IF_ERROR(session_.Rebuild({.deadline = Deadline::After(began, limit_)}));
  }
  raised_at_.store(kNothing, std::memory_order_relaxed);
  return Status::Ok();
}

}  // namespace resilient::plugin
