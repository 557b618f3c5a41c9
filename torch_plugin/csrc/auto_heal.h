#pragma once

#include <atomic>
#include <cstdint>

#include <resilient/clock.h>
#include <resilient/session.h>
#include <resilient/status.h>

namespace resilient::plugin {

// RESILIENT_HEAL=auto: a failure that was raised to the program is acknowledged by the program's
// next operation, which then runs in the next generation. What is a bug of the program
// (RetriedByElastic) stays to be acknowledged by rebuild().
//
// Owner: SessionContext. Thread: thread-safe.
class AutoHeal {
 public:
  // `limit` bounds one rebuild (Ladder::rebuild). `session` and `clock` outlive this.
  AutoHeal(bool on, Duration limit, Session& session, const Clock& clock)
      : on_(on), limit_(limit), session_(session), clock_(clock) {}

  // `status` is about to be raised to the program. Not for futures: who reads those launches
  // operations before the program has seen anything.
  void NoteRaised(const Status& status);

  // Something was raised, so that Rebuild is due.
  bool due() const { return raised_at_.load(std::memory_order_relaxed) != kNothing; }

  // Acknowledges what was raised, blocks until the next generation runs, polls the session's
  // interrupt. OK also when nothing is to be acknowledged, and when it is not ours to acknowledge.
  Status Rebuild();

 private:
  static constexpr std::uint64_t kNothing = 0;

  const bool on_;
  const Duration limit_;
  Session& session_;
  const Clock& clock_;
  // The generation that the latest failure raised belongs to.
  std::atomic<std::uint64_t> raised_at_{kNothing};
};

}  // namespace resilient::plugin
