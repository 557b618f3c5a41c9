#include "store/server/persister.h"

#include <iterator>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "runtime/base/check.h"

namespace resilient::store {
namespace {

// Of several writes of a row in one transaction only the last one counts.
std::vector<Write> LastOfEachRow(std::vector<Write> writes) {
  if (writes.size() < 2) return writes;
  std::vector<bool> superseded(writes.size());
  {
    std::unordered_set<std::string_view> seen;
    seen.reserve(writes.size());
    for (std::size_t i = writes.size(); i-- > 0;) {
      superseded[i] = !seen.insert(writes[i].row).second;
    }
  }
  std::vector<Write> last;
  last.reserve(writes.size());
  for (std::size_t i = 0; i < writes.size(); ++i) {
    if (!superseded[i]) last.push_back(std::move(writes[i]));
  }
  return last;
}

}  // namespace

Persister::Persister(UvLoop& loop, std::unique_ptr<Engine> engine, PersisterEvents events,
                     CrashPoints* crash_points, CommitMeter meter)
    : events_(std::move(events)),
      crash_points_(crash_points),
      meter_(meter),
      kept_signal_(loop, [this] { events_.on_kept(kept_.load()); }),
      engine_(std::move(engine)),
      thread_("res-writer", [this] { WriteLoop(); }) {}

std::uint64_t Persister::Add(std::vector<Write> writes) {
  RESILIENT_CHECK(!writes.empty());
  if (added_.empty()) {
    added_ = std::move(writes);
  } else {
    std::move(writes.begin(), writes.end(), std::back_inserter(added_));
  }
  return ++last_ticket_;
}

void Persister::Flush() {
  if (added_.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    if (queue_.empty()) {
      queue_.swap(added_);
    } else {
      std::move(added_.begin(), added_.end(), std::back_inserter(queue_));
    }
    queue_ticket_ = last_ticket_;
  }
  added_.clear();
  wake_.notify_one();
}

void Persister::Stop() {
  if (!thread_.Joinable()) return;
  Flush();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.Join();
  kept_signal_.Close();
}

void Persister::WriteLoop() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::vector<Write> writes = std::exchange(queue_, {});
    const std::uint64_t ticket = queue_ticket_;
    lock.unlock();
    if (!WriteOut(std::move(writes), ticket)) return;
    lock.lock();
  }
}

bool Persister::WriteOut(std::vector<Write> writes, std::uint64_t ticket) {
  const Instant begun = meter_.clock != nullptr ? meter_.clock->Now() : Instant();
  Status outcome = engine_->Commit(LastOfEachRow(std::move(writes)));
  if (outcome.ok()) {
    if (meter_.clock != nullptr) {
      const std::chrono::duration<double> took = meter_.clock->Now() - begun;
      meter_.metrics->commit_seconds.Observe(took.count());
      meter_.metrics->commit_changes.Observe(static_cast<double>(ticket - kept_.load()));
    }
    kept_.store(ticket);
    kept_signal_.Send();
    if (crash_points_ != nullptr) crash_points_->Pass();
    outcome = engine_->Tend();
  }
  if (!outcome.ok()) events_.on_failure(outcome);
  return outcome.ok();
}

}  // namespace resilient::store
