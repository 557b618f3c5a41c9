#include "runtime/recovery/progress_meter.h"

#include <algorithm>
#include <utility>

namespace resilient::recovery {
namespace {

constexpr Duration kMarkEvery = std::chrono::seconds(1);
constexpr Duration kWatchFor = std::chrono::minutes(2);

// A share of a core is one of this time at least: the kernel counts in ticks of 10 ms, and a moment
// of housekeeping is a large share of a short time.
constexpr Duration kShareOfAtLeast = std::chrono::seconds(5);

template <typename Number>
Number Growth(Number before, Number after) {
  return after > before ? after - before : Number{};
}

}  // namespace

void ProgressMeter::Take(const ProgressSample& sample) {
  const bool stale = sample.now < last_.now || sample.now - last_.now > kSamplesStale;
  if (!started_ || stale) {
    Restart(sample);
    return;
  }
  AddUp(sample);
  while (!window_.empty() && sample.now - window_.front().when > kProgressWindow) {
    window_.pop_front();
  }
  if (HasNewWork(sample) || HasEnoughUse()) {
    progress_at_ = sample.now;
    window_.clear();
  }
  if (window_.empty() || sample.now - window_.back().when >= kMarkEvery) window_.push_back(sum_);
  last_ = sample;
  no_progress_ = sample.now - progress_at_;
}

void ProgressMeter::Restart(const ProgressSample& sample) {
  started_ = true;
  last_ = sample;
  frames_.clear();
  NoteFrames(sample.threads);
  sum_ = Mark();
  sum_.when = sample.now;
  window_.assign(1, sum_);
  progress_at_ = sample.now;
  no_progress_ = Duration::zero();
}

void ProgressMeter::AddUp(const ProgressSample& sample) {
  sum_.when = sample.now;
  const double used = Growth(last_.cpu_seconds, sample.cpu_seconds);
  sum_.cpu_seconds += std::max(0.0, used - SpunSince(sample));
  sum_.call_bytes += Growth(last_.call_bytes, sample.call_bytes);
  sum_.disk_bytes += Growth(last_.disk_bytes, sample.disk_bytes);
}

// What threads have computed since the last sample that stay at their lines. One that was not
// watched then may have computed it elsewhere.
double ProgressMeter::SpunSince(const ProgressSample& sample) const {
  double spun = 0;
  for (const WatchedThread& thread : sample.threads) {
    const auto frame = frames_.find(thread.id);
    const auto before = std::ranges::find(last_.threads, thread.id, &WatchedThread::id);
    if (frame == frames_.end() || before == last_.threads.end()) continue;
    if (thread.frame == 0 || thread.frame == frame->second)
      spun += Growth(before->cpu_seconds, thread.cpu_seconds);
  }
  return spun;
}

// True: a thread is at another line, or another one is watched.
bool ProgressMeter::NoteFrames(const std::vector<WatchedThread>& threads) {
  bool moved = false;
  std::map<int, std::uint64_t> frames;
  for (const WatchedThread& thread : threads) {
    const auto before = frames_.find(thread.id);
    const std::uint64_t known = before == frames_.end() ? 0 : before->second;
    moved = moved || (thread.frame != 0 && known != 0 && thread.frame != known);
    if (thread.frame != 0 || known != 0)
      frames[thread.id] = thread.frame != 0 ? thread.frame : known;
  }
  frames_ = std::move(frames);
  return moved;
}

bool ProgressMeter::HasNewWork(const ProgressSample& sample) {
  const bool others = !last_.threads.empty() &&
                      !std::ranges::is_permutation(last_.threads, sample.threads, {},
                                                   &WatchedThread::id, &WatchedThread::id);
  const bool moved = NoteFrames(sample.threads);
  return others || moved || sample.operations != last_.operations;
}

// Whatever part of the window has enough of it: then progress was made in that part.
bool ProgressMeter::HasEnoughUse() const {
  return std::any_of(window_.begin(), window_.end(), [this](const Mark& mark) {
    const Duration span = std::max(sum_.when - mark.when, kShareOfAtLeast);
    return sum_.cpu_seconds - mark.cpu_seconds >= kProgressShareOfCore * ToSeconds(span) ||
           sum_.call_bytes - mark.call_bytes >= kProgressBytes ||
           sum_.disk_bytes - mark.disk_bytes >= kProgressBytes;
  });
}

Instant NextSample(Instant last_sample, Instant last_asked, Duration every) {
  const Instant next = last_sample + every;
  return next <= last_asked + kWatchFor ? next : kNever;
}

}  // namespace resilient::recovery
